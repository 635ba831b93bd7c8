// The elements of rotated groups without their mean, for quantizing and for the sums of their squares.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "common/quantize.h"
#include "common/rotate.h"
#include "cuda/channels.h"
#include "cuda/groups.h"
#include "cuda/rotation.h"

namespace fewbit::cuda {

// Reads a column of 256 elements that lie side by side.
template <class T>
__device__ void read_neighbors(float* values, const T* from) {
#pragma unroll
  for (int j = 0; j < kSide; ++j) values[j] = as_float(from[j * kSide + lane_of_group()]);
}

// Returns the number of the lane whose number differs in one bit, `step`.
__device__ inline double other_lane(double own, int step) {
  uint64_t bits;
  memcpy(&bits, &own, sizeof bits);
  const uint64_t low = __shfl_xor_sync(kAllLanes, static_cast<uint32_t>(bits), step);
  bits = static_cast<uint64_t>(__shfl_xor_sync(kAllLanes, static_cast<uint32_t>(bits >> 32), step)) << 32 | low;
  memcpy(&own, &bits, sizeof bits);
  return own;
}

// The elements of a group.
template <class T>
class GroupElements {
 public:
  __device__ GroupElements(const T* x, const Normalization& by, const StoredChannels& channels, const GroupPlace& place, int length)
      : x_(x), by_(by), channels_(channels), place_(place), length_(length) {}

  __device__ int length() const { return length_; }

  // Reads a column, normalizes it and takes channels out, if both groups of the warp have 256 elements that lie side by side.
  __device__ void read_full(float* values, Workspace& own) const {
    const Entries entries(by_.index, place_.of(0)), of_channels = entries_from(channels_, place_.of(0));
    const bool are_one = all(entries.are_one(kFullGroup));
    const bool is_quick = !by_.exists() || are_one || entries.are_neighbors(kSide);
    if (!all(is_quick && (!channels_.exists() || of_channels.are_neighbors(kSide)))) return read_one_by_one(values, own, entries);
    read_neighbors(values, x_ + place_.of(0));
    if (by_.exists() && are_one) {
      const int64_t entry = entries.of(0);
      const float mean = mean_at(by_, entry), rstd = by_.rstd[entry];
#pragma unroll
      for (int j = 0; j < kSide; ++j) values[j] = (values[j] - mean) * rstd;
    } else if (by_.exists()) {
      int64_t entry = entries.of(lane_of_group());
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        values[j] = (values[j] - mean_at(by_, entry)) * by_.rstd[entry];
        entry = entries.after(entry, kSide);
      }
    }
    if (!channels_.exists()) return;
    int64_t channel = of_channels.of(lane_of_group());
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      values[j] = taken_out(values[j], numbers_of(channels_, channel));
      channel = of_channels.after(channel, kSide);
    }
  }

  // Reads a column, normalizes it and takes channels out. It has zeros where no elements are.
  __device__ void read(float* values, Workspace& own) const {
    if (!by_.exists() && !channels_.exists() && all(length_ == kFullGroup && place_.contiguous())) {
      return read_neighbors(values, x_ + place_.of(0));
    }
    read_one_by_one(values, own, {by_.index, by_.exists() && place_.contiguous() && length_ > 0 ? place_.of(0) : 0});
  }

  // Returns the mean square of the scales of the channels of the group's elements, in all its lanes; 1 without channels.
  __device__ float mean_square_scale() const {
    if (!channels_.exists()) return 1.0f;
    const Entries entries = entries_from(channels_, length_ > 0 ? place_.of(0) : 0);
    double sum = 0.0;
#pragma unroll 1
    for (int i = lane_of_group(); i < length_; i += kSide) {
      const double scale = numbers_of(channels_, entries.of(i)).scale;
      sum += scale * scale;
    }
#pragma unroll
    for (int step = kSide / 2; step > 0; step /= 2) sum += other_lane(sum, step);
    return static_cast<float>(sum / length_);
  }

 private:
  __device__ void read_one_by_one(float* values, Workspace& own, const Entries& entries) const {
    __syncwarp();
#pragma unroll 1
    for (int i = lane_of_group(); i < kFullGroup; i += kSide) own.at(i) = i < length_ ? one(i, entries) : 0.0f;
    __syncwarp();
    get_column(values, own);
  }

  // Returns the i-th element.
  __device__ float one(int i, const Entries& entries) const {
    const int64_t place = place_.of(i);
    float x = as_float(x_[place]);
    if (by_.exists()) {
      const int64_t entry = place_.contiguous() ? entries.of(i) : entry_of(by_.index, place);
      x = (x - mean_at(by_, entry)) * by_.rstd[entry];
    }
    if (channels_.exists()) x = taken_out(x, numbers_of(channels_, modulo(place, channels_.count)));
    return x;
  }

  const T* x_;
  const Normalization& by_;
  const StoredChannels& channels_;
  const GroupPlace place_;
  const int length_;
};

// Facts about a group's elements minus their mean. The remainders are these numbers times `factor`. In a masked copy, the
// remainders of elements that are 0 are 0.
struct Remainders {
  int count;       // of the elements that the mean is computed from
  float mean;      // that is subtracted
  float factor;
  float energy;    // of the remainders
  float quads;     // the greatest of the sums of four squares in this lane
};

// Returns the number of elements of a column that are not 0, in all lanes of the group summed up.
__device__ inline int count_nonzero(const float* values) {
  int count = 0;
#pragma unroll
  for (int j = 0; j < kSide; ++j) count += values[j] != 0.0f;
#pragma unroll
  for (int step = kSide / 2; step > 0; step /= 2) {
    count += static_cast<int>(__shfl_xor_sync(kAllLanes, static_cast<uint32_t>(count), step));
  }
  return count;
}

__device__ inline float mean_of(float sum, int count) { return count > 0 ? group_mean(sum, count) : 0.0f; }

// Subtracts the mean from a column of m elements.
__device__ inline void subtract(float* values, float mean, int m, bool is_masked) {
#pragma unroll
  for (int j = 0; j < kSide; ++j) {
    const bool exists = j * kSide + lane_of_group() < m && !(is_masked && values[j] == 0.0f);
    values[j] = exists ? values[j] - mean : 0.0f;
  }
}

// Computes `energy` and `quads` from a column of remainders.
__device__ inline void find_squares(Remainders& to, const float* values) {
  float squares[kSide];
#pragma unroll
  for (int j = 0; j < kSide; ++j) squares[j] = values[j] * values[j];
  to.energy = sum_of_group(squares, &to.quads);
}

// Computes the remainders of a full group, minus the stored mean. Afterwards `values` is a column of them. It returns false if one
// of the warp's two groups needs a factor, or has no values, which is rare.
__device__ inline bool remainders_of_full(Remainders& found, float* values, bool is_masked) {
  found = {kFullGroup, 0.0f, 1.0f, 0.0f, 0.0f};
  const float sum = sum_of_group(values);
  if (is_masked) {
    found.count = count_nonzero(values);
    found.mean = mean_of(sum, found.count);
    subtract(values, found.mean, kFullGroup, true);
  } else {
    found.mean = group_mean(sum, kFullGroup);
#pragma unroll
    for (int j = 0; j < kSide; ++j) values[j] -= found.mean;
  }
  find_squares(found, values);
  return all(rescue_factor(found.energy) == 1.0f);
}

// Computes the remainders of any group. Afterwards `values` is a column of them.
template <class T>
__device__ Remainders remainders_of(float* values, const GroupElements<T>& elements, bool is_masked, Workspace& own) {
  elements.read(values, own);
  const float sum = sum_of_group(values);
  Remainders found = {elements.length(), 0.0f, 1.0f, 0.0f, 0.0f};
  if (is_masked) found.count = count_nonzero(values);
  found.mean = mean_of(sum, found.count);
  subtract(values, found.mean, elements.length(), is_masked);
  find_squares(found, values);
  const float factor = rescue_factor(found.energy);
  if (any(factor != 1.0f)) {
    found.factor = factor;
#pragma unroll
    for (int j = 0; j < kSide; ++j) values[j] *= factor;
    find_squares(found, values);
  }
  return found;
}

// Returns true if an element of the warp's two groups may have more than an eighth of its group's energy. A sum of squares is at
// least as great as each of them, even if it is rounded.
__device__ inline bool may_be_spiky(const Remainders& of) { return any(of.quads * 8.0f > of.energy); }

// Returns true if one element has more than an eighth of the group's energy. It compares squares, whose order is that of the
// magnitudes.
__device__ inline bool is_spiky(const Remainders& of, const float* values) {
  float greatest = 0.0f;
#pragma unroll
  for (int j = 0; j < kSide; ++j) greatest = fmaxf(greatest, values[j] * values[j]);
  return any_of_group(greatest * 8.0f > of.energy);
}

}  // namespace fewbit::cuda
