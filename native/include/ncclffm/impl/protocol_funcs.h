// Bodies of protocol.h.
#ifndef NCCLFFM_IMPL_PROTOCOL_FUNCS_H_
#define NCCLFFM_IMPL_PROTOCOL_FUNCS_H_

namespace ncclffm {

static_assert(sizeof(Mailbox) == 128, "a mailbox is a line of its own");

NCCLFFM_DEVICE Letter makeLetter(const Site &site) {
  return static_cast<Letter>(site.hash) << 32 | site.epoch;
}

NCCLFFM_DEVICE bool isOf(Letter letter, uint32_t epoch) {
  return static_cast<uint32_t>(letter) == epoch && letter >> 32 != 0;
}

NCCLFFM_DEVICE bool hasReached(Letter letter, uint32_t epoch) {
  uint32_t got = static_cast<uint32_t>(letter);
  return holds(Rule::kOnTheCircle) ? static_cast<int32_t>(got - epoch) >= 0 : got >= epoch;
}

NCCLFFM_DEVICE uint32_t flagOf(const Site &site) {
  constexpr uint32_t kEpochMask = (1u << NCCLFFM_EPOCH_BITS) - 1;
  return 0x80000000u | (site.hash & 0x7fffu) << 16 | (site.epoch & kEpochMask);
}

// Pointers that never change while a kernel runs: they may stay in the first-level cache.
NCCLFFM_DEVICE char *loadPeer(void *const *peers, int rank) {
#ifdef __CUDACC__
  return reinterpret_cast<char *>(__ldg(reinterpret_cast<const unsigned long long *>(peers) + rank));
#else
  return static_cast<char *>(peers[rank]);
#endif
}

NCCLFFM_DEVICE Mailbox *mailboxOf(const DevComm &comm, int to, int channel, int from) {
  return reinterpret_cast<Mailbox *>(loadPeer(comm.peers, to)) + static_cast<uint64_t>(channel) * comm.nRanks + from;
}

// Of a slot in the window of any rank.
NCCLFFM_DEVICE uint64_t slotOffset(const DevComm &comm, Traffic traffic, ncclFfmProtocol protocol, int channel,
                                   uint32_t epoch, int from) {
  uint64_t n = static_cast<uint64_t>(comm.nRanks), half = holds(Rule::kDoubleBuffer) ? epoch % 2 : 0;
  uint64_t kind = static_cast<uint64_t>(traffic) * 3 + (protocol - ncclFfmProtocolLL);
  uint64_t slot = ((kind * comm.nChannels + channel) * 2 + half) * n + from;
  return comm.nChannels * n * sizeof(Mailbox) + slot * comm.slotBytes;
}

NCCLFFM_DEVICE char *slotOf(const DevComm &comm, Traffic traffic, ncclFfmProtocol protocol, int to, int channel,
                            uint32_t epoch, int from) {
  return loadPeer(comm.peers, to) + slotOffset(comm, traffic, protocol, channel, epoch, from);
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_PROTOCOL_FUNCS_H_
