// Bodies of reduce.h.
#ifndef NCCLFFM_IMPL_REDUCE_FUNCS_H_
#define NCCLFFM_IMPL_REDUCE_FUNCS_H_

#ifndef __CUDACC_RTC__
#include <string.h>
#endif

namespace ncclffm {

NCCLFFM_DEVICE LLPayload ElementType<float>::toPayload(const float (&x)[kPerLine]) {
  LLPayload payload;
  memcpy(&payload, x, sizeof payload);
  return payload;
}

NCCLFFM_DEVICE void ElementType<float>::fromPayload(LLPayload payload, float (&x)[kPerLine]) {
  memcpy(x, &payload, sizeof payload);
}

// What one access moves. The compilers see that its alignment is 8; the host's see, too, that it stands for elements.
template <class T>
struct alignas(sizeof(LLPayload)) WholeLine {
  T element[ElementType<T>::kPerLine];
};

template <class T, class F>
NCCLFFM_DEVICE void loadElements(const T *buffer, uint32_t first, uint32_t count, bool wholeLines, F f,
                                 typename ElementType<T>::Accumulator (&x)[ElementType<T>::kPerLine]) {
  constexpr int kPerLine = ElementType<T>::kPerLine;
  if (wholeLines && first + kPerLine <= count) {
    WholeLine<T> line = *reinterpret_cast<const WholeLine<T> *>(buffer + first);
    NCCLFFM_UNROLL
    for (int k = 0; k < kPerLine; ++k) x[k] = f(line.element[k]);
    return;
  }
  NCCLFFM_UNROLL
  for (int k = 0; k < kPerLine; ++k) x[k] = first + k < count ? f(buffer[first + k]) : T(0);
}

template <class T, class F>
NCCLFFM_DEVICE void storeElements(T *buffer, uint32_t first, uint32_t count, bool wholeLines, F f,
                                  const typename ElementType<T>::Accumulator (&x)[ElementType<T>::kPerLine]) {
  constexpr int kPerLine = ElementType<T>::kPerLine;
  if (wholeLines && first + kPerLine <= count) {
    WholeLine<T> line;
    NCCLFFM_UNROLL
    for (int k = 0; k < kPerLine; ++k) line.element[k] = f(x[k]);
    *reinterpret_cast<WholeLine<T> *>(buffer + first) = line;
    return;
  }
  NCCLFFM_UNROLL
  for (int k = 0; k < kPerLine; ++k) {
    if (first + k < count) buffer[first + k] = f(x[k]);
  }
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_REDUCE_FUNCS_H_
