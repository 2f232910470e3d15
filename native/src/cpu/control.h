// The control segment of a communicator: one memfd that all its ranks map. Plain data and lock-free atomics only; a
// rank may be killed at any instruction, so nothing here is a lock that a dead rank could hold.
#ifndef NCCLFFM_CPU_CONTROL_H_
#define NCCLFFM_CPU_CONTROL_H_

#include <atomic>
#include <cstdint>

namespace ncclffm::cpu {

constexpr int kMaxRanks = 64;
constexpr uint64_t kNoBuffer = UINT64_MAX;

// Test builds define NCCLFFM_TEST_WEAK_BARRIER: ThreadSanitizer must then find the data races that these orders
// prevent.
#ifdef NCCLFFM_TEST_WEAK_BARRIER
constexpr std::memory_order kAcquire = std::memory_order_relaxed;
constexpr std::memory_order kRelease = std::memory_order_relaxed;
constexpr std::memory_order kAcqRel = std::memory_order_relaxed;
constexpr std::memory_order kSeqCst = std::memory_order_relaxed;
#else
constexpr std::memory_order kAcquire = std::memory_order_acquire;
constexpr std::memory_order kRelease = std::memory_order_release;
constexpr std::memory_order kAcqRel = std::memory_order_acq_rel;
constexpr std::memory_order kSeqCst = std::memory_order_seq_cst;
#endif

enum class Function : uint32_t {
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllGather,
  kReduceScatter,
  kAlltoAll,
  kGather,
  kScatter,
  kSend,
  kRecv,
  kPutSignal,
  kSignal,
  kWaitSignal,
  kWindowRegister,
  kSplit,
  kSuspend,
  kResume
};

/// What a rank tells the others about its part of an operation. Buffers are offsets into the rank's heap.
struct Descriptor {
  Function function = Function::kAllReduce;
  int32_t datatype = 0;
  int32_t op = 0;
  int32_t root = 0;    // the peer of a send, receive or signal; the flags of a window; the color of a split
  uint64_t count = 0;  // elements; bytes of a window
  uint64_t send = kNoBuffer;
  uint64_t recv = kNoBuffer;  // of ncclPutSignal: in the peer's heap
  int32_t key = 0;            // of a split
  uint64_t scalar = 0;        // the rank's factor of a pre-multiplied sum, in the first bytes
};

enum RankState : uint32_t { kJoined = 0, kLeft = 1 };

struct alignas(64) RankSlot {
  std::atomic<uint32_t> doorbell;  // futex word: changes whenever something that the rank may wait for has happened
  std::atomic<uint32_t> waiters;   // threads of the rank in futex wait; who rings an empty bell saves the system call
  std::atomic<uint32_t> state;     // a RankState
  std::atomic<uint32_t> busy;      // 1 while the rank reads or writes its peers' buffers
};

/// Operations that all ranks enter in the same order. Phases count from 1; a phase is complete when every rank has
/// arrived.
struct Lane {
  struct alignas(64) Entry {
    std::atomic<uint64_t> arrived;  // the rank's latest phase
    // Two by turns. A rank that overwrites number k has passed a phase that everybody enters after reading number k.
    Descriptor descriptors[2];
  };
  alignas(64) std::atomic<uint64_t> arrivals;  // over all ranks and phases
  std::atomic<uint64_t> completed;             // the latest complete phase
  Entry ranks[kMaxRanks];
};

/// The messages from one rank to another, one at a time.
struct alignas(64) Pair {
  std::atomic<uint64_t> posted;   // number of messages that the sender has described here
  std::atomic<uint64_t> done;     // number of messages that the receiver has taken
  Descriptor message;             // the posted one; stable until done == posted
  std::atomic<uint64_t> signals;  // number of ncclPutSignal and ncclSignal that have been carried out
};

/// The unique id with which some of the ranks make a new communicator, offered by the lowest of them.
struct alignas(64) Offer {
  std::atomic<uint64_t> number;   // odd while the rest is being written
  std::atomic<uint64_t> members;  // bit r = rank r
  std::atomic<uint64_t> token[2];
};

/// The unique ids of ncclCommGetUniqueId, one at a time.
struct alignas(64) Growth {
  std::atomic<uint64_t> claimed;  // number of ids that ranks have set out to make
  std::atomic<uint64_t> offered;  // number of ids made
  std::atomic<uint64_t> taken;    // number of times that a rank has read an id; nRanks an id
  std::atomic<uint64_t> token[2];
};
static_assert(kMaxRanks <= 64, "a set of ranks is a 64-bit number");

struct Control {
  std::atomic<uint32_t> claimed;  // by the first rank that reports a failure
  std::atomic<uint32_t> failed;   // 0, or the ncclResult_t; stored after text
  char text[512];                 // why, for every rank's ncclGetLastError
  RankSlot ranks[kMaxRanks];
  Lane streamLane;          // collectives, entered by stream workers
  Lane hostLane;            // window registration, split, suspend, resume: entered by the caller's thread
  Offer offers[kMaxRanks];  // by the rank that offers
  Growth growth;
  Pair pairs[kMaxRanks][kMaxRanks];  // [source][destination]
};

// A fresh memfd is all zero: that must be the initial state, and atomics must work between processes.
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<uint32_t>) == 4);

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_CONTROL_H_
