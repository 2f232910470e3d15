// Every function with every type, operation, protocol and algorithm, by a thread, by a group of threads and by a grid,
// on 1 to 8 ranks, with counts and places at random; compared bit by bit with sums in the order that collectives.h
// promises, and with exact ones.
#include "cases.h"

namespace ncclffm::test {
namespace {

constexpr uint64_t kSeed = 20250117;

bool hasHierarchy(uint32_t function) {
  return function == ncclFfmFunctionHierarchicalAllReduce;
}

// All combinations on so many ranks, each with one choice of all the rest; every factorisation of the number of ranks
// is a combination.
std::vector<Case> allCases(uint64_t seed, int nRanks, uint64_t partBytes) {
  std::vector<Case> cases;
  uint64_t number = seed << 20;
  auto add = [&](Case c, uint64_t &h) {
    c.number = ++number;
    const int groupOf = c.root;
    chooseRest(c, h, nRanks, partBytes);
    if (hasHierarchy(c.function)) c.root = groupOf;
    if (c.zeroCopy && c.function == ncclFfmFunctionAllToAll) c.inPlace = false;
    cases.push_back(c);
  };
  uint64_t h = seed;
  for (uint32_t function = ncclFfmFunctionAllReduce; function <= ncclFfmFunctionSendRecv; ++function) {
    if (function == ncclFfmFunctionRecv || (nRanks == 1 && function >= ncclFfmFunctionSend)) continue;
    for (int type = ncclInt8; type <= ncclBfloat16; ++type) {
      for (int op = ncclSum; op <= (reduces(function) ? ncclAvg : ncclSum); ++op) {
        for (int group = 1; group <= (hasHierarchy(function) ? nRanks : 1); ++group) {
          if (nRanks % group != 0) continue;
          Case c = {};
          c.function = function;
          c.datatype = type;
          c.op = op;
          c.root = group;
          for (uint32_t algorithm = ncclFfmAlgorithmOneShot; algorithm <= ncclFfmAlgorithmRing; ++algorithm) {
            c.algorithm = algorithm;
            c.zeroCopy = true;
            c.protocol = ncclFfmProtocolSimple;
            if (hasAlgorithm(function, algorithm, true)) add(c, h);
            c.zeroCopy = false;
            if (!hasAlgorithm(function, algorithm, false)) continue;
            for (c.protocol = ncclFfmProtocolLL; c.protocol <= ncclFfmProtocolSimple; ++c.protocol) add(c, h);
          }
          c.algorithm = ncclFfmAlgorithmTwoShot;  // any but the ring: it sums in the order of ranks
          c.protocol = ncclFfmProtocolAuto;
          c.named = true;
          add(c, h);
        }
      }
    }
  }
  return cases;
}

// Batches of 1 to 4 cases each, in random order; of `one in so many` of them.
std::vector<Batch> batchesOf(std::vector<Case> cases, uint64_t seed, const Shape &shape, uint64_t oneIn) {
  uint64_t h = seed;
  for (size_t i = cases.size(); i > 1; --i) std::swap(cases[i - 1], cases[pick(h, i)]);
  cases.resize(cases.size() / oneIn);
  std::vector<Batch> batches;
  for (size_t i = 0; i < cases.size();) {
    Batch batch = {};
    batch.blocks = 1 + static_cast<int>(pick(h, shape.blocks));
    batch.channel = static_cast<int>(pick(h, shape.nChannels - batch.blocks + 1));
    batch.onSession = pick(h, 2) == 0;
    for (uint64_t k = 1 + pick(h, 4); k > 0 && i < cases.size(); --k) batch.cases.push_back(cases[i++]);
    batches.push_back(batch);
  }
  return batches;
}

void run(const Shape &shape, uint64_t oneIn) {
  const uint64_t seed = kSeed + shape.nRanks * 1000 + shape.threads * 100 + shape.blocks * 10 + shape.slotBytes;
  const uint64_t partBytes = shape.slotBytes * 2 + 77;
  char where[128];
  snprintf(where, sizeof where, "seed %llu, %d blocks of %u threads, slots of %u bytes",
           static_cast<unsigned long long>(seed), shape.blocks, shape.threads, shape.slotBytes);
  World world(shape.nRanks, shape.nChannels, shape.slotBytes, timeoutNs());
  const std::vector<Batch> batches = batchesOf(allCases(seed, shape.nRanks, partBytes), seed, shape, oneIn * kSlowdown);
  runBatches<Scope::kThread, Scope::kBlock, Scope::kGrid>(where, world, shape, batches,
                                                          areaBytesFor(shape.nRanks, partBytes));
}

}  // namespace
}  // namespace ncclffm::test

int main() {
  using namespace ncclffm::test;
  for (int nRanks = 1; nRanks <= 8; ++nRanks) {
    const uint64_t oneIn = nRanks <= 4 ? 1 : 3;
    const uint32_t slotBytes = nRanks % 2 == 0 ? 512 : 1024;
    run({nRanks, 3, slotBytes, Scope::kThread, 1, 1}, oneIn);
    run({nRanks, 3, slotBytes, Scope::kBlock, 1, nRanks <= 4 ? 3u : 2u}, 2 * oneIn);
    run({nRanks, 4, slotBytes, Scope::kGrid, 3, 2}, 4 * oneIn);
    if (failures.load() != 0) break;
  }
  return report("collectives_test");
}
