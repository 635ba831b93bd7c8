// Encoding with many breaks. Each element searches a copy of the breaks in shared memory. Draws search the knots.

#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
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
  int point_steps, level_steps;
  float points[Capacity], origins[Capacity], values[Capacity], slopes[Capacity];
  float levels[256], inverse_gaps[256];

  explicit DrawConstants(const Table& table)
      : bits(table.bits),
        count(table.knots.count),
        n_levels(table.knots.n_levels),
        point_steps(table.knots.point_steps),
        level_steps(table.knots.level_steps) {
    const Knots& knots = table.knots;
    std::copy_n(knots.points, count, points);
    std::copy_n(knots.origins, count, origins);
    std::copy_n(knots.values, count, values);
    std::copy_n(knots.slopes, count - 1, slopes);
    std::copy_n(knots.levels, n_levels, levels);
    std::copy_n(knots.inverse_gaps, n_levels - 1, inverse_gaps);
  }
};

// Knots in shared memory. Every thread of the block constructs this.
template <int Capacity>
class SharedKnots {
 public:
  struct Storage {
    float padded_points[1 << DrawConstants<Capacity>::kSteps];
    float origins[Capacity], values[Capacity], slopes[Capacity];
    float padded_levels[512], inverse_gaps[256];
  };

  __device__ SharedKnots(const DrawConstants<Capacity>& constants, Storage& storage) {
    const float beyond_all = float_of(0x7F800000u);
    for (int j = threadIdx.x; j < 1 << constants.point_steps; j += blockDim.x) {
      const bool exists = j < constants.count;
      storage.padded_points[j] = exists ? constants.points[j] : beyond_all;
      if (exists) {
        storage.origins[j] = constants.origins[j];
        storage.values[j] = constants.values[j];
        storage.slopes[j] = constants.slopes[j];
      }
    }
    for (int j = threadIdx.x; j < 1 << constants.level_steps; j += blockDim.x) {
      const bool exists = j < constants.n_levels;
      storage.padded_levels[j] = exists ? constants.levels[j] : beyond_all;
      if (exists) storage.inverse_gaps[j] = constants.inverse_gaps[j];
    }
    __syncthreads();
    knots_.count = constants.count;
    knots_.points = knots_.padded_points = storage.padded_points;
    knots_.origins = storage.origins;
    knots_.values = storage.values;
    knots_.slopes = storage.slopes;
    knots_.n_levels = constants.n_levels;
    knots_.levels = knots_.padded_levels = storage.padded_levels;
    knots_.inverse_gaps = storage.inverse_gaps;
    knots_.point_steps = constants.point_steps;
    knots_.level_steps = constants.level_steps;
  }

  // Returns the codes drawn for 8 elements. Element i has the number first + Tile<T>::element(group, lane, i).
  template <class T>
  __device__ Octet codes(const uint32_t* words, uint64_t seed, int64_t first, int group, int lane) const {
    Octet codes = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint64_t element = static_cast<uint64_t>(first + Tile<T>::element(group, lane, i));
      const float x = static_cast<float>(value<T>(words, i));
      (i < 4 ? codes.low : codes.high) |= static_cast<uint32_t>(draw(knots_, x, seed, element)) << (i % 4 * 8);
    }
    return codes;
  }

 private:
  Knots knots_;
};

}  // namespace fewbit::cuda
