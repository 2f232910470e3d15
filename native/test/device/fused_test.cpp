// The fused kernels on host threads: every type, protocol and algorithm, odd shapes and places, compared with the same
// steps one after the other, computed here once more (bit by bit where the order of additions is promised), and with
// float64; and training, over 1,000 steps.
#include "harness.h"  // first: it sets up the library

#include <algorithm>
#include <limits>
#include <memory>
#include <type_traits>

namespace ncclffm::test {
namespace {

constexpr uint64_t kSeed = 20250201;
constexpr int kChannels = 3;
constexpr uint32_t kSlotBytes = 512;

struct Way {
  uint32_t protocol, algorithm;
  bool zeroCopy;
};
constexpr Way kWays[] = {{ncclFfmProtocolLL, ncclFfmAlgorithmOneShot, false},
                         {ncclFfmProtocolLL, ncclFfmAlgorithmTwoShot, false},
                         {ncclFfmProtocolSimple, ncclFfmAlgorithmOneShot, false},
                         {ncclFfmProtocolSimple, ncclFfmAlgorithmTwoShot, false},
                         {ncclFfmProtocolSimple, ncclFfmAlgorithmTwoShot, true}};

// How the blocks of a launch are made.
struct Launch {
  int nRanks, blocks;
  uint32_t threads;
};

// A buffer of each rank, at an offset in elements, with a guard behind it.
template <class T>
class Buffers {
 public:
  Buffers(int nRanks, size_t count, size_t offset) : count_(count), offset_(offset), memory_(nRanks) {
    for (auto &memory : memory_) memory.resize(count + offset + kGuard);
    for (auto &memory : memory_) peers_.push_back(memory.data());
  }
  T *of(int rank) { return memory_[rank].data() + offset_; }
  LsaBuffer window() { return {peers_.data(), (count_ + offset_ + kGuard) * sizeof(T), offset_ * sizeof(T)}; }
  bool guardsAreUntouched() const {
    const T zero = {};
    for (const auto &memory : memory_) {
      for (size_t i = 0; i < memory.size(); ++i) {
        if (i >= offset_ && i < offset_ + count_) continue;
        if (std::memcmp(&memory[i], &zero, sizeof(T)) != 0) return false;
      }
    }
    return true;
  }

 private:
  static constexpr size_t kGuard = 16;
  size_t count_, offset_;
  std::vector<std::vector<T>> memory_;
  std::vector<void *> peers_;
};

template <class T>
float value(T x) {
  return ElementType<T>::load(x);
}

template <class T>
T rounded(float x) {
  return ElementType<T>::store(x);
}

template <class T>
constexpr double kUnit = sizeof(T) == 4               ? 0x1p-24
                         : std::is_same_v<T, Float16> ? 0x1p-11
                                                      : 0x1p-8;

template <class T>
bool same(T a, T b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

template <class T>
void fill(Buffers<T> &buffers, int nRanks, size_t count, uint64_t call, float scale = 1.0f / 64) {
  for (int r = 0; r < nRanks; ++r) {
    for (size_t i = 0; i < count; ++i) buffers.of(r)[i] = rounded<T>(contribution(kSeed, r, call, i) * scale);
  }
}

// Runs body(coop, comm, rank, block) on every thread of every block of every rank.
template <class Body>
void onBlocks(World &world, const Launch &launch, Body body) {
  std::vector<std::unique_ptr<Group>> groups;
  for (int b = 0; b < launch.nRanks * launch.blocks; ++b) groups.push_back(std::make_unique<Group>(launch.threads));
  const int threads = static_cast<int>(launch.threads);
  inThreads(launch.nRanks * launch.blocks * threads, [&](int i) {
    const int group = i / threads, rank = group / launch.blocks, block = group % launch.blocks;
    const ncclResult_t result =
        launch.threads == 1
            ? body(CoopThread(), world.comm(rank), rank, block)
            : body(CoopGroup{groups[group].get(), static_cast<uint32_t>(i % threads)}, world.comm(rank), rank, block);
    check(result == ncclSuccess, "%d ranks, %d blocks of %u threads: rank %d, block %d: result %d", launch.nRanks,
          launch.blocks, launch.threads, rank, block, result);
  });
}

template <class T>
Call callOf(const Launch &launch, const Way &way, Buffers<T> &send, Buffers<T> &recv, int rank, size_t count, int op) {
  Call call = makeCall(ncclFfmFunctionAllReduce, send.of(rank), recv.of(rank), count, kDataTypeOf<T>, op, 0, 0);
  call.protocol = way.protocol;
  call.algorithm = way.algorithm;
  call.blocks = launch.blocks;
  if (way.zeroCopy) {
    call.send = send.window();
    call.recv = recv.window();
  }
  return call;
}

// The sum, or average, of what is sent, in rank order and rounded: the middle step by itself.
template <class T>
std::vector<T> reduced(const std::vector<std::vector<T>> &sent, bool average) {
  std::vector<T> result(sent[0].size());
  for (size_t i = 0; i < result.size(); ++i) {
    float sum = value(sent[0][i]);
    for (size_t r = 1; r < sent.size(); ++r) sum += value(sent[r][i]);
    result[i] = rounded<T>(average ? sum / static_cast<float>(sent.size()) : sum);
  }
  return result;
}

uint64_t calls = 0;

template <class T>
void scaleAllReduceSqrtMatches(World &world, const Launch &launch, const Way &way, size_t count, size_t sendOffset,
                               size_t recvOffset, bool inPlace) {
  const uint64_t call = ++calls;
  const float a = 1.5f, b = -0.25f;
  Buffers<T> send(launch.nRanks, count, sendOffset), apart(launch.nRanks, count, recvOffset);
  Buffers<T> &recv = inPlace ? send : apart;
  fill(send, launch.nRanks, count, call);
  std::vector<std::vector<T>> scaled(launch.nRanks, std::vector<T>(count));
  std::vector<double> exact(count), bound(count);
  for (int r = 0; r < launch.nRanks; ++r) {
    for (size_t i = 0; i < count; ++i) {
      const float x = value(send.of(r)[i]);
      scaled[r][i] = rounded<T>(fmaf(a, x, b));
      exact[i] += static_cast<double>(a) * x + b;
      bound[i] += std::fabs(static_cast<double>(a) * x + b) * kUnit<T> * (launch.nRanks + 2) + 0x1p-25;
    }
  }
  onBlocks(world, launch, [&](auto coop, const DevComm &comm, int rank, int block) {
    return scaleAllReduceSqrt<T>(coop, comm, block, launch.blocks,
                                 callOf(launch, way, send, recv, rank, count, ncclSum), a, b);
  });
  const std::vector<T> sum = reduced(scaled, false);
  for (int r = 0; r < launch.nRanks; ++r) {
    for (size_t i = 0; i < count; ++i) {
      const T got = recv.of(r)[i], expected = rounded<T>(std::sqrt(std::fabs(value(sum[i]))));
      const double square = static_cast<double>(value(got)) * value(got);
      const double allowed = bound[i] + 4 * kUnit<T> * std::fabs(exact[i]);
      check(same(got, expected) && std::fabs(square - std::fabs(exact[i])) <= allowed,
            "scale: call %llu, type %d, protocol %u, algorithm %u, zero-copy %d, %zu elements, rank %d of %d, element "
            "%zu: %.9g, not %.9g; sum %.9g +- %g",
            static_cast<unsigned long long>(call), kDataTypeOf<T>, way.protocol, way.algorithm, way.zeroCopy, count, r,
            launch.nRanks, i, value(got), value(expected), exact[i], allowed);
    }
  }
  check(send.guardsAreUntouched() && recv.guardsAreUntouched(), "scale: wrote beside the buffer");
}

template <class T>
void rmsNormMatches(World &world, const Launch &launch, const Way &way, size_t tokens, size_t hidden, size_t offset,
                    bool inPlace) {
  const uint64_t call = ++calls;
  const size_t count = tokens * hidden;
  const float eps = 1e-5f;
  Buffers<T> x(launch.nRanks, count, offset), residual(launch.nRanks, count, offset),
      apart(launch.nRanks, count, offset), weight(1, hidden, 0);
  Buffers<T> &out = inPlace ? x : apart;
  fill(x, launch.nRanks, count, call);
  fill(weight, 1, hidden, ++calls);
  fill(residual, 1, count, ++calls);
  for (int r = 1; r < launch.nRanks; ++r) std::copy(residual.of(0), residual.of(0) + count, residual.of(r));
  std::vector<std::vector<T>> sent;
  for (int r = 0; r < launch.nRanks; ++r) sent.emplace_back(x.of(r), x.of(r) + count);
  const std::vector<T> sum = reduced(sent, false);
  std::vector<T> expected(count);
  for (size_t i = 0; i < count; ++i) expected[i] = rounded<T>(value(residual.of(0)[i]) + value(sum[i]));
  onBlocks(world, launch, [&](auto coop, const DevComm &comm, int rank, int block) {
    return allReduceRmsNorm<T>(coop, comm, block, launch.blocks, callOf(launch, way, x, residual, rank, count, ncclSum),
                               RmsNorm{tokens, hidden, weight.of(0), out.of(rank), eps, 0});
  });
  for (size_t t = 0; t < tokens; ++t) {
    double squares = 0;
    for (size_t k = 0; k < hidden; ++k) {
      const double r = value(expected[t * hidden + k]);
      squares += r * r;
    }
    const double scale = 1 / std::sqrt(squares / static_cast<double>(hidden) + eps);
    for (size_t k = 0; k < hidden; ++k) {
      const size_t i = t * hidden + k;
      const double exact = value(expected[i]) * scale * value(weight.of(0)[k]);
      for (int r = 0; r < launch.nRanks; ++r) {
        const T got = out.of(r)[i];
        check(
            same(residual.of(r)[i], expected[i]) && same(got, out.of(0)[i]) &&
                std::fabs(value(got) - exact) <= std::fabs(exact) * (kUnit<T> + 1e-5) + 1e-7,
            "norm: call %llu, type %d, protocol %u, algorithm %u, zero-copy %d, %zu x %zu, rank %d of %d, element %zu: "
            "residual %.9g, not %.9g; %.9g, not %.9g",
            static_cast<unsigned long long>(call), kDataTypeOf<T>, way.protocol, way.algorithm, way.zeroCopy, tokens,
            hidden, r, launch.nRanks, i, value(residual.of(r)[i]), value(expected[i]), value(got), exact);
      }
    }
  }
  check(x.guardsAreUntouched() && residual.guardsAreUntouched() && out.guardsAreUntouched(), "norm: wrote beside");
}

// Weights and what an optimizer keeps of them.
struct Model {
  std::vector<float> w, m, v;
  std::vector<uint16_t> copy;

  explicit Model(size_t count) : w(count), m(count), v(count), copy(count) {
    for (size_t i = 0; i < count; ++i) w[i] = contribution(kSeed, 99, 0, i) / 32;
  }
  bool operator==(const Model &o) const {
    const auto equal = [](const auto &a, const auto &b) {
      return std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
    };
    return equal(w, o.w) && equal(m, o.m) && equal(v, o.v) && equal(copy, o.copy);
  }
};

struct Settings {
  bool adamW;
  float learningRate, beta1, beta2, eps, weightDecay, maxNorm;
};

// One step by the documents of ncclffm.h, after an all-reduce of its own.
template <class T>
void updateUnfused(Model &model, const std::vector<T> &gradient, const Settings &s, uint32_t step) {
  double squares = 0;
  for (T g : gradient) squares += static_cast<double>(value(g)) * value(g);
  const float norm = static_cast<float>(squares);
  const float clip = s.maxNorm == 0 ? 1.0f : std::min(1.0f, s.maxNorm / (std::sqrt(norm) + 1e-6f));
  const double c1 = 1 - std::pow(static_cast<double>(s.beta1), step), c2 = 1 - std::pow(double{s.beta2}, step);
  const float rate = static_cast<float>(s.learningRate / c1), root = 1.0f / std::sqrt(static_cast<float>(c2));
  for (size_t i = 0; i < gradient.size(); ++i) {
    const float g = value(gradient[i]) * clip;
    float &w = model.w[i], &m = model.m[i], &v = model.v[i];
    w = std::fmaf(-(s.learningRate * s.weightDecay), w, w);
    if (s.adamW) {
      m = std::fmaf(s.beta1, m, (1 - s.beta1) * g);
      v = std::fmaf(s.beta2, v, (1 - s.beta2) * g * g);
      w = std::fmaf(-rate, m / std::fmaf(std::sqrt(v), root, s.eps), w);
    } else {
      m = std::fmaf(s.beta1, m, g);
      w = std::fmaf(-s.learningRate, m, w);
    }
    model.copy[i] = toBfloat16(w).bits;
  }
}

// The furthest that two models are from each other, in float's units of the larger weight.
double distance(const Model &a, const Model &b) {
  double most = 0;
  for (size_t i = 0; i < a.w.size(); ++i) {
    most = std::max(most, std::fabs(double{a.w[i]} - b.w[i]) / std::max(1e-3, std::fabs(double{a.w[i]})) * 0x1p24);
  }
  return most;
}

// Trains on the ranks' own data: each wants its own weights, so that the average is what all go to.
template <class T>
void trainingMatchesTheUnfusedSequence(const Launch &launch, const Way &way, const Settings &s, size_t count,
                                       uint32_t steps, bool stepsInMemory) {
  World world(launch.nRanks, kChannels, kSlotBytes, timeoutNs());
  std::vector<Model> models(launch.nRanks, Model(count));
  Model unfused(count);
  Buffers<T> gradients(launch.nRanks, count, 0);
  std::vector<uint32_t> counters(launch.nRanks);
  std::vector<std::vector<T>> sent(launch.nRanks, std::vector<T>(count));
  double furthest = 0;
  for (uint32_t step = 1; step <= steps && failures.load() == 0; ++step) {
    for (int r = 0; r < launch.nRanks; ++r) {
      for (size_t i = 0; i < count; ++i) {
        const float wanted = contribution(kSeed, r, 1, i) / 8, noise = contribution(kSeed, r, step + 1, i) / 512;
        gradients.of(r)[i] = rounded<T>(models[r].w[i] - wanted + noise);
        sent[r][i] = rounded<T>(unfused.w[i] - wanted + noise);
      }
    }
    onBlocks(world, launch, [&](auto coop, const DevComm &comm, int r, int block) {
      const Call call = callOf(launch, way, gradients, gradients, r, count, ncclAvg);
      Model &m = models[r];
      const Optimizer o = {
          m.w.data(),    m.m.data(),     m.v.data(), m.copy.data(), stepsInMemory ? &counters[r] : nullptr,
          step,          s.learningRate, s.beta1,    s.beta2,       s.eps,
          s.weightDecay, s.maxNorm};
      return allReduceUpdate<T>(coop, comm, block, launch.blocks, call, o, s.adamW);
    });
    updateUnfused(unfused, reduced(sent, true), s, step);
    for (int r = 0; r < launch.nRanks; ++r) {
      check(models[r] == models[0], "training: step %u: rank %d differs from rank 0", step, r);
      check(!stepsInMemory || !s.adamW || counters[r] == step, "training: step %u: rank %d counts %u", step, r,
            counters[r]);
    }
    // The norm is the sum of other partial sums: a float apart, now and then.
    if (s.maxNorm == 0) {
      check(models[0] == unfused, "training: type %d, adamW %d, step %u: not what the unfused steps give, %g units",
            kDataTypeOf<T>, s.adamW, step, distance(models[0], unfused));
    } else {
      furthest = std::max(furthest, distance(models[0], unfused));
    }
  }
  check(furthest <= 256, "training with clipping: type %d, adamW %d: %g units from the unfused steps", kDataTypeOf<T>,
        s.adamW, furthest);
  // And it does train: the average of what the ranks want is where it should end.
  double missed = 0, atFirst = 0;
  for (size_t i = 0; i < count; ++i) {
    double wanted = 0;
    for (int r = 0; r < launch.nRanks; ++r) wanted += contribution(kSeed, r, 1, i) / 8.0 / launch.nRanks;
    missed += std::fabs(models[0].w[i] - wanted);
    atFirst += std::fabs(Model(count).w[i] - wanted);
  }
  check(steps < 500 || missed < atFirst / 4, "training: adamW %d: %g from what is wanted, %g at first", s.adamW, missed,
        atFirst);
}

constexpr Settings kAdamW = {true, 0.01f, 0.9f, 0.999f, 1e-8f, 0.01f, 0};
constexpr Settings kSgd = {false, 0.01f, 0.9f, 0, 0, 0.001f, 0};

Settings clipped(Settings s) {
  s.maxNorm = 2.0f;
  return s;
}

template <class T>
void allOf(const Launch &launch, const Way &way) {
  World world(launch.nRanks, kChannels, kSlotBytes, timeoutNs());
  const size_t slots = kSlotBytes / sizeof(T);
  for (size_t count : {size_t{1}, size_t{7}, slots + 3, 4097 / sizeof(T)}) {
    const size_t offset = 16 / sizeof(T);
    scaleAllReduceSqrtMatches<T>(world, launch, way, count, 0, 0, true);
    scaleAllReduceSqrtMatches<T>(world, launch, way, count, offset, 2 * offset, false);
    scaleAllReduceSqrtMatches<T>(world, launch, way, count, 1, 1, true);
    scaleAllReduceSqrtMatches<T>(world, launch, way, count, 3, 2, false);
  }
  for (size_t tokens : {1, 2, 5, 9}) {
    for (size_t hidden : {1, 13, 64, 250}) {
      rmsNormMatches<T>(world, launch, way, tokens, hidden, 0, tokens % 2 == 1);
      rmsNormMatches<T>(world, launch, way, tokens, hidden, 1, tokens % 2 == 0);
    }
  }
  for (int r = 0; r < launch.nRanks; ++r) check(world.status(r).code == 0, "status %u", world.status(r).code);
  for (size_t count : {1, 7, 700}) {
    for (const Settings &s : {kAdamW, kSgd, clipped(kAdamW), clipped(kSgd)}) {
      trainingMatchesTheUnfusedSequence<T>(launch, way, s, count, 2, count == 7);
    }
  }
}

// A gradient that is not finite is not made so: a weight that is wrong must show.
void notFiniteStaysNotFinite() {
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    World world(1, kChannels, kSlotBytes, timeoutNs());
    Model model(5);
    Buffers<float> gradients(1, 5, 0);
    fill(gradients, 1, 5, 1);
    gradients.of(0)[3] = bad;
    onBlocks(world, {1, 2, 1}, [&](auto coop, const DevComm &comm, int, int block) {
      Call call = callOf({1, 2, 1}, kWays[0], gradients, gradients, 0, 5, ncclAvg);
      const Optimizer o = {model.w.data(), model.m.data(), model.v.data(), nullptr, nullptr, 1,
                           0.1f,           0.9f,           0.999f,         1e-8f,   0,       1.0f};
      return allReduceUpdate<float>(coop, comm, block, 2, call, o, true);
    });
    check(std::isnan(model.w[3]), "a weight whose gradient is %g: %g", bad, model.w[3]);
  }
}

// A prologue and an epilogue of somebody else's, with the number of the element, on a session and as a kernel.
struct TimesIndex {
  float operator()(float x, uint64_t i) const { return x * static_cast<float>(i + 1); }
};
struct MinusIndex {
  float operator()(float x, uint64_t i) const { return x - static_cast<float>(i); }
};

void functorsSeeTheNumberOfTheElement() {
  constexpr size_t kCount = 601;
  for (int nRanks : {1, 2, 3}) {
    for (uint32_t protocol : {ncclFfmProtocolAuto, ncclFfmProtocolLL, ncclFfmProtocolLL128, ncclFfmProtocolSimple}) {
      for (uint32_t algorithm :
           {ncclFfmAlgorithmAuto, ncclFfmAlgorithmOneShot, ncclFfmAlgorithmTwoShot, ncclFfmAlgorithmRing}) {
        for (bool asKernel : {false, true}) {
          World world(nRanks, kChannels, kSlotBytes, timeoutNs());
          Buffers<float> x(nRanks, kCount, 1);
          for (int r = 0; r < nRanks; ++r) std::fill(x.of(r), x.of(r) + kCount, 1.0f + static_cast<float>(r));
          const int blocks = asKernel ? 3 : 1;
          onBlocks(world, {nRanks, blocks, 1}, [&](auto coop, const DevComm &given, int r, int block) {
            DevComm comm = given;  // what the kernel does not have gives way to the table
            comm.protocol = protocol;
            comm.algorithm = algorithm;
            if (asKernel) {
              return fusedAllReduceKernel<float>(coop, comm, block, blocks, x.of(r), x.of(r), kCount, ncclSum,
                                                 TimesIndex(), MinusIndex());
            }
            ChannelSession<decltype(coop)> session(coop, comm, 0, ncclFfmFunctionAllReduce);
            return fusedAllReduce<float>(session, x.of(r), x.of(r), kCount, ncclSum, TimesIndex(), MinusIndex());
          });
          const float ranks = static_cast<float>(nRanks * (nRanks + 1) / 2);
          for (int r = 0; r < nRanks; ++r) {
            for (size_t i = 0; i < kCount; ++i) {
              const float expected = ranks * static_cast<float>(i + 1) - static_cast<float>(i);
              check(x.of(r)[i] == expected, "functors: %d ranks, protocol %u, algorithm %u, element %zu: %g, not %g",
                    nRanks, protocol, algorithm, i, x.of(r)[i], expected);
            }
          }
        }
      }
    }
  }
}

void badCallsAreRefusedAndTouchNothing() {
  World world(2, kChannels, kSlotBytes, timeoutNs());
  Buffers<float> x(2, 9, 0);
  const auto refused = [&](const char *what, auto change) {
    Call call = makeCall(ncclFfmFunctionAllReduce, x.of(0), x.of(0), 8, ncclFloat32, ncclSum, 0, 0);
    change(call);
    ChannelSession<CoopThread> session(CoopThread(), world.comm(0), 0, ncclFfmFunctionAllReduce);
    const ncclResult_t result = fusedAllReduceLsa<float>(session, call, TimesIndex(), MinusIndex());
    check(result == ncclInvalidArgument, "%s: %d", what, result);
  };
  refused("LL128", [](Call &c) { c.protocol = ncclFfmProtocolLL128; });
  refused("ring", [](Call &c) { c.algorithm = ncclFfmAlgorithmRing; });
  refused("type", [](Call &c) { c.datatype = ncclFloat16; });
  refused("op", [](Call &c) { c.op = 5; });
  refused("null", [](Call &c) { c.sendbuff = nullptr; });
  refused("overlap", [&](Call &c) { c.recvbuff = x.of(0) + 1; });
  const ncclResult_t blocks = fusedAllReduceKernel<float>(CoopThread(), world.comm(0), 0, kChannels + 1, x.of(0),
                                                          x.of(0), 8, ncclSum, TimesIndex(), MinusIndex());
  check(blocks == ncclInvalidArgument, "more blocks than channels: %d", blocks);
  check(world.isUntouched(1) && world.status(0).code == 0, "a refused call sent something");
}

// Ranks that disagree, and a rank that does not come, end as any collective does; and nothing is updated.
void disagreementAndAbsenceAreReported() {
  for (bool absent : {false, true}) {
    World world(2, kChannels, kSlotBytes, (absent ? 200 : 20000) * kMs);
    Buffers<float> gradients(2, 5, 0);
    std::vector<Model> models(2, Model(5));
    inThreads(absent ? 1 : 2, [&](int r) {
      Call call = callOf({2, 1, 1}, kWays[0], gradients, gradients, r, 5, ncclAvg);
      call.root = r;  // what the shim puts there is a hash of learning rate and so on
      Model &m = models[r];
      const Optimizer o = {m.w.data(), m.m.data(), m.v.data(), nullptr, nullptr, 1, 0.1f, 0.9f, 0.9f, 1e-8f, 0, 1.0f};
      const ncclResult_t result = allReduceUpdate<float>(CoopThread(), world.comm(r), 0, 1, call, o, true);
      const Status status = world.status(r);
      const ncclResult_t expected = absent ? ncclTimeout : ncclInvalidUsage;
      check(result == expected && status.code == static_cast<uint32_t>(expected) &&
                status.function == ncclFfmFunctionFusedAdamW && status.peer == 1 - r,
            "absent %d: rank %d: result %d, status %u, function %u, peer %d", absent, r, result, status.code,
            status.function, status.peer);
      check(m == Model(5), "a failed update changed the model");
    });
  }
}

// Block 1 of rank 1 does not come. Every other block waits for it, in the exchange or where blocks meet to clip.
void blockThatIsMissingWhereTheyClipEndsTheOthers() {
  constexpr int kBlocks = 2;
  constexpr uint64_t kCount = 64;
  World world(2, kChannels, kSlotBytes, 300 * kMs);
  Buffers<float> gradients(2, kCount, 0);
  std::vector<Model> models(2, Model(kCount));
  inThreads(3, [&](int thread) {
    const int rank = thread / kBlocks, block = thread % kBlocks;
    const Call call = callOf({2, kBlocks, 1}, kWays[0], gradients, gradients, rank, kCount, ncclAvg);
    Model &m = models[rank];
    const Optimizer o = {m.w.data(), m.m.data(), m.v.data(), nullptr, nullptr, 1, 0.1f, 0.9f, 0.9f, 1e-8f, 0, 1.0f};
    const ncclResult_t result = allReduceUpdate<float>(CoopThread(), world.comm(rank), block, kBlocks, call, o, true);
    check(result == ncclTimeout, "rank %d, block %d: result %d", rank, block, result);
  });
  for (int r = 0; r < 2; ++r) {
    check(world.status(r).code == ncclTimeout, "rank %d: status %u", r, world.status(r).code);
    check(models[r] == Model(kCount), "rank %d: a failed update changed the model", r);
  }
}

}  // namespace
}  // namespace ncclffm::test

int main() {
  using namespace ncclffm;
  using namespace ncclffm::test;
  for (int nRanks : {1, 2, 3, 4, 8}) {
    for (const Way &way : kWays) {
      const Launch launch = {nRanks, 1 + static_cast<int>(way.algorithm) % 2, nRanks <= 3 ? 3u : 1u};
      allOf<float>(launch, way);
      if (nRanks != 3 && kSlowdown > 1) continue;
      allOf<Float16>(launch, way);
      allOf<Bfloat16>({nRanks, 2, 1}, way);
    }
    if (failures.load() != 0) return report("fused_test");
  }
  const uint32_t steps = kSlowdown > 1 ? 100 : 1000;
  trainingMatchesTheUnfusedSequence<float>({3, 2, 1}, kWays[0], kAdamW, 97, steps, true);
  trainingMatchesTheUnfusedSequence<Bfloat16>({2, 2, 1}, kWays[3], clipped(kAdamW), 97, steps, false);
  trainingMatchesTheUnfusedSequence<Bfloat16>({2, 1, 1}, kWays[1], kSgd, 97, steps, false);
  trainingMatchesTheUnfusedSequence<float>({2, 2, 1}, kWays[4], clipped(kSgd), 97, steps, false);
  notFiniteStaysNotFinite();
  functorsSeeTheNumberOfTheElement();
  badCallsAreRefusedAndTouchNothing();
  disagreementAndAbsenceAreReported();
  blockThatIsMissingWhereTheyClipEndsTheOthers();
  return report("fused_test");
}
