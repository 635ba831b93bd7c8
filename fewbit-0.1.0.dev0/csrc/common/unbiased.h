// The float32 arithmetic of exactly unbiased copies that CPU and CUDA share, operation for operation as in
// docs/concepts/quantizer.md. Groups are rotated as those of rotated copies (rotate.h). Encoder and decoder share a random number
// for each element, which selects a row of the code's arrays.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "host_device.h"
#include "planes.h"
#include "rotate.h"

namespace fewbit {

// A vector of float32 has the codes of all numbers of bits (fewbit/catalog/unbiased_codes.py). It begins with 1 / T for 1 to 8 bits,
// where T is the greatest number that can be encoded. The arrays of each number of bits follow.
constexpr int kUnbiasedFloats = kMaxBits + 3 * 8320;

// The code for one number of bits. Each array has a row of 2^bits numbers for each value of the shared random number.
struct UnbiasedCode {
  float inverse_limit;
  const float* levels;
  const float* means;
  const float* gaps;
};

inline namespace FEWBIT_NAMESPACE {

// The number of values of the shared random number, a power of two.
FEWBIT_HD constexpr int shared_values(int bits) { return bits == 1 ? 64 : bits == 2 ? 32 : 16; }

// The number of floats in each array of the code, and in each array of all codes of fewer bits.
FEWBIT_HD constexpr int code_size(int bits) { return shared_values(bits) << bits; }
FEWBIT_HD constexpr int code_sizes_before(int bits) { return bits < 3 ? 128 * (bits - 1) : (16 << bits) + 128; }

static_assert(kUnbiasedFloats == kMaxBits + 3 * code_sizes_before(kMaxBits + 1));

// all: the vector of all codes.
FEWBIT_HD inline UnbiasedCode unbiased_code(const float* all, int bits) {
  const float* levels = all + kMaxBits + 3 * code_sizes_before(bits);
  return {all[bits - 1], levels, levels + code_size(bits), levels + 2 * code_size(bits)};
}

// The first counter of a group's shared random numbers, and of the encoder's own. Each of these two runs has kDrawCounters counters.
FEWBIT_HD constexpr uint64_t shared_counter(int64_t group) {
  return (uint64_t{1} << 62) + static_cast<uint64_t>(2 * kDrawCounters * group);
}
FEWBIT_HD constexpr uint64_t own_counter(int64_t group) { return shared_counter(group) + kDrawCounters; }

// Returns the place of the first number of a row. shared: the 16 random bits that encoder and decoder share.
FEWBIT_HD inline int row_of(uint32_t shared, int bits) { return static_cast<int>(shared % shared_values(bits)) << bits; }

// Returns the number to store for the scale of a group that has codes: a bfloat16. greatest: the greatest magnitude of the rotated
// numbers, which has to be at most T in units of the scale. rms and u: see rotate.h.
FEWBIT_HD inline uint16_t unbiased_scale(float greatest, float inverse_limit, float rms, float u) {
  const float least = greatest * inverse_limit;
  const float exact = (least > rms ? least : rms) * inverse_rescue(u);
  const float scale = exact < kGreatestScale ? exact : kGreatestScale;
  return static_cast<uint16_t>((bits_of(scale) + 0xFFFFu) >> 16);
}

// Returns the number by which rotated numbers are multiplied before they are encoded.
FEWBIT_HD inline float inverse_scale(uint16_t scale, float u) { return 1.0f / (float_of(uint32_t{scale} << 16) * u); }

// Returns a number in (0, 1) from the encoder's 16 random bits.
FEWBIT_HD inline float own_share(uint32_t own) { return static_cast<float>(static_cast<int32_t>(2 * own + 1)) * 0x1p-17f; }

// Does a step of a binary search for the code of z, a number in units of the scale. place: the index of the lowest code that is
// still possible. Returns place + step if the code is at least `step` higher, else place. The outcome is random, so a branch would
// often be predicted wrongly.
FEWBIT_HD inline int next_place(const UnbiasedCode& code, int place, int step, float z, float share) {
  const int above = place + step - 1;
  return place + step * static_cast<int>(z > code.means[above] + share * code.gaps[above]);
}

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
