// Which protocol, which algorithm, how many blocks: the one table, from measurements (benchmarks/results), and what is
// possible at all.
#ifndef NCCLFFM_IMPL_CHOOSE_H_
#define NCCLFFM_IMPL_CHOOSE_H_

#include "../types.h"

namespace ncclffm {

struct Choice {
  uint32_t protocol;
  uint32_t algorithm;
};

NCCLFFM_DEVICE bool isZeroCopy(const Call &call) {
  return call.send.peers != nullptr && call.recv.peers != nullptr;
}

// LL128 needs stores of 128 bytes that arrive whole, and groups of whole warps.
NCCLFFM_DEVICE bool allowsProtocol(uint32_t protocol, uint32_t path, uint32_t groupSize) {
#ifdef __CUDACC__
  if (protocol == ncclFfmProtocolLL128) return path >= ncclFfmPathNvLink && groupSize % 32 == 0;
#else
  (void)groupSize;
  if (protocol == ncclFfmProtocolLL128) return path >= ncclFfmPathNvLink;
#endif
  return protocol >= ncclFfmProtocolLL && protocol <= ncclFfmProtocolSimple;
}

NCCLFFM_DEVICE bool hasAlgorithm(uint32_t function, uint32_t algorithm, bool zeroCopy) {
  switch (function) {
    case ncclFfmFunctionAllReduce:
      return zeroCopy ? algorithm == ncclFfmAlgorithmTwoShot
                      : algorithm >= ncclFfmAlgorithmOneShot && algorithm <= ncclFfmAlgorithmRing;
    case ncclFfmFunctionAllGather:
      return algorithm == ncclFfmAlgorithmOneShot || (algorithm == ncclFfmAlgorithmRing && !zeroCopy);
    case ncclFfmFunctionBroadcast:
      return algorithm == ncclFfmAlgorithmOneShot || (algorithm == ncclFfmAlgorithmTwoShot && !zeroCopy);
    case ncclFfmFunctionReduceScatter:
    case ncclFfmFunctionReduce:
    case ncclFfmFunctionAllToAll:
      return algorithm == ncclFfmAlgorithmOneShot;
    case ncclFfmFunctionHierarchicalAllReduce:
      return algorithm == ncclFfmAlgorithmTwoShot && !zeroCopy;
    case ncclFfmFunctionBarrier:
    case ncclFfmFunctionSend:
    case ncclFfmFunctionRecv:
    case ncclFfmFunctionSendRecv:
      return algorithm == ncclFfmAlgorithmOneShot && !zeroCopy;
    default:
      return false;
  }
}

// The bytes of one rank for LL and one-shot to be the fastest, when so many groups share the work. Measured by
// all-reduces of 2, 4 and 8 ranks on one H200, in launches of up to 16 blocks and by a block in a running kernel; LL128
// never was the fastest there.
NCCLFFM_DEVICE uint64_t mostBytesOfLL(uint32_t path, int nRanks, int nGroups) {
  const uint32_t ofAGroup = nRanks <= 4 ? 16 << 10 : (64 << 10) / static_cast<uint32_t>(nRanks);
  return uint64_t{path == ncclFfmPathHostStaged ? ofAGroup / 2 : ofAGroup} * (static_cast<uint32_t>(nGroups) + 1);
}

// Likewise beyond it, for an all-reduce by LL in two shots to be faster than by Simple: with 8 ranks, not with 4. Not
// over PCIe, where twice the bytes weigh more.
NCCLFFM_DEVICE uint64_t mostBytesOfLLInTwoShots(uint32_t path, int nRanks, int nGroups) {
  return nRanks <= 4 || path < ncclFfmPathNvLink ? 0 : uint64_t{64 << 10} * (static_cast<uint32_t>(nGroups) + 1);
}

// Likewise by Simple: times the square of the ranks, for one-shot to be faster than two shots.
NCCLFFM_DEVICE uint64_t mostBytesOfOneShot(int nGroups) {
  return uint64_t{1 << 20} * static_cast<uint32_t>(nGroups);
}

// The longest all-reduce of one group, in bytes, for which choose() says LL and one-shot, and one slot is enough.
NCCLFFM_DEVICE uint32_t smallAllReduceBytes(const DevComm &comm) {
  if (comm.protocol > ncclFfmProtocolLL || comm.algorithm > ncclFfmAlgorithmOneShot) return 0;
  const uint32_t ofSlot = comm.slotBytes / 2;
  if (comm.protocol == ncclFfmProtocolLL && comm.algorithm == ncclFfmAlgorithmOneShot) return ofSlot;
  const uint32_t most = static_cast<uint32_t>(mostBytesOfLL(comm.path, comm.nRanks, 1));
  return most < ofSlot ? most : ofSlot;
}

// What Auto stands for. bytes: of a buffer, of one rank's part where parts are exchanged, on all nGroups together.
NCCLFFM_DEVICE Choice choose(uint32_t function, uint32_t protocol, uint32_t algorithm, int nRanks, uint64_t bytes,
                             int nGroups, uint32_t path, bool zeroCopy) {
  const uint32_t n = static_cast<uint32_t>(nRanks);
  const bool isSmall = bytes <= mostBytesOfLL(path, nRanks, nGroups);
  const bool hasOneShot = hasAlgorithm(function, ncclFfmAlgorithmOneShot, zeroCopy);
  const bool hasTwoShot = hasAlgorithm(function, ncclFfmAlgorithmTwoShot, zeroCopy);
  if (protocol == ncclFfmProtocolAuto) {
    const bool isInTwoShots = function == ncclFfmFunctionAllReduce && algorithm != ncclFfmAlgorithmOneShot &&
                              algorithm != ncclFfmAlgorithmRing &&
                              bytes <= mostBytesOfLLInTwoShots(path, nRanks, nGroups);
    protocol = isSmall || isInTwoShots ? ncclFfmProtocolLL : ncclFfmProtocolSimple;
  }
  if (algorithm == ncclFfmAlgorithmAuto) {
    const bool one = protocol == ncclFfmProtocolSimple ? bytes <= mostBytesOfOneShot(nGroups) / (n * n) : isSmall;
    algorithm = hasOneShot && (one || !hasTwoShot) ? ncclFfmAlgorithmOneShot : ncclFfmAlgorithmTwoShot;
  }
  return {protocol, algorithm};
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_CHOOSE_H_
