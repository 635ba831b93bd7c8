// The PTX instructions on pairs of 16-bit floats, computed on the host in double: what the PTX manual says of rounding, NaN,
// subnormals and the sign of zero. It shares no code with csrc/common/dtype.h.

#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace cuda_emulation::ptx {

// A 16-bit format: bits of the fraction, and the exponent of the least normal number.
struct Format {
  int fraction, least;
};
constexpr Format kFloat16{10, -14}, kBfloat16{7, -126};

inline double widen(Format format, uint32_t bits) {
  const int exponents = (1 << (15 - format.fraction)) - 1;
  const int exponent = static_cast<int>(bits >> format.fraction) & exponents;
  const int fraction = static_cast<int>(bits & ((1u << format.fraction) - 1));
  double magnitude;
  if (exponent == exponents) {
    magnitude = fraction ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  } else if (exponent == 0) {
    magnitude = std::ldexp(fraction, format.least - format.fraction);
  } else {
    magnitude = std::ldexp((1 << format.fraction) + fraction, format.least + exponent - 1 - format.fraction);
  }
  return bits & 0x8000u ? -magnitude : magnitude;
}

// Rounds to nearest, ties to even. All NaNs become 0x7FFF, as in PTX.
inline uint32_t narrow(Format format, double x) {
  if (std::isnan(x)) return 0x7FFFu;
  const uint32_t sign = std::signbit(x) ? 0x8000u : 0u;
  const uint32_t infinity = ((1u << (15 - format.fraction)) - 1) << format.fraction;
  if (x == 0.0) return sign;
  if (std::isinf(x)) return sign | infinity;
  const int exponent = std::ilogb(x) < format.least ? format.least : std::ilogb(x);
  const double places = std::nearbyint(std::ldexp(std::fabs(x), format.fraction - exponent));
  // A carry into the exponent gives the next power of two.
  const uint32_t bits =
      (static_cast<uint32_t>(exponent - format.least) << format.fraction) + static_cast<uint32_t>(places);
  return sign | (bits < infinity ? bits : infinity);
}

template <class Operation>
uint32_t for_both(Operation operation) {
  return operation(0) | operation(16) << 16;
}

inline uint32_t convert(Format format, float high, float low) {
  return for_both([&](int shift) { return narrow(format, shift ? high : low); });
}

inline uint32_t minimum(Format format, uint32_t a, uint32_t b) {
  return for_both([&](int shift) {
    const double x = widen(format, a >> shift & 0xFFFFu), y = widen(format, b >> shift & 0xFFFFu);
    if (std::isnan(x)) return narrow(format, y);
    if (std::isnan(y)) return narrow(format, x);
    return narrow(format, x < y || (x == y && std::signbit(x)) ? x : y);
  });
}

inline uint32_t cvt_rn_f16x2_f32(float high, float low) { return convert(kFloat16, high, low); }
inline uint32_t cvt_rn_bf16x2_f32(float high, float low) { return convert(kBfloat16, high, low); }
inline uint32_t min_f16x2(uint32_t a, uint32_t b) { return minimum(kFloat16, a, b); }
inline uint32_t min_bf16x2(uint32_t a, uint32_t b) { return minimum(kBfloat16, a, b); }

// A double holds the difference of two float16 exactly.
inline uint32_t sub_rn_f16x2(uint32_t a, uint32_t b) {
  return for_both([&](int shift) {
    return narrow(kFloat16, widen(kFloat16, a >> shift & 0xFFFFu) - widen(kFloat16, b >> shift & 0xFFFFu));
  });
}

// The product is exact. Rounding the sum to double first does not change the result, because a double has more than twice as
// many places.
inline uint32_t fma_rn_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  return for_both([&](int shift) {
    const double product = widen(kBfloat16, a >> shift & 0xFFFFu) * widen(kBfloat16, b >> shift & 0xFFFFu);
    return narrow(kBfloat16, product + widen(kBfloat16, c >> shift & 0xFFFFu));
  });
}

}  // namespace cuda_emulation::ptx
