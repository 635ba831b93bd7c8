// Rotations of groups of any length. It needs `transform` and `multiply_signed` of the instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "../common/rotate.h"
#include "rotate_one_by_one.h"
#include "signs.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {
namespace {

// The mean of a group, and facts about its remainders, the elements minus the mean.
struct Remainders {
  float mean, energy, factor, greatest;  // energy and greatest magnitude after the multiplication by `factor`

  bool has_values() const { return FEWBIT_NAMESPACE::has_values(energy, mean); }
  bool has_codes() const { return has_values() && energy > 0.0f; }
  bool is_twice() const { return needs_second_rotation(greatest, energy); }
};

// Writes the remainders of m elements, times `factor`, to `out`, followed by zeros.
inline void subtract(const float* values, int m, float mean, float factor, float* out) {
  for (int i = 0; i < m; ++i) out[i] = (values[i] - mean) * factor;
  for (int i = m; i < kFullGroup; ++i) out[i] = 0.0f;
}

// Rotates the m numbers of a group. rotation: 0 or 1.
inline void rotate(float* y, int m, Signs& signs, int64_t group, int rotation) {
  const int size = transform_size(m);
  const float root = inverse_root(size);
  const uint64_t* of_transform = signs.of(group, rotation, 0);
  multiply_signed(y, 0, size, root, of_transform);
  multiply_signed(y, size, m, 1.0f, of_transform);
  transform(y, size);
  if (size == m) return;
  of_transform = signs.of(group, rotation, 1);
  multiply_signed(y, m - size, m, root, of_transform);
  transform(y + m - size, size);
}

// Moves the m numbers of a group by `places` to the left, around the end.
inline void move(float* y, int m, int places) {
  if (places == 0) return;
  float first[kFullGroup];
  memcpy(first, y, places * sizeof(float));
  memmove(y, y + places, (m - places) * sizeof(float));
  memcpy(y + m - places, first, places * sizeof(float));
}

// Undoes a rotation, and multiplies the numbers by `scale`.
inline void rotate_back(float* y, int m, Signs& signs, int64_t group, int rotation, float scale) {
  const int size = transform_size(m);
  const float root = inverse_root(size);
  if (size < m) {
    transform(y + m - size, size);
    multiply_signed(y, m - size, m, root, signs.of(group, rotation, 1));
  }
  const uint64_t* of_transform = signs.of(group, rotation, 0);
  transform(y, size);
  multiply_signed(y, 0, size, scale * root, of_transform);
  multiply_signed(y, size, m, scale, of_transform);
}

// Rotates the remainders of a group, twice if `is_twice`. y: memory for kFullGroup numbers; those after the first m are 0.
inline void rotate_remainders(const float* values, int m, int64_t group, const Remainders& of, bool is_twice, Signs& signs,
                              float* y) {
  subtract(values, m, of.mean, of.factor, y);
  rotate(y, m, signs, group, 0);
  if (!is_twice) return;
  move(y, m, shift_of(m));
  rotate(y, m, signs, group, 1);
}

// Undoes this: computes the m elements of a group from rotated numbers, followed by zeros up to whole blocks. y is changed.
inline void restore_elements(float* y, int m, int64_t number, const GroupScale& group, bool is_twice, Signs& signs,
                             float* out) {
  if (is_twice) {
    rotate_back(y, m, signs, number, 1, 1.0f);
    move(y, m, m - shift_of(m));
  }
  rotate_back(y, m, signs, number, 0, group.scale);
  for (int i = 0; i < m; ++i) out[i] = group.mean + y[i];
  for (int i = m; i % kBlock != 0; ++i) out[i] = 0.0f;
}

}  // namespace
}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
