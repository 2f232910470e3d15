// Kernels of the shim that tell the host that they have finished, through the C ABI on streams of the CPU backend: the
// host never waits for a stream before it looks at the results.
#include "../../src/cpu/abi.h"
#include "harness.h"

#include <deque>
#include <functional>

namespace ncclffm::test {
namespace {

constexpr int kChannels = 4;
constexpr uint32_t kSlotBytes = 1024;
constexpr uint64_t kSeed = 20250118;
constexpr uint32_t kJustBeforeTheEnd = 0xffffffe0u;

void cuda(cudaError_t error, const char *what) {
  check(error == cudaSuccess, "%s: %s", what, cudaGetErrorString(error));
}

void shim(int code, const char *what) {
  check(code == ncclSuccess, "%s: %d: %s", what, code, ncclFfmGetLastError());
}

/// Destroyed last: what the kernels use must outlive them.
class Streams {
 public:
  explicit Streams(int n) : streams_(n) {
    for (cudaStream_t &stream : streams_) cuda(cudaStreamCreateWithFlags(&stream, 1), "cudaStreamCreateWithFlags");
  }
  ~Streams() {
    for (cudaStream_t stream : streams_) {
      cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
      cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
    }
  }
  cudaStream_t operator[](int i) const { return streams_[i]; }

 private:
  std::vector<cudaStream_t> streams_;
};

/// A communicator whose kernels signal the host, and how many each rank has launched.
struct Ranks {
  Ranks(int nRanks, uint32_t from, uint64_t deadlineNs)
      : world(nRanks, kChannels, kSlotBytes, deadlineNs), streams(nRanks), launched(nRanks, from) {
    world.signalHost(from);
  }

  void await(int rank, const char *what) {
    const bool finished = world.awaitKernels(rank, launched[rank], timeoutNs());
    const uint32_t told = world.hostSignal(rank);
    check(finished && told == launched[rank], "%s, rank %d of %d: the word is %u, not %u", what, rank, world.nRanks(),
          told, launched[rank]);
  }

  /// So that after a failure nobody waits for long.
  bool haveFailed() {
    if (failures.load() != 0) world.abort();
    return failures.load() != 0;
  }

  World world;
  Streams streams;
  std::vector<uint32_t> launched;
};

Call allReduceOf(std::vector<float> &buffer, int blocks) {
  Call call =
      makeCall(ncclFfmFunctionAllReduce, buffer.data(), buffer.data(), buffer.size(), ncclFloat32, ncclSum, 0, 0);
  call.blocks = blocks;
  return call;
}

float sumOf(int nRanks, uint64_t number, size_t i, const std::function<float(float)> &prologue) {
  float sum = prologue(contribution(kSeed, 0, number, i));
  for (int r = 1; r < nRanks; ++r) sum += prologue(contribution(kSeed, r, number, i));
  return sum;
}

void resultsAreThereAfterTheWord(int nRanks, uint32_t from, int calls) {
  Ranks ranks(nRanks, from, timeoutNs());
  inThreads(nRanks, [&](int rank) {
    const cudaStream_t stream = ranks.streams[rank];
    std::vector<float> weights(2000), momentum(2000), variance(2000);
    for (int n = 0; n < calls && !ranks.haveFailed(); ++n) {
      const size_t count = 1 + mix(kSeed + static_cast<uint64_t>(n)) % 1200;
      std::vector<float> buffer(count), recv(count), out(count);
      for (size_t i = 0; i < count; ++i) buffer[i] = contribution(kSeed, rank, n, i);
      Call call = allReduceOf(buffer, n % 3);
      const int kind = n % 5;
      RmsNorm norm = {1, count, weights.data(), out.data(), 1e-5f, 0};
      Optimizer optimizer = {};
      optimizer.weights = weights.data();
      optimizer.momentum = momentum.data();
      optimizer.variance = variance.data();
      optimizer.beta1 = optimizer.beta2 = 0.5f;
      optimizer.step = 1;
      optimizer.maxNorm = kind == 3 ? 1.0f : 0.0f;
      switch (kind) {
        case 0:
          shim(ncclFfmLaunch(&ranks.world.comm(rank), &call, stream), "all-reduce");
          break;
        case 1:
          shim(ncclFfmFusedScaleAllReduceSqrt(&ranks.world.comm(rank), &call, 2, 1, stream), "scale");
          break;
        case 2:
          call.recvbuff = recv.data();
          call.blocks = 0;  // of one token
          shim(ncclFfmFusedRmsNorm(&ranks.world.comm(rank), &call, &norm, stream), "norm");
          break;
        case 3:
          shim(ncclFfmFusedSgd(&ranks.world.comm(rank), &call, &optimizer, stream), "SGD");
          break;
        default:
          shim(ncclFfmFusedAdamW(&ranks.world.comm(rank), &call, &optimizer, stream), "AdamW");
      }
      ++ranks.launched[rank];
      ranks.await(rank, "a call");
      const std::vector<float> &got = kind == 2 ? recv : buffer;
      for (size_t i = 0; i < count; ++i) {
        float expected = sumOf(nRanks, n, i, [&](float x) { return kind == 1 ? std::fmaf(2.0f, x, 1.0f) : x; });
        if (kind == 1) expected = std::sqrt(std::fabs(expected));
        if (kind >= 3) expected *= 1.0f / static_cast<float>(nRanks);
        const bool equal = kind < 3 ? got[i] == expected : std::fabs(got[i] - expected) <= 1e-5f * std::fabs(expected);
        check(equal, "seed %llu, rank %d of %d, call %d, kind %d, element %zu: %.9g, not %.9g",
              static_cast<unsigned long long>(kSeed), rank, nRanks, n, kind, i, got[i], expected);
      }
    }
  });
  for (int r = 0; r < nRanks; ++r) check(ranks.world.status(r).code == 0, "rank %d: status", r);
}

// On streams of their own; the all-reduce of both ranks waits for both.
void sendsBesideACollectiveAreCounted(int rounds) {
  Ranks ranks(2, kJustBeforeTheEnd, timeoutNs());
  Streams others(2);
  inThreads(2, [&](int rank) {
    std::vector<float> buffer(900), data(500);
    for (int n = 0; n < rounds && !ranks.haveFailed(); ++n) {
      for (size_t i = 0; i < buffer.size(); ++i) buffer[i] = contribution(kSeed, rank, n, i);
      for (size_t i = 0; i < data.size(); ++i) data[i] = rank == 0 ? contribution(kSeed + 1, 0, n, i) : 0;
      const Call call = allReduceOf(buffer, 2);
      Call pair = makeCall(rank == 0 ? ncclFfmFunctionSend : ncclFfmFunctionRecv, data.data(), data.data(), data.size(),
                           ncclFloat32, ncclSum, 1 - rank, 1 - rank);
      pair.blocks = 1 + n % 2;
      shim(ncclFfmLaunch(&ranks.world.comm(rank), &pair, others[rank]), "send or receive");
      shim(ncclFfmLaunch(&ranks.world.comm(rank), &call, ranks.streams[rank]), "all-reduce");
      ranks.launched[rank] += 2;
      ranks.await(rank, "a collective and a send");
      for (size_t i = 0; i < data.size(); ++i) {
        check(data[i] == contribution(kSeed + 1, 0, n, i), "rank %d, round %d, element %zu sent: %.9g", rank, n, i,
              data[i]);
      }
      for (size_t i = 0; i < buffer.size(); ++i) {
        const float expected = sumOf(2, n, i, [](float x) { return x; });
        check(buffer[i] == expected, "rank %d, round %d, element %zu: %.9g, not %.9g", rank, n, i, buffer[i], expected);
      }
    }
  });
}

// The host counts the kernels of a graph, and the graph as often as it launches it.
void replaysOfAGraphAreCounted(int replays) {
  constexpr int kRanks = 3;
  Ranks ranks(kRanks, kJustBeforeTheEnd, timeoutNs());
  std::vector<std::vector<float>> buffers(kRanks, std::vector<float>(700));
  inThreads(kRanks, [&](int rank) {
    const cudaStream_t stream = ranks.streams[rank];
    std::vector<float> &buffer = buffers[rank];
    cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    const Call call = allReduceOf(buffer, 2);
    shim(ncclFfmLaunch(&ranks.world.comm(rank), &call, stream), "captured");
    shim(ncclFfmFusedScaleAllReduceSqrt(&ranks.world.comm(rank), &call, 2, 1, stream), "captured, fused");
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    cuda(cudaGraphInstantiateWithFlags(&executable, graph, 0), "cudaGraphInstantiateWithFlags");
    check(ranks.world.hostSignal(rank) == kJustBeforeTheEnd, "a capture has signalled");
    for (int n = 0; n < replays && !ranks.haveFailed(); ++n) {
      for (size_t i = 0; i < buffer.size(); ++i) buffer[i] = contribution(kSeed, rank, n, i);
      cuda(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
      ranks.launched[rank] += 2;
      ranks.await(rank, "a replay");
      for (size_t i = 0; i < buffer.size(); ++i) {
        const float x = std::fmaf(2.0f, sumOf(kRanks, n, i, [](float y) { return y; }), 1.0f);
        float expected = x;
        for (int r = 1; r < kRanks; ++r) expected += x;
        expected = std::sqrt(std::fabs(expected));
        check(buffer[i] == expected, "rank %d, replay %d, element %zu: %.9g, not %.9g", rank, n, i, buffer[i],
              expected);
      }
    }
    cuda(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
    cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
  });
}

// A kernel that fails, and those after it, which find the communicator failed: the host then looks at the record.
void failedKernelsAreCounted() {
  for (bool abort : {false, true}) {
    Ranks ranks(2, 0, abort ? timeoutNs() : 300 * kMs);
    std::deque<std::vector<float>> buffers(3, std::vector<float>(500, 1.0f));
    for (std::vector<float> &buffer : buffers) {
      const Call call = allReduceOf(buffer, 2);
      shim(ncclFfmLaunch(&ranks.world.comm(0), &call, ranks.streams[0]), "without its peer");
      ++ranks.launched[0];
    }
    if (abort) ranks.world.abort(0);
    ranks.await(0, "kernels that fail");
    const Status status = ranks.world.status(0);
    check(status.code == (abort ? ncclRemoteError : ncclTimeout) && status.peer == 1, "status: code %u, peer %d",
          status.code, status.peer);
  }
}

void whatLaunchesNothingIsNotCounted() {
  Ranks ranks(1, 5, timeoutNs());
  std::vector<float> buffer(8, 1.0f);
  Call call = allReduceOf(buffer, 0);
  call.count = 0;
  const DevComm &comm = ranks.world.comm(0);
  shim(ncclFfmLaunch(&comm, &call, ranks.streams[0]), "of nothing");
  shim(ncclFfmFusedScaleAllReduceSqrt(&comm, &call, 2, 1, ranks.streams[0]), "of nothing, fused");
  shim(ncclFfmPrime(ranks.streams[0]), "ncclFfmPrime");
  cuda(cudaStreamSynchronize(ranks.streams[0]), "cudaStreamSynchronize");
  check(ranks.world.hostSignal(0) == 5, "nothing: the word is %u", ranks.world.hostSignal(0));
  call.function = ncclFfmFunctionBarrier;
  shim(ncclFfmLaunch(&comm, &call, ranks.streams[0]), "a barrier");
  ++ranks.launched[0];
  ranks.await(0, "a barrier");
}

}  // namespace
}  // namespace ncclffm::test

int main() {
  using namespace ncclffm::test;
  resultsAreThereAfterTheWord(2, kJustBeforeTheEnd, 10000 / kSlowdown);
  for (int nRanks : {1, 3, 4, 8}) resultsAreThereAfterTheWord(nRanks, kJustBeforeTheEnd, 1000 / nRanks / kSlowdown);
  sendsBesideACollectiveAreCounted(1000 / kSlowdown);
  replaysOfAGraphAreCounted(500 / kSlowdown);
  failedKernelsAreCounted();
  whatLaunchesNothingIsNotCounted();
  return report("signal_cpu_test");
}
