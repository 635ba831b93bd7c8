// Encoding with many breaks. Each element searches a copy of the breaks in shared memory. Draws search the knots.

#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "common/draw.h"
#include "common/philox.h"
#include "common/table.h"
#include "cuda/launch.h"
#include "cuda/tile.h"

namespace fewbit::cuda {

// Kernel parameters can take 32,764 bytes since CUDA 12.1. Every byte costs time, so there are two sizes.
constexpr size_t kMostParameterBytes = 32764;

inline void require_capacity(int64_t count, int64_t capacity, const char* what) {
  if (count <= capacity) return;
  throw std::runtime_error("expected a table of at most " + std::to_string(capacity) + " " + what +
                           " for the CUDA kernels, got " + std::to_string(count));
}

// -- breaks ----------------------------------------------------------------------------------------------

template <class B, int Capacity>
struct Pieces {
  static constexpr int kSteps = Capacity < 512 ? 9 : 12;  // 2**steps > capacity
  static_assert(Capacity < 1 << kSteps);

  int bits;
  int count;
  int steps;
  B breaks[Capacity];
  uint8_t codes[Capacity + 1];  // of each piece

  Pieces(const Table& table, const Breaks<B>& source)
      : bits(table.bits), count(source.count), steps(source.steps) {
    std::copy_n(source.values, count, breaks);
    std::copy_n(source.codes, count + 1, codes);
  }
};

// Pieces in shared memory. Every thread of the block constructs this.
template <class B, int Capacity>
class SharedPieces {
 public:
  struct Storage {
    B padded[1 << Pieces<B, Capacity>::kSteps];
    uint8_t codes[1 << Pieces<B, Capacity>::kSteps];
  };

  __device__ SharedPieces(const Pieces<B, Capacity>& pieces, Storage& storage)
      : storage_(storage), steps_(pieces.steps) {
    const B beyond_all = float_of(0x7F800000u);
    for (int j = threadIdx.x; j < 1 << steps_; j += blockDim.x) {
      storage.padded[j] = j < pieces.count ? pieces.breaks[j] : beyond_all;
      // NaN is beyond the padding too.
      storage.codes[j] = pieces.codes[j < pieces.count ? j : pieces.count];
    }
    __syncthreads();
  }

  // Returns the codes of 8 elements, whose searches overlap.
  template <class T>
  __device__ Octet codes(const uint32_t* group) const {
    int32_t places[8] = {};
#pragma unroll 1
    for (int32_t half = 1 << steps_ >> 1; half > 0; half >>= 1) {
#pragma unroll
      for (int i = 0; i < 8; ++i) places[i] = beyond(storage_.padded, places[i], half, value<T>(group, i));
    }
    Octet codes = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      (i < 4 ? codes.low : codes.high) |= static_cast<uint32_t>(storage_.codes[places[i]]) << (i % 4 * 8);
    }
    return codes;
  }

 private:
  const Storage& storage_;
  int steps_;
};

// -- knots -----------------------------------------------------------------------------------------------

template <int Capacity>
struct DrawConstants {
  static constexpr int kSteps = Capacity < 256 ? 8 : 11;
  static_assert(Capacity < 1 << kSteps);

  int bits;
  int count;
  int n_levels;
  int gap_steps;
  float lowest, highest;  // levels
  float points[Capacity], origins[Capacity], values[Capacity], slopes[Capacity];
  float levels[256], inverse_gaps[256];
  // The gap between levels with which a search begins, by the number of points below x. gap_steps halvings find any gap that a
  // mean between the same points can be in.
  uint8_t first_gaps[Capacity + 1];

  explicit DrawConstants(const Table& table) : bits(table.bits), count(table.knots.count), n_levels(table.knots.n_levels) {
    const Knots& knots = table.knots;
    std::copy_n(knots.points, count, points);
    std::copy_n(knots.origins, count, origins);
    std::copy_n(knots.values, count, values);
    std::copy_n(knots.slopes, count - 1, slopes);
    std::copy_n(knots.levels, n_levels, levels);
    std::copy_n(knots.inverse_gaps, n_levels - 1, inverse_gaps);
    lowest = levels[0], highest = levels[n_levels - 1];
    find_first_gaps(knots);
  }

 private:
  // Means between two points are monotone in x, also after rounding, so those of the first and the last x limit the others.
  void find_first_gaps(const Knots& knots) {
    int most = 0;
    bool is_nan = false;  // true if the formula overflows; all gaps are then searched
    for (int segment = 0; segment <= count; ++segment) {
      first_gaps[segment] = 0;
      const bool is_inner = segment > 0 && segment < count;
      const float first = is_inner ? std::nextafterf(points[segment - 1], float_of(0x7F800000u)) : 0.0f;
      const float last = is_inner ? points[segment] : 0.0f;
      if (first > last) continue;  // no x is between equal points
      const float means[] = {draw_mean(knots, segment, first), draw_mean(knots, segment, last)};
      int gaps[] = {-1, -1};
      for (int end = 0; end < 2; ++end) {
        is_nan = is_nan || means[end] != means[end];
        for (int j = 0; j < n_levels; ++j) gaps[end] += !(means[end] < levels[j]);
      }
      first_gaps[segment] = static_cast<uint8_t>(std::min(gaps[0], gaps[1]));
      most = std::max(most, std::abs(gaps[0] - gaps[1]));
    }
    if (is_nan) {
      std::fill_n(first_gaps, count + 1, uint8_t{0});
      most = n_levels - 1;
    }
    for (gap_steps = 0; (1 << gap_steps) - 1 < most;) ++gap_steps;
  }
};

// Returns the number that begins at a byte of an array.
__device__ inline float at_byte(const float* array, uint32_t byte) {
  return *reinterpret_cast<const float*>(reinterpret_cast<const char*>(array) + byte);
}

// Replaces counters, whose upper half is given, by the first word that Philox makes of each. A round is computed for all
// counters before the next one, so that they share its keys, and the operations on the upper half.
__device__ inline void replace_by_philox(uint32_t (&counters)[8], uint64_t seed, uint32_t upper) {
  uint32_t c1[8], c2[8] = {}, c3[8] = {};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int i = 0; i < 8; ++i) c1[i] = upper;
#pragma unroll
  for (int round = 0; round < kPhiloxRounds; ++round) {
#pragma unroll
    for (int i = 0; i < 8; ++i) philox_round(counters[i], c1[i], c2[i], c3[i], k0, k1);
    k0 += kPhiloxWeyl0;
    k1 += kPhiloxWeyl1;
  }
}

// Returns the place that the outcomes of a search lead to. The first outcome is the lowest bit of `path` and the highest bit
// of the place.
__device__ inline int place_of(int path, int steps) {
  int place = 0;
  for (int step = 0; step < steps; ++step) place |= (path >> step & 1) << (steps - 1 - step);
  return place;
}

// Knots in shared memory. Every thread of the block constructs this.
//
// Points are in the order in which a search reads them: first that of the first halving, then the two of the second one, and so
// on, by the path that leads to them. In ascending order, most points of a halving would be in the same memory bank. Paths and
// gaps are counted in bytes, so that a halving needs one load, one comparison and one addition.
template <int Capacity>
class SharedKnots {
 public:
  // The stand-in for f' between two points, value + (x - origin) * slope, and its first gap. If the slope is NaN, the stand-in
  // is the value, whatever x is.
  struct alignas(16) Segment {
    float origin, value, slope;
    uint32_t gap;
  };
  // The draw between two levels: the codes of both, and the constants of the probability of the upper one.
  struct alignas(16) Gap {
    float level, inverse;
    uint32_t lower, upper;
  };
  struct Storage {
    float points[1 << DrawConstants<Capacity>::kSteps];
    Segment segments[1 << DrawConstants<Capacity>::kSteps];  // by path
    float padded_levels[512];
    Gap gaps[256];
  };

  __device__ SharedKnots(const DrawConstants<Capacity>& constants, Storage& storage)
      : storage_(storage), constants_(constants) {
    const float beyond_all = float_of(0x7F800000u), nan = float_of(0x7FC00000u);
    const int count = constants.count;
    for (int j = threadIdx.x; j < 1 << kSteps; j += blockDim.x) {
      int step = 0;
      while (2 << step <= j + 1) ++step;
      // The last j is behind all points.
      const int point = step < kSteps ? place_of(j + 1 - (1 << step), kSteps) + (1 << kSteps >> (step + 1)) - 1 : count;
      storage.points[j] = point < count ? constants.points[point] : beyond_all;
      const int place = place_of(j, kSteps), below = place < count ? place : count, i = below > 0 ? below - 1 : 0;
      storage.segments[j] = {constants.origins[i], constants.values[i],
                             below == 0 || below == count ? nan : constants.slopes[i], kSize * constants.first_gaps[below]};
    }
    for (int j = threadIdx.x; j < 512; j += blockDim.x) {
      storage.padded_levels[j] = j < constants.n_levels ? constants.levels[j] : beyond_all;
      if (j > constants.n_levels - 2) continue;
      const uint32_t lower = static_cast<uint32_t>(j), upper = lower + 1;
      storage.gaps[j] = {constants.levels[j], constants.inverse_gaps[j], lower ^ (lower >> 1), upper ^ (upper >> 1)};
    }
    __syncthreads();
  }

  // Returns the codes drawn for 8 elements, which `draw` defines. Their searches overlap. Element i has the number
  // first + Tile<T>::element(group, lane, i), where `first` is a multiple of Tile<T>::kElements.
  template <class T>
  __device__ Octet codes(const uint32_t* words, uint64_t seed, int64_t first, int group, int lane) const {
    uint32_t random[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      random[i] = static_cast<uint32_t>(first) + static_cast<uint32_t>(Tile<T>::element(group, lane, i));
    }
    replace_by_philox(random, seed, static_cast<uint32_t>(first >> 32));
    float means[8];
    uint32_t gaps[8];
    find_means<T>(means, gaps, words);
#pragma unroll 1
    for (uint32_t half = kSize << constants_.gap_steps >> 1; half >= kSize; half /= 2) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (!(means[i] < at_byte(storage_.padded_levels, gaps[i] + half))) gaps[i] += half;
      }
    }
    Octet codes = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t last = kSize * (constants_.n_levels - 2);
      const Gap gap = storage_.gaps[(gaps[i] < last ? gaps[i] : last) / kSize];
      const uint32_t code = uniform_of(random[i]) < (means[i] - gap.level) * gap.inverse ? gap.upper : gap.lower;
      (i < 4 ? codes.low : codes.high) |= code << (i % 4 * 8);
    }
    return codes;
  }

 private:
  static constexpr int kSteps = DrawConstants<Capacity>::kSteps;
  static constexpr uint32_t kSize = sizeof(float);

  // Computes the stand-in for f' at 8 elements, as draw_mean does, and finds the first gaps.
  template <class T>
  __device__ void find_means(float* means, uint32_t* gaps, const uint32_t* words) const {
    uint32_t paths[8] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t first = kSize * ((1u << step) - 1), bit = kSize << step;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float x = static_cast<float>(value<T>(words, i));
        if (!(x <= at_byte(storage_.points, first + paths[i]))) paths[i] += bit;
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const Segment segment = storage_.segments[paths[i] / kSize];
      const float inside = segment.value + (static_cast<float>(value<T>(words, i)) - segment.origin) * segment.slope;
      const float mean = segment.slope == segment.slope ? inside : segment.value;
      const float above = mean < constants_.lowest ? constants_.lowest : mean;
      means[i] = above > constants_.highest ? constants_.highest : above;
      gaps[i] = segment.gap;
    }
  }

  const Storage& storage_;
  const DrawConstants<Capacity>& constants_;
};

}  // namespace fewbit::cuda
