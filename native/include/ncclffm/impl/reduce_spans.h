// The reduction of buffers that lie in memory, for Simple and for zero-copy.
#ifndef NCCLFFM_IMPL_REDUCE_SPANS_H_
#define NCCLFFM_IMPL_REDUCE_SPANS_H_

#include "../protocol.h"
#include "../reduce.h"
#include "memory.h"

namespace ncclffm {

// How a reduction ends: the average of nRanks contributions is only taken where finish says so.
struct Reduction {
  int op;
  int nRanks;
  bool finish;

  NCCLFFM_DEVICE int lastOp() const { return finish ? op : ncclSum; }
};

// Buffers of the members of a team: at an offset from a table of addresses, or this member's own and the others' in its
// slots; and where a result goes: one place, or the same offset of several ranks' windows.
struct Places {
  void *const *table;
  uint64_t offset;  // from the table's addresses
  char *own;        // without a table: of member `self`
  char *slots;      // without a table: of member 0
  uint64_t stride;  // between members' slots
  int self;         // without a table; with one: the entry to start at, around the ring
  int n;

  NCCLFFM_DEVICE char *operator()(int k) const {
    if (table == nullptr) return k == self ? own : slots + static_cast<uint64_t>(k) * stride;
    const int entry = self + k < n ? self + k : self + k - n;
    return loadPeer(table, entry) + offset;
  }
};

NCCLFFM_DEVICE Places onePlace(char *address) {
  return {nullptr, 0, address, nullptr, 0, 0, 1};
}

// Where the vectors of up to kFixed buffers lie, in registers: what a loop reads again and again must not be looked up.
template <int kFixed>
struct Addresses {
  char *of[kFixed];

  NCCLFFM_DEVICE Addresses(const Places &places, uint64_t offset) {
    NCCLFFM_UNROLL
    for (int k = 0; k < kFixed; ++k) of[k] = k < places.n ? places(k) + offset : nullptr;
  }
  NCCLFFM_DEVICE char *operator()(int k) const { return of[k]; }
};

// Of any number of buffers.
template <>
struct Addresses<0> {
  const Places &places;
  uint64_t offset;

  NCCLFFM_DEVICE Addresses(const Places &p, uint64_t o) : places(p), offset(o) {}
  NCCLFFM_DEVICE char *operator()(int k) const { return places(k) + offset; }
};

template <int kWidth, int kAtOnce, class Strip>
NCCLFFM_DEVICE void loadVectors(Vec16 (&vec)[kAtOnce], const char *source, const Strip &strip) {
  if (kWidth == 16 || reinterpret_cast<uintptr_t>(source) % 16 == 0) {
    NCCLFFM_UNROLL
    for (int k = 0; k < kAtOnce; ++k) {
      if (strip.has(k)) vec[k] = loadVec16<16>(source + strip.at(k) * sizeof(Vec16));
    }
  } else {
    NCCLFFM_UNROLL
    for (int k = 0; k < kAtOnce; ++k) {
      if (strip.has(k)) vec[k] = loadVec16<kWidth>(source + strip.at(k) * sizeof(Vec16));
    }
  }
}

template <int kAtOnce, class Strip>
NCCLFFM_DEVICE void storeVectors(char *target, const Strip &strip, const Vec16 (&result)[kAtOnce]) {
  NCCLFFM_UNROLL
  for (int k = 0; k < kAtOnce; ++k) {
    if (strip.has(k)) storeAs(target + strip.at(k) * sizeof(Vec16), result[k]);
  }
}

// Vectors reduced.
template <class T, int kAtOnce>
struct VectorSums {
  WordReducer<T> sum[kAtOnce][2];

  NCCLFFM_DEVICE void add(const Vec16 (&vec)[kAtOnce], bool isFirst, int op) {
    NCCLFFM_UNROLL
    for (int k = 0; k < kAtOnce; ++k) {
      NCCLFFM_UNROLL
      for (int w = 0; w < 2; ++w) {
        if (isFirst) {
          sum[k][w].start(vec[k].word[w]);
        } else {
          sum[k][w].add(vec[k].word[w], op);
        }
      }
    }
  }

  NCCLFFM_DEVICE void finish(Vec16 (&result)[kAtOnce], int lastOp, int nRanks) {
    NCCLFFM_UNROLL
    for (int k = 0; k < kAtOnce; ++k) {
      result[k] = {{sum[k][0].finish(lastOp, nRanks), sum[k][1].finish(lastOp, nRanks)}};
    }
  }
};

// kFixed: the number of sources, at least that of targets; 0: known at run time only, and then averages are taken one
// vector at a time, since a division by what is not known takes much code. kWidth: of loads.
template <class T, int kFixed, int kWidth, int kAtOnce, class Strip>
NCCLFFM_DEVICE void reduceAt(const Addresses<kFixed> &from, int nFrom, const Addresses<kFixed> &to, int nTo,
                             const Strip &strip, const Reduction &reduction) {
  VectorSums<T, kAtOnce> sums;
  Vec16 result[kAtOnce];
  if constexpr (kFixed != 0) {
    Vec16 vec[kFixed][kAtOnce] = {};
    NCCLFFM_UNROLL
    for (int s = 0; s < kFixed; ++s) loadVectors<kWidth>(vec[s], from(s), strip);
    NCCLFFM_UNROLL
    for (int s = 0; s < kFixed; ++s) sums.add(vec[s], s == 0, ncclSum);
    sums.finish(result, reduction.lastOp(), kFixed);
    NCCLFFM_UNROLL
    for (int t = 0; t < kFixed; ++t) {
      if (t < nTo) storeVectors(to(t), strip, result);
    }
  } else {
    Vec16 vec[kAtOnce];
    loadVectors<kWidth>(vec, from(0), strip);
    sums.add(vec, true, reduction.op);
    NCCLFFM_NO_UNROLL
    for (int s = 1; s < nFrom; ++s) {
      loadVectors<kWidth>(vec, from(s), strip);
      sums.add(vec, false, reduction.op);
    }
    sums.finish(result, kAtOnce > 1 ? static_cast<int>(ncclSum) : reduction.lastOp(), reduction.nRanks);
    NCCLFFM_NO_UNROLL
    for (int t = 0; t < nTo; ++t) storeVectors(to(t), strip, result);
  }
}

// kFixed is 0 unless the operation is a sum, or the average of as many.
template <class T, int kFixed, int kWidth>
NCCLFFM_DEVICE void reduceVectors(Share share, const Places &from, const Places &to, uint64_t offset, uint64_t vectors,
                                  const Reduction &reduction) {
  const Addresses<kFixed> sources(from, offset), targets(to, offset);
  constexpr int kAtOnce = kFixed == 2 ? 8 : kFixed == 8 ? 2 : kInFlight;  // of each source; of all, 16 vectors
  const uint64_t together = kFixed != 0 || reduction.lastOp() != ncclAvg ? vectors : 0, stride = share.nThreads;
  uint64_t i = share.thread;
  NCCLFFM_NO_UNROLL
  for (; i + (kAtOnce - 1) * stride < together; i += kAtOnce * stride) {
    reduceAt<T, kFixed, kWidth, kAtOnce>(sources, from.n, targets, to.n, WholeStrip{i, stride}, reduction);
  }
  if constexpr (kFixed != 0) {
    if (i < vectors) {
      reduceAt<T, kFixed, kWidth, kAtOnce>(sources, from.n, targets, to.n, PartialStrip{i, stride, vectors}, reduction);
    }
  } else {
    NCCLFFM_NO_UNROLL
    for (; i < vectors; i += stride) {
      reduceAt<T, kFixed, kWidth, 1>(sources, from.n, targets, to.n, WholeStrip{i, 0}, reduction);
    }
  }
}

// The elements of buffers of so many bytes, but for those in [skipped, skipped + skippedBytes).
template <class T>
NCCLFFM_DEVICE void reduceElements(Share share, const Places &from, const Places &to, uint64_t skipped,
                                   uint64_t skippedBytes, uint64_t bytes, const Reduction &reduction) {
  const uint64_t end = bytes - skippedBytes;
  NCCLFFM_NO_UNROLL
  for (uint64_t i = share.thread * sizeof(T); i < end; i += share.nThreads * sizeof(T)) {
    const uint64_t at = i < skipped ? i : i + skippedBytes;
    WordReducer<T> sum;  // of a word that holds one element
    NCCLFFM_NO_UNROLL
    for (int base = 0; base < from.n; base += kInFlight) {
      uint64_t element[kInFlight] = {};
      NCCLFFM_UNROLL
      for (int k = 0; k < kInFlight; ++k) {
        if (base + k < from.n) element[k] = loadUpTo8(from(base + k) + at, sizeof(T));
      }
      NCCLFFM_UNROLL
      for (int k = 0; k < kInFlight; ++k) {
        if (base + k >= from.n) break;
        if (base + k == 0) {
          sum.start(element[k]);
        } else {
          sum.add(element[k], reduction.op);
        }
      }
    }
    const uint64_t result = sum.finish(reduction.lastOp(), reduction.nRanks);
    NCCLFFM_NO_UNROLL
    for (int t = 0; t < to.n; ++t) storeUpTo8(to(t) + at, sizeof(T), result);
  }
}

// Reduces buffers of equal length, in their order, and stores the result to all places `to`, which may be among them. A
// share on each thread.
template <class T>
NCCLFFM_DEVICE void reduceSpans(Share share, const Places &from, const Places &to, uint64_t bytes,
                                const Reduction &reduction) {
  // Stores are whole vectors where all targets allow it; loads are as wide as all sources allow.
  const uintptr_t first = reinterpret_cast<uintptr_t>(to(0));
  uintptr_t targets = 0, sources = 0;
  NCCLFFM_NO_UNROLL
  for (int t = 1; t < to.n; ++t) targets |= reinterpret_cast<uintptr_t>(to(t)) ^ first;
  NCCLFFM_NO_UNROLL
  for (int s = 0; s < from.n; ++s) sources |= reinterpret_cast<uintptr_t>(from(s)) ^ first;
  uint64_t head = 0, vectors = 0;
  if (targets % 16 == 0 && sources % 4 == 0) {
    head = headBytes(to(0), bytes);
    vectors = (bytes - head) / 16;
    const bool averages = reduction.lastOp() == ncclAvg;
    const bool sums = reduction.op == ncclSum || (reduction.op == ncclAvg && (!averages || reduction.nRanks == from.n));
    if (sources % 16 != 0) {
      reduceVectors<T, 0, 4>(share, from, to, head, vectors, reduction);
    } else if (sums && from.n == 2) {
      reduceVectors<T, 2, 16>(share, from, to, head, vectors, reduction);
    } else if (sums && from.n == 4) {
      reduceVectors<T, 4, 16>(share, from, to, head, vectors, reduction);
    } else if (sums && from.n == 8) {
      reduceVectors<T, 8, 16>(share, from, to, head, vectors, reduction);
    } else {
      reduceVectors<T, 0, 16>(share, from, to, head, vectors, reduction);
    }
  }
  reduceElements<T>(share, from, to, head, vectors * 16, bytes, reduction);
}

// The same as a call, where small code counts for more: a function that is called has registers for a few loads in
// flight, not for all.
template <class T>
NCCLFFM_DEVICE_CALL void reduceSpansApart(Share share, Places from, Places to, uint64_t bytes, Reduction reduction) {
  reduceSpans<T>(share, from, to, bytes, reduction);
}

// Vectors of buffers that are all aligned to one, reduced through functors; one vector in i, i + stride ...
template <class T, int kAtOnce, class Prologue, class Epilogue>
NCCLFFM_DEVICE void reduceMappedAt(const Places &from, int mapped, const Places &to, uint64_t i, uint64_t stride,
                                   const Reduction &reduction, uint64_t index, const Prologue &prologue,
                                   const Epilogue &epilogue) {
  constexpr uint64_t kPerWord = 8 / sizeof(T);
  WordReducer<T> sum[kAtOnce][2];
  NCCLFFM_NO_UNROLL
  for (int base = 0; base < from.n; base += 2) {
    Vec16 vec[2][kAtOnce];
    NCCLFFM_UNROLL
    for (int m = 0; m < 2; ++m) {
      const char *source = from(base + m < from.n ? base + m : base);
      NCCLFFM_UNROLL
      for (int k = 0; k < kAtOnce; ++k) vec[m][k] = loadVec16<16>(source + (i + k * stride) * sizeof(Vec16));
    }
    NCCLFFM_UNROLL
    for (int m = 0; m < 2; ++m) {
      if (base + m >= from.n) break;
      const bool isMapped = mapped < 0 || base + m == mapped;
      NCCLFFM_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        NCCLFFM_UNROLL
        for (int w = 0; w < 2; ++w) {
          uint64_t word = vec[m][k].word[w];
          if (isMapped) word = mapWord<T>(word, prologue, index + (2 * (i + k * stride) + w) * kPerWord, 8);
          if (base + m == 0) {
            sum[k][w].start(word);
          } else {
            sum[k][w].add(word, reduction.op);
          }
        }
      }
    }
  }
  NCCLFFM_UNROLL
  for (int k = 0; k < kAtOnce; ++k) {
    Vec16 result;
    NCCLFFM_UNROLL
    for (int w = 0; w < 2; ++w) {
      result.word[w] = mapWord<T>(sum[k][w].finish(reduction.lastOp(), reduction.nRanks), epilogue,
                                  index + (2 * (i + k * stride) + w) * kPerWord, 8);
    }
    NCCLFFM_NO_UNROLL
    for (int t = 0; t < to.n; ++t) storeAs(to(t) + (i + k * stride) * sizeof(Vec16), result);
  }
}

// reduceSpans with functors: the buffer `mapped`, or every one if it is negative, goes through the prologue first, the
// result through the epilogue. index is that of the first element, for both.
template <class T, class Prologue, class Epilogue>
NCCLFFM_DEVICE void reduceMapped(Share share, const Places &from, int mapped, const Places &to, uint64_t bytes,
                                 const Reduction &reduction, uint64_t index, const Prologue &prologue,
                                 const Epilogue &epilogue) {
  uintptr_t all = 0;
  NCCLFFM_NO_UNROLL
  for (int s = 0; s < from.n; ++s) all |= reinterpret_cast<uintptr_t>(from(s));
  NCCLFFM_NO_UNROLL
  for (int t = 0; t < to.n; ++t) all |= reinterpret_cast<uintptr_t>(to(t));
  const uint64_t vectors = all % 16 == 0 ? bytes / 16 : 0;
  uint64_t i = share.thread;
  NCCLFFM_NO_UNROLL
  for (; i + (kInFlight - 1) * share.nThreads < vectors; i += kInFlight * share.nThreads) {
    reduceMappedAt<T, kInFlight>(from, mapped, to, i, share.nThreads, reduction, index, prologue, epilogue);
  }
  NCCLFFM_NO_UNROLL
  for (; i < vectors; i += share.nThreads) {
    reduceMappedAt<T, 1>(from, mapped, to, i, 0, reduction, index, prologue, epilogue);
  }
  // What is left, or not aligned, word by word.
  NCCLFFM_NO_UNROLL
  for (uint64_t w = vectors * 2 + share.thread; w * 8 < bytes; w += share.nThreads) {
    const uint64_t first = index + w * (8 / sizeof(T)), left = bytes - w * 8;
    WordReducer<T> sum;
    NCCLFFM_NO_UNROLL
    for (int s = 0; s < from.n; ++s) {
      const ConstSpan span = {from(s), bytes, sizeof(T)};
      uint64_t word = loadWord(span, span.alignment(), w);
      if (mapped < 0 || s == mapped) word = mapWord<T>(word, prologue, first, left);
      if (s == 0) {
        sum.start(word);
      } else {
        sum.add(word, reduction.op);
      }
    }
    const uint64_t result = mapWord<T>(sum.finish(reduction.lastOp(), reduction.nRanks), epilogue, first, left);
    NCCLFFM_NO_UNROLL
    for (int t = 0; t < to.n; ++t) {
      const MutableSpan span = {to(t), bytes, sizeof(T)};
      storeWord(span, span.alignment(), w, result);
    }
  }
}

template <class T>
NCCLFFM_DEVICE void reduceMapped(Share share, const Places &from, int, const Places &to, uint64_t bytes,
                                 const Reduction &reduction, uint64_t, const Identity &, const Identity &) {
  reduceSpans<T>(share, from, to, bytes, reduction);
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_REDUCE_SPANS_H_
