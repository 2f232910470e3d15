// One rank's communicator: its place among the ranks, waiting for them, failing with them, and the order of its
// operations.
#ifndef NCCLFFM_CPU_COMMUNICATOR_H_
#define NCCLFFM_CPU_COMMUNICATOR_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "abi.h"
#include "control.h"
#include "futex.h"
#include "rendezvous.h"
#include "stream.h"

namespace ncclffm::cpu {

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  Communicator(int rank, int device, Membership membership);

  int rank() const { return rank_; }
  int nRanks() const { return static_cast<int>(membership_.ranks.size()); }
  int device() const { return device_; }
  Control &control() const { return *control_; }
  const PeerProcess &processOf(int rank) const {
    return membership_.processes[static_cast<size_t>(membership_.ranks[static_cast<size_t>(rank)].process)];
  }

  /// A range of a rank's heap as mapped here, or null when it leaves the heap.
  char *at(int rank, uint64_t offset, uint64_t bytes) const;

  // ---- Order of operations ----

  /// Appends an operation to the stream, after this communicator's earlier ones on any stream. A result other than
  /// ncclSuccess fails the stream. Nothing when the stream has been closed.
  std::optional<Ticket> enqueue(const std::shared_ptr<Stream> &stream, std::vector<Ticket> after,
                                std::function<ncclResult_t()> operation);

  /// Waits for everything enqueued.
  void flush();

  /// flush(), then tells the others that this rank will not come any more.
  void leave();

  void finalize() { finalized_.store(true); }
  bool finalized() const { return finalized_.load(); }

  // ---- Failing ----

  /// Fails the communicator on all ranks, with the text for all. The first failure counts; it is returned.
  ncclResult_t fail(ncclResult_t code, const std::string &text);

  /// ncclSuccess, or why the communicator has failed. Looks at the shared mark, not at peers' processes.
  ncclResult_t error();
  std::string errorText();

  /// error(), after looking whether every peer's process is alive.
  ncclResult_t checkPeers();

  /// Fails this rank's operations and its peers', from any thread, and waits for the one that is running.
  void abort();

  /// As abort(), but the communicator can still make others: ncclCommRevoke, and ncclCommShrink that terminates what
  /// runs. what is for the texts, "has revoked".
  void terminate(const char *what);

  /// After terminate(): no operations any more, and no error either.
  void revoke() { revoked_.store(true); }
  bool revoked() const { return revoked_.load(); }

  /// While suspended, nothing but ncclCommResume and the end is allowed.
  void setSuspended(bool suspended) { suspended_.store(suspended); }
  bool suspended() const { return suspended_.load(); }

  /// Throws NcclFailure when an operation cannot start: failed, revoked, finalized or suspended.
  void checkUsable(const char *function);

  /// Device memory of the communicator itself: what the ranks share, counted once a rank.
  uint64_t memoryBytes() const { return membership_.control->bytes(); }

  /// After abort(): streams that this communicator's operations failed can be used again.
  void forgiveStreams() { aborted_->store(true); }

  /// Whether a rank has destroyed its communicator.
  bool hasLeft(int rank) const { return control_->ranks[rank].state.load(kAcquire) == kLeft; }

  // ---- Meeting the others ----

  /// Waits until missing() returns -1; else it returns the rank that is being waited for. Ends with an error when the
  /// communicator fails, a peer's process ends, the missing rank has left, or waitLimit() passes.
  template <class Missing>
  ncclResult_t wait(const char *operation, Missing missing);

  /// As wait(), for ranks that may go on together although the communicator has failed: only the missing rank and
  /// abort() end it, with NcclFailure, and nobody else is told.
  void waitDespiteFailure(const char *operation, const std::function<int()> &missing);

  /// Wakes a rank that may be waiting for what this rank has just stored.
  void ring(int rank);
  void ringAll();

  /// A rank's position in a lane.
  struct Cursor {
    Lane *lane;
    uint64_t phase = 0;
  };

  /// Enters the next phase with a descriptor.
  void arrive(Cursor &cursor, const Descriptor &descriptor);

  /// Waits until all ranks are in the phase; their descriptors can be read until this rank enters the next one.
  ncclResult_t awaitAll(const Cursor &cursor, const char *operation);

  /// awaitAll() on the host lane, also when revoked; throws NcclFailure when that fails or the ranks called different
  /// functions.
  void meetAll(const char *operation);

  /// Offers the ranks of a set (bit r = rank r) a new communicator, and finds that offer; the lowest rank offers.
  /// Throws NcclFailure.
  void offer(uint64_t members, const ncclUniqueId &id);
  ncclUniqueId awaitOffer(uint64_t members, const char *operation);

  /// Makes the id for ncclCommGrow; takes this rank's next one. Throw NcclFailure.
  ncclUniqueId offerGrowth();
  ncclUniqueId awaitGrowth();

  const Descriptor &descriptorOf(const Cursor &cursor, int rank) const {
    return cursor.lane->ranks[rank].descriptors[cursor.phase % 2];
  }

  Cursor &streamCursor() { return streamCursor_; }
  Cursor &hostCursor() { return hostCursor_; }

  /// Messages sent to, and taken from, each rank so far.
  std::vector<uint64_t> &sent() { return sent_; }
  std::vector<uint64_t> &received() { return received_; }

  /// Signals of each rank that ncclWaitSignal has consumed.
  std::vector<uint64_t> &consumed() { return consumed_; }

  /// While one exists, this rank may touch peers' buffers, and a peer that fails waits before it lets its caller free
  /// them. Check stopped() every few hundred microseconds in between.
  class PeerAccess {
   public:
    explicit PeerAccess(Communicator &comm) : slot_(comm.self()) { slot_.busy.store(1, kSeqCst); }
    ~PeerAccess() { slot_.busy.store(0, kSeqCst); }
    PeerAccess(const PeerAccess &) = delete;
    PeerAccess &operator=(const PeerAccess &) = delete;

   private:
    RankSlot &slot_;
  };

  bool stopped() const { return control_->failed.load(kSeqCst) != 0; }

  /// memcpy in pieces, until stopped().
  void copy(char *to, const char *from, uint64_t bytes) const;

 private:
  using Clock = std::chrono::steady_clock;

  RankSlot &self() { return control_->ranks[rank_]; }
  cudaError_t execute(const std::function<ncclResult_t()> &operation);
  void adopt(ncclResult_t code, const std::string &text);
  void publish(ncclResult_t code, const std::string &text);
  void quiesce();
  int deadRank() const;
  ncclResult_t failBecauseDead(int rank, const char *operation);
  static void pauseProcessor();

  const int rank_;
  const int device_;
  const Membership membership_;
  Control *const control_;
  const std::chrono::milliseconds limit_;
  Cursor streamCursor_;
  Cursor hostCursor_;
  std::vector<uint64_t> sent_;
  std::vector<uint64_t> received_;
  std::vector<uint64_t> consumed_;
  std::vector<uint64_t> offersTaken_;  // the number of the latest offer taken from each rank
  uint64_t growthsTaken_ = 0;
  std::atomic<bool> finalized_{false};
  std::atomic<bool> revoked_{false};
  std::atomic<bool> suspended_{false};
  std::atomic<bool> ending_{false};  // abort() has been called
  const std::shared_ptr<std::atomic<bool>> aborted_ = std::make_shared<std::atomic<bool>>(false);

  std::mutex orderMutex_;
  Ticket last_;

  std::mutex stateMutex_;
  std::condition_variable idle_;
  int executing_ = 0;
  ncclResult_t error_ = ncclSuccess;
  std::string errorText_;
};

template <class Missing>
ncclResult_t Communicator::wait(const char *operation, Missing missing) {
  // Ranks of one machine come within microseconds of each other when their processors are free, and no sooner than the
  // scheduler lets them when they are not: spin for about 2 us, then sleep.
  constexpr int kSpins = 64;
  for (int i = 0; i < kSpins; ++i) {
    if (missing() < 0) {
      return ncclSuccess;
    }
    pauseProcessor();
  }
  constexpr long kSliceMs = 100;  // how soon a peer's death is noticed
  const auto start = Clock::now();
  RankSlot &slot = self();
  while (true) {
    const uint32_t bell = slot.doorbell.load(kAcquire);
    int absent = missing();
    if (absent < 0) {
      return ncclSuccess;
    }
    const ncclResult_t failure = error();
    if (failure != ncclSuccess) {
      return failure;
    }
    if (control_->ranks[absent].state.load(kAcquire) == kLeft) {
      absent = missing();  // it may have arrived and then left
      return absent < 0 ? ncclSuccess
                        : fail(ncclRemoteError, std::string(operation) + ": rank " + std::to_string(absent) +
                                                    " has destroyed its communicator and will not come");
    }
    slot.waiters.fetch_add(1, kSeqCst);
    futexWait(&slot.doorbell, bell, kSliceMs);
    slot.waiters.fetch_sub(1, kSeqCst);
    if (slot.doorbell.load(kAcquire) != bell) {
      continue;
    }
    const int dead = deadRank();
    if (dead >= 0) {
      absent = missing();
      return absent < 0 ? ncclSuccess : failBecauseDead(dead, operation);
    }
    if (Clock::now() - start >= limit_) {
      absent = missing();
      return absent < 0 ? ncclSuccess
                        : fail(ncclRemoteError, std::string(operation) + ": rank " + std::to_string(absent) +
                                                    " did not come to it within " + std::to_string(limit_.count()) +
                                                    " ms (rank " + std::to_string(rank_) + " waited)");
    }
  }
}

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_COMMUNICATOR_H_
