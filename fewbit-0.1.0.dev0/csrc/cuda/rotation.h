// Two groups of a rotated copy in a warp: lanes 0 to 15 work on one group, lanes 16 to 31 on the next group.
//
// A group is a matrix of 16 x 16 numbers: element i is in row i / 16 and column i % 16. A lane has one column in its
// registers, or one row. Sums, and the first four stages of the Walsh-Hadamard transform, stay within columns until few
// numbers are left. The last four stages stay within rows. Shared memory turns columns into rows and back, which takes fewer
// instructions than shuffles between lanes.
//
// Groups of fewer than 256 elements are rare. They are rotated in shared memory, by fewer lines of code and in more time.
//
// All lanes of a warp take part in every shuffle, vote and __syncwarp, so a condition around one is equal in all lanes.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/philox.h"
#include "common/rotate.h"
#include "cuda/pairs.h"
#include "cuda/tile.h"

namespace fewbit::cuda {

static_assert(kSide * kSide == kFullGroup);

// The blocks that fit on a multiprocessor with 64 registers a thread, and the blocks that are launched for each: two full waves,
// or four on a device whose shared memory has room for two blocks. More warps hide more latency.
constexpr int kResidentBlocks = 4, kLaunchedBlocks = 8;

// The shared memory of the lanes that work on one group.
struct alignas(16) Workspace {
  // Rows are padded. Otherwise lanes that read 16 bytes of different rows would meet in the same banks.
  static constexpr int kRow = kSide + 4;

  float numbers[kSide * kRow];
  uint32_t random[4 * kSide];  // the four Philox words of each lane's counter
  float pending[kSide];        // for the caller; the workspaces of a warp's two groups begin in different banks

  __device__ float& at(int i) { return numbers[i / kSide * kRow + i % kSide]; }
};

// -- columns and rows ------------------------------------------------------------------------------------

__device__ inline void put_column(const float* values, Workspace& own) {
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kSide; ++j) own.numbers[j * Workspace::kRow + lane_of_group()] = values[j];
  __syncwarp();
}

__device__ inline void get_column(float* values, const Workspace& own) {
#pragma unroll
  for (int j = 0; j < kSide; ++j) values[j] = own.numbers[j * Workspace::kRow + lane_of_group()];
}

__device__ inline void put_row(const float* values, Workspace& own) {
  __syncwarp();
#pragma unroll
  for (int k = 0; k < kSide; k += 4) {
    uint4 vector;
    vector.x = bits_of(values[k]), vector.y = bits_of(values[k + 1]);
    vector.z = bits_of(values[k + 2]), vector.w = bits_of(values[k + 3]);
    *reinterpret_cast<uint4*>(own.numbers + lane_of_group() * Workspace::kRow + k) = vector;
  }
  __syncwarp();
}

__device__ inline void get_row(float* values, const Workspace& own) {
#pragma unroll
  for (int k = 0; k < kSide; k += 4) {
    const uint4 vector = *reinterpret_cast<const uint4*>(own.numbers + lane_of_group() * Workspace::kRow + k);
    values[k] = float_of(vector.x), values[k + 1] = float_of(vector.y);
    values[k + 2] = float_of(vector.z), values[k + 3] = float_of(vector.w);
  }
}

// Returns the sum of a group in all its lanes. column: zeros where no elements are. quads: set to the greatest of the sums of four
// numbers of this lane, unless it is null.
__device__ inline float sum_of_group(const float* column, float* quads = nullptr) {
  float sums[kSide / 2];
#pragma unroll
  for (int j = 0; j < kSide / 2; ++j) sums[j] = column[j] + column[j + kSide / 2];
#pragma unroll
  for (int half = kSide / 4; half > 0; half /= 2) {
#pragma unroll
    for (int j = 0; j < half; ++j) sums[j] += sums[j + half];
    if (half == kSide / 4 && quads) *quads = fmaxf(fmaxf(sums[0], sums[1]), fmaxf(sums[2], sums[3]));
  }
  float sum = sums[0];
#pragma unroll
  for (int step = kSide / 2; step > 0; step /= 2) {
    sum += float_of(__shfl_xor_sync(kAllLanes, bits_of(sum), step));
  }
  return sum;
}

// Does one stage of a transform on a column or a row, or on another number of adjacent numbers.
template <int Distance, int Count = kSide>
__device__ inline void transform_stage(float* values) {
#pragma unroll
  for (int j = 0; j < Count; ++j) {
    if (j & Distance) continue;
    const float a = values[j], b = values[j + Distance];
    values[j] = a + b;
    values[j + Distance] = a - b;
  }
}

// Does the stages of a transform, from distance First on.
template <int First = kSide / 2, int Count = kSide>
__device__ inline void transform(float* values) {
  transform_stage<First, Count>(values);
  if constexpr (First > 1) transform<First / 2, Count>(values);
}

// -- random words ----------------------------------------------------------------------------------------

// Writes the words of 16 counters to `own.random`.
__device__ inline void put_random(Workspace& own, uint64_t seed, uint64_t counter) {
  const PhiloxWords random = philox_words(seed, counter);
  uint4 vector;
  vector.x = random.words[0], vector.y = random.words[1], vector.z = random.words[2], vector.w = random.words[3];
  __syncwarp();
  reinterpret_cast<uint4*>(own.random)[lane_of_group()] = vector;
  __syncwarp();
}

// Writes all words of a group. Those of counter k begin at 4 k.
__device__ inline void put_random_of_group(Workspace& own, uint64_t seed, int64_t number) {
  put_random(own, seed, group_counter(number) + static_cast<unsigned>(lane_of_group()));
}

// Writes the words that the next groups of these lanes need, if the groups are full and are rotated once: Counters counters
// each for 16 / Counters groups, those of turn t from word 4 * Counters * t on. The first two counters are those of the signs. A third
// one is that of the scale. number: that of the first of these groups. apart: the distance from each group to the next one.
template <int Counters>
__device__ inline void put_random_ahead(Workspace& own, uint64_t seed, int64_t number, int64_t apart) {
  const int lane = lane_of_group_now(), turn = lane / Counters, k = lane % Counters;
  const int64_t group = number + turn * apart;
  put_random(own, seed, group_counter(group) + static_cast<unsigned>(k < 2 ? k : kRoundingCounter));
}

// -- signs -----------------------------------------------------------------------------------------------

__device__ inline bool is_negative(const uint32_t* words, int i) { return words[i / 32] >> (i % 32) & 1u; }

// Multiplies a column by +factor or -factor. first, second: the words of signs.
__device__ inline void multiply_column(float* values, const uint4& first, const uint4& second, float factor) {
  const uint32_t signs[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
  const uint32_t even = 1u << lane_of_group(), odd = even << kSide;
#pragma unroll
  for (int j = 0; j < kSide; ++j) values[j] *= signs[j / 2] & (j % 2 ? odd : even) ? -factor : factor;
}

__device__ inline void multiply_row(float* values, const uint32_t* words, float factor) {
  const uint32_t signs = words[lane_of_group() / 2] >> (lane_of_group() % 2 * kSide);
#pragma unroll
  for (int k = 0; k < kSide; ++k) values[k] *= signs & (1u << k) ? -factor : factor;
}

// -- rotations in registers ------------------------------------------------------------------------------

// Rotates a column of a full group into a row. signs: 8 words, aligned to 16 bytes.
__device__ inline void rotate(float* values, Workspace& own, const uint32_t* signs) {
  const auto* words = reinterpret_cast<const uint4*>(signs);
  multiply_column(values, words[0], words[1], inverse_root(kFullGroup));
  transform(values);
  put_column(values, own);
  get_row(values, own);
  transform(values);
}

// Undoes a rotation of a full group, and multiplies by `scale`: a column, after the first stage, becomes a row.
__device__ inline void rotate_back(float* values, Workspace& own, const uint32_t* signs, float scale) {
  transform<kSide / 4>(values);
  put_column(values, own);
  get_row(values, own);
  transform(values);
  multiply_row(values, signs, scale * inverse_root(kFullGroup));
}

// Rotates a row of a full group a second time, if is_twice. number: that of the group. The lanes of the warp's other group, which
// may be rotated once, take part in all exchanges. Their numbers become a column and a row again.
__device__ inline void rotate_again(float* values, Workspace& own, uint64_t seed, int64_t number, bool is_twice) {
  // The signs are in the padding of the first two rows.
  const auto signs = [&own](int i) -> uint4& { return *reinterpret_cast<uint4*>(own.numbers + i * Workspace::kRow + kSide); };
  put_row(values, own);
  const int lane = lane_of_group_now();
  if (lane < 2) {
    const PhiloxWords random = philox_words(seed, group_counter(number) + static_cast<unsigned>(sign_counter(1, 0) + lane));
    signs(lane) = {random.words[0], random.words[1], random.words[2], random.words[3]};
  }
  __syncwarp();
  get_column(values, own);
  if (is_twice) {
    multiply_column(values, signs(0), signs(1), inverse_root(kFullGroup));
    transform(values);
  }
  put_column(values, own);
  get_row(values, own);
  if (is_twice) transform(values);
}

// Undoes the rotations of a full group, and multiplies by `scale`: a column becomes a row.
__device__ inline void rotate_full_back(float* values, Workspace& own, const uint32_t* words, float scale, bool is_twice) {
  if (is_twice) transform(values);
  put_column(values, own);
  get_row(values, own);
  if (is_twice) {
    transform(values);
    multiply_row(values, words + 4 * sign_counter(1, 0), inverse_root(kFullGroup));
  }
  put_row(values, own);
  get_column(values, own);
  transform_stage<kSide / 2>(values);
  rotate_back(values, own, words + 4 * sign_counter(0, 0), scale);
}

// -- rotations in shared memory --------------------------------------------------------------------------

// Transforms `size` numbers of the group, a power of two or 0, from number `first` on.
__device__ inline void transform_in_memory(Workspace& own, int first, int size) {
#pragma unroll 1
  for (int distance = kFullGroup / 2; distance > 0; distance /= 2) {
#pragma unroll 1
    for (int pair = lane_of_group(); distance < size && pair < size / 2; pair += kSide) {
      const int i = first + pair + (pair & -distance);
      const float a = own.at(i), b = own.at(i + distance);
      own.at(i) = a + b;
      own.at(i + distance) = a - b;
    }
    __syncwarp();
  }
}

// Multiplies numbers begin to end - 1: those below `size` by +inside or -inside, the others by +outside or -outside.
__device__ inline void multiply_in_memory(Workspace& own, const uint32_t* words, int begin, int end, int size, float inside,
                                          float outside) {
#pragma unroll 1
  for (int i = begin + lane_of_group(); i < end; i += kSide) {
    const float factor = i < size ? inside : outside;
    own.at(i) *= is_negative(words, i) ? -factor : factor;
  }
  __syncwarp();
}

// Moves the numbers of a group of m elements: number i becomes the former number (i + by) mod m.
__device__ inline void move_in_memory(Workspace& own, int m, int by) {
  float moved[kSide];
#pragma unroll
  for (int j = 0; j < kSide; ++j) {
    const int i = j * kSide + lane_of_group(), from = i + by < m ? i + by : i + by - m;
    moved[j] = i < m ? own.at(from) : 0.0f;
  }
  put_column(moved, own);
}

// Does one rotation of a group of m elements. signs: those of the first transform before those of the second one.
__device__ inline void rotate_once_in_memory(Workspace& own, const uint32_t* signs, int m) {
  const int size = transform_size(m), last = size < m ? size : 0;
  const float root = inverse_root(size);
  multiply_in_memory(own, signs, 0, m, size, root, 1.0f);
  transform_in_memory(own, 0, size);
  multiply_in_memory(own, signs + 8, m - last, m, m, root, root);
  transform_in_memory(own, m - last, last);
}

// Undoes one rotation, and multiplies by `scale`.
__device__ inline void rotate_once_back_in_memory(Workspace& own, const uint32_t* signs, int m, float scale) {
  const int size = transform_size(m), last = size < m ? size : 0;
  const float root = inverse_root(size);
  transform_in_memory(own, m - last, last);
  multiply_in_memory(own, signs + 8, m - last, m, m, root, root);
  transform_in_memory(own, 0, size);
  multiply_in_memory(own, signs, 0, m, size, scale * root, scale);
}

// Rotates a group of m elements, and undoes it. words: those of the group. has_spike: one element has more than an eighth of
// the energy.
__device__ inline void rotate_in_memory(Workspace& own, const uint32_t* words, int m, bool has_spike) {
  const int twice = rotates_twice(m, has_spike) ? m : 0;
#pragma unroll 1
  for (int rotation = 0; rotation < 2; ++rotation) {
    if (rotation == 1 && !any(twice > 0)) break;
    if (rotation == 1) move_in_memory(own, m, twice > 0 ? shift_of(m) : 0);
    rotate_once_in_memory(own, words + 4 * sign_counter(rotation, 0), rotation == 0 ? m : twice);
  }
}
__device__ inline void rotate_back_in_memory(Workspace& own, const uint32_t* words, int m, float scale, bool has_spike) {
  const int twice = rotates_twice(m, has_spike) ? m : 0;
#pragma unroll 1
  for (int rotation = 1; rotation >= 0; --rotation) {
    if (rotation == 1 && !any(twice > 0)) continue;
    const uint32_t* signs = words + 4 * sign_counter(rotation, 0);
    rotate_once_back_in_memory(own, signs, rotation == 0 ? m : twice, rotation == 0 ? scale : 1.0f);
    if (rotation == 1) move_in_memory(own, m, twice > 0 ? (m - shift_of(m)) % m : 0);
  }
}

// -- bit-planes ------------------------------------------------------------------------------------------
//
// A register of codes has the bits of a lane's row in two planes, an even plane in its lower half and the next one in its upper
// half.

// Exchanges between such a register and the word that a lane reads or writes: an even lane has the word of the even plane of
// 32 elements, the next lane that of the odd plane. The exchange is its own inverse.
__device__ inline uint32_t exchange_planes(uint32_t own) {
  const uint32_t other = __shfl_xor_sync(kAllLanes, own, 1);
  return __byte_perm(own, other, lane_of_group() % 2 ? 0x3276 : 0x5410);
}

// Transposes two matrices of 16 x 16 bits, one in each half of the registers of 16 lanes. Bits of rows become bits of columns.
__device__ inline uint32_t transposed_planes(uint32_t own) {
  const int lane = lane_of_group();
#pragma unroll
  for (int step = kSide / 2; step > 0; step /= 2) {
    const uint32_t low = step == 8 ? 0x00FF00FFu : step == 4 ? 0x0F0F0F0Fu : step == 2 ? 0x33333333u : 0x55555555u;
    const bool is_upper = lane & step;
    const uint32_t stays = is_upper ? ~low : low;
    const uint32_t other = __shfl_xor_sync(kAllLanes, own, step);
    const uint32_t moved = __funnelshift_l(other, other, is_upper ? 32 - step : step);
    own = (own & stays) | (moved & ~stays);
  }
  return own;
}

// A lane's bits in all planes.
struct Planes {
  uint32_t pairs[kMaxBits / 2];
};

// Packs 16 codes, and unpacks them.
__device__ inline Planes pack_codes(const uint32_t* codes) {
  Octet octets[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t* own = codes + 8 * i;
    octets[i] = transposed({own[0] | own[1] << 8 | own[2] << 16 | own[3] << 24,
                            own[4] | own[5] << 8 | own[6] << 16 | own[7] << 24});
  }
  return {{__byte_perm(octets[0].low, octets[1].low, 0x5140), __byte_perm(octets[0].low, octets[1].low, 0x7362),
           __byte_perm(octets[0].high, octets[1].high, 0x5140), __byte_perm(octets[0].high, octets[1].high, 0x7362)}};
}

__device__ inline void unpack_codes(const Planes& planes, uint32_t* codes) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned selector = i == 0 ? 0x6420 : 0x7531;
    const Octet octet = transposed({__byte_perm(planes.pairs[0], planes.pairs[1], selector),
                                    __byte_perm(planes.pairs[2], planes.pairs[3], selector)});
#pragma unroll
    for (int j = 0; j < 8; ++j) codes[8 * i + j] = (j < 4 ? octet.low : octet.high) >> (j % 4 * 8) & 0xFFu;
  }
}

}  // namespace fewbit::cuda
