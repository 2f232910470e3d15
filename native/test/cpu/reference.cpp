// See reference.h.
#include "reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

namespace test {

double decode(const Format &format, uint32_t bits) {
  const uint32_t mantissa = bits & ((1u << format.mantissaBits) - 1);
  const uint32_t exponent = bits >> format.mantissaBits & ((1u << format.exponentBits) - 1);
  const double sign = bits >> (format.exponentBits + format.mantissaBits) & 1 ? -1 : 1;
  const int bias = (1 << (format.exponentBits - 1)) - 1;
  const bool top = exponent == (1u << format.exponentBits) - 1;
  if (top && format.hasInfinity) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  }
  if (top && mantissa == (1u << format.mantissaBits) - 1) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  return exponent == 0 ? sign * std::ldexp(mantissa, 1 - bias - format.mantissaBits)
                       : sign * std::ldexp(mantissa + (1u << format.mantissaBits),
                                           static_cast<int>(exponent) - bias - format.mantissaBits);
}

uint32_t encode(const Format &format, double value) {
  const uint32_t sign = std::signbit(value) ? 1u << (format.exponentBits + format.mantissaBits) : 0;
  const double magnitude = std::fabs(value);
  // Finite patterns of positive numbers are ordered like their values: search for the greatest that is not above.
  const uint32_t infinity = ((1u << format.exponentBits) - 1) << format.mantissaBits;
  const uint32_t largest = format.hasInfinity ? infinity - 1 : infinity + (1u << format.mantissaBits) - 2;
  uint32_t low = 0;
  uint32_t high = largest;
  while (low < high) {
    const uint32_t middle = (low + high + 1) / 2;
    if (decode(format, middle) <= magnitude) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const double below = decode(format, low);
  const double above =
      low < largest ? decode(format, low + 1) : 2 * below - decode(format, low - 1);  // where the next number would be
  const double toBelow = magnitude - below;
  const double toAbove = above - magnitude;
  uint32_t result = toBelow < toAbove || (toBelow == toAbove && low % 2 == 0) ? low : low + 1;
  if (result > largest) {
    result = format.saturates ? largest : infinity;
  }
  return sign | result;
}

size_t bytesOf(ncclDataType_t type) {
  switch (type) {
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    default:
      return 1;
  }
}

namespace {

uint64_t mix(uint64_t value) {  // splitmix64
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
  value = (value ^ value >> 27) * 0x94d049bb133111ebu;
  return value ^ value >> 31;
}

const Format *formatOf(ncclDataType_t type) {
  switch (type) {
    case ncclFloat16:
      return &kFloat16;
    case ncclBfloat16:
      return &kBfloat16;
    case ncclFloat8e4m3:
      return &kFloat8e4m3;
    case ncclFloat8e5m2:
      return &kFloat8e5m2;
    default:
      return nullptr;
  }
}

template <class T>
T at(const char *data, size_t index) {
  T value;
  std::memcpy(&value, data + index * sizeof(T), sizeof(T));
  return value;
}

/// The values of all patterns of a small format.
const std::vector<double> &valuesOf(ncclDataType_t type) {
  static const std::vector<std::vector<double>> all = [] {
    std::vector<std::vector<double>> tables(ncclNumTypes);
    for (ncclDataType_t each : kAllTypes) {
      if (const Format *format = formatOf(each)) {
        for (uint32_t bits = 0; bits < 1u << 8 * bytesOf(each); ++bits) {
          tables[each].push_back(decode(*format, bits));
        }
      }
    }
    return tables;
  }();
  return all[type];
}

/// The patterns of a small format that serve as inputs of a product (or of another operation).
const std::vector<uint16_t> &inputPatterns(ncclDataType_t type, bool product) {
  static const std::vector<std::vector<uint16_t>> all = [] {
    std::vector<std::vector<uint16_t>> tables(2 * ncclNumTypes);
    for (ncclDataType_t each : kAllTypes) {
      const std::vector<double> &values = valuesOf(each);
      for (size_t bits = 0; bits < values.size(); ++bits) {
        const double magnitude = std::fabs(values[bits]);
        if (magnitude <= 2) {
          tables[each].push_back(static_cast<uint16_t>(bits));
        }
        if (magnitude >= 0.5 && magnitude <= 1.5) {
          tables[ncclNumTypes + each].push_back(static_cast<uint16_t>(bits));
        }
      }
    }
    return tables;
  }();
  return all[type + (product ? ncclNumTypes : 0)];
}

double floatingAt(ncclDataType_t type, const char *data, size_t index) {
  if (type == ncclFloat32) {
    return at<float>(data, index);
  }
  if (type == ncclFloat64) {
    return at<double>(data, index);
  }
  return valuesOf(type)[bytesOf(type) == 2 ? at<uint16_t>(data, index) : at<uint8_t>(data, index)];
}

/// Distance between 1 and the next number of the type.
double epsilonOf(ncclDataType_t type) {
  if (type == ncclFloat64) {
    return std::numeric_limits<double>::epsilon();
  }
  return type == ncclFloat32 ? std::numeric_limits<float>::epsilon() : std::ldexp(1.0, -formatOf(type)->mantissaBits);
}

double smallestOf(ncclDataType_t type) {
  const Format *format = formatOf(type);
  return format == nullptr ? 0 : decode(*format, 1);
}

std::string checkFloating(ncclDataType_t type, ncclRedOp_t op, const std::vector<std::vector<char>> &inputs,
                          size_t index, double got) {
  const auto n = static_cast<double>(inputs.size());
  double want = floatingAt(type, inputs[0].data(), index);
  double magnitude = std::fabs(want);  // bounds the intermediate results
  for (size_t rank = 1; rank < inputs.size(); ++rank) {
    const double next = floatingAt(type, inputs[rank].data(), index);
    switch (op) {
      case ncclProd:
        want *= next;
        magnitude = std::fabs(want);
        break;
      case ncclMax:
        want = std::max(want, next);
        break;
      case ncclMin:
        want = std::min(want, next);
        break;
      default:
        want += next;
        magnitude += std::fabs(next);
    }
  }
  if (op == ncclAvg) {
    want /= n;
    magnitude /= n;
  }
  // Rounded once from float (or computed in the type itself): n rounding errors of the wider type, half a unit of the
  // type.
  const double computing =
      type == ncclFloat64 ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
  const bool exact = op == ncclMax || op == ncclMin;
  const double bound =
      exact ? 0 : (n + 1) * computing * magnitude + 0.5 * epsilonOf(type) * std::fabs(want) + 0.5 * smallestOf(type);
  if (std::fabs(got - want) <= bound) {
    return "";
  }
  return "element " + std::to_string(index) + " is " + std::to_string(got) + ", expected " + std::to_string(want) +
         " +- " + std::to_string(bound);
}

template <class T>
std::string checkInteger(ncclRedOp_t op, const std::vector<std::vector<char>> &inputs, size_t index, T got) {
  using Wide = unsigned __int128;  // wraps like every narrower type
  T want = at<T>(inputs[0].data(), index);
  for (size_t rank = 1; rank < inputs.size(); ++rank) {
    const T next = at<T>(inputs[rank].data(), index);
    switch (op) {
      case ncclProd:
        want = static_cast<T>(static_cast<Wide>(want) * static_cast<Wide>(next));
        break;
      case ncclMax:
        want = std::max(want, next);
        break;
      case ncclMin:
        want = std::min(want, next);
        break;
      default:
        want = static_cast<T>(static_cast<Wide>(want) + static_cast<Wide>(next));
    }
  }
  if (op == ncclAvg) {
    want = static_cast<T>(want / static_cast<T>(inputs.size()));
  }
  return got == want
             ? ""
             : "element " + std::to_string(index) + " is " + std::to_string(got) + ", expected " + std::to_string(want);
}

}  // namespace

std::vector<char> makeInput(ncclDataType_t type, ncclRedOp_t op, size_t count, int rank, uint64_t call) {
  const size_t bytes = bytesOf(type);
  std::vector<char> result(count * bytes);
  uint64_t state = mix(call * 64 + static_cast<uint64_t>(rank));
  const bool product = op == ncclProd;
  for (size_t i = 0; i < count; ++i) {
    state = mix(state);
    uint64_t bits = state;
    if (type == ncclFloat32 || type == ncclFloat64) {
      const double unit = std::ldexp(static_cast<double>(state >> 11), -53);  // [0, 1)
      const double sign = state & 1 ? -1 : 1;
      const double value = sign * (product ? 0.5 + unit : 2 * unit);
      const auto narrow = static_cast<float>(value);
      type == ncclFloat32 ? std::memcpy(&bits, &narrow, 4) : std::memcpy(&bits, &value, 8);
    } else if (formatOf(type) != nullptr) {
      const std::vector<uint16_t> &patterns = inputPatterns(type, product);
      bits = patterns[state % patterns.size()];
    }
    std::memcpy(result.data() + i * bytes, &bits, bytes);
  }
  return result;
}

std::string checkReduced(ncclDataType_t type, ncclRedOp_t op, const std::vector<std::vector<char>> &inputs, size_t from,
                         size_t count, const char *got) {
  for (size_t i = 0; i < count; ++i) {
    std::string wrong;
    switch (type) {
      case ncclInt8:
        wrong = checkInteger(op, inputs, from + i, at<int8_t>(got, i));
        break;
      case ncclUint8:
        wrong = checkInteger(op, inputs, from + i, at<uint8_t>(got, i));
        break;
      case ncclInt32:
        wrong = checkInteger(op, inputs, from + i, at<int32_t>(got, i));
        break;
      case ncclUint32:
        wrong = checkInteger(op, inputs, from + i, at<uint32_t>(got, i));
        break;
      case ncclInt64:
        wrong = checkInteger(op, inputs, from + i, at<int64_t>(got, i));
        break;
      case ncclUint64:
        wrong = checkInteger(op, inputs, from + i, at<uint64_t>(got, i));
        break;
      default:
        wrong = checkFloating(type, op, inputs, from + i, floatingAt(type, got, i));
    }
    if (!wrong.empty()) {
      return wrong;
    }
  }
  return "";
}

}  // namespace test
