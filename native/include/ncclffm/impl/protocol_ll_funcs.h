// Bodies of protocol_ll.h.
#ifndef NCCLFFM_IMPL_PROTOCOL_LL_FUNCS_H_
#define NCCLFFM_IMPL_PROTOCOL_LL_FUNCS_H_

namespace ncclffm {

NCCLFFM_DEVICE LLLine packLine(LLPayload payload, uint32_t epoch) {
  uint64_t flag = static_cast<uint64_t>(epoch) << 32;
  return {{flag | payload.data[0], flag | payload.data[1]}};
}

NCCLFFM_DEVICE LLPayload unpackLine(const LLLine &line) {
  return {{static_cast<uint32_t>(line.pair[0]), static_cast<uint32_t>(line.pair[1])}};
}

NCCLFFM_DEVICE bool isComplete(const LLLine &line, uint32_t epoch) {
  return static_cast<uint32_t>(line.pair[0] >> 32) == epoch &&
         (!holds(Rule::kBothFlags) || static_cast<uint32_t>(line.pair[1] >> 32) == epoch);
}

// Pointers that never change while a kernel runs: they may stay in the first-level cache.
NCCLFFM_DEVICE LLLine *windowOf(const DevComm &comm, int rank) {
#ifdef __CUDACC__
  return reinterpret_cast<LLLine *>(__ldg(reinterpret_cast<const unsigned long long *>(comm.peers) + rank));
#else
  return static_cast<LLLine *>(comm.peers[rank]);
#endif
}

NCCLFFM_DEVICE LLSlots::LLSlots(const DevComm &comm, const Site &site) : comm_(comm) {
  uint64_t half = holds(Rule::kDoubleBuffer) ? site.epoch % 2 : 0;
  uint64_t firstSlot = (static_cast<uint64_t>(site.channel) * 2 + half) * static_cast<uint64_t>(comm.nRanks);
  inbox_ = windowOf(comm, comm.rank) + firstSlot * comm.linesPerSlot;
  outIndex_ = (firstSlot + static_cast<uint64_t>(comm.rank)) * comm.linesPerSlot;
}

NCCLFFM_DEVICE void LLSlots::put(int peer, uint32_t index, LLLine line) const {
  storeLineRelaxedSys(windowOf(comm_, peer) + outIndex_ + index, line);
}

NCCLFFM_DEVICE LLLine LLSlots::poll(int peer, uint32_t index) const {
  return loadLineRelaxedSys(inbox_ + static_cast<uint64_t>(peer) * comm_.linesPerSlot + index);
}

NCCLFFM_DEVICE void LLSlots::clear(uint32_t threadRank, uint32_t groupSize) const {
  for (int peer = 0; peer < comm_.nRanks; ++peer) {
    LLLine *slot = inbox_ + static_cast<uint64_t>(peer) * comm_.linesPerSlot;
    for (uint32_t i = threadRank; i < comm_.linesPerSlot; i += groupSize) storeLineRelaxedSys(slot + i, {{0, 0}});
  }
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_PROTOCOL_LL_FUNCS_H_
