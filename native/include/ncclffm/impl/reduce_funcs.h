// Bodies of reduce.h.
#ifndef NCCLFFM_IMPL_REDUCE_FUNCS_H_
#define NCCLFFM_IMPL_REDUCE_FUNCS_H_

#ifndef __CUDACC_RTC__
#include <math.h>
#endif

namespace ncclffm {

NCCLFFM_DEVICE constexpr uint32_t elementBytesOf(int datatype) {
  switch (datatype) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 0;
  }
}

// Integers are summed and multiplied without a sign, at least as wide as int, so that promotion brings none back; and
// divided at least as wide as int, so that the number of ranks is a number of the type.
template <class A>
struct Wide {
  using Unsigned = uint32_t;
  using Divisor = int;
};
template <>
struct Wide<uint32_t> {
  using Unsigned = uint32_t;
  using Divisor = uint32_t;
};
template <>
struct Wide<int64_t> {
  using Unsigned = uint64_t;
  using Divisor = int64_t;
};
template <>
struct Wide<uint64_t> {
  using Unsigned = uint64_t;
  using Divisor = uint64_t;
};

template <class A>
struct Arithmetic {
  using W = typename Wide<A>::Unsigned;
  NCCLFFM_DEVICE static A sum(A a, A b) { return static_cast<A>(static_cast<W>(a) + static_cast<W>(b)); }
  NCCLFFM_DEVICE static A product(A a, A b) { return static_cast<A>(static_cast<W>(a) * static_cast<W>(b)); }
  NCCLFFM_DEVICE static A max(A a, A b) { return a < b ? b : a; }
  NCCLFFM_DEVICE static A min(A a, A b) { return b < a ? b : a; }
  NCCLFFM_DEVICE static A average(A sum, int n) {
    return static_cast<A>(sum / static_cast<typename Wide<A>::Divisor>(n));
  }
};
template <>
struct Arithmetic<float> {
  NCCLFFM_DEVICE static float sum(float a, float b) { return a + b; }
  NCCLFFM_DEVICE static float product(float a, float b) { return a * b; }
  NCCLFFM_DEVICE static float max(float a, float b) { return fmaxf(a, b); }
  NCCLFFM_DEVICE static float min(float a, float b) { return fminf(a, b); }
  NCCLFFM_DEVICE static float average(float sum, int n) { return sum / static_cast<float>(n); }
};
template <>
struct Arithmetic<double> {
  NCCLFFM_DEVICE static double sum(double a, double b) { return a + b; }
  NCCLFFM_DEVICE static double product(double a, double b) { return a * b; }
  NCCLFFM_DEVICE static double max(double a, double b) { return fmax(a, b); }
  NCCLFFM_DEVICE static double min(double a, double b) { return fmin(a, b); }
  NCCLFFM_DEVICE static double average(double sum, int n) { return sum / static_cast<double>(n); }
};

template <class T>
struct WordElements {
  T element[8 / sizeof(T)];
};

template <class T>
NCCLFFM_DEVICE void WordReducer<T>::start(uint64_t word) {
  const auto elements = bitCast<WordElements<T>>(word);
  NCCLFFM_UNROLL
  for (int k = 0; k < kPerWord; ++k) x_[k] = ElementType<T>::load(elements.element[k]);
}

template <class T>
NCCLFFM_DEVICE void WordReducer<T>::add(uint64_t word, int op) {
  using A = Arithmetic<Accumulator>;
  const auto elements = bitCast<WordElements<T>>(word);
  Accumulator y[kPerWord];
  NCCLFFM_UNROLL
  for (int k = 0; k < kPerWord; ++k) y[k] = ElementType<T>::load(elements.element[k]);
  if (op == ncclSum || op == ncclAvg) {
    NCCLFFM_UNROLL
    for (int k = 0; k < kPerWord; ++k) x_[k] = A::sum(x_[k], y[k]);
  } else if (op == ncclProd) {
    NCCLFFM_UNROLL
    for (int k = 0; k < kPerWord; ++k) x_[k] = A::product(x_[k], y[k]);
  } else if (op == ncclMax) {
    NCCLFFM_UNROLL
    for (int k = 0; k < kPerWord; ++k) x_[k] = A::max(x_[k], y[k]);
  } else {
    NCCLFFM_UNROLL
    for (int k = 0; k < kPerWord; ++k) x_[k] = A::min(x_[k], y[k]);
  }
}

template <class T>
NCCLFFM_DEVICE uint64_t WordReducer<T>::finish(int op, int nRanks) {
  WordElements<T> elements;
  NCCLFFM_UNROLL
  for (int k = 0; k < kPerWord; ++k) {
    elements.element[k] =
        ElementType<T>::store(op == ncclAvg ? Arithmetic<Accumulator>::average(x_[k], nRanks) : x_[k]);
  }
  return bitCast<uint64_t>(elements);
}

template <class T, class F>
NCCLFFM_DEVICE uint64_t mapWord(uint64_t word, const F &f, uint64_t index, uint64_t left) {
  auto elements = bitCast<WordElements<T>>(word);
  NCCLFFM_UNROLL
  for (uint32_t k = 0; k < 8 / sizeof(T); ++k) {
    if (k * sizeof(T) >= left) break;
    elements.element[k] = ElementType<T>::store(f(ElementType<T>::load(elements.element[k]), index + k));
  }
  return bitCast<uint64_t>(elements);
}

template <class T>
NCCLFFM_DEVICE uint64_t mapWord(uint64_t word, const Identity &, uint64_t, uint64_t) {
  return word;
}

// Of a word at an address.
template <class T, class F>
NCCLFFM_DEVICE uint64_t mapWordAt(uint64_t word, const Placed<F> &placed, const char *address, uint64_t left) {
  return mapWord<T>(word, placed.f, indexOf<T>(placed, address), left);
}

template <class T>
NCCLFFM_DEVICE uint64_t mapWordAt(uint64_t word, const Identity &, const char *, uint64_t) {
  return word;
}

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_REDUCE_FUNCS_H_
