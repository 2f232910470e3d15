// What results must be: element formats and reductions by definition, in float64 and exact integers, sharing no code
// with the backend.
#ifndef NCCLFFM_TEST_CPU_REFERENCE_H_
#define NCCLFFM_TEST_CPU_REFERENCE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "abi.h"

namespace test {

struct Format {
  int exponentBits;
  int mantissaBits;
  bool hasInfinity;
  bool saturates;
};

constexpr Format kFloat16 = {5, 10, true, false};
constexpr Format kBfloat16 = {8, 7, true, false};
constexpr Format kFloat8e4m3 = {4, 3, false, true};
constexpr Format kFloat8e5m2 = {5, 2, true, true};

/// The value of a bit pattern.
double decode(const Format &format, uint32_t bits);

/// The pattern nearest to the value, ties to even; not for NaN.
uint32_t encode(const Format &format, double value);

constexpr ncclDataType_t kAllTypes[] = {ncclInt8,    ncclUint8,    ncclInt32,      ncclUint32,
                                        ncclInt64,   ncclUint64,   ncclFloat16,    ncclFloat32,
                                        ncclFloat64, ncclBfloat16, ncclFloat8e4m3, ncclFloat8e5m2};
constexpr ncclRedOp_t kAllOps[] = {ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg};

size_t bytesOf(ncclDataType_t type);

/// count elements, different for every rank, index and call; small enough that no operation on 8 of them overflows a
/// floating-point type (integers wrap, and shall).
std::vector<char> makeInput(ncclDataType_t type, ncclRedOp_t op, size_t count, int rank, uint64_t call);

/// Empty, or what is wrong about got: count elements that shall be the reduction of elements [from, from + count) of
/// inputs.
std::string checkReduced(ncclDataType_t type, ncclRedOp_t op, const std::vector<std::vector<char>> &inputs, size_t from,
                         size_t count, const char *got);

}  // namespace test

#endif  // NCCLFFM_TEST_CPU_REFERENCE_H_
