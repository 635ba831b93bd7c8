// The float32 arithmetic of rotated copies that CPU and CUDA share, operation for operation as in docs/concepts/quantizer.md.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "host_device.h"
#include "philox.h"
#include "quantize.h"
#include "streams.h"

namespace fewbit {

constexpr int kFullGroup = 256;       // the most elements of a group, and the number of elements of most groups
constexpr int kSeedRows = 2;          // rows at the end of the ranges that have the seed
constexpr int kCountersOfGroup = 16;  // Philox counters that belong to one group; not all of them are used
constexpr int kRoundingCounter = 8;   // the one that rounds the group's scale
constexpr float kGreatestScale = 0x1.FEp127f;  // the greatest bfloat16

static_assert(kSeedRows * kColumns == 4, "the rows of the seed have its four words of 16 bits");

// The number of rows of the ranges that have a copy's seed.
constexpr int seed_rows(bool is_rotated) { return is_rotated ? kSeedRows : 0; }

// The mean and the scale with which a group is dequantized.
struct GroupScale {
  float mean, scale;
  bool is_twice;  // rotated twice
};

inline namespace FEWBIT_NAMESPACE {

// -- Random signs ------------------------------------------------------------------------------------------------

// The first Philox counter of a group. Counters from 2^63 on occur in no uniform copy.
FEWBIT_HD constexpr uint64_t group_counter(int64_t group) {
  return (uint64_t{1} << 63) + static_cast<uint64_t>(kCountersOfGroup * group);
}

// The first of the two counters of the signs of a transform, minus the group's first counter. rotation: 0 or 1; transform: 0
// for the first numbers of the group, 1 for the last ones.
FEWBIT_HD constexpr int sign_counter(int rotation, int transform) { return 4 * rotation + 2 * transform; }

// -- Rotations ---------------------------------------------------------------------------------------------------

// The number of elements of a group of m elements that are transformed together: the largest power of two that is at most m.
FEWBIT_HD constexpr int transform_size(int m) {
  int size = kFullGroup;
  while (size > m) size /= 2;
  return size;
}

// Returns fl(1 / sqrt(size)) for a power of two.
FEWBIT_HD constexpr float inverse_root(int size) {
  float root = 1.0f;
  for (; size >= 4; size /= 4) root *= 0.5f;
  return size == 2 ? root * 0x1.6A09E6p-1f : root;  // 1 / sqrt(2), rounded to the nearest float32
}

// Returns true if a group of m elements is rotated twice. is_spiky: one element has more than an eighth of the energy.
FEWBIT_HD constexpr bool rotates_twice(int m, bool is_spiky) { return is_spiky || (m & (m - 1)) != 0; }

// The number of places by which the numbers of a group move to the left before the second rotation.
FEWBIT_HD constexpr int shift_of(int m) { return (m - transform_size(m)) / 2; }

// -- Numbers of a group ------------------------------------------------------------------------------------------

// Returns sum / n. Most groups have 256 elements, for which a product is as precise and faster.
FEWBIT_HD inline float over_count(float sum, int n) {
  return n == kFullGroup ? sum * (1.0f / kFullGroup) : sum / static_cast<float>(n);
}

// Returns the mean of a group of n elements with this sum, as it is stored, never -0.
FEWBIT_HD inline float group_mean(float sum, int n) { return widen_bfloat16(narrow_bfloat16(over_count(sum, n))) + 0.0f; }

// Returns the factor u by which the remainders of a group are multiplied before their energy is computed again; 1 if the
// energy is precise.
FEWBIT_HD inline float rescue_factor(float energy) {
  return energy < 0x1p-80f ? 0x1p96f : energy < 0x1p100f ? 1.0f : 0x1p-96f;
}

// Returns 1 / u exactly.
FEWBIT_HD inline float inverse_rescue(float u) { return u == 1.0f ? 1.0f : u > 1.0f ? 0x1p-96f : 0x1p96f; }

// Returns true if the group is rotated twice. greatest: the greatest magnitude of the remainders, times u.
FEWBIT_HD inline bool needs_second_rotation(float greatest, float energy) {
  return greatest * greatest * 8.0f > energy;
}

// Returns false if the group has no values: mean and scale are stored as NaN, and all codes are 0.
FEWBIT_HD inline bool has_values(float energy, float mean) { return is_finite(energy) && is_finite(mean); }

// Returns the root mean square of the remainders times u, by which the breaks of the normal table are multiplied.
FEWBIT_HD inline float root_mean_square(float energy, int n) { return square_root(over_count(energy, n)); }

// -- Mean and scale in the ranges --------------------------------------------------------------------------------

// Returns the number to store for the scale of a group that has values. inner: the sum I of the magnitudes times their levels.
// random: the first Philox word of kRoundingCounter.
FEWBIT_HD inline uint16_t stored_scale(float energy, float inner, float u, uint32_t random, bool is_twice) {
  if (energy == 0.0f) return 0;
  const float exact = energy / inner * inverse_rescue(u);
  // The bound has no lower bits, so rounding does not make it infinite.
  const float scale = exact < kGreatestScale ? exact : kGreatestScale;
  const uint32_t rounded = (bits_of(scale) + (random & 0xFFFFu)) >> 16;
  return static_cast<uint16_t>(rounded | (is_twice ? 0x8000u : 0u));
}

FEWBIT_HD inline void store_scale(float mean, uint16_t scale, int64_t group, uint16_t* ranges) {
  uint16_t* row = ranges + group * kColumns;
  row[0] = static_cast<uint16_t>(bits_of(mean) >> 16);
  row[1] = scale;
}

// Stores the NaN of a group without values.
FEWBIT_HD inline void store_no_scale(int64_t group, uint16_t* ranges) {
  store_scale(float_of(0x7FC00000u), 0x7FC0u, group, ranges);
}

FEWBIT_HD inline GroupScale load_scale(const uint16_t* ranges, int64_t group) {
  const uint16_t* row = ranges + group * kColumns;
  GroupScale found;
  found.mean = widen_bfloat16(row[0]);
  found.scale = float_of(static_cast<uint32_t>(row[1] & 0x7FFFu) << 16);
  found.is_twice = row[1] >> 15 != 0;
  return found;
}

// -- The seed in the last rows of the ranges ---------------------------------------------------------------------

// rows: the first of the kSeedRows rows.
FEWBIT_HD inline void store_seed(uint64_t seed, uint16_t* rows) {
  for (int i = 0; i < 4; ++i) rows[i] = static_cast<uint16_t>(seed >> 16 * i);
}

FEWBIT_HD inline uint64_t load_seed(const uint16_t* rows) {
  uint64_t seed = 0;
  for (int i = 0; i < 4; ++i) seed |= static_cast<uint64_t>(rows[i]) << 16 * i;
  return seed;
}

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
