// Element types and reductions.
#ifndef NCCLFFM_CPU_REDUCE_H_
#define NCCLFFM_CPU_REDUCE_H_

#include <cstddef>
#include <cstdint>

#include "abi.h"

namespace ncclffm::cpu {

/// Bytes of an element; 0 for a value that is no ncclDataType_t.
size_t elementBytes(int datatype);
const char *datatypeName(int datatype);
const char *opName(int op);

constexpr uint64_t kReduceBlock = 2048;  // elements; 16 KiB of float64 stay in the first-level cache

/// result[i] = sources[0][i] op sources[1][i] ... in this order, for count <= kReduceBlock elements. 16- and 8-bit
/// types are computed in float and rounded once; integers wrap; an integer average is the wrapped sum divided by n,
/// towards zero. NaN loses against a number in max and min, as in fmax. result must not overlap a source.
using ReduceBlock = void (*)(const void *const *sources, int n, uint64_t count, void *result);

/// The function for a type and a built-in operation, both valid.
ReduceBlock reduceBlock(ncclDataType_t datatype, ncclRedOp_t op);

/// What descriptors say instead of the number of an operation of ncclRedOpCreatePreMulSum, which differs between ranks.
constexpr int32_t kPreMulSum = ncclNumOps;

/// As ReduceBlock, the sum of sources[rank][i] * scalars[rank], each scalar in the first bytes of its number.
using ScaledSumBlock = void (*)(const void *const *sources, const uint64_t *scalars, int n, uint64_t count,
                                void *result);
ScaledSumBlock scaledSumBlock(ncclDataType_t datatype);

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_REDUCE_H_
