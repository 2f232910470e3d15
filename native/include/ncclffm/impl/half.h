// The 16-bit floating-point types, to and from float: rounded to nearest, ties to even. The library includes no header
// of CUDA's, for NVRTC has none.
#ifndef NCCLFFM_IMPL_HALF_H_
#define NCCLFFM_IMPL_HALF_H_

#include "config.h"

#ifndef __CUDACC_RTC__
#include <string.h>
#endif

namespace ncclffm {

struct Float16 {
  uint16_t bits;
};

struct Bfloat16 {
  uint16_t bits;
};

template <class To, class From>
NCCLFFM_DEVICE To bitCast(const From &from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

NCCLFFM_DEVICE float toFloat(Bfloat16 x) {
  return bitCast<float>(static_cast<uint32_t>(x.bits) << 16);
}

#ifdef __CUDACC__

NCCLFFM_DEVICE float toFloat(Float16 x) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
  return value;
}

NCCLFFM_DEVICE Float16 toFloat16(float value) {
  Float16 x;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x.bits) : "f"(value));
  return x;
}

NCCLFFM_DEVICE Bfloat16 toBfloat16(float value) {
  Bfloat16 x;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(x.bits) : "f"(value));
  return x;
}

#else

NCCLFFM_DEVICE float toFloat(Float16 x) {
  uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return bitCast<float>(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // The exponent of a float has another bias; scaling moves it, and makes subnormals normal on the way.
  float value = bitCast<float>(magnitude << 13) * 0x1p112f;
  return bitCast<float>(sign | bitCast<uint32_t>(value));
}

NCCLFFM_DEVICE Float16 toFloat16(float value) {
  uint32_t bits = bitCast<uint32_t>(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return {static_cast<uint16_t>(0x7fff)};
  if (magnitude >= 0x477ff000) return {static_cast<uint16_t>(sign | 0x7c00)};  // rounds to more than 65504
  if (magnitude < 0x38800000) {                                                // below 2^-14: subnormal or 0
    // Adding 2^-1 leaves the result in the low bits, rounded by the addition itself.
    float shifted = bitCast<float>(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (bitCast<uint32_t>(shifted) - 0x3f000000))};
  }
  uint32_t rounded = magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1);
  return {static_cast<uint16_t>(sign | rounded >> 13)};
}

NCCLFFM_DEVICE Bfloat16 toBfloat16(float value) {
  uint32_t bits = bitCast<uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return {static_cast<uint16_t>(0x7fff)};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

#endif

}  // namespace ncclffm

#endif  // NCCLFFM_IMPL_HALF_H_
