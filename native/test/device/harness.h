// What the tests of the device library share: ranks of one communicator in plain memory, groups of host threads that
// stand for the blocks of a GPU, values that differ from call to call, and checks that say what they saw.
#ifndef NCCLFFM_TEST_DEVICE_HARNESS_H_
#define NCCLFFM_TEST_DEVICE_HARNESS_H_

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace ncclffm::test {

inline uint64_t mix(uint64_t x) {  // the finalizer of splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// Of so many stalls, one is one.
inline std::atomic<uint64_t> stallRarity{64};

/// Called between two steps of a protocol: now and then, somebody else runs there, once in a while for long.
inline void stall() {
  static std::atomic<uint64_t> threads{0};
  thread_local uint64_t n = ++threads << 32;
  const uint64_t h = mix(++n);
  const uint64_t rarity = stallRarity.load(std::memory_order_relaxed);
  if (h % rarity == 0) sched_yield();
  if (h % (64 * rarity) == 0) {
    for (int i = 0; i < 50; ++i) sched_yield();
  }
}

/// Fails if peers or the host take part in what is at the address.
void checkGpuScope(const void *address);

}  // namespace ncclffm::test

#define NCCLFFM_STALL() ::ncclffm::test::stall()
#define NCCLFFM_AT_GPU_SCOPE(address) ::ncclffm::test::checkGpuScope(address)

#include "../../include/ncclffm/device.h"

namespace ncclffm::test {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kSlowdown = 4;
#else
constexpr int kSlowdown = 1;
#endif

constexpr uint64_t kMs = 1000000;

inline std::atomic<int> failures{0};

/// Records a failure; prints the first few.
__attribute__((format(printf, 2, 3))) inline void check(bool holds, const char *format, ...) {
  if (holds || failures.fetch_add(1) >= 10) return;
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fprintf(stderr, "FAILED: %s\n", text);
}

/// A test that breaks a rule of the protocol on purpose is started with --break and its name, and passes only if the
/// checks notice.
inline bool expectFailure = false;

#ifdef NCCLFFM_RULES_AT_RUN_TIME
inline void breakRule(const char *name) {
  constexpr struct {
    const char *name;
    Rule rule;
  } kRules[] = {
      {"kAdvanceEpoch", Rule::kAdvanceEpoch},
      {"kOnTheCircle", Rule::kOnTheCircle},
      {"kDoubleBuffer", Rule::kDoubleBuffer},
      {"kClearOnWrap", Rule::kClearOnWrap},
      {"kBothFlags", Rule::kBothFlags},
      {"kWholeLine", Rule::kWholeLine},
      {"kDataBeforeFlag", Rule::kDataBeforeFlag},
      {"kCredits", Rule::kCredits},
      {"kBusyChannel", Rule::kBusyChannel},
      {"kCompareHash", Rule::kCompareHash},
      {"kSystemScope", Rule::kSystemScope},
      {"kReadBeforeEnd", Rule::kReadBeforeEnd},
      {"kCheckOverlap", Rule::kCheckOverlap},
      {"kScalarTail", Rule::kScalarTail},
      {"kTaskRoom", Rule::kTaskRoom},
      {"kTaskWhole", Rule::kTaskWhole},
      {"kTaskGeneration", Rule::kTaskGeneration},
      {"kLaunchBound", Rule::kLaunchBound},
      {"kTaskOrder", Rule::kTaskOrder},
      {"kLanesPark", Rule::kLanesPark},
      {"kTaskAgreement", Rule::kTaskAgreement},
      {"kIdleRecheck", Rule::kIdleRecheck},
      {"kSignalLast", Rule::kSignalLast},
      {"kSignalAgain", Rule::kSignalAgain},
  };
  for (const auto &row : kRules) {
    if (strcmp(row.name, name) == 0) brokenRule = row.rule;
  }
  if (brokenRule == Rule::kNone) {
    fprintf(stderr, "there is no rule %s\n", name);
    exit(2);
  }
  expectFailure = true;
  // A task that is not whole has addresses of nothing.
  for (int crash : {SIGSEGV, SIGBUS, SIGFPE, SIGABRT}) {
    std::signal(crash, [](int) {
      constexpr char kText[] = "a broken rule was noticed: a crash\n";
      _exit(write(STDERR_FILENO, kText, sizeof kText - 1) < 0 ? 1 : 0);
    });
  }
}
#endif

/// 0 if all is well; with a broken rule, if that was noticed.
inline int report(const char *name) {
  int n = failures.load();
  if (expectFailure) {
    fprintf(stderr, "%s: a broken rule was noticed %d times\n", name, n);
    return n > 0 ? 0 : 1;
  }
  fprintf(stderr, "%s: %s, %d failures\n", name, n == 0 ? "PASS" : "FAIL", n);
  return n == 0 ? 0 : 1;
}

// A broken protocol may hang: its deadline is shorter. A right one must not time out on a busy machine, which the
// control that goes unnoticed shows for the shorter one, too.
inline uint64_t timeoutNs() {
  return (expectFailure ? 10000 : 60000) * kMs;
}

/// A group of host threads in step. arrive() combines what its members bring.
class Group {
 public:
  explicit Group(uint32_t size) : size_(size) {}

  uint32_t size() const { return size_; }

  struct Combined {
    bool any;
    uint64_t ofRank0;
  };

  Combined arrive(uint32_t rank, bool flag, uint64_t value) {
    std::unique_lock<std::mutex> lock(mutex_);
    collecting_.any |= flag;
    if (rank == 0) collecting_.ofRank0 = value;
    if (++arrived_ == size_) {
      combined_ = collecting_;
      collecting_ = {};
      arrived_ = 0;
      ++generation_;
      changed_.notify_all();
    } else {
      // The next generation cannot end, and replace combined_, before every member of this one has arrived again.
      const bool inTime = changed_.wait_for(lock, std::chrono::nanoseconds(3 * timeoutNs()),
                                            [this, mine = generation_] { return generation_ != mine; });
      if (!inTime) {
        check(false, "a group of %u threads fell out of step", size_);
        std::_Exit(report("a group of threads"));
      }
    }
    return combined_;
  }

  /// What the members bring, summed in the order of their ranks.
  double sum(uint32_t rank, double value) {
    values_[rank] = value;
    arrive(rank, false, 0);
    double sum = 0;
    for (double v : values_) sum += v;
    arrive(rank, false, 0);
    return sum;
  }

 private:
  const uint32_t size_;
  std::vector<double> values_ = std::vector<double>(size_);
  std::mutex mutex_;
  std::condition_variable changed_;
  uint32_t arrived_ = 0;
  uint64_t generation_ = 0;
  Combined collecting_ = {}, combined_ = {};
};

/// Counts threads that have come to their end.
class Arrivals {
 public:
  void arrive() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++arrived_;
    changed_.notify_all();
  }

  /// Whether n have come in time; the next ones are counted from 0.
  bool await(size_t n, uint64_t waitNs) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::nanoseconds(waitNs), [&] { return arrived_ == n; })) return false;
    arrived_ = 0;
    return true;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t arrived_ = 0;
};

/// A Group as the cooperation group of a block: what CoopBlock is on a GPU.
struct CoopGroup {
  Group *group;
  uint32_t threadRank;

  uint32_t rank() const { return threadRank; }
  uint32_t size() const { return group->size(); }
  void sync() const { group->arrive(threadRank, false, 0); }
  bool syncAny(bool flag) const { return group->arrive(threadRank, flag, 0).any; }
  uint64_t syncBroadcast(uint64_t value) const { return group->arrive(threadRank, false, value).ofRank0; }
  template <class V, int N>
  void syncSum(V (&x)[N]) const {
    for (V &value : x) value = static_cast<V>(group->sum(threadRank, value));
  }
};

/// Memory that is not one rank's alone, for as long as this lives: its peers, or the host, take part in what is there.
/// Made and ended while nobody else accesses any.
class SharedMemory {
 public:
  SharedMemory(const void *start, size_t bytes) : range_{static_cast<const char *>(start), bytes} {
    ranges().push_back(range_);
  }
  SharedMemory(const SharedMemory &) = delete;
  ~SharedMemory() {
    for (Range &range : ranges()) {
      if (range.start != range_.start) continue;
      range = ranges().back();
      ranges().pop_back();
      return;
    }
  }

  static bool has(const void *address) {
    for (const Range &range : ranges()) {
      if (static_cast<const char *>(address) - range.start < static_cast<ptrdiff_t>(range.bytes) &&
          static_cast<const char *>(address) >= range.start) {
        return true;
      }
    }
    return false;
  }

 private:
  struct Range {
    const char *start;
    size_t bytes;
  };
  static std::vector<Range> &ranges() {
    static std::vector<Range> all;
    return all;
  }
  const Range range_;
};

inline void checkGpuScope(const void *address) {
  check(!SharedMemory::has(address), "an access at GPU scope to memory that peers or the host see, %p", address);
}

/// The memory of all ranks of a communicator.
class World {
 public:
  World(int nRanks, int nChannels, uint32_t slotBytes, uint64_t timeoutNs) : ranks_(nRanks) {
    const uint64_t bytes = windowBytes(nRanks, nChannels, slotBytes);
    for (Rank &rank : ranks_) {
      rank.window.resize(bytes / sizeof(Line));
      rank.channels.resize(nChannels);
      rank.pairs.resize(nChannels * nRanks);
      rank.peers.resize(nRanks);
    }
    for (int r = 0; r < nRanks; ++r) {
      Rank &rank = ranks_[r];
      for (int p = 0; p < nRanks; ++p) rank.peers[p] = ranks_[p].window.data();
      shared_.push_back(std::make_unique<SharedMemory>(rank.window.data(), bytes));
      shared_.push_back(std::make_unique<SharedMemory>(&rank.status, sizeof rank.status));
      shared_.push_back(std::make_unique<SharedMemory>(&rank.hostSignal, sizeof rank.hostSignal));
      DevComm &comm = rank.comm;
      comm.magic = NCCLFFM_DEVCOMM_MAGIC;
      comm.version = NCCLFFM_ABI_VERSION;
      comm.rank = r;
      comm.nRanks = nRanks;
      comm.nChannels = nChannels;
      comm.slotBytes = slotBytes;
      comm.timeoutNs = timeoutNs;
      comm.channels = rank.channels.data();
      comm.pairs = rank.pairs.data();
      comm.peers = rank.peers.data();
      comm.status = &rank.status;
      comm.path = ncclFfmPathSameGpu;
      comm.ranksPerDevice = 1;
    }
  }

  int nRanks() const { return static_cast<int>(ranks_.size()); }
  DevComm &comm(int rank) { return ranks_[rank].comm; }

  /// As after so many exchanges and steps: with epochs close to their end, a wrap is reached.
  void startAt(uint32_t epoch) {
    for (Rank &rank : ranks_) {
      for (Channel &channel : rank.channels) channel.state = epoch;
      for (Pair &pair : rank.pairs) pair.send = pair.recv = epoch;
      Mailbox *mailboxes = reinterpret_cast<Mailbox *>(rank.window.data());
      for (size_t i = 0; i < rank.pairs.size(); ++i) {
        mailboxes[i].pairTaken = epoch;
      }
    }
  }

  /// From now on every rank's kernels signal the host, whose count is as after so many of them.
  void signalHost(uint32_t from) {
    for (Rank &rank : ranks_) {
      rank.channels[0].finished = uint64_t{from} << 32;
      rank.hostSignal = from;
      rank.comm.hostSignal = &rank.hostSignal;
    }
  }

  /// Whether a rank's kernels before that number, on the circle, have finished by then.
  bool awaitKernels(int rank, uint32_t number, uint64_t waitNs) {
    const uint64_t deadline = nowNs() + waitNs;
    while (static_cast<int32_t>(__atomic_load_n(&ranks_[rank].hostSignal, __ATOMIC_ACQUIRE) - number) < 0) {
      if (nowNs() > deadline) return false;
      sched_yield();
    }
    return true;
  }

  uint32_t hostSignal(int rank) { return __atomic_load_n(&ranks_[rank].hostSignal, __ATOMIC_ACQUIRE); }

  /// The status record of a rank whose ready word is set; all zero while it is not.
  Status status(int rank) {
    const Status &s = ranks_[rank].status;
    if (__atomic_load_n(&s.ready, __ATOMIC_ACQUIRE) == 0) return {};
    // But for abort, which abort() may write.
    return {s.code, s.function, s.rank, s.peer, s.channel, s.epoch, s.waitedNs, 0, 1, s.task, s.peerTask};
  }

  void abort(int rank) { __atomic_store_n(&ranks_[rank].status.abort, 1, __ATOMIC_RELAXED); }

  /// So that after a failure nobody waits for long.
  void abort() {
    for (int r = 0; r < nRanks(); ++r) abort(r);
  }

  uint64_t state(int rank, int channel) {
    return __atomic_load_n(&ranks_[rank].channels[channel].state, __ATOMIC_RELAXED);
  }

  /// Whether nobody has stored anything to the window of a rank.
  bool isUntouched(int rank) {
    for (Line &line : ranks_[rank].window) {
      for (uint64_t &word : line.word) {
        if (__atomic_load_n(&word, __ATOMIC_RELAXED) != 0) return false;
      }
    }
    return true;
  }

 private:
  struct alignas(128) Line {
    uint64_t word[16];
  };
  struct Rank {
    std::vector<Line> window;
    std::vector<Channel> channels;
    std::vector<Pair> pairs;
    std::vector<void *> peers;
    Status status = {};
    uint32_t hostSignal = 0;
    DevComm comm = {};
  };
  std::vector<Rank> ranks_;
  std::vector<std::unique_ptr<SharedMemory>> shared_;
};

/// What a rank contributes as element i of a call: never the same in two calls, of mixed magnitudes.
inline float contribution(uint64_t seed, int rank, uint64_t call, size_t i) {
  uint64_t h = mix(mix(mix(seed + static_cast<uint64_t>(rank)) + call) + i);
  float mantissa = static_cast<float>(static_cast<int32_t>(h >> 40) - (1 << 23)) / (1 << 23);
  return std::ldexp(mantissa, static_cast<int>(h % 8));
}

/// All threads run body(i), for i in [0, n), at the same time.
template <class Body>
void inThreads(int n, Body body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < n; ++i) threads.emplace_back(body, i);
  for (std::thread &thread : threads) thread.join();
}

}  // namespace ncclffm::test

#endif  // NCCLFFM_TEST_DEVICE_HARNESS_H_
