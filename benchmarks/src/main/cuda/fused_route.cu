// What a step takes that computes, all-reduces and goes on computing: by one fused kernel, and by a kernel,
// ncclAllReduce and a kernel, in one run: back to back, as a single step that the host waits for, and both as CUDA
// graphs. A single step of the first kind is also waited for at a word in pinned memory, which its last kernel stores
// (signalHost), instead of with cudaStreamSynchronize; the bar of a single step is against NCCL's with that. Ranks are
// threads of this process, rank r on GPU r % GPUS; buffers are plain device memory, which also serve as windows
// (zero-copy). NCCL is the library that NCCLFFM_NCCL names.
//
//   NCCLFFM_NCCL=/path/to/libnccl.so.2 fused_route [GPUS [RANKS [CHANNELS]]]
//
// All results are compared with float64 before anything is timed. Figures are medians, in microseconds a step, of the
// slowest rank; "ratio" is what NCCL's route takes for each of the fused route's microseconds.
#include <cmath>

#include "route.h"

namespace {

constexpr size_t kMaxCount = (64 << 20) / sizeof(float) + 64;
constexpr int kStepsInGraph = 20;
constexpr float kEps = 1e-5f;

// Of the other route: kernels with nothing to wait for, on the whole GPU, as far as ranks leave it.
constexpr int kThreads = 512;

__global__ void scaleAddKernel(float4 *x, size_t n, float a, float b) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < n; i += size_t{gridDim.x} * blockDim.x) {
    float4 v = x[i];
    v.x = fmaf(a, v.x, b), v.y = fmaf(a, v.y, b), v.z = fmaf(a, v.z, b), v.w = fmaf(a, v.w, b);
    x[i] = v;
  }
}

__device__ void sqrtAbs(float4 *x, size_t n) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < n; i += size_t{gridDim.x} * blockDim.x) {
    float4 v = x[i];
    v.x = sqrtf(fabsf(v.x)), v.y = sqrtf(fabsf(v.y)), v.z = sqrtf(fabsf(v.z)), v.w = sqrtf(fabsf(v.w));
    x[i] = v;
  }
}

__global__ void sqrtAbsKernel(float4 *x, size_t n) {
  sqrtAbs(x, n);
}

// The same as a kernel of a user's who has a word for it.
__global__ void sqrtAbsToldKernel(float4 *x, size_t n, const __grid_constant__ DevComm comm) {
  sqrtAbs(x, n);
  signalHost(thisGrid(), comm);
}

// One block a token: residual += sum, out = the norm of it. hidden is a multiple of 4.
__global__ void __launch_bounds__(kThreads)
    addNormKernel(const Bfloat16 *sum, Bfloat16 *residual, const Bfloat16 *weight, Bfloat16 *out, uint64_t hidden) {
  if (hidden == 0) return;
  const uint64_t row = blockIdx.x * hidden;
  float squares[1] = {};
  for (uint64_t i = threadIdx.x; i < hidden / 4; i += blockDim.x) {
    const Four<Bfloat16> s = loadFour(sum + row + 4 * i);
    Four<Bfloat16> r = loadFour(residual + row + 4 * i);
    for (int k = 0; k < 4; ++k) {
      r.x[k] = toBfloat16(toFloat(r.x[k]) + toFloat(s.x[k]));
      const float x = toFloat(r.x[k]);
      squares[0] = fmaf(x, x, squares[0]);
    }
    storeFour(residual + row + 4 * i, r);
  }
  CoopBlock().syncSum(squares);
  const float scale = 1.0f / sqrtf(squares[0] / static_cast<float>(hidden) + kEps);
  scaleRow(Share{threadIdx.x, blockDim.x}, residual + row, weight, out + row, scale, hidden, hidden / 4);
}

template <class T>
__global__ void __launch_bounds__(kThreads) adamWKernel(const T *gradients, const __grid_constant__ Optimizer optimizer,
                                                        uint64_t count, float learning, float rootCorrection) {
  if (count == 0) return;
  update<T, true>(Share{blockIdx.x * uint64_t{blockDim.x} + threadIdx.x, gridDim.x * uint64_t{blockDim.x}}, optimizer,
                  Rates{1.0f, learning, rootCorrection}, gradients, BlockShare{0, count});
}

__global__ void emptyKernel() {}

struct State {
  float *weights, *momentum, *variance;
  Bfloat16 *weight;  // of the norm
};

using Enqueue = std::function<void(int rank)>;

struct Figures {
  double backToBack, single, graphBackToBack, graphSingle;
  int kernels;      // nodes of a captured step
  double told = 0;  // single, waited for at the word
};

// Steps whose last kernel signals the host.
class Told {
 public:
  Told(World &world, const Enqueue &step) : step_(step), first_(world.ranks.data()), launched_(world.size()) {
    world.synchronize();
    for (int r = 0; r < world.size(); ++r) launched_[r] = *world.ranks[r].hostSignal;
  }
  void enqueue(int r) {
    step_(r);
    ++launched_[r];
  }
  void wait(const Rank &rank) const {
    const uint32_t number = launched_[static_cast<size_t>(&rank - first_)];
    const double deadline = nowUs() + 60e6;
    while (static_cast<int32_t>(__atomic_load_n(rank.hostSignal, __ATOMIC_ACQUIRE) - number) < 0) {
      if (nowUs() < deadline) continue;
      fprintf(stderr, "FAILED: the word of rank %d is %u, not %u\n", rank.comm.rank, *rank.hostSignal, number);
      exit(1);
    }
  }

 private:
  const Enqueue &step_;
  const Rank *first_;
  std::vector<uint32_t> launched_;
};

// A step, or several, as a graph of each rank.
class Graphs {
 public:
  Graphs(World &world, int steps, const Enqueue &step) : world_(world), graphs_(world.size()) {
    Meeting meeting(world.size());
    onThreads(world.size(), [&](int r) {
      World::use(r);
      cudaStream_t stream = world.ranks[r].stream;
      meeting.wait();
      CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      for (int i = 0; i < steps; ++i) step(r);
      cudaGraph_t graph;
      CUDA(cudaStreamEndCapture(stream, &graph));
      if (r == 0) kernels_ = kernelsOf(graph);
      CUDA(cudaGraphInstantiate(&graphs_[r], graph, 0));
      CUDA(cudaGraphUpload(graphs_[r], stream));
      CUDA(cudaStreamSynchronize(stream));
      CUDA(cudaGraphDestroy(graph));
      meeting.wait();
    });
  }
  ~Graphs() {
    world_.synchronize();
    for (cudaGraphExec_t graph : graphs_) CUDA(cudaGraphExecDestroy(graph));
  }
  void launch(int rank) { CUDA(cudaGraphLaunch(graphs_[rank], world_.ranks[rank].stream)); }
  int kernels() const { return kernels_; }

 private:
  static int kernelsOf(cudaGraph_t graph) {
    size_t n = 0;
    CUDA(cudaGraphGetNodes(graph, nullptr, &n));
    std::vector<cudaGraphNode_t> nodes(n);
    CUDA(cudaGraphGetNodes(graph, nodes.data(), &n));
    int kernels = 0;
    for (cudaGraphNode_t node : nodes) {
      cudaGraphNodeType type;
      CUDA(cudaGraphNodeGetType(node, &type));
      kernels += type == cudaGraphNodeTypeKernel;
    }
    return kernels;
  }

  World &world_;
  std::vector<cudaGraphExec_t> graphs_;
  int kernels_ = 0;
};

// What a sample line says of a step; the bytes are those that are all-reduced.
struct Subject {
  const char *route;
  std::string operation;
  size_t bytes;
};

Figures measured(World &world, size_t bytes, const Subject &subject, const Enqueue &step) {
  const bool large = bytes > (4 << 20);
  auto medianOf = [&](const char *how, int times, int repetitions, int steps, const Enqueue &operation) {
    std::vector<double> us = backToBackSamples(world, times, repetitions, operation);
    for (double &x : us) x /= steps;
    printSamples(subject.route, how + subject.operation, world.size(), subject.bytes, us);
    return median(us);
  };
  Figures f = {};
  f.backToBack = medianOf("", large ? 10 : 50, large ? 15 : 21, 1, step);
  f.single = medianOf("single ", 1, large ? 31 : 101, 1, step);
  {
    Graphs graphs(world, kStepsInGraph, step);
    f.graphBackToBack =
        medianOf("graph ", large ? 1 : 3, large ? 11 : 21, kStepsInGraph, [&](int r) { graphs.launch(r); });
  }
  Graphs graphs(world, 1, step);
  f.kernels = graphs.kernels();
  f.graphSingle = medianOf("graph single ", 1, large ? 31 : 101, 1, [&](int r) { graphs.launch(r); });
  return f;
}

// A single step, waited for at the word.
double toldOf(World &world, size_t bytes, const Subject &subject, const Enqueue &step) {
  Told told(world, step);
  const std::vector<double> us = backToBackSamples(
      world, 1, bytes > (4 << 20) ? 31 : 101, [&](int r) { told.enqueue(r); },
      [&](const Rank &rank) { told.wait(rank); });
  printSamples(subject.route, "single " + subject.operation + ", told by the kernel", world.size(), subject.bytes, us);
  return median(us);
}

// The least ratio that is asked of a scale step; 0: none.
double barOf(int nRanks, size_t bytes, bool single) {
  if (single) return bytes > (64 << 10) ? 0 : nRanks == 2 ? 2 : nRanks == 4 ? 1.5 : nRanks == 8 ? 1.8 : 0;
  if (bytes <= (64 << 10)) return nRanks == 2 ? 3 : 2.5;
  if (bytes == (1 << 20)) return nRanks == 2 ? 2 : nRanks == 4 ? 1.7 : 1.5;
  return bytes == (64 << 20) ? 1 : 0;
}

void printed(const char *what, const Figures &fused, const Figures &other, int nRanks = 0, size_t bytes = 0) {
  if (fused.kernels != 1) {
    fprintf(stderr, "FAILED: %s: %d kernels in a fused step\n", what, fused.kernels);
    ++failures;
  }
  auto bar = [&](bool single) {
    char text[32] = "";
    const double least = nRanks == 0 ? 0 : barOf(nRanks, bytes, single);
    const double ratio = single ? other.single / fused.single : other.backToBack / fused.backToBack;
    if (least != 0) snprintf(text, sizeof text, " (bar %.1f %s)", least, ratio >= least ? "met" : "MISSED");
    return std::string(text);
  };
  auto three = [](double ours, double theirs) {
    char text[64];
    snprintf(text, sizeof text, "%8.2f %8.2f %5.2f", ours, theirs, theirs / ours);
    return std::string(text);
  };
  printf("%-30s | %s%s | %s%s | %s | %s | %d against %d\n", what, three(fused.backToBack, other.backToBack).c_str(),
         bar(false).c_str(), three(fused.single, other.single).c_str(), bar(true).c_str(),
         three(fused.graphBackToBack, other.graphBackToBack).c_str(),
         three(fused.graphSingle, other.graphSingle).c_str(), fused.kernels, other.kernels);
}

// The bar is against NCCL's route as it is waited for with cudaStreamSynchronize; the other ratio is between equals.
void printTold(const Figures &fused, const Figures &other, int nRanks, size_t bytes) {
  const double least = barOf(nRanks, bytes, true), ratio = other.single / fused.told;
  char bar[32] = "";
  if (least != 0 && other.single != 0) {
    snprintf(bar, sizeof bar, " (bar %.1f %s)", least, ratio >= least ? "met" : "MISSED");
  }
  printf(
      "  single step, told by the kernel: fused %.2f, NCCL with cudaStreamSynchronize %.2f, ratio %.2f%s; NCCL told "
      "by its last kernel %.2f, ratio %.2f\n",
      fused.told, other.single, ratio, bar, other.told, other.told / fused.told);
}

void heading(const char *what) {
  printf("%-30s | back to back: fused, NCCL, ratio | single step | graph, back to back | graph, single | kernels\n",
         what);
}

int gridFor(size_t vectors, int nRanks) {
  // Half of what the ranks' share of the GPU holds, so that ncclAllReduce of another rank finds room beside it.
  int processors = 0;
  CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
  const size_t most = static_cast<size_t>(std::max(1, 2 * processors * gpus / nRanks));
  return static_cast<int>(std::max<size_t>(1, std::min(most, (vectors + kThreads - 1) / kThreads)));
}

class Bench {
 public:
  Bench(World &world, Communicators &communicators, std::vector<State> &states)
      : world_(world), communicators_(communicators), states_(states), n_(world.size()) {}

  void scale();
  void rmsNorm();
  template <class T>
  void adamW(const char *type);

 private:
  // The call of a rank; zero-copy, the buffers as windows.
  ncclFfmCall callOf(const Rank &rank, const void *send, void *recv, size_t count, int datatype, bool zeroCopy) {
    ncclFfmCall call = allReduceOf(send, recv, count, datatype);
    if (zeroCopy) {
      call.send = {send == rank.send ? rank.sends : rank.recvs, kMaxCount * sizeof(float), 0};
      call.recv = {recv == rank.send ? rank.sends : rank.recvs, kMaxCount * sizeof(float), 0};
    }
    return call;
  }
  void ncclAllReduce(int r, const void *send, void *recv, size_t count, int datatype, int op) {
    NCCL(nccl.allReduce(send, recv, count, datatype, op, communicators_.comms[r], world_.ranks[r].stream));
  }
  // On all ranks, then waits.
  void once(const Enqueue &step) {
    onThreads(n_, [&](int r) {
      World::use(r);
      step(r);
    });
    world_.synchronize();
    for (const Rank &rank : world_.ranks) check(rank.status->code == 0, "status", rank.status->code, rank.status->peer);
  }
  // As soon as the word of a rank says so, floats of send to hostRecv, by a stream that knows nothing of the step.
  void onceTold(const Enqueue &step, size_t count) {
    std::vector<cudaStream_t> others(n_);
    world_.onEach([&](Rank &, int r) { CUDA(cudaStreamCreateWithFlags(&others[r], cudaStreamNonBlocking)); });
    Told told(world_, step);
    onThreads(n_, [&](int r) {
      World::use(r);
      const Rank &rank = world_.ranks[r];
      told.enqueue(r);
      told.wait(rank);
      CUDA(cudaMemcpyAsync(rank.hostRecv, rank.send, count * sizeof(float), cudaMemcpyDeviceToHost, others[r]));
      CUDA(cudaStreamSynchronize(others[r]));
    });
    world_.synchronize();
    for (const Rank &rank : world_.ranks) check(rank.status->code == 0, "status", rank.status->code, rank.status->peer);
    world_.onEach([&](Rank &, int r) { CUDA(cudaStreamDestroy(others[r])); });
  }
  // Of many elements, some are compared.
  static size_t strideFor(size_t count) { return count > (1 << 18) ? 1009 : 1; }

  World &world_;
  Communicators &communicators_;
  std::vector<State> &states_;
  const int n_;
};

// On the host, where the library's own functions of halves are not.
uint16_t bfloat16Of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float floatOf(Bfloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

float floatOf(float x) {
  return x;
}

void put(float *host, size_t i, float x) {
  host[i] = x;
}

void put(Bfloat16 *host, size_t i, float x) {
  host[i].bits = bfloat16Of(x);
}

// Everybody's value number i: one of bfloat16, small enough for sums of it.
float valueOf(int rank, uint64_t call, size_t i) {
  return floatOf(Bfloat16{bfloat16Of(contribution(rank, call, i) / 64)});
}

// Fills a device buffer of every rank with valueOf, of one rank's for all if sameOnAll.
template <class T>
void fillAll(World &world, uint64_t call, size_t count, bool sameOnAll, const std::function<T *(int)> &device) {
  onThreads(world.size(), [&](int r) {
    World::use(r);
    Rank &rank = world.ranks[r];
    T *host = reinterpret_cast<T *>(rank.hostSend);
    for (size_t i = 0; i < count; ++i) put(host, i, valueOf(sameOnAll ? 0 : r, call, i));
    CUDA(cudaMemcpyAsync(device(r), host, count * sizeof(T), cudaMemcpyHostToDevice, rank.stream));
    CUDA(cudaStreamSynchronize(rank.stream));
  });
}

// Device buffers of all ranks, to hostRecv.
template <class T>
void copyAll(World &world, size_t count, const std::function<const T *(int)> &device) {
  world.onEach([&](Rank &rank, int r) {
    CUDA(cudaMemcpyAsync(rank.hostRecv, device(r), count * sizeof(T), cudaMemcpyDeviceToHost, rank.stream));
  });
  world.synchronize();
}

// Compares what is in hostRecv of all ranks with expected(i), within bound(i).
template <class T>
void compareCopies(World &world, const char *what, size_t count, size_t stride,
                   const std::function<double(size_t)> &expected, const std::function<double(size_t)> &bound) {
  for (size_t i = 0; i < count; i += stride) {
    const double want = expected(i), allowed = bound(i);
    for (int r = 0; r < world.size(); ++r) {
      const double got = floatOf(reinterpret_cast<const T *>(world.ranks[r].hostRecv)[i]);
      if (std::fabs(got - want) <= allowed) continue;
      if (++failures <= 20) {
        fprintf(stderr, "FAILED: %s: %zu elements, rank %d of %d, element %zu: %.9g, not %.9g +- %g\n", what, count, r,
                world.size(), i, got, want, allowed);
      }
    }
  }
}

template <class T>
void compareAll(World &world, const char *what, size_t count, size_t stride,
                const std::function<const T *(int)> &device, const std::function<double(size_t)> &expected,
                const std::function<double(size_t)> &bound) {
  copyAll<T>(world, count, device);
  compareCopies<T>(world, what, count, stride, expected, bound);
}

void Bench::scale() {
  constexpr float kA = 2, kB = 1;
  uint64_t call = 1000;
  heading("x=2x+1, sum, sqrt|x|: f32 bytes");
  for (size_t bytes : {4u << 10, 16u << 10, 64u << 10, 256u << 10, 1u << 20, 4u << 20, 64u << 20}) {
    const size_t count = bytes / sizeof(float);
    const int grid = gridFor(count / 4, n_);
    auto fused = [&](bool zeroCopy, DevComm Rank::*comm) {
      return [=](int r) {
        const Rank &rank = world_.ranks[r];
        const ncclFfmCall c = callOf(rank, rank.send, rank.send, count, ncclFloat32, zeroCopy);
        SHIM(ncclFfmFusedScaleAllReduceSqrt(&(rank.*comm), &c, kA, kB, rank.stream));
      };
    };
    auto threeKernels = [&](bool told) {
      return [=](int r) {
        const Rank &rank = world_.ranks[r];
        float4 *x = reinterpret_cast<float4 *>(rank.send);
        scaleAddKernel<<<grid, kThreads, 0, rank.stream>>>(x, count / 4, kA, kB);
        ncclAllReduce(r, x, x, count, ncclFloat32, ncclSum);
        if (told) {
          sqrtAbsToldKernel<<<grid, kThreads, 0, rank.stream>>>(x, count / 4, rank.signalling);
        } else {
          sqrtAbsKernel<<<grid, kThreads, 0, rank.stream>>>(x, count / 4);
        }
      };
    };
    const Enqueue byFused = fused(false, &Rank::comm), byZeroCopy = fused(true, &Rank::comm);
    const Enqueue fusedTold = fused(false, &Rank::signalling);
    const Enqueue three = threeKernels(false), threeTold = threeKernels(true);
    for (const Enqueue *step : {&byFused, &byZeroCopy, &fusedTold, &three, &threeTold}) {
      if ((step == &three || step == &threeTold) && nccl.allReduce == nullptr) continue;
      fillAll<float>(world_, ++call, count, false, [&](int r) { return world_.ranks[r].send; });
      const bool isTold = step == &fusedTold || step == &threeTold;
      if (isTold) {
        onceTold(*step, count);
      } else {
        once(*step);
      }
      auto sumOf = [&](size_t i, bool magnitude) {
        double sum = 0;
        for (int r = 0; r < n_; ++r) {
          const double x = static_cast<double>(kA) * valueOf(r, call, i) + kB;
          sum += magnitude ? std::fabs(x) : x;
        }
        return sum;
      };
      if (!isTold) copyAll<float>(world_, count, [&](int r) { return world_.ranks[r].send; });
      compareCopies<float>(
          world_,
          step == &three       ? "three"
          : step == &threeTold ? "three, told by the kernel"
          : step == &byFused   ? "fused"
          : step == &fusedTold ? "fused, told by the kernel"
                               : "zero-copy",
          count, strideFor(count), [&](size_t i) { return std::sqrt(std::fabs(sumOf(i, false))); },
          [&](size_t i) {
            const double root = std::sqrt(std::fabs(sumOf(i, false))), error = sumOf(i, true) * n_ * 0x1p-23;
            return std::min(std::sqrt(error), error / std::max(root, 1e-9)) + root * 0x1p-23;
          });
    }
    if (failures != 0) return;
    auto of = [&](const char *route, const Enqueue &step, const Enqueue *told = nullptr) {
      const Subject subject = {route, "2x+1, allReduce, sqrt", bytes};
      Figures f = measured(world_, bytes, subject, step);
      if (told != nullptr) f.told = toldOf(world_, bytes, subject, *told);
      return f;
    };
    const Figures ofThree = nccl.allReduce == nullptr ? Figures{} : of("host", three, &threeTold);
    const Figures ofFused = of("fused", byFused, &fusedTold);
    printed(std::to_string(bytes).c_str(), ofFused, ofThree, n_, bytes);
    printTold(ofFused, ofThree, n_, bytes);
    printed((std::to_string(bytes) + " zero-copy").c_str(), of("fused zero-copy", byZeroCopy), ofThree);
  }
}

void Bench::rmsNorm() {
  using T = Bfloat16;
  uint64_t call = 2000;
  heading("add + RMSNorm, bf16: tokens x hidden");
  for (uint64_t hidden : {4096u, 8192u}) {
    for (uint64_t tokens : {1u, 8u, 32u, 128u}) {
      const size_t count = tokens * hidden;
      // x, sum and out after each other in send; the residual in recv.
      auto x = [&](int r) { return reinterpret_cast<T *>(world_.ranks[r].send); };
      auto sum = [&](int r) { return x(r) + count; };
      auto out = [&](int r) { return x(r) + 2 * count; };
      auto residual = [&](int r) { return reinterpret_cast<T *>(world_.ranks[r].recv); };
      const Enqueue fused = [&](int r) {
        const Rank &rank = world_.ranks[r];
        const ncclFfmCall c = callOf(rank, x(r), residual(r), count, ncclBfloat16, false);
        const ncclFfmRmsNorm norm = {tokens, hidden, states_[r].weight, out(r), kEps, 0};
        SHIM(ncclFfmFusedRmsNorm(&rank.comm, &c, &norm, rank.stream));
      };
      const Enqueue two = [&](int r) {
        const Rank &rank = world_.ranks[r];
        ncclAllReduce(r, x(r), sum(r), count, ncclBfloat16, ncclSum);
        addNormKernel<<<static_cast<int>(tokens), kThreads, 0, rank.stream>>>(sum(r), residual(r), states_[r].weight,
                                                                              out(r), hidden);
      };
      for (const Enqueue *step : {&fused, &two}) {
        if (step == &two && nccl.allReduce == nullptr) continue;
        const uint64_t ofX = ++call, ofResidual = ++call, ofWeight = ++call;
        fillAll<T>(world_, ofX, count, false, x);
        fillAll<T>(world_, ofResidual, count, true, residual);
        fillAll<T>(world_, ofWeight, hidden, true, [&](int r) { return states_[r].weight; });
        once(*step);
        std::vector<double> r(count), scale(tokens);
        for (uint64_t t = 0; t < tokens; ++t) {
          double squares = 0;
          for (uint64_t k = 0; k < hidden; ++k) {
            const size_t i = t * hidden + k;
            for (int p = 0; p < n_; ++p) r[i] += valueOf(p, ofX, i);
            r[i] += valueOf(0, ofResidual, i);
            squares += r[i] * r[i];
          }
          scale[t] = 1 / std::sqrt(squares / static_cast<double>(hidden) + kEps);
        }
        // bf16 has 8 bits: the sum is rounded by each who adds on the way, the residual and the result once.
        auto magnitudeOf = [&](size_t i) {
          double magnitude = std::fabs(valueOf(0, ofResidual, i));
          for (int p = 0; p < n_; ++p) magnitude += std::fabs(valueOf(p, ofX, i));
          return magnitude;
        };
        const char *what = step == &fused ? "fused norm" : "norm of two";
        compareAll<T>(
            world_, what, count, 1, residual, [&](size_t i) { return r[i]; },
            [&](size_t i) { return magnitudeOf(i) * n_ * 0x1p-8; });
        compareAll<T>(
            world_, what, count, 1, out,
            [&](size_t i) { return r[i] * scale[i / hidden] * valueOf(0, ofWeight, i % hidden); },
            [&](size_t i) {
              return magnitudeOf(i) * (n_ + 3) * 0x1p-7 * scale[i / hidden] *
                     std::fabs(valueOf(0, ofWeight, i % hidden));
            });
      }
      if (failures != 0) return;
      char what[64];
      snprintf(what, sizeof what, "%llu x %llu", static_cast<unsigned long long>(tokens),
               static_cast<unsigned long long>(hidden));
      auto of = [&](const char *route, const Enqueue &step) {
        const size_t bytes = count * sizeof(T);
        return measured(world_, bytes, {route, std::string("allReduce, add, RMSNorm, bf16 ") + what, bytes}, step);
      };
      const Figures ofTwo = nccl.allReduce == nullptr ? Figures{} : of("host", two);
      printed(what, of("fused", fused), ofTwo);
    }
  }
}

template <class T>
void Bench::adamW(const char *type) {
  uint64_t call = 3000;
  constexpr uint32_t kStep = 3;
  heading((std::string("AdamW, gradients ") + type + ": elements").c_str());
  for (size_t count : {1u << 10, 16u << 10, 256u << 10, 1u << 20, 16u << 20}) {
    auto gradients = [&](int r) { return reinterpret_cast<T *>(world_.ranks[r].send); };
    auto optimizerOf = [&](int r, float maxNorm) {
      const State &s = states_[r];
      return ncclFfmOptimizer{s.weights, s.momentum, s.variance, nullptr, nullptr, kStep,
                              0.01f,     0.9f,       0.999f,     1e-8f,   0.01f,   maxNorm};
    };
    auto fused = [&](bool zeroCopy, float maxNorm) {
      return [=](int r) {
        const Rank &rank = world_.ranks[r];
        const ncclFfmCall c = callOf(rank, rank.send, rank.send, count, kDataTypeOf<T>, zeroCopy);
        const ncclFfmOptimizer o = optimizerOf(r, maxNorm);
        SHIM(ncclFfmFusedAdamW(&rank.comm, &c, &o, rank.stream));
      };
    };
    const double c1 = 1 - std::pow(double{0.9f}, kStep), c2 = 1 - std::pow(double{0.999f}, kStep);
    const float learning = static_cast<float>(0.01f / c1), root = static_cast<float>(1 / std::sqrt(c2));
    const int grid = gridFor(count / 4, n_);
    const Enqueue two = [&](int r) {
      const Rank &rank = world_.ranks[r];
      ncclAllReduce(r, gradients(r), gradients(r), count, kDataTypeOf<T>, ncclAvg);
      adamWKernel<T><<<grid, kThreads, 0, rank.stream>>>(gradients(r), optimizerOf(r, 0), count, learning, root);
    };
    const Enqueue byFused = fused(false, 0), byZeroCopy = fused(true, 0), clipped = fused(false, 0.5f);
    struct {
      const Enqueue &step;
      const char *name;
      float maxNorm;
    } routes[] = {{byFused, "fused", 0}, {byZeroCopy, "zero-copy", 0}, {clipped, "clipped", 0.5f}, {two, "two", 0}};
    for (const auto &route : routes) {
      if (&route.step == &two && nccl.allReduce == nullptr) continue;
      const uint64_t ofGradients = ++call, ofWeights = ++call;
      fillAll<T>(world_, ofGradients, count, false, gradients);
      fillAll<float>(world_, ofWeights, count, true, [&](int r) { return states_[r].weights; });
      world_.onEach([&](Rank &rank, int r) {
        CUDA(cudaMemsetAsync(states_[r].momentum, 0, count * sizeof(float), rank.stream));
        CUDA(cudaMemsetAsync(states_[r].variance, 0, count * sizeof(float), rank.stream));
      });
      world_.synchronize();
      once(route.step);
      auto averageOf = [&](size_t i) {
        double sum = 0;
        for (int r = 0; r < n_; ++r) sum += valueOf(r, ofGradients, i);
        return sum / n_;
      };
      double clip = 1;
      if (route.maxNorm != 0) {
        double squares = 0;
        for (size_t i = 0; i < count; ++i) squares += averageOf(i) * averageOf(i);
        clip = std::min(1.0, route.maxNorm / (std::sqrt(squares) + 1e-6));
      }
      const double unit = sizeof(T) == 2 ? 0x1p-7 : 0x1p-20;
      compareAll<float>(
          world_, route.name, count, strideFor(count), [&](int r) { return states_[r].momentum; },
          [&](size_t i) { return 0.1 * clip * averageOf(i); },
          [&](size_t i) {
            double magnitude = 0;
            for (int r = 0; r < n_; ++r) magnitude += std::fabs(valueOf(r, ofGradients, i));
            return magnitude * unit * clip;
          });
      // m' / sqrt(v') is a sign times a number of the step alone, where the gradient is not about 0.
      compareAll<float>(
          world_, route.name, count, strideFor(count), [&](int r) { return states_[r].weights; },
          [&](size_t i) {
            const double g = clip * averageOf(i), m = 0.1 * g / c1, v = 0.001 * g * g / c2;
            return valueOf(0, ofWeights, i) * (1 - 0.01 * 0.01) - 0.01 * m / (std::sqrt(v) + 1e-8);
          },
          [&](size_t i) {
            // Where summands cancel, the order of the sum decides on the sign.
            double magnitude = 0;
            for (int r = 0; r < n_; ++r) magnitude += std::fabs(valueOf(r, ofGradients, i));
            return std::fabs(averageOf(i)) * n_ < magnitude / 32 + 1e-5 ? 0.05 : 1e-4;
          });
      // Weights stay the same on all ranks, to the bit.
      std::vector<float> first(count), other(count);
      CUDA(cudaMemcpy(first.data(), states_[0].weights, count * sizeof(float), cudaMemcpyDefault));
      for (int r = 1; r < n_; ++r) {
        CUDA(cudaMemcpy(other.data(), states_[r].weights, count * sizeof(float), cudaMemcpyDefault));
        const bool same = memcmp(first.data(), other.data(), count * sizeof(float)) == 0;
        check(same || &route.step == &two, "weights of ranks differ: rank, elements", r, static_cast<long long>(count));
      }
    }
    if (failures != 0) return;
    auto of = [&](const char *route, const Enqueue &step) {
      const std::string operation = std::string("allReduce, AdamW, gradients ") + type;
      return measured(world_, count * 4 * sizeof(float), {route, operation, count * sizeof(T)}, step);
    };
    const Figures ofTwo = nccl.allReduce == nullptr ? Figures{} : of("host", two);
    const std::string name = std::to_string(count);
    printed(name.c_str(), of("fused", byFused), ofTwo);
    printed((name + " zero-copy").c_str(), of("fused zero-copy", byZeroCopy), ofTwo);
    printed((name + " clipped").c_str(), of("fused clipped", clipped), ofTwo);
  }
}

void measure(int nRanks, int channels) {
  std::vector<State> states(nRanks);
  for (int r = 0; r < nRanks; ++r) {
    World::use(r);
    for (float **x : {&states[r].weights, &states[r].momentum, &states[r].variance}) {
      CUDA(cudaMalloc(x, kMaxCount * sizeof(float)));
    }
    CUDA(cudaMalloc(&states[r].weight, 8192 * sizeof(Bfloat16)));
  }
  {
    World world(
        nRanks, 20000 * kMs, kMaxCount,
        [](const Rank &rank) {
          scaleAddKernel<<<1, 32, 0, rank.stream>>>(nullptr, 0, 0, 0);
          sqrtAbsKernel<<<1, 32, 0, rank.stream>>>(nullptr, 0);
          sqrtAbsToldKernel<<<1, 32, 0, rank.stream>>>(nullptr, 0, DevComm{});
          addNormKernel<<<1, 32, 0, rank.stream>>>(nullptr, nullptr, nullptr, nullptr, 0);
          adamWKernel<float><<<1, 32, 0, rank.stream>>>(nullptr, {}, 0, 0, 0);
          adamWKernel<Bfloat16><<<1, 32, 0, rank.stream>>>(nullptr, {}, 0, 0, 0);
          emptyKernel<<<1, 32, 0, rank.stream>>>();
        },
        channels);
    Communicators communicators(world);
    if (nccl.allReduce != nullptr) {  // the ranks meet, once for each type
      for (int type : {static_cast<int>(ncclFloat32), static_cast<int>(ncclBfloat16)}) {
        onThreads(nRanks, [&](int r) {
          World::use(r);
          const Rank &rank = world.ranks[r];
          NCCL(nccl.allReduce(rank.send, rank.recv, 1024, type, ncclSum, communicators.comms[r], rank.stream));
          NCCL(nccl.allReduce(rank.send, rank.recv, 1024, type, ncclAvg, communicators.comms[r], rank.stream));
        });
        world.synchronize();
      }
    }
    printf("\n== %d ranks on %d GPUs, %d channels ==\n", nRanks, gpus, channels);
    const Figures empty = measured(world, 0, {"host", "empty kernel", 0},
                                   [&](int r) { emptyKernel<<<1, 32, 0, world.ranks[r].stream>>>(); });
    printf(
        "floors: an empty kernel %.2f back to back, %.2f single, in graphs %.2f and %.2f; 64 MiB loaded and stored "
        "by all ranks %.1f\n",
        empty.backToBack, empty.single, empty.graphBackToBack, empty.graphSingle, bytesFloor(nRanks, 64 << 20));
    Bench bench(world, communicators, states);
    bench.scale();
    bench.rmsNorm();
    bench.adamW<float>("f32");
    bench.adamW<Bfloat16>("bf16");
    communicators.abort();
  }
  for (int r = 0; r < nRanks; ++r) {
    World::use(r);
    const State &s = states[r];
    for (void *x : {static_cast<void *>(s.weights), static_cast<void *>(s.momentum), static_cast<void *>(s.variance),
                    static_cast<void *>(s.weight)}) {
      CUDA(cudaFree(x));
    }
  }
}

}  // namespace

int main(int argc, char **argv) {
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 0);
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  begin(argc, argv);
  loadNccl();
  std::vector<int> sizes = {2, 4, 8};
  if (argc > 2) sizes = {atoi(argv[2])};
  for (int nRanks : sizes) measure(nRanks, argc > 3 ? atoi(argv[3]) : kChannels);
  printf("%s\n", failures == 0 ? "PASS" : "FAIL");
  return failures == 0 ? 0 : 1;
}
