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

// What all ranks together may hold, in bytes, for LL and one-shot to be the fastest; beyond it Simple is, and two shots
// where the function has them. Measured with 2, 4 and 8 ranks on one H200; LL128 never was the fastest there. Not yet
// measured on other paths.
NCCLFFM_DEVICE uint64_t oneShotBytes(uint32_t path) {
  return path == ncclFfmPathHostStaged ? 256 << 10 : 2 << 20;
}

// The longest all-reduce, in bytes, for which choose() says LL and one-shot, and one slot is enough.
NCCLFFM_DEVICE uint32_t smallAllReduceBytes(const DevComm &comm) {
  if (comm.protocol > ncclFfmProtocolLL || comm.algorithm > ncclFfmAlgorithmOneShot) return 0;
  const uint32_t ofSlot = comm.slotBytes / 2;
  if (comm.protocol == ncclFfmProtocolLL && comm.algorithm == ncclFfmAlgorithmOneShot) return ofSlot;
  const uint32_t most = static_cast<uint32_t>(oneShotBytes(comm.path)) / static_cast<uint32_t>(comm.nRanks);
  return most < ofSlot ? most : ofSlot;
}

// What Auto stands for. bytes: of a buffer, of one rank's part where parts are exchanged.
NCCLFFM_DEVICE Choice choose(uint32_t function, uint32_t protocol, uint32_t algorithm, int nRanks, uint64_t bytes,
                             uint32_t path, bool zeroCopy) {
  const bool isSmall = bytes <= static_cast<uint32_t>(oneShotBytes(path)) / static_cast<uint32_t>(nRanks);
  const bool hasOneShot = hasAlgorithm(function, ncclFfmAlgorithmOneShot, zeroCopy);
  const bool hasTwoShot = hasAlgorithm(function, ncclFfmAlgorithmTwoShot, zeroCopy);
  if (zeroCopy) protocol = ncclFfmProtocolSimple;
  if (protocol == ncclFfmProtocolAuto) protocol = isSmall ? ncclFfmProtocolLL : ncclFfmProtocolSimple;
  if (algorithm == ncclFfmAlgorithmAuto) {
    algorithm = hasOneShot && (isSmall || !hasTwoShot) ? ncclFfmAlgorithmOneShot : ncclFfmAlgorithmTwoShot;
  }
  return {protocol, algorithm};
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_CHOOSE_H_
