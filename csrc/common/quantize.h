// The float32 arithmetic of the group quantizer, operation for operation as in docs/concepts/quantizer.md.
#pragma once

#include <cstdint>

#include "channels.h"
#include "dtype.h"
#include "host_device.h"
#include "streams.h"

namespace fewbit {

constexpr int kDrawBlock = 256;  // elements whose draws come from kDrawCounters counters, 8 each
constexpr int kDrawCounters = 32;

// The minimum and the range with which a group is quantized and dequantized.
struct GroupLimits {
  float minimum, range;  // both NaN if no value of the group can be dequantized
  float scale;
};

// The index of vectors over a tensor: element number e, in storage order with samples outermost, has entry number
// (e div inner) mod count of each vector. inner * count divides the number of elements.
struct VectorIndex {
  int64_t count = 1, inner = 1;
};

// Normalization of elements before they are quantized: (x - mean) * rstd. Without rstd there is none. Without a mean the
// mean is 0. Then the numbers of channels are taken out.
struct Normalization {
  const float* mean;
  const float* rstd;
  VectorIndex index;
  Channels channels;

  FEWBIT_HD bool exists() const { return rstd != nullptr; }
};

// A map that is applied to dequantized values before they are rounded to their dtype. If scale or shift is given, the map is
// affine: a value is multiplied by scale, then shift is added. If a mask is given, a value is multiplied by its element's bit: bit
// e % 32 of word e / 32 for element e of the tensor. A map is never both. If nothing is given, values do not change. The numbers of
// channels are put in before.
struct ValueMap {
  const float* scale;
  const float* shift;
  VectorIndex index;     // which entry of scale and shift an element has
  const uint32_t* mask;
  Channels channels;

  FEWBIT_HD bool is_affine() const { return scale != nullptr || shift != nullptr; }
};

inline namespace FEWBIT_NAMESPACE {

// Returns the bits of `count` elements, at most 32, from element `first` on. Bits beyond them may be those of later elements.
FEWBIT_HD inline uint32_t mask_bits(const uint32_t* mask, int64_t first, int count) {
  const uint32_t* words = mask + first / 32;
  const int shift = static_cast<int>(first % 32);
  const uint32_t bits = words[0] >> shift;
  return shift + count > 32 ? bits | words[1] << (32 - shift) : bits;
}

// The entry of a vector. Without a vector it is a number that changes nothing, not even the sign of a zero.
FEWBIT_HD inline float mean_at(const Normalization& by, int64_t entry) { return by.mean ? by.mean[entry] : 0.0f; }
FEWBIT_HD inline float scale_at(const ValueMap& by, int64_t entry) { return by.scale ? by.scale[entry] : 1.0f; }
FEWBIT_HD inline float shift_at(const ValueMap& by, int64_t entry) { return by.shift ? by.shift[entry] : -0.0f; }

FEWBIT_HD constexpr int top_of(int bits) { return (1 << bits) - 1; }

FEWBIT_HD inline bool is_finite(float x) { return (bits_of(x) & 0x7F800000u) != 0x7F800000u; }

// Returns x rounded to bfloat16 toward -inf (`up` false) or +inf, in float32.
FEWBIT_HD inline float toward_bfloat16(float x, bool up) {
  const uint32_t bits = bits_of(x), cut = bits & 0xFFFF0000u;
  const bool away = up ? x > 0.0f : x < 0.0f;  // truncation rounds these the other way
  return float_of(away && bits != cut ? cut + 0x10000u : cut);
}

// Returns the limits of a group with these extremes. clean: all elements of the group are finite. A zero minimum is stored
// as +0, since of two zeros either may be found as the smallest element.
FEWBIT_HD inline GroupLimits limits_of(float least, float greatest, bool clean, int bits) {
  GroupLimits limits;
  const float low = toward_bfloat16(least, false) + 0.0f;
  const float range = toward_bfloat16(greatest - low, true) + 0.0f;
  const bool kept = clean && is_finite(low) && is_finite(range);
  const float nan = float_of(0x7FC00000u);
  // The quotient is bounded, because it could overflow for ranges below 1e-31.
  const float steps = static_cast<float>(top_of(bits)) / range;
  limits.minimum = kept ? low : nan;
  limits.range = kept ? range : nan;
  limits.scale = kept && range > 0.0f ? (steps < 0x1p111f ? steps : 0x1p111f) * 65536.0f : 0.0f;
  return limits;
}

FEWBIT_HD inline bool is_kept(const GroupLimits& limits) { return limits.range == limits.range; }

// Rounds a value from 0 to 2^24 to the nearest integer, ties to even. Below 2^23 the addition does it.
FEWBIT_HD inline int32_t nearest(float value) {
#ifdef __CUDA_ARCH__
  return __float2int_rn(value);
#else
  const int32_t rounded = static_cast<int32_t>(bits_of(value + 0x1p23f) - 0x4B000000u);
  return value < 0x1p23f ? rounded : static_cast<int32_t>(value);
#endif
}

// Returns the code of x in a group whose limits are finite, times 65536, and a remainder. most: top * 65536.
FEWBIT_HD inline int32_t scaled_code_of(float x, const GroupLimits& limits, float most, uint32_t draw) {
  const float steps = (x - limits.minimum) * limits.scale;
#ifdef __CUDA_ARCH__
  return nearest(fminf(steps, most)) + static_cast<int32_t>(draw);  // one instruction, also for NaN
#else
  return nearest(steps < most ? steps : most) + static_cast<int32_t>(draw);
#endif
}

FEWBIT_HD inline int32_t code_of(float x, const GroupLimits& limits, float most, uint32_t draw) {
  return scaled_code_of(x, limits, most, draw) >> 16;
}

FEWBIT_HD inline float most_of(int bits) { return static_cast<float>(top_of(bits)) * 65536.0f; }

// Returns the value of a code. unit: 1 / top.
FEWBIT_HD inline float restored(int32_t code, float minimum, float range, float unit) {
  return minimum + range * (static_cast<float>(code) * unit);
}

// Returns the same, clamped to the range of float16. In a group that holds the largest float16 the rounded range reaches
// beyond it, and the value is rounded to float16 next. NaN stays NaN.
FEWBIT_HD inline float within_float16(float x) {
  const float below = x > 65504.0f ? 65504.0f : x;
  return below < -65504.0f ? -65504.0f : below;
}

FEWBIT_HD inline float unit_of(int bits) { return 1.0f / static_cast<float>(top_of(bits)); }

FEWBIT_HD inline void store_limits(const GroupLimits& limits, int64_t group, uint16_t* ranges) {
  uint16_t* row = ranges + group * kColumns;
  row[0] = static_cast<uint16_t>(bits_of(limits.minimum) >> 16);
  row[1] = static_cast<uint16_t>(bits_of(limits.range) >> 16);
}

// minimum and range alone.
FEWBIT_HD inline GroupLimits load_limits(const uint16_t* ranges, int64_t group) {
  const uint16_t* row = ranges + group * kColumns;
  GroupLimits limits;
  limits.minimum = widen_bfloat16(row[0]);
  limits.range = widen_bfloat16(row[1]);
  limits.scale = 0.0f;
  return limits;
}

// The first of the kDrawCounters counters for a block of a group, whose elements begin at kDrawBlock * block.
FEWBIT_HD constexpr uint64_t first_counter(int64_t group, int block, int group_size) {
  const int64_t blocks = (group_size + kDrawBlock - 1) / kDrawBlock;
  return static_cast<uint64_t>(kDrawCounters * (group * blocks + block));
}

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
