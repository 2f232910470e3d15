// Thousands of calls, one after the other on random channels by random protocols, with nothing but the protocol to keep
// the ranks in step. Built with shrunken epochs too (NCCLFFM_EPOCH_BITS), so that the flags of lines come round again
// thousands of times. With --break RULE it passes only if the checks notice that the rule is broken.
#include "cases.h"

namespace ncclffm::test {
namespace {

constexpr uint64_t kSeed = 20250118;

// Half of the calls are one of a few, so that lines of an earlier one are still there with the very flags of a later
// one if nobody cleared them.
std::vector<Batch> randomBatches(uint64_t seed, const Shape &shape, uint64_t partBytes, int calls) {
  constexpr uint32_t kFunctions[] = {ncclFfmFunctionAllReduce, ncclFfmFunctionReduceScatter,
                                     ncclFfmFunctionAllGather, ncclFfmFunctionBroadcast,
                                     ncclFfmFunctionReduce,    ncclFfmFunctionAllToAll,
                                     ncclFfmFunctionBarrier,   ncclFfmFunctionHierarchicalAllReduce,
                                     ncclFfmFunctionSend,      ncclFfmFunctionSendRecv,
                                     ncclFfmFunctionAllReduce, ncclFfmFunctionSend};
  constexpr uint64_t kFavourites = 6;
  uint64_t h = seed, number = seed << 20;
  auto randomCase = [&] {
    Case c = {};
    do {
      c.function = kFunctions[pick(h, std::size(kFunctions))];
    } while (shape.nRanks == 1 && c.function >= ncclFfmFunctionSend);
    c.datatype = static_cast<int>(pick(h, 10));
    c.op = reduces(c.function) ? static_cast<int>(pick(h, 5)) : ncclSum;
    do {
      c.algorithm = 1 + static_cast<uint32_t>(pick(h, 3));
      c.zeroCopy = pick(h, 8) == 0;
    } while (!hasAlgorithm(c.function, c.algorithm, c.zeroCopy));
    c.protocol = 1 + static_cast<uint32_t>(pick(h, 3));
    if (c.zeroCopy) c.protocol = ncclFfmProtocolSimple;
    c.named = !c.zeroCopy && pick(h, 4) == 0;
    if (c.named) c.algorithm = ncclFfmAlgorithmTwoShot;  // any but the ring: it sums in the order of ranks
    chooseRest(c, h, shape.nRanks, partBytes);
    return c;
  };
  std::vector<Case> favourites;
  while (favourites.size() < kFavourites) favourites.push_back(randomCase());
  std::vector<Batch> batches;
  while (calls > 0) {
    Batch batch = {};
    batch.blocks = 1;
    batch.channel = static_cast<int>(pick(h, shape.nChannels));
    batch.onSession = pick(h, 2) == 0;
    for (uint64_t k = 1 + pick(h, 8); k > 0; --k, --calls) {
      batch.cases.push_back(pick(h, 2) == 0 ? favourites[pick(h, kFavourites)] : randomCase());
      batch.cases.back().number = ++number;
    }
    batches.push_back(batch);
  }
  return batches;
}

void run(const Shape &shape, uint32_t startAt, int calls) {
  const uint64_t seed = kSeed + shape.nRanks * 1000 + shape.threads * 100 + startAt % 7;
  const uint64_t partBytes = shape.slotBytes + 88;
  char where[128];
  snprintf(where, sizeof where, "seed %llu, %u threads, epochs from %u", static_cast<unsigned long long>(seed),
           shape.threads, startAt);
  World world(shape.nRanks, shape.nChannels, shape.slotBytes, timeoutNs());
  if (startAt != 0) world.startAt(startAt);
  runBatches<Scope::kBlock>(where, world, shape, randomBatches(seed, shape, partBytes, calls / kSlowdown),
                            areaBytesFor(shape.nRanks, partBytes));
}

// A collective, a send and a receive at the same time on one channel, on every rank.
void sendsRunBesideCollectives(int nRanks, int calls) {
  constexpr uint32_t kSlotBytes = 512;
  constexpr uint64_t kMost = 700;
  World world(nRanks, 1, kSlotBytes, timeoutNs());
  const uint64_t seed = kSeed + 777 + static_cast<uint64_t>(nRanks);
  auto countOf = [&](int call) { return 1 + mix(seed + static_cast<uint64_t>(call)) % kMost; };
  auto protocolOf = [&](int call) {
    return 1 + static_cast<uint32_t>(mix(seed + static_cast<uint64_t>(call)) >> 32) % 3;
  };
  auto ended = [&](const char *what, int rank, int call, ncclResult_t result) {
    const Status s = world.status(rank);
    check(result == ncclSuccess, "seed %llu, rank %d of %d, %s %d: result %d; status: code %u, peer %d, epoch %u",
          static_cast<unsigned long long>(seed), rank, nRanks, what, call, result, s.code, s.peer, s.epoch);
    if (failures.load() != 0) world.abort();
    return failures.load() != 0;
  };
  inThreads(3 * nRanks, [&](int thread) {
    const int rank = thread / 3, role = thread % 3;
    const int next = (rank + 1) % nRanks, previous = (rank + nRanks - 1) % nRanks;
    std::vector<float> in(kMost), out(kMost);
    for (int call = 0; call < calls; ++call) {
      const uint64_t count = countOf(call);
      Call c = {};
      c.datatype = ncclFloat32;
      c.protocol = protocolOf(call);
      c.count = count;
      c.sendbuff = in.data();
      c.recvbuff = out.data();
      if (role == 0) {
        c.function = ncclFfmFunctionAllReduce;
        c.algorithm = ncclFfmAlgorithmTwoShot;
        for (uint64_t i = 0; i < count; ++i) in[i] = contribution(seed, rank, call, i);
        if (ended("all-reduce", rank, call, ncclDevCallLsa(CoopThread(), world.comm(rank), c, 0))) return;
        for (uint64_t i = 0; i < count; ++i) {
          float sum = contribution(seed, 0, call, i);
          for (int r = 1; r < nRanks; ++r) sum += contribution(seed, r, call, i);
          check(out[i] == sum, "seed %llu, rank %d, all-reduce %d, element %llu: %.9g, not %.9g",
                static_cast<unsigned long long>(seed), rank, call, static_cast<unsigned long long>(i), out[i], sum);
        }
      } else if (role == 1) {
        c.function = ncclFfmFunctionSend;
        c.root = next;
        for (uint64_t i = 0; i < count; ++i) in[i] = contribution(seed + 1, rank, call, i);
        if (ended("send", rank, call, ncclDevCallLsa(CoopThread(), world.comm(rank), c, 0))) return;
      } else {
        c.function = ncclFfmFunctionRecv;
        c.source = previous;
        if (ended("receive", rank, call, ncclDevCallLsa(CoopThread(), world.comm(rank), c, 0))) return;
        for (uint64_t i = 0; i < count; ++i) {
          const float sent = contribution(seed + 1, previous, call, i);
          check(out[i] == sent, "seed %llu, rank %d, receive %d, element %llu: %.9g, not %.9g",
                static_cast<unsigned long long>(seed), rank, call, static_cast<unsigned long long>(i), out[i], sent);
        }
      }
    }
  });
}

void run() {
  constexpr int kCalls = 10000;
  constexpr uint32_t kJustBeforeTheEnd = 0xfffffff0u;
  constexpr uint32_t kHalfWay = 0x80000001u;  // from where what was never written seems to be ahead
  const struct {
    Shape shape;
    uint32_t startAt;
    int calls;
  } rows[] = {
      {{2, 3, 512, Scope::kBlock, 1, 1}, 0, kCalls},
      {{3, 1, 512, Scope::kBlock, 1, 1}, kJustBeforeTheEnd, kCalls / 20},
      {{3, 2, 512, Scope::kBlock, 1, 1}, kHalfWay, kCalls / 20},
      {{2, 1, 512, Scope::kBlock, 1, 3}, 0, kCalls / 4},
      {{4, 2, 512, Scope::kBlock, 1, 1}, 0, kCalls / 2},
      {{3, 2, 512, Scope::kBlock, 1, 2}, 0, kCalls / 8},
      {{5, 1, 1024, Scope::kBlock, 1, 1}, 0, kCalls / 8},
      {{8, 2, 512, Scope::kBlock, 1, 1}, 0, kCalls / 16},
      {{1, 1, 512, Scope::kBlock, 1, 2}, 0, kCalls / 16},
  };
  for (const auto &row : rows) {
    run(row.shape, row.startAt, row.calls);
    if (failures.load() != 0) return;
  }
  sendsRunBesideCollectives(2, kCalls / 10 / kSlowdown);
  sendsRunBesideCollectives(3, kCalls / 10 / kSlowdown);
}

}  // namespace
}  // namespace ncclffm::test

int main(int argc, char **argv) {
  using namespace ncclffm::test;
#ifdef NCCLFFM_RULES_AT_RUN_TIME
  if (argc == 3 && strcmp(argv[1], "--break") == 0) breakRule(argv[2]);
#else
  (void)argc, (void)argv;
#endif
  run();
  return report("back_to_back_test");
}
