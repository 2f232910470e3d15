// The 16-bit floating-point types of half.h: each of their values, and what floats round to, against arithmetic in
// double.
#include "harness.h"  // first: it sets up the library

#include <cfloat>

namespace ncclffm::test {
namespace {

constexpr uint64_t kSeed = 20250214;

// A format of 16 bits by its definition in IEEE 754.
struct Format {
  const char *name;
  int mantissaBits;  // without the leading one
  int bias;

  uint32_t infinity() const { return 0x7fffu >> mantissaBits << mantissaBits; }
  double valueOf(uint32_t bits) const {
    const uint32_t magnitude = bits & 0x7fff, exponent = magnitude >> mantissaBits;
    const uint32_t mantissa = magnitude & ((1u << mantissaBits) - 1);
    const double one = 1u << mantissaBits;
    const double value = exponent == 0 ? std::ldexp(mantissa / one, 1 - bias)
                                       : std::ldexp(1 + mantissa / one, static_cast<int>(exponent) - bias);
    return (bits & 0x8000) != 0 ? -value : value;
  }
};

constexpr Format kFloat16 = {"float16", 10, 15}, kBfloat16 = {"bfloat16", 7, 127};

template <class Small>
void everyValueComesBack(const Format &format, Small (*fromFloat)(float)) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const float x = toFloat(Small{static_cast<uint16_t>(bits)});
    const uint32_t magnitude = bits & 0x7fff;
    if (magnitude > format.infinity()) {
      const uint32_t back = fromFloat(x).bits & 0x7fff;
      check(std::isnan(x) && back > format.infinity(), "%s 0x%04x, a NaN, is %g and comes back as 0x%04x", format.name,
            bits, x, back);
      continue;
    }
    const bool isInfinite = magnitude == format.infinity();
    const double expected = isInfinite ? (bits >> 15 != 0 ? -INFINITY : INFINITY) : format.valueOf(bits);
    check(x == expected && std::signbit(x) == (bits >> 15 != 0), "%s 0x%04x is %.9g, not %.17g", format.name, bits, x,
          expected);
    check(fromFloat(x).bits == bits, "%s 0x%04x comes back as 0x%04x", format.name, bits, fromFloat(x).bits);
  }
}

// The nearest value, of two equally near ones that with an even last bit; by a search among all values.
uint16_t nearest(const Format &format, float x) {
  const uint32_t sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(x));
  uint32_t below = 0, above = format.infinity();  // of the value above is what follows the largest, 2 to a power
  while (above - below > 1) {
    const uint32_t middle = (below + above) / 2;
    (format.valueOf(middle) <= magnitude ? below : above) = middle;
  }
  if (std::isinf(x)) return static_cast<uint16_t>(sign | format.infinity());
  const double toBelow = magnitude - format.valueOf(below), toAbove = format.valueOf(above) - magnitude;
  const bool up = toAbove < toBelow || (toAbove == toBelow && below % 2 != 0);
  return static_cast<uint16_t>(sign | (up ? above : below));
}

template <class Small>
void floatsRoundToTheNearest(const Format &format, Small (*fromFloat)(float)) {
  auto look = [&](float x) {
    for (float y : {x, -x}) {
      const uint16_t got = fromFloat(y).bits, expected = nearest(format, y);
      check(got == expected, "%s of %.9g (%a) is 0x%04x, not 0x%04x", format.name, y, y, got, expected);
    }
  };
  for (uint32_t bits = 0; bits < format.infinity(); ++bits) {
    // Halfway to the next value, and one float to each side of that.
    const double middle = (format.valueOf(bits) + format.valueOf(bits + 1)) / 2;
    const float x = static_cast<float>(middle);
    look(x);
    look(std::nextafter(x, 0.0f));
    look(std::nextafter(x, INFINITY));
  }
  look(FLT_MAX);
  look(INFINITY);
  look(std::ldexp(1.0f, -149));
  uint64_t h = kSeed;
  for (int i = 0; i < 2000000 / kSlowdown; ++i) {
    h = mix(h);
    const float x = bitCast<float>(static_cast<uint32_t>(h >> 32));
    if (!std::isnan(x)) look(x);
  }
  for (uint32_t payload : {1u, 0x1000u, 0x2000u, 0x400000u, 0x7fffffu}) {
    for (uint32_t sign : {0u, 0x80000000u}) {
      const uint32_t got = fromFloat(bitCast<float>(sign | 0x7f800000u | payload)).bits & 0x7fffu;
      check(got > format.infinity(), "%s of a NaN with payload 0x%x is 0x%04x", format.name, payload, got);
    }
  }
}

}  // namespace
}  // namespace ncclffm::test

int main() {
  using namespace ncclffm;
  using namespace ncclffm::test;
  everyValueComesBack<Float16>(kFloat16, toFloat16);
  everyValueComesBack<Bfloat16>(kBfloat16, toBfloat16);
  floatsRoundToTheNearest<Float16>(kFloat16, toFloat16);
  floatsRoundToTheNearest<Bfloat16>(kBfloat16, toBfloat16);
  return report("half_test");
}
