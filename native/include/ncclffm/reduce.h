// Element types and reduction operations. A type says how many elements an LL line holds, in which type they are
// accumulated, and how they are moved; an operation combines two accumulators. So far: float32, sum.
#ifndef NCCLFFM_REDUCE_H_
#define NCCLFFM_REDUCE_H_

#include "protocol_ll.h"

namespace ncclffm {

template <class T>
struct ElementType;

template <>
struct ElementType<float> {
  using Accumulator = float;
  static constexpr int kPerLine = 2;

  NCCLFFM_DEVICE static LLPayload toPayload(const float (&x)[kPerLine]);
  NCCLFFM_DEVICE static void fromPayload(LLPayload payload, float (&x)[kPerLine]);
};

template <class T>
struct Sum {
  using Accumulator = typename ElementType<T>::Accumulator;
  NCCLFFM_DEVICE Accumulator operator()(Accumulator a, Accumulator b) const { return a + b; }
};

// Elements [first, first + kPerLine) of a buffer of count elements, each passed through f; those beyond count read as
// 0. A line's elements move in one access where the buffer is aligned to them (wholeLines), else one by one.
template <class T, class F>
NCCLFFM_DEVICE void loadElements(const T *buffer, uint32_t first, uint32_t count, bool wholeLines, F f,
                                 typename ElementType<T>::Accumulator (&x)[ElementType<T>::kPerLine]);
template <class T, class F>
NCCLFFM_DEVICE void storeElements(T *buffer, uint32_t first, uint32_t count, bool wholeLines, F f,
                                  const typename ElementType<T>::Accumulator (&x)[ElementType<T>::kPerLine]);

// Whether loadElements and storeElements may be called with wholeLines.
template <class T>
NCCLFFM_DEVICE bool holdsWholeLines(const T *buffer) {
  return reinterpret_cast<uintptr_t>(buffer) % sizeof(LLPayload) == 0;
}

}  // namespace ncclffm

#include "impl/reduce_funcs.h"

#endif  // NCCLFFM_REDUCE_H_
