// Conversion of 16-bit floats to float32 and back, by integer operations alone, so that loops vectorize everywhere.
//
// Widening is exact. Narrowing rounds to nearest, ties to even. A NaN becomes a quiet NaN.
#pragma once

#include <cstdint>
#include <cstring>

#include "host_device.h"

namespace fewbit {

// The numbers of the dtypes that fewbit.runtime passes.
enum class DType : int { float32 = 0, float64 = 1, float16 = 2, bfloat16 = 3 };

inline namespace FEWBIT_NAMESPACE {

constexpr int item_size(DType dtype) {
  return dtype == DType::float32 ? 4 : dtype == DType::float64 ? 8 : 2;
}

FEWBIT_HD inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

FEWBIT_HD inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

FEWBIT_HD inline float widen_bfloat16(uint16_t x) { return float_of(static_cast<uint32_t>(x) << 16); }

FEWBIT_HD inline uint16_t narrow_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  const uint32_t quiet = bits >> 16 | 0x40u;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
}

FEWBIT_HD inline float widen_float16(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x & 0x7FFFu) << 13;
  // Exponents differ by 127 - 15. Infinity and NaN get the exponent 255, and a NaN becomes quiet.
  const uint32_t normal = magnitude + (112u << 23);
  const uint32_t special = (magnitude + (224u << 23)) | (magnitude > 0x0F800000u ? 0x00400000u : 0u);
  // A subnormal is an integer times 2^-24.
  const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(x & 0x3FFu)) * 0x1p-24f);
  uint32_t bits = magnitude >= 0x0F800000u ? special : normal;
  bits = magnitude < 0x00800000u ? subnormal : bits;
  return float_of(sign | bits);
}

FEWBIT_HD inline uint16_t narrow_float16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  // Rounding removes 13 bits. Its carry may reach the exponent and make the number infinite.
  const uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
  // Below 2^-14 the last place is 2^-24, as of a float32 between 1/2 and 1, so adding 1/2 rounds to that place.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
  const uint32_t special = magnitude > 0x7F800000u ? 0x7E00u | (magnitude >> 13 & 0x3FFu) : 0x7C00u;
  uint32_t rounded = magnitude < 0x38800000u ? subnormal : normal;
  rounded = magnitude >= 0x477FF000u ? special : rounded;  // 65520 and above, where normal would overflow
  return static_cast<uint16_t>(sign | rounded);
}

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
