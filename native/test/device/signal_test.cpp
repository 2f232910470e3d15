// Kernels that tell the host that they have finished (signalHost): the host looks at what they wrote as soon as the
// word says so. With --break RULE it passes only if the checks notice that the rule is broken.
#include "harness.h"

#include <deque>

namespace ncclffm::test {
namespace {

constexpr uint64_t kSeed = 20250118;
constexpr uint32_t kJustBeforeTheEnd = 0xffffff00u;

// The host waits for each kernel before it launches the next one.
void whatAllBlocksWroteIsThereWhenTheWordSaysSo(int nBlocks, uint32_t threads, uint32_t from, uint32_t kernels) {
  World world(1, 1, 512, timeoutNs());
  world.signalHost(from);
  const int nThreads = nBlocks * static_cast<int>(threads);
  std::deque<Group> blocks;
  for (int b = 0; b < nBlocks; ++b) blocks.emplace_back(threads);
  std::vector<uint32_t> written(nThreads);
  uint32_t launched = from;
  inThreads(1 + nThreads, [&](int i) {
    if (i < nThreads) {
      const int block = i / static_cast<int>(threads);
      const CoopGroup coop = {&blocks[block], static_cast<uint32_t>(i) % threads};
      for (uint32_t k = 1; k <= kernels; ++k) {
        while (__atomic_load_n(&launched, __ATOMIC_ACQUIRE) - from < k) sched_yield();
        stall();
        written[i] = k;
        signalHost(Grid<CoopGroup>{coop, block, nBlocks}, world.comm(0));
      }
      return;
    }
    for (uint32_t k = 1; k <= kernels; ++k) {
      __atomic_store_n(&launched, from + k, __ATOMIC_RELEASE);
      const bool finished = world.awaitKernels(0, from + k, timeoutNs());
      check(finished, "%d blocks of %u threads, kernel %u from %u: the word is %u", nBlocks, threads, k, from,
            world.hostSignal(0));
      check(!finished || world.hostSignal(0) == from + k, "kernel %u from %u: the word is %u", k, from,
            world.hostSignal(0));
      for (int t = 0; t < nThreads && finished; ++t) {
        check(written[t] == k, "%d blocks of %u threads, kernel %u from %u: thread %d had written %u", nBlocks, threads,
              k, from, t, written[t]);
      }
    }
  });
}

// As sends beside a collective, on streams of their own: grids of one to three blocks that end in any order.
void kernelsThatRunSideBySideAreAllCounted(int nStreams, int rounds) {
  World world(1, 1, 512, timeoutNs());
  world.signalHost(kJustBeforeTheEnd);
  std::vector<int> blocksOf, kernelOf;
  for (int s = 0; s < nStreams; ++s) {
    for (int b = 0; b < 1 + s % 3; ++b) {
      blocksOf.push_back(1 + s % 3);
      kernelOf.push_back(b);
    }
  }
  const int nThreads = static_cast<int>(blocksOf.size());
  Group start(static_cast<uint32_t>(nThreads) + 1);
  std::vector<int> written(nThreads);
  inThreads(nThreads + 1, [&](int i) {
    for (int round = 1; round <= rounds; ++round) {
      start.arrive(static_cast<uint32_t>(i), false, 0);
      if (i < nThreads) {
        stall();
        written[i] = round;
        signalHost(Grid<CoopThread>{CoopThread(), kernelOf[i], blocksOf[i]}, world.comm(0));
      } else {
        const uint32_t number = kJustBeforeTheEnd + static_cast<uint32_t>(round * nStreams);
        const bool finished = world.awaitKernels(0, number, timeoutNs());
        check(finished, "round %d of %d kernels: the word is %u, not %u", round, nStreams, world.hostSignal(0), number);
        for (int t = 0; t < nThreads && finished; ++t) {
          check(written[t] == round, "round %d: block %d of %d had written %d", round, kernelOf[t], blocksOf[t],
                written[t]);
        }
      }
      // A word that was taken back is not told again: a broken rule is noticed by the next wait, too.
      if (start.arrive(static_cast<uint32_t>(i), failures.load() != 0, 0).any) return;
    }
  });
}

// Every block of every rank has a channel; the last exchange ends before the word.
void resultsOfAnAllReduceAreThereOnEveryRank(int nRanks, int nBlocks, uint32_t from, int calls) {
  constexpr size_t kCount = 37;
  World world(nRanks, nBlocks, 512, timeoutNs());
  world.signalHost(from);
  std::vector<std::vector<float>> buffers(nRanks, std::vector<float>(kCount * nBlocks));
  std::vector<uint32_t> launched(nRanks, 0);
  auto wanted = [&](int call, size_t i) {
    float sum = contribution(kSeed, 0, call, i);
    for (int r = 1; r < nRanks; ++r) sum += contribution(kSeed, r, call, i);
    return sum;
  };
  inThreads(nRanks * (nBlocks + 1), [&](int thread) {
    const int rank = thread / (nBlocks + 1), block = thread % (nBlocks + 1);
    std::vector<float> &buffer = buffers[rank];
    for (int call = 1; call <= calls; ++call) {
      const uint32_t number = static_cast<uint32_t>(call);
      if (block < nBlocks) {
        while (__atomic_load_n(&launched[rank], __ATOMIC_ACQUIRE) < number) sched_yield();
        float *part = buffer.data() + kCount * block;
        const ncclResult_t result =
            ncclDevAllReduce(CoopThread(), world.comm(rank), part, part, kCount, ncclFloat32, ncclSum, block);
        check(result == ncclSuccess, "rank %d of %d, call %d: result %d", rank, nRanks, call, result);
        signalHost(Grid<CoopThread>{CoopThread(), block, nBlocks}, world.comm(rank));
      } else {
        for (size_t i = 0; i < buffer.size(); ++i) buffer[i] = contribution(kSeed, rank, call, i);
        __atomic_store_n(&launched[rank], number, __ATOMIC_RELEASE);
        const bool finished = world.awaitKernels(rank, from + number, timeoutNs());
        check(finished, "rank %d of %d, call %d: the word is %u", rank, nRanks, call, world.hostSignal(rank));
        for (size_t i = 0; i < buffer.size() && finished; ++i) {
          check(buffer[i] == wanted(call, i), "rank %d of %d, call %d, element %zu: %.9g, not %.9g", rank, nRanks, call,
                i, buffer[i], wanted(call, i));
        }
      }
    }
  });
}

void withoutAWordNobodyIsToldAndAnInvalidCommunicatorIsNotTouched() {
  World world(1, 1, 512, timeoutNs());
  const Grid<CoopThread> grid = {CoopThread(), 0, 1};
  signalHost(grid, world.comm(0));
  check(world.comm(0).channels[0].finished == 0, "without a word: %llu",
        static_cast<unsigned long long>(world.comm(0).channels[0].finished));
  world.signalHost(0);
  DevComm invalid = world.comm(0);
  invalid.magic = 0;
  signalHost(grid, invalid);
  check(world.hostSignal(0) == 0 && invalid.channels[0].finished == 0, "an invalid communicator: %u",
        world.hostSignal(0));
}

void run() {
  constexpr uint32_t kKernels = 10000;
  const struct {
    int nBlocks;
    uint32_t threads, from, kernels;
  } rows[] = {
      {1, 1, 0, kKernels},     {2, 1, kJustBeforeTheEnd, kKernels},     {3, 1, 0, kKernels / 2},
      {2, 3, 0, kKernels / 4}, {5, 2, kJustBeforeTheEnd, kKernels / 8},
  };
  for (const auto &row : rows) {
    whatAllBlocksWroteIsThereWhenTheWordSaysSo(row.nBlocks, row.threads, row.from, row.kernels / kSlowdown);
    if (failures.load() != 0) return;
  }
  stallRarity = 4;  // between the end of a kernel and its store of the word, another one ends
  for (int nStreams : {2, 3, 5}) {
    kernelsThatRunSideBySideAreAllCounted(nStreams, 4000 / kSlowdown);
    if (failures.load() != 0) return;
  }
  stallRarity = 64;
  for (int nRanks : {1, 2, 3, 4, 8}) {
    resultsOfAnAllReduceAreThereOnEveryRank(nRanks, nRanks == 8 ? 2 : 3, kJustBeforeTheEnd, 2000 / nRanks / kSlowdown);
  }
  withoutAWordNobodyIsToldAndAnInvalidCommunicatorIsNotTouched();
}

}  // namespace
}  // namespace ncclffm::test

int main(int argc, char **argv) {
  using namespace ncclffm::test;
  if (argc == 3 && strcmp(argv[1], "--break") == 0) breakRule(argv[2]);
  run();
  return report("signal_test");
}
