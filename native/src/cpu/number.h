// The element types that C++ lacks: 16- and 8-bit floating point, stored as integers and computed in float.
#ifndef NCCLFFM_CPU_NUMBER_H_
#define NCCLFFM_CPU_NUMBER_H_

#include <cstdint>
#include <cstring>

namespace ncclffm::cpu {

inline uint32_t bitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float floatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

/// 2 to a power within float's normal range.
constexpr float powerOfTwo(int exponent) {
  float value = 1;
  for (int i = 0; i < (exponent < 0 ? -exponent : exponent); ++i) {
    value = exponent < 0 ? value / 2 : value * 2;
  }
  return value;
}

/// A binary format narrower than float: a sign, kExponentBits, kMantissaBits. kHasInfinity: the largest exponent means
/// infinity and NaN as in IEEE 754; without it (e4m3) only all ones is NaN. kSaturates: what is too large becomes the
/// largest finite value instead of infinity, as CUDA's conversions to 8 bits do.
template <class Storage, int kExponentBits, int kMantissaBits, bool kHasInfinity, bool kSaturates>
struct SmallFloat {
  Storage bits;

  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr int kShift = 23 - kMantissaBits;  // float has 23 mantissa bits
  static constexpr uint32_t kSign = 1u << (kExponentBits + kMantissaBits);
  static constexpr uint32_t kMagnitude = kSign - 1;
  static constexpr uint32_t kInfinity = ((1u << kExponentBits) - 1) << kMantissaBits;
  static constexpr uint32_t kNaN = kHasInfinity ? kInfinity | (1u << (kMantissaBits - 1)) : kMagnitude;
  static constexpr uint32_t kLargest = kHasInfinity ? kInfinity - 1 : kMagnitude - 1;

  float toFloat() const {
    const uint32_t magnitude = bits & kMagnitude;
    const uint32_t sign = (bits & kSign) != 0 ? 0x80000000u : 0u;
    uint32_t result;
    if (kHasInfinity ? magnitude >= kInfinity : magnitude == kNaN) {
      result = kHasInfinity ? 0x7f800000u | (magnitude & (kInfinity ^ kMagnitude)) << kShift : 0x7fc00000u;
    } else if (kBias == 127) {
      result = magnitude << kShift;  // float's own exponents: subnormal numbers need no care
    } else if (magnitude >> kMantissaBits != 0) {
      result = (magnitude << kShift) + (static_cast<uint32_t>(127 - kBias) << 23);
    } else {
      result = bitsOf(static_cast<float>(magnitude) * powerOfTwo(1 - kBias - kMantissaBits));
    }
    return floatOf(sign | result);
  }

  /// Rounds to nearest, ties to even.
  static SmallFloat fromFloat(float value) {
    const uint32_t all = bitsOf(value);
    const uint32_t sign = (all >> 31) != 0 ? kSign : 0;
    const uint32_t magnitude = all & 0x7fffffffu;
    uint32_t result;
    if (magnitude > 0x7f800000u) {
      result = kNaN;
    } else if (kBias == 127 || magnitude >= static_cast<uint32_t>(128 - kBias) << 23) {
      // Adding just under half of the last place carries into the exponent by itself where it must.
      const uint32_t odd = magnitude >> kShift & 1;
      const uint32_t rounded = (magnitude + (1u << (kShift - 1)) - 1 + odd) >> kShift;
      result = rounded - (static_cast<uint32_t>(127 - kBias) << kMantissaBits);
      if (result > kLargest) {
        result = kSaturates ? kLargest : kInfinity;
      }
    } else {
      // Subnormal in the small format: a multiple of its smallest number. Adding 2^23 makes float round to an integer.
      const float scaled =
          floatOf(magnitude) * powerOfTwo(kBias == 127 ? 0 : kBias - 1 + kMantissaBits) + powerOfTwo(23);
      result = bitsOf(scaled) & 0x7fffffu;
    }
    return {static_cast<Storage>(sign | result)};
  }
};

using Float16 = SmallFloat<uint16_t, 5, 10, true, false>;
using Bfloat16 = SmallFloat<uint16_t, 8, 7, true, false>;
using Float8e4m3 = SmallFloat<uint8_t, 4, 3, false, true>;
using Float8e5m2 = SmallFloat<uint8_t, 5, 2, true, true>;

static_assert(sizeof(Float16) == 2 && sizeof(Bfloat16) == 2 && sizeof(Float8e4m3) == 1 && sizeof(Float8e5m2) == 1);

}  // namespace ncclffm::cpu

#endif  // NCCLFFM_CPU_NUMBER_H_
