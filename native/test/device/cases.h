// Random calls of the device library on host threads, and what must come out of them: computed here once more, element
// by element, from the documents of collectives.h alone.
#ifndef NCCLFFM_TEST_DEVICE_CASES_H_
#define NCCLFFM_TEST_DEVICE_CASES_H_

#include "harness.h"  // first: it sets up the library

#include <algorithm>
#include <limits>
#include <memory>
#include <type_traits>

#include "../../src/cpu/number.h"

namespace ncclffm::test {

/// A number that 64 bits of a hash choose from [0, n).
inline uint64_t pick(uint64_t &h, uint64_t n) {
  h = mix(h);
  return h % n;
}

inline bool isPairCase(uint32_t function) {
  return function == ncclFfmFunctionSend || function == ncclFfmFunctionSendRecv;
}

/// A call, the same on all ranks.
struct Case {
  uint64_t number;  // no two cases of a test have the same: values and offsets depend on it
  uint32_t function;
  int datatype, op;
  uint32_t protocol, algorithm;
  uint64_t count;
  int root;    // as in ncclFfmCall. Send: who receives; SendRecv: the distance around the ring of ranks
  int source;  // Send: who sends
  bool inPlace, zeroCopy;
  bool special;  // NaN, infinities, zeros, subnormal and extreme numbers among the values
  bool named;    // by ncclDevAllReduce and so on: protocol and algorithm are left open
};

/// What one group of threads does between two syncs of its own: calls on one channel, back to back.
struct Batch {
  std::vector<Case> cases;
  int channel;
  int blocks;      // of a grid
  bool onSession;  // collectives on one session
};

template <class F>
void withNumberType(int datatype, F f) {
  switch (datatype) {
    case ncclInt8:
      return f(int8_t{});
    case ncclUint8:
      return f(uint8_t{});
    case ncclInt32:
      return f(int32_t{});
    case ncclUint32:
      return f(uint32_t{});
    case ncclInt64:
      return f(int64_t{});
    case ncclUint64:
      return f(uint64_t{});
    case ncclFloat16:
      return f(cpu::Float16{});
    case ncclFloat32:
      return f(float{});
    case ncclFloat64:
      return f(double{});
    default:
      return f(cpu::Bfloat16{});
  }
}

/// How a type computes, written once more without the library: halves in float, integers wrapping.
template <class T>
struct Number {
  using Accumulator = T;
  static T load(T x) { return x; }
  static T store(T x) { return x; }
};
template <int kMantissa, class Small>
struct SmallNumber {
  using Accumulator = float;
  static float load(Small x) { return x.toFloat(); }
  static Small store(float x) { return Small::fromFloat(x); }
  static constexpr int kMantissaBits = kMantissa;
};
template <>
struct Number<cpu::Float16> : SmallNumber<11, cpu::Float16> {
  static constexpr double kSmallest = 0x1p-24, kLargest = 65504;
};
template <>
struct Number<cpu::Bfloat16> : SmallNumber<8, cpu::Bfloat16> {
  static constexpr double kSmallest = 0x1p-133, kLargest = 0x1.fep127;
};
template <>
struct Number<float> {
  using Accumulator = float;
  static float load(float x) { return x; }
  static float store(float x) { return x; }
  static constexpr int kMantissaBits = 24;
  static constexpr double kSmallest = 0x1p-149, kLargest = std::numeric_limits<float>::max();
};
template <>
struct Number<double> {
  using Accumulator = double;
  static double load(double x) { return x; }
  static double store(double x) { return x; }
  static constexpr int kMantissaBits = 53;
  static constexpr double kSmallest = 0x1p-1074, kLargest = std::numeric_limits<double>::max();
};

template <class T>
T bitsAs(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/// Element i of what a rank gives: never the same in two calls. Floats are of mixed magnitudes.
template <class T>
T valueOf(const Case &c, int rank, uint64_t i) {
  uint64_t h = mix(mix(c.number * 64 + static_cast<uint64_t>(rank)) + i);
  if (!reduces(c.function)) return bitsAs<T>(h);
  using N = Number<T>;
  if constexpr (std::is_integral_v<T>) {
    if (c.special && h % 8 == 0) {
      const T corners[] = {0, 1, static_cast<T>(-1), std::numeric_limits<T>::min(), std::numeric_limits<T>::max()};
      return corners[(h >> 8) % 5];
    }
    return static_cast<T>(h >> 16);
  } else {
    if (c.special && h % 8 == 0) {
      const double corners[] = {std::nan(""), INFINITY,     -INFINITY,     0.0,
                                -0.0,         N::kSmallest, -N::kSmallest, N::kSmallest * (1 << 5),
                                N::kLargest,  -N::kLargest};
      return N::store(static_cast<typename N::Accumulator>(corners[(h >> 8) % 10]));
    }
    constexpr uint64_t kOne = uint64_t{1} << (N::kMantissaBits - 1);
    const double mantissa = static_cast<double>(kOne + (h >> 8) % kOne) / static_cast<double>(kOne);
    const double value = std::ldexp(mantissa, static_cast<int>((h >> 3) % 8) - 4);
    return N::store(static_cast<typename N::Accumulator>(h % 2 == 0 ? value : -value));
  }
}

template <class A>
A combine(A a, A b, int op) {
  if constexpr (std::is_integral_v<A>) {
    const uint64_t x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
    return op == ncclMax    ? std::max(a, b)
           : op == ncclMin  ? std::min(a, b)
           : op == ncclProd ? static_cast<A>(x * y)
                            : static_cast<A>(x + y);
  } else {
    if (op == ncclSum || op == ncclAvg) return a + b;
    if (op == ncclProd) return a * b;
    if (std::isnan(a)) return b;
    if (std::isnan(b)) return a;
    return (op == ncclMax) == (a < b) ? b : a;
  }
}

/// Elements of each of n parts, but for the last ones: whole lines of 128 bytes, as equal as they can be.
inline uint64_t partOf(uint64_t count, uint64_t elementBytes, int n) {
  const uint64_t lines = (count * elementBytes + 127) / 128, m = static_cast<uint64_t>(n);
  return (lines + m - 1) / m * 128 / elementBytes;
}

/// Adds contributions in order, a subtotal stored in between where the algorithm hands one on.
template <class T>
class Sum {
 public:
  using N = Number<T>;
  explicit Sum(int op) : op_(op) {}

  void add(T x) {
    total_ = n_ == 0 ? N::load(x) : combine(N::load(x), total_, op_);
    ++n_;
  }
  void handOn() { total_ = N::load(N::store(total_)); }
  T subtotal() const { return N::store(total_); }
  T result(int nRanks) const {
    return op_ == ncclAvg ? N::store(total_ / static_cast<typename N::Accumulator>(nRanks)) : N::store(total_);
  }

 private:
  int op_, n_ = 0;
  typename N::Accumulator total_ = {};
};

/// The element of a reduction that all ranks give element i to, which is number inCall of `count` in the call.
template <class T>
T expectedSum(const Case &c, int nRanks, int blocks, uint64_t i) {
  if (c.function == ncclFfmFunctionHierarchicalAllReduce) {
    Sum<T> total(c.op);
    for (int first = 0; first < nRanks; first += c.root) {
      Sum<T> group(c.op);
      for (int r = first; r < first + c.root; ++r) group.add(valueOf<T>(c, r, i));
      total.add(group.subtotal());
    }
    return total.result(nRanks);
  }
  Sum<T> sum(c.op);
  if (c.algorithm == ncclFfmAlgorithmRing) {
    const uint64_t ofBlock = partOf(c.count, sizeof(T), blocks), inBlock = i % ofBlock;
    const uint64_t block = i / ofBlock * ofBlock;
    const uint64_t ofRank = partOf(std::min(ofBlock, c.count - block), sizeof(T), nRanks);
    const int owner = static_cast<int>(inBlock / ofRank);
    for (int k = 1; k <= nRanks; ++k) {
      sum.handOn();
      sum.add(valueOf<T>(c, (owner + k) % nRanks, i));
    }
  } else {
    for (int r = 0; r < nRanks; ++r) sum.add(valueOf<T>(c, r, i));
  }
  return sum.result(nRanks);
}

/// Whether a result is that of exact arithmetic, but for the rounding of nRanks steps. Of infinities and NaN: true.
template <class T>
bool isNearExact(const Case &c, int nRanks, uint64_t i, T got) {
  using N = Number<T>;
  if constexpr (std::is_integral_v<T>) {
    return true;
  } else {
    // A product of extremes overflows or not, as its order has it.
    if (c.op == ncclMax || c.op == ncclMin || (c.op == ncclProd && c.special)) return true;
    long double exact = c.op == ncclProd ? 1 : 0, magnitude = exact, largest = 0;
    for (int r = 0; r < nRanks; ++r) {
      const long double x = N::load(valueOf<T>(c, r, i));
      if (!std::isfinite(x)) return true;
      exact = c.op == ncclProd ? exact * x : exact + x;
      magnitude = c.op == ncclProd ? std::fabs(exact) : magnitude + std::fabs(x);
      largest = std::max(largest, magnitude);
      // A partial product that underflows loses bits which none of these bounds knows of.
      if (c.op == ncclProd && magnitude < N::kSmallest * (1 << 30)) return true;
    }
    if (largest >= N::kLargest) return true;
    if (c.op == ncclAvg) exact /= nRanks;
    const long double bound = 1.01L * (nRanks + 1) * std::ldexp(magnitude, -N::kMantissaBits) + N::kSmallest;
    return std::fabs(static_cast<long double>(N::load(got)) - exact) <= bound;
  }
}

/// Bits, but that a NaN is as good as another, and so are the zeros of min and max.
template <class T>
bool isSame(const Case &c, T got, T expected) {
  if (std::memcmp(&got, &expected, sizeof got) == 0) return true;
  if constexpr (!std::is_integral_v<T>) {
    if (!reduces(c.function)) return false;
    const auto a = Number<T>::load(got), b = Number<T>::load(expected);
    if (std::isnan(a) && std::isnan(b)) return true;
    return (c.op == ncclMax || c.op == ncclMin) && a == 0 && b == 0;
  }
  return false;
}

/// The memory that one case has on one rank: two areas with guards around, and the same once more as it must be in the
/// end.
class Arena {
 public:
  static constexpr uint64_t kGuard = 128;

  explicit Arena(uint64_t areaBytes) : areaBytes_(areaBytes), memory_(bytes() / 8 + 3), expected_(bytes()) {}

  uint64_t bytes() const { return 2 * areaBytes_ + 3 * kGuard; }

  /// base() is a multiple of 8, not always of 16.
  void moveTo(int rank) { shift_ = 8 * static_cast<uint64_t>(rank % 3); }
  char *base() { return reinterpret_cast<char *>(memory_.data()) + shift_; }

  /// Lays out a case for a rank and fills it in. Offsets are zero where nothing is.
  void prepare(const Case &c, int rank, int nRanks, int blocks) {
    rank_ = rank;
    nRanks_ = nRanks;
    blocks_ = blocks;
    std::memset(base(), static_cast<int>(0x55 + c.number % 64), bytes());
    layOut(c);
    withNumberType(c.datatype, [&](auto zero) {
      using T = decltype(zero);
      for (uint64_t i = 0; i < sendCount_; ++i) put(base() + send_, i, valueOf<T>(c, rank, i));
    });
    std::memcpy(expected_.data(), base(), bytes());
  }

  uint64_t sendOffset() const { return send_; }
  uint64_t recvOffset() const { return recv_; }
  const void *send(const Case &c) { return sendCount_ == 0 || c.count == 0 ? nullptr : base() + send_; }
  void *recv(const Case &c) { return recvCount_ == 0 || c.count == 0 ? nullptr : base() + recv_; }

  void verify(const Case &c, const char *where) {
    bool right = true;
    withNumberType(c.datatype, [&](auto zero) { right = verifyAs(c, where, zero); });
    if (!right) return;
    const char *got = base();
    for (uint64_t i = 0; i < bytes(); ++i) {
      if (got[i] == expected_[i]) continue;
      check(false, "%s: byte %lld of sendbuff (%lld of recvbuff) was changed", describe(c, where).c_str(),
            static_cast<long long>(i - send_), static_cast<long long>(i - recv_));
      return;
    }
  }

  std::string describe(const Case &c, const char *where) const {
    char text[256];
    snprintf(
        text, sizeof text,
        "%s, rank %d of %d, call %llu: function %u, type %d, op %d, protocol %u, algorithm %u, root %d, source %d, "
        "%llu elements, %d blocks%s%s%s%s",
        where, rank_, nRanks_, static_cast<unsigned long long>(c.number), c.function, c.datatype, c.op, c.protocol,
        c.algorithm, c.root, c.source, static_cast<unsigned long long>(c.count), blocks_, c.inPlace ? ", in place" : "",
        c.zeroCopy ? ", zero-copy" : "", c.special ? ", special" : "", c.named ? ", named" : "");
    return text;
  }

 private:
  template <class T>
  static void put(char *to, uint64_t i, T value) {
    std::memcpy(to + i * sizeof(T), &value, sizeof value);
  }

  void layOut(const Case &c) {
    const uint64_t n = static_cast<uint64_t>(nRanks_), rank = static_cast<uint64_t>(rank_), one = c.count;
    const bool isRoot = c.root == rank_;
    sendCount_ = recvCount_ = one;
    switch (c.function) {
      case ncclFfmFunctionReduceScatter:
        sendCount_ = n * one;
        break;
      case ncclFfmFunctionAllGather:
        recvCount_ = n * one;
        break;
      case ncclFfmFunctionAllToAll:
        sendCount_ = recvCount_ = n * one;
        break;
      case ncclFfmFunctionBroadcast:
        sendCount_ = isRoot ? one : 0;
        break;
      case ncclFfmFunctionReduce:
        recvCount_ = isRoot ? one : 0;
        break;
      case ncclFfmFunctionSend:
        sendCount_ = c.source == rank_ ? one : 0;
        recvCount_ = isRoot ? one : 0;
        break;
      case ncclFfmFunctionBarrier:
        sendCount_ = recvCount_ = 0;
        break;
      default:
        break;
    }
    // In windows, buffers are at the same offset on every rank.
    uint64_t h = mix(c.number * 64 + (c.zeroCopy ? 63 : rank));
    const uint64_t size = elementBytesOf(c.datatype);
    send_ = kGuard + pick(h, 17) * size;
    recv_ = kGuard + areaBytes_ + kGuard + pick(h, 17) * size;
    if (!c.inPlace) return;
    if (c.function == ncclFfmFunctionReduceScatter) {
      recv_ = send_ + rank * one * size;
    } else if (c.function == ncclFfmFunctionAllGather) {
      send_ = recv_ + rank * one * size;
    } else {
      recv_ = send_;
    }
  }

  template <class T>
  T expectedAt(const Case &c, uint64_t i) const {
    const uint64_t rank = static_cast<uint64_t>(rank_);
    switch (c.function) {
      case ncclFfmFunctionReduceScatter:
        return expectedSum<T>(c, nRanks_, blocks_, rank * c.count + i);
      case ncclFfmFunctionAllGather:
        return valueOf<T>(c, static_cast<int>(i / c.count), i % c.count);
      case ncclFfmFunctionAllToAll:
        return valueOf<T>(c, static_cast<int>(i / c.count), rank * c.count + i % c.count);
      case ncclFfmFunctionBroadcast:
        return valueOf<T>(c, c.root, i);
      case ncclFfmFunctionSend:
        return valueOf<T>(c, c.source, i);
      case ncclFfmFunctionSendRecv:
        return valueOf<T>(c, (rank_ + nRanks_ - c.root) % nRanks_, i);
      default:
        return expectedSum<T>(c, nRanks_, blocks_, i);
    }
  }

  template <class T>
  bool verifyAs(const Case &c, const char *where, T) {
    const char *out = base() + recv_;
    for (uint64_t i = 0; i < recvCount_; ++i) {
      T got;
      std::memcpy(&got, out + i * sizeof(T), sizeof got);
      const T expected = expectedAt<T>(c, i);
      const uint64_t inSend =
          c.function == ncclFfmFunctionReduceScatter ? static_cast<uint64_t>(rank_) * c.count + i : i;
      const bool near = !reduces(c.function) || isNearExact<T>(c, nRanks_, inSend, got);
      if (!isSame(c, got, expected) || !near) {
        check(false, "%s: element %llu is %.17g, not %.17g%s", describe(c, where).c_str(),
              static_cast<unsigned long long>(i), static_cast<double>(Number<T>::load(got)),
              static_cast<double>(Number<T>::load(expected)), near ? "" : "; float64 differs");
        return false;
      }
      put(expected_.data() + recv_, i, got);
    }
    return true;
  }

  const uint64_t areaBytes_;
  std::vector<uint64_t> memory_;
  std::vector<char> expected_;
  uint64_t shift_ = 0, send_ = 0, recv_ = 0, sendCount_ = 0, recvCount_ = 0;
  int rank_ = 0, nRanks_ = 0, blocks_ = 1;
};

/// Who calls: one thread, a group of threads, or several groups as a grid.
template <class Coop>
struct IsGrid : std::false_type {};
template <class Coop>
struct IsGrid<Grid<Coop>> : std::true_type {};

/// Calls a collective by its name: with `first` before the arguments, which is given to what takes it, and `channel`
/// after them, which is not there where a session is.
template <class First, class... Channel>
ncclResult_t callByName(const Call &c, First first, Channel... channel) {
  switch (c.function) {
    case ncclFfmFunctionAllReduce:
      return first([&](auto &...f) {
        return ncclDevAllReduce(f..., c.sendbuff, c.recvbuff, c.count, c.datatype, c.op, channel...);
      });
    case ncclFfmFunctionReduceScatter:
      return first([&](auto &...f) {
        return ncclDevReduceScatter(f..., c.sendbuff, c.recvbuff, c.count, c.datatype, c.op, channel...);
      });
    case ncclFfmFunctionAllGather:
      return first(
          [&](auto &...f) { return ncclDevAllGather(f..., c.sendbuff, c.recvbuff, c.count, c.datatype, channel...); });
    case ncclFfmFunctionBroadcast:
      return first([&](auto &...f) {
        return ncclDevBroadcast(f..., c.sendbuff, c.recvbuff, c.count, c.datatype, c.root, channel...);
      });
    case ncclFfmFunctionReduce:
      return first([&](auto &...f) {
        return ncclDevReduce(f..., c.sendbuff, c.recvbuff, c.count, c.datatype, c.op, c.root, channel...);
      });
    case ncclFfmFunctionAllToAll:
      return first(
          [&](auto &...f) { return ncclDevAllToAll(f..., c.sendbuff, c.recvbuff, c.count, c.datatype, channel...); });
    case ncclFfmFunctionBarrier:
      return first([&](auto &...f) { return ncclDevBarrier(f..., channel...); });
    default:
      return first([&](auto &...f) {
        return ncclDevHierarchicalAllReduce(f..., c.sendbuff, c.recvbuff, c.count, c.datatype, c.op, c.root,
                                            channel...);
      });
  }
}

/// What a rank calls for a case; function None if it has no part in it.
inline Call callOf(const Case &c, Arena &arena, int rank, int nRanks, void **windows) {
  Call call = {};
  call.function = c.function;
  call.datatype = c.datatype;
  call.op = c.op;
  call.root = c.root;
  call.source = c.source;
  call.protocol = c.named ? 0 : c.protocol;
  call.algorithm = c.named ? 0 : c.algorithm;
  call.count = c.count;
  if (c.zeroCopy) {
    call.send = {windows, arena.bytes(), arena.sendOffset()};
    call.recv = {windows, arena.bytes(), arena.recvOffset()};
  } else {
    call.sendbuff = arena.send(c);
    call.recvbuff = arena.recv(c);
  }
  if (c.function == ncclFfmFunctionSendRecv) {
    call.root = (rank + c.root) % nRanks;
    call.source = (rank + nRanks - c.root) % nRanks;
  } else if (c.function == ncclFfmFunctionSend && rank != c.source) {
    call.function = rank == c.root ? ncclFfmFunctionRecv : ncclFfmFunctionNone;
  }
  return call;
}

template <class Coop>
ncclResult_t callWithChannel(Coop coop, const DevComm &comm, const Call &call, bool named, bool bare, int channel) {
  if (!named) return ncclDevCallLsa(coop, comm, call, channel);
  if constexpr (!IsGrid<Coop>::value) {
    switch (call.function) {
      case ncclFfmFunctionSend:
        return bare ? ncclDevSend(comm, call.sendbuff, call.count, call.datatype, call.root, channel)
                    : ncclDevSend(coop, comm, call.sendbuff, call.count, call.datatype, call.root, channel);
      case ncclFfmFunctionRecv:
        return bare ? ncclDevRecv(comm, call.recvbuff, call.count, call.datatype, call.source, channel)
                    : ncclDevRecv(coop, comm, call.recvbuff, call.count, call.datatype, call.source, channel);
      case ncclFfmFunctionSendRecv:
        return ncclDevSendRecv(coop, comm, call.sendbuff, call.root, call.recvbuff, call.source, call.count,
                               call.datatype, channel);
      default:
        break;
    }
  } else if (call.function >= ncclFfmFunctionSend) {
    return ncclDevCallLsa(coop, comm, call, channel);
  }
  if constexpr (std::is_same_v<Coop, CoopBlock>) {
    if (bare) return callByName(call, [&](auto function) { return function(comm); }, channel);
  }
  return callByName(call, [&](auto function) { return function(coop, comm); }, channel);
}

/// The arenas of all ranks: one for each case of a batch.
class Memory {
 public:
  Memory(int nRanks, int casesAtOnce, uint64_t areaBytes) : nRanks_(nRanks), windows_(casesAtOnce) {
    for (int k = 0; k < casesAtOnce; ++k) {
      for (int r = 0; r < nRanks; ++r) {
        arenas_.push_back(std::make_unique<Arena>(areaBytes));
        arenas_.back()->moveTo(r);
        windows_[k].push_back(arenas_.back()->base());
      }
    }
  }
  Arena &arena(int k, int rank) { return *arenas_[k * nRanks_ + rank]; }
  void **windows(int k) { return windows_[k].data(); }

 private:
  int nRanks_;
  std::vector<std::unique_ptr<Arena>> arenas_;
  std::vector<std::vector<void *>> windows_;
};

template <class Coop>
ncclResult_t runBatch(Coop coop, const DevComm &comm, const Batch &batch, Memory &memory, size_t &at) {
  auto callFor = [&](size_t k) {
    return callOf(batch.cases[k], memory.arena(static_cast<int>(k), comm.rank), comm.rank, comm.nRanks,
                  memory.windows(static_cast<int>(k)));
  };
  auto bare = [&](size_t k) { return std::is_same_v<Coop, CoopBlock> && batch.cases[k].number % 2 == 0; };
  if constexpr (!IsGrid<Coop>::value) {
    // Not every rank, for it is the same to the others.
    if (batch.onSession && mix(batch.cases[0].number * 64 + static_cast<uint64_t>(comm.rank)) % 4 != 0) {
      ChannelSession<Coop> session(coop, comm, batch.channel, ncclFfmFunctionNone);
      ncclResult_t result = session.result();
      for (at = 0; at < batch.cases.size() && result == ncclSuccess; ++at) {
        const Call call = callFor(at);
        if (call.function == ncclFfmFunctionNone) continue;
        const bool named = batch.cases[at].named;
        if (call.function >= ncclFfmFunctionSend) {
          result = callWithChannel(coop, comm, call, named, bare(at), batch.channel);
        } else if (named) {
          result = callByName(call, [&](auto function) { return function(session); });
        } else {
          result = ncclDevCallLsa(session, call);
        }
        if (result != ncclSuccess) break;
      }
      return result;
    }
  }
  for (at = 0; at < batch.cases.size(); ++at) {
    const Call call = callFor(at);
    if (call.function == ncclFfmFunctionNone) continue;
    const ncclResult_t result = callWithChannel(coop, comm, call, batch.cases[at].named, bare(at), batch.channel);
    if (result != ncclSuccess) return result;
  }
  return ncclSuccess;
}

enum class Scope { kThread, kBlock, kGrid };

struct Shape {
  int nRanks, nChannels;
  uint32_t slotBytes;
  Scope scope;
  int blocks;
  uint32_t threads;  // of a block
};

/// Runs batches on all ranks, with nothing but the protocol to keep ranks in step. Stops at the first failure. Scopes
/// that a test does not ask for are not compiled.
template <Scope... kScopes>
void runBatches(const char *where, World &world, const Shape &shape, const std::vector<Batch> &batches,
                uint64_t areaBytes) {
  size_t casesAtOnce = 1;
  for (const Batch &batch : batches) casesAtOnce = std::max(casesAtOnce, batch.cases.size());
  Memory memory(shape.nRanks, static_cast<int>(casesAtOnce), areaBytes);
  inThreads(shape.nRanks, [&](int rank) {
    const uint32_t threads = static_cast<uint32_t>(shape.blocks) * shape.threads;
    Group launch(threads);
    std::vector<std::unique_ptr<Group>> groups;
    for (int b = 0; b < shape.blocks; ++b) groups.push_back(std::make_unique<Group>(shape.threads));
    const DevComm &comm = world.comm(rank);
    inThreads(static_cast<int>(threads), [&](int thread) {
      const int block = thread / static_cast<int>(shape.threads);
      const CoopGroup coop = {groups[block].get(), static_cast<uint32_t>(thread) % shape.threads};
      for (const Batch &batch : batches) {
        if (thread == 0) {
          for (size_t k = 0; k < batch.cases.size(); ++k) {
            memory.arena(static_cast<int>(k), rank).prepare(batch.cases[k], rank, shape.nRanks, batch.blocks);
          }
        }
        launch.arrive(thread, false, 0);
        size_t at = 0;
        ncclResult_t result = ncclSuccess;
        auto runOn = [&](auto scope) {
          constexpr Scope kScope = decltype(scope)::value;
          if (shape.scope != kScope || block >= batch.blocks) return;
          if constexpr (kScope == Scope::kThread) {
            result = runBatch(CoopThread(), comm, batch, memory, at);
          } else if constexpr (kScope == Scope::kBlock) {
            result = runBatch(coop, comm, batch, memory, at);
          } else {
            result = runBatch(Grid<CoopGroup>{coop, block, batch.blocks}, comm, batch, memory, at);
          }
        };
        (runOn(std::integral_constant<Scope, kScopes>()), ...);
        if (result != ncclSuccess && at < batch.cases.size()) {
          const Status status = world.status(rank);
          check(false, "%s: result %d; status: code %u, function %u, peer %d, channel %d, epoch %u",
                memory.arena(static_cast<int>(at), rank).describe(batch.cases[at], where).c_str(), result, status.code,
                status.function, status.peer, status.channel, status.epoch);
        }
        // Whoever took part finds all of the result, without a sync of the test's own.
        const uint64_t taking = static_cast<uint64_t>(batch.blocks) * shape.threads;
        if (result == ncclSuccess && static_cast<uint64_t>(thread) == batch.cases[0].number % taking) {
          for (size_t k = 0; k < batch.cases.size(); ++k) {
            memory.arena(static_cast<int>(k), rank).verify(batch.cases[k], where);
          }
        }
        const bool failed = result != ncclSuccess || failures.load() != 0;
        if (failed) world.abort();
        if (launch.arrive(thread, failed, 0).any) return;
      }
    });
  });
}

/// The most bytes that an area of any case needs.
inline uint64_t areaBytesFor(int nRanks, uint64_t partBytes) {
  return (static_cast<uint64_t>(nRanks) * partBytes + 17 * 8 + 7) / 8 * 8;
}

/// Chooses what is left of a case: count (at most bytes of a part), place, root and so on.
inline void chooseRest(Case &c, uint64_t &h, int nRanks, uint64_t partBytes) {
  const uint64_t n = static_cast<uint64_t>(nRanks), size = elementBytesOf(c.datatype);
  const bool whole = c.function == ncclFfmFunctionAllReduce || c.function == ncclFfmFunctionBroadcast ||
                     c.function == ncclFfmFunctionReduce || c.function == ncclFfmFunctionHierarchicalAllReduce;
  const uint64_t most = (whole ? std::min<uint64_t>(n, 3) : 1) * partBytes / size;
  const uint64_t limit = pick(h, 4) == 0 ? 4 : pick(h, 2) == 0 ? most / 4 : most;  // small counts have the corners
  c.count = pick(h, std::min(limit, most) + 1);
  c.inPlace = pick(h, 3) == 0 && c.function != ncclFfmFunctionAllToAll && c.function < ncclFfmFunctionSend;
  c.special = pick(h, 4) == 0;
  c.root = static_cast<int>(pick(h, n));
  c.source = 0;
  if (c.function == ncclFfmFunctionHierarchicalAllReduce) {
    do {
      c.root = 1 + static_cast<int>(pick(h, n));
    } while (nRanks % c.root != 0);
  } else if (c.function == ncclFfmFunctionSendRecv) {
    c.root = 1 + static_cast<int>(pick(h, n - 1));
  } else if (c.function == ncclFfmFunctionSend) {
    c.source = (c.root + 1 + static_cast<int>(pick(h, n - 1))) % nRanks;
  }
}

}  // namespace ncclffm::test

#endif  // NCCLFFM_TEST_DEVICE_CASES_H_
