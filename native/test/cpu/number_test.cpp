// The 16- and 8-bit floating-point formats against their definition, exhaustively, and rounding against a search.
#include <cmath>
#include <limits>
#include <random>

#include "check.h"
#include "number.h"
#include "reference.h"

using namespace test;
using namespace ncclffm::cpu;

template <class Number>
static void checkFormat(const char *name, const Format &format) {
  const auto patterns = static_cast<uint32_t>(1u << (1 + format.exponentBits + format.mantissaBits));
  for (uint32_t bits = 0; bits < patterns; ++bits) {
    const Number number{static_cast<decltype(Number::bits)>(bits)};
    const double want = decode(format, bits);
    const double got = number.toFloat();
    const std::string context = std::string(name) + " pattern " + std::to_string(bits);
    CHECK_EQ_IN(std::isnan(got), std::isnan(want), context);
    if (std::isnan(want)) {
      CHECK_EQ_IN(std::isnan(Number::fromFloat(number.toFloat()).toFloat()), true, context);
      continue;
    }
    CHECK_EQ_IN(got, want, context);
    if (std::isfinite(want)) {
      CHECK_EQ_IN(static_cast<uint32_t>(Number::fromFloat(number.toFloat()).bits), bits, context);
    }
  }
  constexpr uint32_t kSeed = 20301;
  std::mt19937 random(kSeed);
  for (int i = 0; i < 200000; ++i) {
    // Any float whatsoever, and numbers close to the format's own range.
    const float value = i % 2 == 0 ? floatOf(random())
                                   : std::ldexp(static_cast<float>(random()) / 4294967296.0f - 0.5f,
                                                static_cast<int>(random() % 40) - 24);
    if (std::isnan(value)) {
      continue;
    }
    const std::string context =
        std::string(name) + " of float " + std::to_string(bitsOf(value)) + " seed " + std::to_string(kSeed);
    CHECK_EQ_IN(static_cast<uint32_t>(Number::fromFloat(value).bits), encode(format, value), context);
  }
}

TEST(smallFloatsMatchTheirDefinition) {
  checkFormat<Float16>("float16", kFloat16);
  checkFormat<Bfloat16>("bfloat16", kBfloat16);
  checkFormat<Float8e4m3>("float8e4m3", kFloat8e4m3);
  checkFormat<Float8e5m2>("float8e5m2", kFloat8e5m2);
}
