// Bodies of channel.h.
#ifndef NCCLFFM_IMPL_CHANNEL_FUNCS_H_
#define NCCLFFM_IMPL_CHANNEL_FUNCS_H_

namespace ncclffm {

// Channel.state: the epoch, and this bit. One word, so that one atomic access takes the channel and tells its epoch.
constexpr uint64_t kBusyBit = uint64_t{1} << 32;

// 0 is never an epoch: memory that was never written carries it. After the largest, which is odd, comes 2 and not 1, so
// that odd and even epochs alternate for ever.
NCCLFFM_DEVICE constexpr uint32_t nextEpoch(uint32_t epoch) {
  return epoch == kMaxEpoch ? 2 : epoch + 1;
}

// Whether no later exchange of this lap uses the half that this epoch used.
NCCLFFM_DEVICE constexpr bool isLastOfItsHalf(uint32_t epoch) {
  return epoch >= kMaxEpoch - 1;
}

NCCLFFM_DEVICE bool isValid(const DevComm &comm) {
  return comm.magic == NCCLFFM_DEVCOMM_MAGIC && comm.version == NCCLFFM_ABI_VERSION && comm.nRanks >= 1 &&
         comm.rank >= 0 && comm.rank < comm.nRanks && comm.nChannels >= 1 && comm.linesPerSlot >= 1 &&
         comm.linesPerSlot <= NCCLFFM_MAX_LINES_PER_SLOT && comm.channels != nullptr && comm.peers != nullptr &&
         comm.status != nullptr;
}

template <class Coop>
NCCLFFM_DEVICE ChannelSession<Coop>::ChannelSession(Coop coop, const DevComm &comm, int channel,
                                                    ncclFfmFunction function)
    : coop_(coop), comm_(comm), site_{function, channel, 0}, result_(ncclInvalidArgument) {
  if (!isValid(comm) || channel < 0 || channel >= comm.nChannels) return;
  uint64_t resultAndEpoch = 0;
  if (coop_.rank() == 0) {
    ncclResult_t result = failureOf(comm);
    if (result == ncclSuccess) {
      uint64_t state = fetchOrRelaxedGpu(&comm.channels[channel].state, kBusyBit);
      site_.epoch = static_cast<uint32_t>(state);
      if (holds(Rule::kBusyChannel) && (state & kBusyBit) != 0)
        result = fail(comm, site_, ncclInvalidUsage, kNobody, 0);
    }
    resultAndEpoch = static_cast<uint64_t>(result) << 32 | site_.epoch;
  }
  resultAndEpoch = coop_.syncBroadcast(resultAndEpoch);
  result_ = static_cast<ncclResult_t>(resultAndEpoch >> 32);
  site_.epoch = static_cast<uint32_t>(resultAndEpoch);
  held_ = result_ == ncclSuccess;
}

template <class Coop>
NCCLFFM_DEVICE ChannelSession<Coop>::~ChannelSession() {
  // The sync of the last exchange, or of the constructor, has made sure that nobody in the group still needs the
  // channel.
  if (held_ && coop_.rank() == 0) {
    storeRelaxedGpu(&comm_.channels[site_.channel].state, holds(Rule::kAdvanceEpoch) ? site_.epoch : 0);
  }
}

template <class Coop>
NCCLFFM_DEVICE void ChannelSession<Coop>::beginExchange() {
  site_.epoch = nextEpoch(site_.epoch);
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ChannelSession<Coop>::endExchange(ncclResult_t ofThisThread) {
  bool failed = coop_.syncAny(ofThisThread != ncclSuccess);
  if (failed) result_ = failureOf(comm_);
  // Clearing (protocol_ll.h) races with no store of a peer, if what a peer sends after it saw this rank's next exchange
  // comes after the clearing: fences at both ends. Epoch 2 ends the second half's first exchange after a wrap.
  if (isLastOfItsHalf(site_.epoch) || site_.epoch == 2) fenceSys();
  return result_;
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_CHANNEL_FUNCS_H_
