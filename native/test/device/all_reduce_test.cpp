// The device library on host threads: random calls on random shapes, compared with sums in float64 and, bit by bit,
// with sums of float32 in rank order.
//
// Built several times: as it is, with shrunken epochs (NCCLFFM_EPOCH_BITS), so that the epoch wraps thousands of times,
// and with a rule of the protocol broken (NCCLFFM_BROKEN_RULE). The latter runs are started with --expect-failure and
// pass only if the checks, or the deadline, notice.
#include "harness.h"

namespace ncclffm::test {
namespace {

constexpr uint64_t kSeed = 20250117;
constexpr float kScale = 1.5f, kOffset = -0.25f;
constexpr float kGuard = 12345.0f;  // around every buffer
constexpr size_t kGuards = 8;

bool expectFailure = false;

// A broken protocol may hang: its deadline is short. A right one must not time out on a busy machine.
uint64_t timeoutNs() {
  return (expectFailure ? 2000 : 60000) * kMs;
}

struct Call {
  size_t count, sendOffset, recvOffset;  // in elements
  bool inPlace, fused;
};

Call randomCall(uint64_t seed, size_t maxCount) {
  uint64_t h = mix(seed);
  size_t limit = h % 4 == 0 ? 4 : maxCount;  // small counts are the ones with corners
  h = mix(h);
  Call call = {h % (limit + 1), (h >> 32) % 4, (h >> 36) % 4, (h >> 40) % 3 == 0, (h >> 44) % 4 == 0};
  if (call.fused) call.inPlace = true;
  return call;
}

// The buffers of one rank for one call, and the check of what came out.
class Buffers {
 public:
  explicit Buffers(size_t maxCount) : send_(maxCount + 2 * kGuards), recv_(maxCount + 2 * kGuards) {}

  void fill(const Call &call, uint64_t seed, int rank, uint64_t number) {
    std::fill(send_.begin(), send_.end(), kGuard);
    std::fill(recv_.begin(), recv_.end(), kGuard);
    for (size_t i = 0; i < call.count; ++i) send(call)[i] = contribution(seed, rank, number, i);
  }

  float *send(const Call &call) { return send_.data() + kGuards / 2 + call.sendOffset; }
  float *recv(const Call &call) { return call.inPlace ? send(call) : recv_.data() + kGuards / 2 + call.recvOffset; }

  void verify(const Call &call, uint64_t seed, int rank, int nRanks, uint64_t number) {
    for (size_t i = 0; i < call.count; ++i) {
      float inOrder = 0;
      double exact = 0, magnitude = 0;
      for (int r = 0; r < nRanks; ++r) {
        float x = contribution(seed, r, number, i);
        if (call.fused) x = std::fmaf(kScale, x, kOffset);
        inOrder = r == 0 ? x : inOrder + x;
        exact += x;
        magnitude += std::fabs(x);
      }
      // Each of the additions rounds once; a square root turns an absolute error e into at most sqrt(e).
      double bound = magnitude * nRanks * 0x1p-24;
      if (call.fused) {
        inOrder = std::sqrt(std::fabs(inOrder));
        exact = std::sqrt(std::fabs(exact));
        bound = std::sqrt(bound) + exact * 0x1p-24;
      }
      float got = recv(call)[i];
      check(std::fabs(got - exact) <= bound && std::memcmp(&got, &inOrder, sizeof got) == 0,
            "seed %llu, rank %d of %d, call %llu, element %zu of %zu%s%s: %.9g, not %.9g (float64: %.17g)",
            static_cast<unsigned long long>(seed), rank, nRanks, static_cast<unsigned long long>(number), i, call.count,
            call.inPlace ? ", in place" : "", call.fused ? ", fused" : "", got, inOrder, exact);
      if (!call.inPlace) {
        check(send(call)[i] == contribution(seed, rank, number, i), "seed %llu, call %llu: sendbuff was changed",
              static_cast<unsigned long long>(seed), static_cast<unsigned long long>(number));
      }
    }
    checkGuards(send_, call.count == 0 ? nullptr : send(call), call.count, number);
    checkGuards(recv_, call.count == 0 || call.inPlace ? nullptr : recv(call), call.count, number);
  }

 private:
  static void checkGuards(const std::vector<float> &buffer, const float *used, size_t count, uint64_t number) {
    for (const float &x : buffer) {
      if (used != nullptr && &x >= used && &x < used + count) continue;
      check(x == kGuard, "call %llu of %zu elements wrote outside its buffer", static_cast<unsigned long long>(number),
            count);
    }
  }

  std::vector<float> send_, recv_;
};

ncclResult_t runBlock(CoopGroup coop, const DevComm &comm, int block, int nBlocks, const Call &call, Buffers &buffers) {
  if (call.fused) {
    return fusedAllReduceKernel(coop, comm, block, nBlocks, ncclFfmFunctionFusedScaleAllReduceSqrt, buffers.send(call),
                                buffers.recv(call), call.count, ScaleAdd{kScale, kOffset}, SqrtAbs());
  }
  return fusedAllReduceKernel(coop, comm, block, nBlocks, ncclFfmFunctionAllReduce, buffers.send(call),
                              buffers.recv(call), call.count, Identity(), Identity());
}

void checkResult(World &world, uint64_t seed, int rank, uint64_t number, ncclResult_t result) {
  Status status = world.status(rank);
  check(result == ncclSuccess,
        "seed %llu, rank %d, call %llu: result %d; status: code %u, peer %d, channel %d, epoch %u",
        static_cast<unsigned long long>(seed), rank, static_cast<unsigned long long>(number), result, status.code,
        status.peer, status.channel, status.epoch);
}

// Whole launches: nBlocks of nChannels blocks, of several threads each; from call to call another number of blocks.
void launchesOfAnyShapeMatchFloat64(int nRanks, int nChannels, uint32_t threadsPerBlock, uint32_t linesPerSlot,
                                    int calls) {
  const uint64_t seed = kSeed + 1000 * nRanks + 100 * nChannels + 10 * threadsPerBlock + linesPerSlot;
  const size_t maxCount = 6 * linesPerSlot * nChannels + 33;
  World world(nRanks, nChannels, linesPerSlot, timeoutNs());
  inThreads(nRanks, [&](int rank) {
    Buffers buffers(maxCount);
    const uint32_t threads = nChannels * threadsPerBlock;
    Group launch(threads);
    std::vector<Group *> blocks;
    for (int b = 0; b < nChannels; ++b) blocks.push_back(new Group(threadsPerBlock));
    inThreads(static_cast<int>(threads), [&](int thread) {
      const int block = thread / static_cast<int>(threadsPerBlock);
      const CoopGroup coop = {blocks[block], static_cast<uint32_t>(thread) % threadsPerBlock};
      for (int number = 0; number < calls; ++number) {
        const Call call = randomCall(seed + number, maxCount);
        const int nBlocks = 1 + static_cast<int>(mix(seed + number + 7) % nChannels);
        if (thread == 0) buffers.fill(call, seed, rank, number);
        launch.arrive(thread, false, 0);
        ncclResult_t result = ncclSuccess;
        if (block < nBlocks) result = runBlock(coop, world.comm(rank), block, nBlocks, call, buffers);
        checkResult(world, seed, rank, number, result);
        bool failed = launch.arrive(thread, result != ncclSuccess, 0).any;
        if (failed) break;
        if (thread == 0) buffers.verify(call, seed, rank, nRanks, number);
      }
    });
    for (Group *block : blocks) delete block;
  });
}

// One thread a rank, and nothing but the protocol to keep ranks in step: one channel after another, sometimes several
// calls on one session.
void callsBackToBackMatchFloat64(int nRanks, uint32_t linesPerSlot, int calls) {
  const uint64_t seed = kSeed + 77000 + 100 * nRanks + linesPerSlot;
  const int nChannels = 3;
  const size_t maxCount = 3 * linesPerSlot;
  World world(nRanks, nChannels, linesPerSlot, timeoutNs());
  inThreads(nRanks, [&](int rank) {
    Buffers buffers(maxCount);
    for (int number = 0; number < calls;) {
      const uint64_t h = mix(seed + number + 13);
      ChannelSession<CoopThread> session(CoopThread(), world.comm(rank), static_cast<int>(h % nChannels),
                                         ncclFfmFunctionAllReduce);
      for (int last = number + 1 + static_cast<int>((h >> 20) % 4); number < last; ++number) {
        Call call = randomCall(seed + number, maxCount);
        call.fused = false;
        buffers.fill(call, seed, rank, number);
        ncclResult_t result =
            ncclDevAllReduce(session, buffers.send(call), buffers.recv(call), call.count, ncclFloat32, ncclSum);
        checkResult(world, seed, rank, number, result);
        if (result != ncclSuccess) return;
        buffers.verify(call, seed, rank, nRanks, number);
      }
    }
  });
}

void epochsAlternateHalvesAcrossTheWrap() {
  check(nextEpoch(0) == 1, "the first epoch is %u", nextEpoch(0));
  for (uint32_t epoch : {1u, 2u, kMaxEpoch - 1, kMaxEpoch}) {
    check(nextEpoch(epoch) != 0 && nextEpoch(epoch) <= kMaxEpoch, "%u follows epoch %u", nextEpoch(epoch), epoch);
    check(nextEpoch(epoch) % 2 != epoch % 2, "epoch %u and the next use the same half", epoch);
  }
}

using Test = void (*)();

void run() {
  constexpr int kCalls = 20000 / kSlowdown, kLaunches = 400 / kSlowdown;
  const Test tests[] = {
      epochsAlternateHalvesAcrossTheWrap,
      [] { callsBackToBackMatchFloat64(2, 1, kCalls); },
      [] { callsBackToBackMatchFloat64(2, 8, kCalls); },
      [] { callsBackToBackMatchFloat64(3, 5, kCalls / 2); },
      [] { callsBackToBackMatchFloat64(4, 8, kCalls / 4); },
      [] { callsBackToBackMatchFloat64(8, 4, kCalls / 16); },
      [] { launchesOfAnyShapeMatchFloat64(1, 2, 2, 8, kLaunches); },
      [] { launchesOfAnyShapeMatchFloat64(2, 1, 4, 5, kLaunches); },
      [] { launchesOfAnyShapeMatchFloat64(2, 4, 1, 32, kLaunches); },
      [] { launchesOfAnyShapeMatchFloat64(3, 2, 3, 7, kLaunches); },
      [] { launchesOfAnyShapeMatchFloat64(4, 2, 2, 1, kLaunches); },
      [] { launchesOfAnyShapeMatchFloat64(5, 3, 1, 16, kLaunches / 2); },
      [] { launchesOfAnyShapeMatchFloat64(8, 2, 1, 8, kLaunches / 4); },
  };
  for (Test test : tests) {
    test();
    if (failures.load() != 0) return;
  }
}

}  // namespace
}  // namespace ncclffm::test

int main(int argc, char **argv) {
  using namespace ncclffm::test;
  expectFailure = argc > 1 && std::strcmp(argv[1], "--expect-failure") == 0;
  run();
  if (!expectFailure) return report("all_reduce_test");
  fprintf(stderr, "a broken rule was noticed %d times\n", failures.load());
  return failures.load() > 0 ? 0 : 1;
}
