// Bodies of channel.h.
#ifndef NCCLFFM_IMPL_CHANNEL_FUNCS_H_
#define NCCLFFM_IMPL_CHANNEL_FUNCS_H_

namespace ncclffm {

// In a state word, above the epoch. One word, so that one atomic access takes the channel and tells its epoch.
constexpr uint64_t kBusyBit = uint64_t{1} << 32;

NCCLFFM_DEVICE bool isValid(const DevComm &comm) {
  return comm.magic == NCCLFFM_DEVCOMM_MAGIC && comm.version == NCCLFFM_ABI_VERSION && comm.nRanks >= 1 &&
         comm.rank >= 0 && comm.rank < comm.nRanks && comm.nChannels >= 1 && comm.slotBytes >= NCCLFFM_SLOT_UNIT &&
         comm.slotBytes <= NCCLFFM_MAX_SLOT_BYTES && comm.slotBytes % NCCLFFM_SLOT_UNIT == 0 &&
         comm.channels != nullptr && comm.pairs != nullptr && comm.peers != nullptr && comm.status != nullptr;
}

// Takes what a state word guards. The group then knows the epoch, or why not.
template <class Coop>
NCCLFFM_DEVICE ncclResult_t take(const Coop &coop, const DevComm &comm, uint64_t *state, Site &site) {
  uint64_t resultAndEpoch = 0;
  if (coop.rank() == 0) {
    ncclResult_t result = failureOf(comm, site.channel);
    if (result == ncclSuccess) {
      uint64_t old = fetchOrAcquireGpu(state, kBusyBit);
      site.epoch = static_cast<uint32_t>(old);
      if (holds(Rule::kBusyChannel) && (old & kBusyBit) != 0) result = fail(comm, site, ncclInvalidUsage, kNobody, 0);
    }
    resultAndEpoch = static_cast<uint64_t>(result) << 32 | site.epoch;
  }
  resultAndEpoch = coop.syncBroadcast(resultAndEpoch);
  site.epoch = static_cast<uint32_t>(resultAndEpoch);
  return static_cast<ncclResult_t>(resultAndEpoch >> 32);
}

// The sync of the last exchange, or of take(), has made sure that nobody in the group still needs it.
template <class Coop>
NCCLFFM_DEVICE void giveBack(const Coop &coop, uint64_t *state, uint32_t epoch) {
  if (coop.rank() == 0) storeReleaseGpu(state, holds(Rule::kAdvanceEpoch) ? uint64_t{epoch} : 0);
}

// Clears the lines of a slot, of both protocols that have flags: the share of one thread.
NCCLFFM_DEVICE void clearLines(const DevComm &comm, Traffic traffic, int channel, uint32_t epoch, int from,
                               uint32_t threadRank, uint32_t groupSize) {
  const ncclFfmProtocol protocols[] = {ncclFfmProtocolLL, ncclFfmProtocolLL128};
  for (int p = 0; p < 2; ++p) {
    Vec16 *slot = reinterpret_cast<Vec16 *>(slotOf(comm, traffic, protocols[p], comm.rank, channel, epoch, from));
    for (uint32_t i = threadRank; i < comm.slotBytes / sizeof(Vec16); i += groupSize) {
      storeVec16RelaxedSys(slot + i, {{0, 0}});
    }
  }
}

// Waits for a letter of peer's about this exchange or step, and so for what came before it.
NCCLFFM_DEVICE ncclResult_t awaitLetter(const DevComm &comm, const Site &site, const Letter *letter, int peer) {
  Letter got = 0;
  auto letterOf = [&](int) { return letter; };
  const ncclResult_t result = waitFor(Alone(), comm, site, letterOf, [&] {
    got = holds(Rule::kSystemScope) ? loadAcquireSys(letter) : loadAcquireGpu(letter);
    return isOf(got, site.epoch) ? kNobody : peer;
  });
  // Whoever went on after a call of its own would leave the others to time out.
  if (result == ncclSuccess && holds(Rule::kCompareHash) && got != makeLetter(site)) {
    return fail(comm, site, ncclInvalidUsage, peer, 0);
  }
  return result;
}

template <class Coop>
NCCLFFM_DEVICE ChannelSession<Coop>::ChannelSession(Coop coop, const DevComm &comm, int channel,
                                                    ncclFfmFunction function)
    : coop_(coop), comm_(comm), site_{function, channel, 0, 0}, result_(ncclInvalidArgument) {
  if (!isValid(comm) || channel < 0 || channel >= comm.nChannels) return;
  result_ = take(coop_, comm_, &comm_.channels[channel].state, site_);
  held_ = result_ == ncclSuccess;
  smallBytes_ = smallAllReduceBytes(comm);
  const bool two = comm.nRanks == 2;
  const int other = two ? 1 - comm.rank : 0;
  const uint64_t base = two ? reinterpret_cast<uintptr_t>(loadPeer(comm.peers, other)) : 0;
  const uint64_t mailbox = static_cast<uint64_t>(channel) * comm.nRanks + comm.rank;
  smallSlots_ = {base + slotOffset(comm, Traffic::kCollective, ncclFfmProtocolLL, channel, 0, comm.rank),
                 slotOf(comm, Traffic::kCollective, ncclFfmProtocolLL, comm.rank, channel, 0, other),
                 holds(Rule::kDoubleBuffer) ? static_cast<uint64_t>(comm.nRanks) * comm.slotBytes : 0,
                 base + mailbox * sizeof(Mailbox) + offsetof(Mailbox, begun)};
}

template <class Coop>
NCCLFFM_DEVICE ChannelSession<Coop>::~ChannelSession() {
  if (held_) giveBack(coop_, &comm_.channels[site_.channel].state, site_.epoch);
}

template <class Coop>
NCCLFFM_DEVICE const Letter *ChannelSession<Coop>::begun(int peer) const {
  return &mailboxOf(comm_, comm_.rank, site_.channel, peer)->begun[site_.epoch % 2];
}

template <class Coop>
NCCLFFM_DEVICE void ChannelSession<Coop>::beginExchange(uint32_t hash) {
  ++site_.epoch;
  site_.hash = hash ^ taskHash_;
}

template <class Coop>
NCCLFFM_DEVICE void ChannelSession<Coop>::tellBegun() const {
  for (int peer = static_cast<int>(coop_.rank()); peer < comm_.nRanks; peer += static_cast<int>(coop_.size())) {
    if (peer != comm_.rank) {
      storeRelaxedSys(&mailboxOf(comm_, peer, site_.channel, comm_.rank)->begun[site_.epoch % 2], makeLetter(site_));
    }
  }
}

template <class Coop>
NCCLFFM_DEVICE void ChannelSession<Coop>::tellReady() const {
  coop_.sync();
  for (int peer = static_cast<int>(coop_.rank()); peer < comm_.nRanks; peer += static_cast<int>(coop_.size())) {
    if (peer != comm_.rank) {
      storeReleaseSys(&mailboxOf(comm_, peer, site_.channel, comm_.rank)->begun[site_.epoch % 2], makeLetter(site_));
    }
  }
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ChannelSession<Coop>::awaitReady() const {
  ncclResult_t result = ncclSuccess;
  for (int peer = static_cast<int>(coop_.rank()); peer < comm_.nRanks && result == ncclSuccess;
       peer += static_cast<int>(coop_.size())) {
    if (peer != comm_.rank) result = awaitLetter(comm_, site_, begun(peer), peer);
  }
  return result;
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t ChannelSession<Coop>::endExchange(ncclResult_t ofThisThread) {
  if (holds(Rule::kClearOnWrap) && isLastOfItsHalf(site_.epoch)) {
    coop_.sync();  // a thread clears lines that others read
    for (int peer = 0; peer < comm_.nRanks; ++peer) {
      clearLines(comm_, Traffic::kCollective, site_.channel, site_.epoch, peer, coop_.rank(), coop_.size());
    }
  }
  bool failed = holds(Rule::kReadBeforeEnd) ? coop_.syncAny(ofThisThread != ncclSuccess) : ofThisThread != ncclSuccess;
  if (failed) result_ = failureOf(comm_, site_.channel);
  // A slot of Simple has been read, by loads whose values are stored by now: the next lines of LL may tell the peers.
  releaseForSanitizer(mailboxOf(comm_, comm_.rank, site_.channel, comm_.rank));
  // Clearing races with no store of a peer, if what a peer sends after it saw this rank's next exchange comes after the
  // clearing: fences at both ends. The first two epochs of a lap are the next on each half.
  constexpr uint32_t kEpochMask = (1u << NCCLFFM_EPOCH_BITS) - 1;
  if (isLastOfItsHalf(site_.epoch) || (site_.epoch & kEpochMask) < 2) fenceSys();
  return result_;
}

template <class Coop>
NCCLFFM_DEVICE PairSession<Coop>::PairSession(Coop coop, const DevComm &comm, int channel, int peer,
                                              Direction direction, ncclFfmFunction function)
    : coop_(coop),
      comm_(comm),
      peer_(peer),
      direction_(direction),
      site_{function, channel, 0, 0},
      result_(ncclInvalidArgument) {
  if (!isValid(comm) || channel < 0 || channel >= comm.nChannels) return;
  if (peer == kNobody) result_ = ncclSuccess;
  if (peer < 0 || peer >= comm.nRanks || peer == comm.rank) return;
  result_ = take(coop_, comm_, state(), site_);
  held_ = result_ == ncclSuccess;
  taken_ = site_.epoch - 2;  // at least: the last step's own wait has seen it
}

template <class Coop>
NCCLFFM_DEVICE PairSession<Coop>::~PairSession() {
  if (held_) giveBack(coop_, state(), site_.epoch);
}

template <class Coop>
NCCLFFM_DEVICE uint64_t *PairSession<Coop>::state() const {
  Pair *pair = comm_.pairs + static_cast<uint64_t>(site_.channel) * comm_.nRanks + peer_;
  return direction_ == Direction::kSend ? &pair->send : &pair->recv;
}

template <class Coop>
NCCLFFM_DEVICE Mailbox *PairSession<Coop>::outbox() const {
  return mailboxOf(comm_, peer_, site_.channel, comm_.rank);
}

template <class Coop>
NCCLFFM_DEVICE const Mailbox *PairSession<Coop>::inbox() const {
  return mailboxOf(comm_, comm_.rank, site_.channel, peer_);
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t PairSession<Coop>::beginStep(uint32_t hash) {
  ++site_.epoch;
  site_.hash = hash;
  if (direction_ == Direction::kRecv) return ncclSuccess;
  const uint32_t needed = site_.epoch - 2;
  if (holds(Rule::kCredits) && static_cast<int32_t>(taken_ - needed) < 0) {
    Letter credit = 0;
    if (coop_.rank() == 0) {
      auto noLetter = [](int) -> const Letter * { return nullptr; };
      const Letter *taken = &inbox()->pairTaken;
      waitFor(Alone(), comm_, site_, noLetter, [&] {
        credit = loadAcquireSys(taken);
        return hasReached(credit, needed) ? kNobody : peer_;
      });
    }
    credit = coop_.syncBroadcast(credit);
    taken_ = static_cast<uint32_t>(credit);
    if (static_cast<int32_t>(taken_ - needed) < 0) {
      result_ = failureOf(comm_, site_.channel);
      return result_;
    }
  }
  return ncclSuccess;
}

template <class Coop>
NCCLFFM_DEVICE void PairSession<Coop>::tellBegun() const {
  if (coop_.rank() == 0) storeRelaxedSys(&outbox()->pairBegun[site_.epoch % 2], makeLetter(site_));
}

template <class Coop>
NCCLFFM_DEVICE void PairSession<Coop>::tellReady() const {
  coop_.sync();
  if (coop_.rank() == 0) storeReleaseSys(&outbox()->pairBegun[site_.epoch % 2], makeLetter(site_));
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t PairSession<Coop>::awaitReady() const {
  return coop_.rank() == 0 ? awaitLetter(comm_, site_, begun(), peer_) : ncclSuccess;
}

template <class Coop>
NCCLFFM_DEVICE const Letter *PairSession<Coop>::begun() const {
  return &inbox()->pairBegun[site_.epoch % 2];
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t PairSession<Coop>::endStep(ncclResult_t ofThisThread) {
  if (direction_ == Direction::kRecv && holds(Rule::kClearOnWrap) && isLastOfItsHalf(site_.epoch)) {
    coop_.sync();
    clearLines(comm_, Traffic::kPair, site_.channel, site_.epoch, peer_, coop_.rank(), coop_.size());
  }
  bool failed = coop_.syncAny(ofThisThread != ncclSuccess);
  if (failed) {
    result_ = failureOf(comm_, site_.channel);
  } else if (direction_ == Direction::kRecv && coop_.rank() == 0) {
    storeReleaseSys(&outbox()->pairTaken, makeLetter(site_));
  }
  return result_;
}

template <class Coop>
NCCLFFM_DEVICE ncclResult_t syncGrid(const Grid<Coop> &grid, const DevComm &comm, int channel) {
  if (!isValid(comm) || channel < 0 || channel >= comm.nChannels) return ncclInvalidArgument;
  if (grid.nBlocks < 1 || grid.index < 0 || grid.index >= grid.nBlocks) return ncclInvalidArgument;
  grid.block.sync();
  ncclResult_t result = ncclSuccess;
  if (grid.block.rank() == 0) {
    // The blocks add up to exactly 2^31, so the top bit turns once they are all here, whatever their number.
    constexpr uint32_t kTurn = 0x80000000u;
    const uint32_t add = grid.index == 0 ? kTurn - static_cast<uint32_t>(grid.nBlocks - 1) : 1;
    uint32_t *word = &comm.channels[channel].gridSync;
    const uint32_t old = fetchAddAcqRelGpu(word, add);
    const Site site = {ncclFfmFunctionGridSync, channel + grid.index, 0, 0};
    auto noLetter = [](int) -> const Letter * { return nullptr; };
    result = waitFor(Alone(), comm, site, noLetter,
                     [&] { return ((loadAcquireGpu(word) ^ old) & kTurn) != 0 ? kNobody : comm.rank; });
    if (result == ncclSuccess) result = failureOf(comm, channel);  // of any block: the grid is one group
  }
  return static_cast<ncclResult_t>(grid.block.syncBroadcast(result));
}

template <class Coop>
NCCLFFM_DEVICE void signalHost(const Grid<Coop> &grid, const DevComm &comm) {
  if (comm.hostSignal == nullptr || !isValid(comm)) return;
  grid.block.sync();
  if (grid.block.rank() != 0) return;
  // The blocks of a kernel add up to exactly 2^32. So the upper half is the number of kernels, and the lower half zero,
  // once all have finished; while a block is missing, the upper half is less than that. In between, kernels that run
  // side by side may make the lower half zero together: the host is then told of fewer than there are.
  constexpr uint64_t kOneKernel = uint64_t{1} << 32;
  const uint64_t add = grid.index == 0 ? kOneKernel - static_cast<uint64_t>(grid.nBlocks - 1) : 1;
  uint64_t *finished = &comm.channels[0].finished;
  uint64_t sum = fetchAddAcqRelGpu(finished, add) + add;
  if (!holds(Rule::kSignalLast)) sum = (sum + kOneKernel - 1) / kOneKernel * kOneKernel;
  while (static_cast<uint32_t>(sum) == 0) {
    NCCLFFM_STALL();
    storeReleaseSys(comm.hostSignal, static_cast<uint32_t>(sum >> 32));
    if (!holds(Rule::kSignalAgain)) return;
    // Who has finished since may have told the host before, and this store would have taken that back; who finishes
    // after this look tells the host after this store.
    const uint64_t now = fetchAddAcqRelGpu(finished, 0);
    if (now == sum) return;
    sum = now;
  }
}

#ifdef __CUDACC__
NCCLFFM_DEVICE CoopGrid thisGrid() {
  return {CoopBlock(), static_cast<int>(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)),
          static_cast<int>(gridDim.x * gridDim.y * gridDim.z)};
}
#endif

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_CHANNEL_FUNCS_H_
