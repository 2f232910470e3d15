// Element types and reduction operations, on words of 8 bytes. Types: the ten of NCCL up to bfloat16; float16 and
// bfloat16 are accumulated in float. Operations: sum, prod, max, min, avg. Sums and products of integers wrap; the
// average is the sum divided by the number of ranks, for integers toward zero; min and max prefer a number to a NaN.
#ifndef NCCLFFM_REDUCE_H_
#define NCCLFFM_REDUCE_H_

#include "impl/half.h"
#include "types.h"

namespace ncclffm {

// The size of an ncclDataType_t in bytes, 0 if it is none of these.
NCCLFFM_DEVICE constexpr uint32_t elementBytesOf(int datatype);

NCCLFFM_DEVICE constexpr bool isReduction(int op) {
  return op >= ncclSum && op <= ncclAvg;
}

// What elements of a type are accumulated in, and how they get there and back.
template <class T>
struct ElementType {
  using Accumulator = T;
  NCCLFFM_DEVICE static T load(T x) { return x; }
  NCCLFFM_DEVICE static T store(T x) { return x; }
};

template <>
struct ElementType<Float16> {
  using Accumulator = float;
  NCCLFFM_DEVICE static float load(Float16 x) { return toFloat(x); }
  NCCLFFM_DEVICE static Float16 store(float x) { return toFloat16(x); }
};

template <>
struct ElementType<Bfloat16> {
  using Accumulator = float;
  NCCLFFM_DEVICE static float load(Bfloat16 x) { return toFloat(x); }
  NCCLFFM_DEVICE static Bfloat16 store(float x) { return toBfloat16(x); }
};

// The element type of a call that only moves data, in words of any type.
struct Unreduced {};
template <class T>
constexpr bool kReduces = true;
template <>
constexpr bool kReduces<Unreduced> = false;

struct Identity {
  template <class T>
  NCCLFFM_DEVICE T operator()(T x) const {
    return x;
  }
};

// A word of elements, accumulated: started with one word, then others are added in the order of the calls.
template <class T>
class WordReducer {
 public:
  using Accumulator = typename ElementType<T>::Accumulator;
  static constexpr int kPerWord = 8 / sizeof(T);

  NCCLFFM_DEVICE void start(uint64_t word);
  NCCLFFM_DEVICE void add(uint64_t word, int op);
  // The word of results; for the average, of nRanks contributions.
  NCCLFFM_DEVICE uint64_t finish(int op, int nRanks);

 private:
  Accumulator x_[kPerWord] = {};
};

// The elements of a word passed through f(x, i), in the accumulator's type. index is the first one's i; the others, of
// `left` bytes in all, follow.
template <class T, class F>
NCCLFFM_DEVICE uint64_t mapWord(uint64_t word, const F &f, uint64_t index, uint64_t left);

// A functor and the first element of the buffer that it is for: where a word lies says which elements it holds.
template <class F>
struct Placed {
  F f;
  const void *base;
};

template <class T, class F>
NCCLFFM_DEVICE uint64_t indexOf(const Placed<F> &placed, const char *address) {
  return static_cast<uint64_t>(address - static_cast<const char *>(placed.base)) / sizeof(T);
}

}  // namespace ncclffm

#include "impl/reduce_funcs.h"

#endif  // NCCLFFM_REDUCE_H_
