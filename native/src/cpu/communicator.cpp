// Waiting, failing and ordering of one rank.
#include "communicator.h"

#include <algorithm>
#include <cstring>

#include "error.h"
#include "operation.h"

namespace ncclffm::cpu {

Communicator::Communicator(int rank, int device, Membership membership)
    : rank_(rank),
      device_(device),
      membership_(std::move(membership)),
      control_(reinterpret_cast<Control *>(membership_.control->base())),
      limit_(waitLimit()),
      streamCursor_{&control_->streamLane},
      hostCursor_{&control_->hostLane},
      sent_(membership_.ranks.size()),
      received_(membership_.ranks.size()),
      consumed_(membership_.ranks.size()),
      offersTaken_(membership_.ranks.size()) {}

char *Communicator::at(int rank, uint64_t offset, uint64_t bytes) const {
  const PeerProcess &process = processOf(rank);
  const bool inside = bytes <= process.heapBytes && offset <= process.heapBytes - bytes;
  return inside ? process.heapBase + offset : nullptr;
}

std::optional<Ticket> Communicator::enqueue(const std::shared_ptr<Stream> &stream, std::vector<Ticket> after,
                                            std::function<ncclResult_t()> operation) {
  std::lock_guard<std::mutex> lock(orderMutex_);
  if (last_.stream != nullptr && last_.stream != stream) {
    after.push_back(last_);
  }
  std::shared_ptr<Communicator> self = shared_from_this();
  std::optional<Ticket> ticket =
      append(stream, Work{[self, operation = std::move(operation)] { return self->execute(operation); },
                          [self] {
                            self->fail(ncclUnhandledCudaError, format("rank %d cannot go on: the stream of its next "
                                                                      "operation has failed before",
                                                                      self->rank()));
                          },
                          std::move(after), aborted_});
  if (ticket) {
    last_ = *ticket;
  }
  return ticket;
}

cudaError_t Communicator::execute(const std::function<ncclResult_t()> &operation) {
  {
    std::lock_guard<std::mutex> lock(stateMutex_);
    ++executing_;
  }
  ncclResult_t result = error();
  if (result == ncclSuccess) {
    result = operation();
  }
  if (result != ncclSuccess) {
    quiesce();
  }
  {
    std::lock_guard<std::mutex> lock(stateMutex_);
    --executing_;
    idle_.notify_all();
  }
  return result == ncclSuccess ? cudaSuccess : cudaErrorLaunchFailure;
}

void Communicator::flush() {
  Ticket last;
  {
    std::lock_guard<std::mutex> lock(orderMutex_);
    last = last_;
  }
  if (last.stream != nullptr) {
    (void)last.stream->wait(last.number);  // its error is the communicator's or the stream's, and reported there
  }
}

void Communicator::leave() {
  flush();
  self().state.store(kLeft, kRelease);
  ringAll();
}

ncclResult_t Communicator::fail(ncclResult_t code, const std::string &text) {
  publish(code, text);
  if (error() == ncclSuccess) {  // another rank has claimed the failure and was killed before it could say why
    adopt(code, text);
  }
  return error();
}

void Communicator::publish(ncclResult_t code, const std::string &text) {
  if (control_->claimed.exchange(1, kAcqRel) == 0) {
    const size_t bytes = std::min(text.size(), sizeof(control_->text) - 1);
    std::memcpy(control_->text, text.data(), bytes);
    control_->text[bytes] = '\0';
    control_->failed.store(code, kSeqCst);
    ringAll();
  }
}

void Communicator::adopt(ncclResult_t code, const std::string &text) {
  std::lock_guard<std::mutex> lock(stateMutex_);
  if (error_ == ncclSuccess) {
    error_ = code;
    errorText_ = text;
  }
}

ncclResult_t Communicator::error() {
  const uint32_t failed = control_->failed.load(kAcquire);
  if (failed != 0) {
    adopt(static_cast<ncclResult_t>(failed), control_->text);
  }
  std::lock_guard<std::mutex> lock(stateMutex_);
  return error_;
}

std::string Communicator::errorText() {
  std::lock_guard<std::mutex> lock(stateMutex_);
  return errorText_;
}

ncclResult_t Communicator::checkPeers() {
  const ncclResult_t result = error();
  const int dead = result == ncclSuccess ? deadRank() : -1;
  return dead < 0 ? result : failBecauseDead(dead, "ncclCommGetAsyncError");
}

int Communicator::deadRank() const {
  for (size_t i = 0; i < membership_.processes.size(); ++i) {
    if (!membership_.processes[i].dead()) {
      continue;
    }
    for (int rank = 0; rank < nRanks(); ++rank) {
      if (membership_.ranks[static_cast<size_t>(rank)].process == static_cast<int>(i) &&
          control_->ranks[rank].state.load(kAcquire) != kLeft) {
        return rank;
      }
    }
  }
  return -1;
}

ncclResult_t Communicator::failBecauseDead(int rank, const char *operation) {
  return fail(ncclRemoteError, format("%s: rank %d (process %d) has ended", operation, rank, processOf(rank).pid));
}

void Communicator::abort() {
  ending_.store(true);
  terminate("has aborted");
}

void Communicator::terminate(const char *what) {
  adopt(ncclInvalidUsage, format("rank %d %s this communicator", rank_, what));
  publish(ncclRemoteError, format("rank %d %s its communicator", rank_, what));
  ring(rank_);
  std::unique_lock<std::mutex> lock(stateMutex_);
  // Waits see the failure at once and work checks it often; the bound is for a stopped machine only.
  idle_.wait_for(lock, std::chrono::seconds(10), [&] { return executing_ == 0; });
}

void Communicator::checkUsable(const char *function) {
  if (revoked()) {
    throw NcclFailure(ncclInvalidUsage, format("%s: the communicator has been revoked", function));
  }
  if (error() != ncclSuccess) {
    throw NcclFailure(error(), errorText());
  }
  if (finalized()) {
    throw NcclFailure(ncclInvalidUsage, format("%s: the communicator has been finalized", function));
  }
  if (suspended()) {
    throw NcclFailure(ncclInvalidUsage, format("%s: the communicator is suspended; call ncclCommResume", function));
  }
}

// After a failure: peers may still be reading or writing this rank's buffers, and the caller is about to free them.
// Peers check the failure often; a stopped (not dead) process must not hold this one for ever.
void Communicator::quiesce() {
  const auto deadline = Clock::now() + std::chrono::seconds(2);
  for (int rank = 0; rank < nRanks(); ++rank) {
    RankSlot &slot = control_->ranks[rank];
    while (rank != rank_ && slot.busy.load(kSeqCst) != 0 && !processOf(rank).dead() && Clock::now() < deadline) {
      futexWait(&slot.busy, 1, 1);
    }
  }
}

void Communicator::ring(int rank) {
  RankSlot &slot = control_->ranks[rank];
  slot.doorbell.fetch_add(1, kSeqCst);
  if (slot.waiters.load(kSeqCst) != 0) {
    futexWakeAll(&slot.doorbell);
  }
}

void Communicator::ringAll() {
  for (int rank = 0; rank < nRanks(); ++rank) {
    if (rank != rank_) {
      ring(rank);
    }
  }
}

void Communicator::arrive(Cursor &cursor, const Descriptor &descriptor) {
  const uint64_t phase = ++cursor.phase;
  Lane &lane = *cursor.lane;
  lane.ranks[rank_].descriptors[phase % 2] = descriptor;
  lane.ranks[rank_].arrived.store(phase, kRelease);
  // Nobody enters a phase before the last one is complete, so the count of arrivals tells the phase.
  if (lane.arrivals.fetch_add(1, kAcqRel) + 1 == phase * static_cast<uint64_t>(nRanks())) {
    lane.completed.store(phase, kRelease);
    ringAll();
  }
}

ncclResult_t Communicator::awaitAll(const Cursor &cursor, const char *operation) {
  return wait(operation, [&] {
    if (cursor.lane->completed.load(kAcquire) >= cursor.phase) {
      return -1;
    }
    for (int rank = 0; rank < nRanks(); ++rank) {
      if (cursor.lane->ranks[rank].arrived.load(kAcquire) < cursor.phase) {
        return rank;
      }
    }
    return rank_;  // the last one has arrived and is about to complete the phase
  });
}

void Communicator::waitDespiteFailure(const char *operation, const std::function<int()> &missing) {
  constexpr long kSliceMs = 20;  // how soon a peer's end is noticed
  const auto start = Clock::now();
  RankSlot &slot = self();
  while (true) {
    const uint32_t bell = slot.doorbell.load(kAcquire);
    const int absent = missing();
    if (absent < 0) {
      return;
    }
    const bool gone = processOf(absent).dead() || hasLeft(absent);
    const bool late = Clock::now() - start >= limit_;
    if (ending_.load() || ((gone || late) && missing() >= 0)) {
      throw NcclFailure(ending_.load() ? ncclInternalError : ncclRemoteError,
                        format("%s: rank %d %s", operation, ending_.load() ? rank_ : absent,
                               ending_.load() ? "was aborted meanwhile"
                               : gone         ? "has ended or destroyed its communicator"
                                              : "did not come to it in time, or with other ranks in mind"));
    }
    slot.waiters.fetch_add(1, kSeqCst);
    futexWait(&slot.doorbell, bell, kSliceMs);
    slot.waiters.fetch_sub(1, kSeqCst);
  }
}

void Communicator::meetAll(const char *operation) {
  const auto missing = [&] {
    if (hostCursor_.lane->completed.load(kAcquire) >= hostCursor_.phase) {
      return -1;
    }
    for (int rank = 0; rank < nRanks(); ++rank) {
      if (hostCursor_.lane->ranks[rank].arrived.load(kAcquire) < hostCursor_.phase) {
        return rank;
      }
    }
    return rank_;
  };
  if (revoked()) {
    waitDespiteFailure(operation, missing);
  } else if (wait(operation, missing) != ncclSuccess) {
    throw NcclFailure(error(), errorText());
  }
  const Function own = descriptorOf(hostCursor_, rank_).function;
  for (int rank = 0; rank < nRanks(); ++rank) {
    const Function other = descriptorOf(hostCursor_, rank).function;
    if (other != own) {
      const ncclResult_t code =
          fail(ncclInvalidUsage, format("ranks disagree: rank %d called %s, rank %d called %s", std::min(rank, rank_),
                                        functionName(rank < rank_ ? other : own), std::max(rank, rank_),
                                        functionName(rank < rank_ ? own : other)));
      throw NcclFailure(code, errorText());
    }
  }
}

void Communicator::offer(uint64_t members, const ncclUniqueId &id) {
  Offer &own = control_->offers[rank_];
  const IdToken token = tokenOf(id);
  own.number.fetch_add(1, kSeqCst);
  own.token[0].store(token[0], kSeqCst);
  own.token[1].store(token[1], kSeqCst);
  own.members.store(members, kSeqCst);
  own.number.fetch_add(1, kSeqCst);
  ringAll();
}

ncclUniqueId Communicator::awaitOffer(uint64_t members, const char *operation) {
  int leader = 0;
  while ((members >> leader & 1) == 0) {
    ++leader;
  }
  const Offer &from = control_->offers[leader];
  uint64_t &taken = offersTaken_[static_cast<size_t>(leader)];
  IdToken token{};
  const auto missing = [&] {
    const uint64_t number = from.number.load(kSeqCst);
    if (number % 2 != 0 || number <= taken || from.members.load(kSeqCst) != members) {
      return leader;
    }
    token = {from.token[0].load(kSeqCst), from.token[1].load(kSeqCst)};
    if (from.number.load(kSeqCst) != number) {
      return leader;
    }
    taken = number;
    return -1;
  };
  waitDespiteFailure(operation, missing);
  return idOf(token);
}

ncclUniqueId Communicator::offerGrowth() {
  Growth &growth = control_->growth;
  uint64_t made = growth.offered.load(kSeqCst);
  if (growth.taken.load(kSeqCst) != made * static_cast<uint64_t>(nRanks()) ||
      !growth.claimed.compare_exchange_strong(made, made + 1, kSeqCst)) {
    throw NcclFailure(ncclInvalidUsage,
                      "ncclCommGetUniqueId: the communicator's last unique id has not been used by ncclCommGrow on all "
                      "its ranks yet");
  }
  const ncclUniqueId id = openRendezvous();
  const IdToken token = tokenOf(id);
  growth.token[0].store(token[0], kSeqCst);
  growth.token[1].store(token[1], kSeqCst);
  growth.offered.store(made + 1, kSeqCst);
  ringAll();
  return id;
}

ncclUniqueId Communicator::awaitGrowth() {
  Growth &growth = control_->growth;
  // Nobody knows which rank calls ncclCommGetUniqueId; any other rank's end is reported by error().
  const int other = rank_ == 0 && nRanks() > 1 ? 1 : 0;
  if (wait("ncclCommGrow", [&] { return growth.offered.load(kSeqCst) > growthsTaken_ ? -1 : other; }) != ncclSuccess) {
    throw NcclFailure(error(), errorText());
  }
  ++growthsTaken_;
  const IdToken token = {growth.token[0].load(kSeqCst), growth.token[1].load(kSeqCst)};
  growth.taken.fetch_add(1, kSeqCst);
  return idOf(token);
}

void Communicator::copy(char *to, const char *from, uint64_t bytes) const {
  constexpr uint64_t kPiece = 1u << 20;
  for (uint64_t done = 0; done < bytes && !stopped(); done += kPiece) {
    std::memcpy(to + done, from + done, std::min(kPiece, bytes - done));
  }
}

void Communicator::pauseProcessor() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace ncclffm::cpu
