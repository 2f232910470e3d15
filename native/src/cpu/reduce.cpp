// The reduction loops, one instance per type and operation, shaped so that the compiler vectorises them.
#include "reduce.h"

#include <cstring>
#include <type_traits>

#include "number.h"

namespace ncclffm::cpu {

namespace {

/// How an element type is computed with: loaded as Accumulator, stored once at the end.
template <class T>
struct Arithmetic {
  using Accumulator = T;
  static T load(T value) { return value; }
  static T store(T value) { return value; }
};

template <class S, int E, int M, bool I, bool F>
struct Arithmetic<SmallFloat<S, E, M, I, F>> {
  using Number = SmallFloat<S, E, M, I, F>;
  using Accumulator = float;
  static float load(Number value) { return value.toFloat(); }
  static Number store(float value) { return Number::fromFloat(value); }
};

// Sums and products of integers wrap: computed unsigned, at least as wide as int so that promotion cannot make them
// signed.
template <class T>
using Wrapping = std::conditional_t<sizeof(T) <= 4, uint32_t, uint64_t>;

struct Sum {
  template <class T>
  static T combine(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
    } else {
      return a + b;
    }
  }
  template <class T>
  static T finish(T value, int) {
    return value;
  }
};

struct Average : Sum {
  template <class T>
  static T finish(T value, int n) {
    return static_cast<T>(value / static_cast<T>(n));
  }
};

struct Product : Sum {
  template <class T>
  static T combine(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
    } else {
      return a * b;
    }
  }
};

struct Max : Sum {
  template <class T>
  static T combine(T a, T b) {
    return a < b || a != a ? b : a;
  }
};

struct Min : Sum {
  template <class T>
  static T combine(T a, T b) {
    return b < a || a != a ? b : a;
  }
};

template <class T, class Op>
void reduce(const void *const *sources, int n, uint64_t count, void *result) {
  using Accumulator = typename Arithmetic<T>::Accumulator;
  Accumulator accumulators[kReduceBlock];
  const T *first = static_cast<const T *>(sources[0]);
  for (uint64_t i = 0; i < count; ++i) {
    accumulators[i] = Arithmetic<T>::load(first[i]);
  }
  for (int source = 1; source < n; ++source) {
    const T *__restrict next = static_cast<const T *>(sources[source]);
    for (uint64_t i = 0; i < count; ++i) {
      accumulators[i] = Op::combine(accumulators[i], Arithmetic<T>::load(next[i]));
    }
  }
  T *__restrict out = static_cast<T *>(result);
  for (uint64_t i = 0; i < count; ++i) {
    out[i] = Arithmetic<T>::store(Op::finish(accumulators[i], n));
  }
}

template <class T>
void scaledSum(const void *const *sources, const uint64_t *scalars, int n, uint64_t count, void *result) {
  using Accumulator = typename Arithmetic<T>::Accumulator;
  alignas(64) Accumulator accumulators[kReduceBlock];
  for (int source = 0; source < n; ++source) {
    T factor;
    std::memcpy(&factor, &scalars[source], sizeof(T));
    const Accumulator scalar = Arithmetic<T>::load(factor);
    const T *__restrict next = static_cast<const T *>(sources[source]);
    for (uint64_t i = 0; i < count; ++i) {
      const Accumulator term = Product::combine(Arithmetic<T>::load(next[i]), scalar);
      accumulators[i] = source == 0 ? term : Sum::combine(accumulators[i], term);
    }
  }
  T *__restrict out = static_cast<T *>(result);
  for (uint64_t i = 0; i < count; ++i) {
    out[i] = Arithmetic<T>::store(accumulators[i]);
  }
}

template <class T>
ReduceBlock ofType(ncclRedOp_t op) {
  switch (op) {
    case ncclSum:
      return reduce<T, Sum>;
    case ncclProd:
      return reduce<T, Product>;
    case ncclMax:
      return reduce<T, Max>;
    case ncclMin:
      return reduce<T, Min>;
    case ncclAvg:
      return reduce<T, Average>;
    case ncclNumOps:
    case ncclMaxRedOp:
      break;
  }
  return nullptr;
}

struct TypeRow {
  const char *name;
  size_t bytes;
  ReduceBlock (*reduction)(ncclRedOp_t);
  ScaledSumBlock scaledSum;
};

constexpr TypeRow kTypes[ncclNumTypes] = {
    {"ncclInt8", 1, ofType<int8_t>, scaledSum<int8_t>},
    {"ncclUint8", 1, ofType<uint8_t>, scaledSum<uint8_t>},
    {"ncclInt32", 4, ofType<int32_t>, scaledSum<int32_t>},
    {"ncclUint32", 4, ofType<uint32_t>, scaledSum<uint32_t>},
    {"ncclInt64", 8, ofType<int64_t>, scaledSum<int64_t>},
    {"ncclUint64", 8, ofType<uint64_t>, scaledSum<uint64_t>},
    {"ncclFloat16", 2, ofType<Float16>, scaledSum<Float16>},
    {"ncclFloat32", 4, ofType<float>, scaledSum<float>},
    {"ncclFloat64", 8, ofType<double>, scaledSum<double>},
    {"ncclBfloat16", 2, ofType<Bfloat16>, scaledSum<Bfloat16>},
    {"ncclFloat8e4m3", 1, ofType<Float8e4m3>, scaledSum<Float8e4m3>},
    {"ncclFloat8e5m2", 1, ofType<Float8e5m2>, scaledSum<Float8e5m2>},
};

bool isType(int datatype) {
  return datatype >= 0 && datatype < ncclNumTypes;
}

}  // namespace

size_t elementBytes(int datatype) {
  return isType(datatype) ? kTypes[datatype].bytes : 0;
}

const char *datatypeName(int datatype) {
  return isType(datatype) ? kTypes[datatype].name : "unknown type";
}

const char *opName(int op) {
  static constexpr const char *kNames[ncclNumOps] = {"ncclSum", "ncclProd", "ncclMax", "ncclMin", "ncclAvg"};
  return op >= 0 && op < ncclNumOps ? kNames[op] : op == kPreMulSum ? "pre-multiplied sum" : "unknown operation";
}

ScaledSumBlock scaledSumBlock(ncclDataType_t datatype) {
  return kTypes[datatype].scaledSum;
}

ReduceBlock reduceBlock(ncclDataType_t datatype, ncclRedOp_t op) {
  return kTypes[datatype].reduction(op);
}

}  // namespace ncclffm::cpu
