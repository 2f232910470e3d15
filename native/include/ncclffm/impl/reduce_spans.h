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

// Some vectors, one every stride. kFixed: the number of sources at compile time, so that their addresses stay in
// registers; 0: known at run time only.
template <class T, int kFixed, int kAtOnce>
NCCLFFM_DEVICE void reduceAt(const Places &from, const Places &to, uint64_t offset, uint64_t i, uint64_t stride,
                             const Reduction &reduction) {
  const int nSources = kFixed != 0 ? kFixed : from.n;
  WordReducer<T> sum[kAtOnce][2];
  NCCLFFM_UNROLL
  for (int s = 0; s < nSources; ++s) {
    const char *source = from(s) + offset;
    Vec16 vec[kAtOnce];
    NCCLFFM_UNROLL
    for (int k = 0; k < kAtOnce; ++k) vec[k] = loadAs<Vec16>(source + (i + k * stride) * sizeof(Vec16));
    NCCLFFM_UNROLL
    for (int k = 0; k < kAtOnce; ++k) {
      NCCLFFM_UNROLL
      for (int w = 0; w < 2; ++w) {
        if (s == 0) {
          sum[k][w].start(vec[k].word[w]);
        } else {
          sum[k][w].add(vec[k].word[w], reduction.op);
        }
      }
    }
  }
  NCCLFFM_UNROLL
  for (int k = 0; k < kAtOnce; ++k) {
    const Vec16 result = {{sum[k][0].finish(reduction.lastOp(), reduction.nRanks),
                           sum[k][1].finish(reduction.lastOp(), reduction.nRanks)}};
    for (int t = 0; t < to.n; ++t) storeAs(to(t) + offset + (i + k * stride) * sizeof(Vec16), result);
  }
}

template <class T, int kFixed>
NCCLFFM_DEVICE void reduceVectors(Share share, const Places &from, const Places &to, uint64_t offset, uint64_t vectors,
                                  const Reduction &reduction) {
  uint64_t i = share.thread;
  for (; i + (kInFlight - 1) * share.nThreads < vectors; i += kInFlight * share.nThreads) {
    reduceAt<T, kFixed, kInFlight>(from, to, offset, i, share.nThreads, reduction);
  }
  for (; i < vectors; i += share.nThreads) reduceAt<T, kFixed, 1>(from, to, offset, i, 0, reduction);
}

// The words of `bytes` bytes, at any alignment.
template <class T>
NCCLFFM_DEVICE void reduceWords(Share share, const Places &from, const Places &to, uint64_t offset, uint64_t bytes,
                                const Reduction &reduction) {
  for (uint64_t i = share.thread; i < (bytes + 7) / 8; i += share.nThreads) {
    WordReducer<T> sum;
    for (int s = 0; s < from.n; ++s) {
      const ConstSpan source = {from(s) + offset, bytes, sizeof(T)};
      const uint64_t word = loadWord(source, source.alignment(), i);
      if (s == 0) {
        sum.start(word);
      } else {
        sum.add(word, reduction.op);
      }
    }
    const uint64_t result = sum.finish(reduction.lastOp(), reduction.nRanks);
    for (int t = 0; t < to.n; ++t) {
      const MutableSpan target = {to(t) + offset, bytes, sizeof(T)};
      storeWord(target, target.alignment(), i, result);
    }
  }
}

// Reduces buffers of equal length, in their order, and stores the result to all places `to`, which may be among them. A
// share on each thread.
template <class T>
NCCLFFM_DEVICE_CALL void reduceSpans(Share share, Places from, Places to, uint64_t bytes, Reduction reduction) {
  if (bytes == 0) return;
  const uintptr_t first = reinterpret_cast<uintptr_t>(from(0));
  uintptr_t different = 0;
  for (int s = 1; s < from.n; ++s) different |= reinterpret_cast<uintptr_t>(from(s)) ^ first;
  for (int t = 0; t < to.n; ++t) different |= reinterpret_cast<uintptr_t>(to(t)) ^ first;
  uint64_t head = 0, tail = 0;
  if (different % 16 == 0) {
    head = headBytes(from(0), bytes);
    const uint64_t vectors = (bytes - head) / 16;
    tail = head + vectors * 16;
    if (from.n == 2) {
      reduceVectors<T, 2>(share, from, to, head, vectors, reduction);
    } else if (from.n == 4) {
      reduceVectors<T, 4>(share, from, to, head, vectors, reduction);
    } else if (from.n == 8) {
      reduceVectors<T, 8>(share, from, to, head, vectors, reduction);
    } else {
      reduceVectors<T, 0>(share, from, to, head, vectors, reduction);
    }
  }
  reduceWords<T>(share, from, to, 0, head, reduction);
  reduceWords<T>(share, from, to, tail, bytes - tail, reduction);
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_REDUCE_SPANS_H_
