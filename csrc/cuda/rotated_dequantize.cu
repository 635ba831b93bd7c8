// The dequantizer of rotated copies: two groups a warp.

#include <type_traits>

#include "common/normal_levels.h"
#include "common/rotate.h"
#include "cuda/dispatch.h"
#include "cuda/groups.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/rotation.h"

namespace fewbit::cuda {
namespace {

__device__ const NormalLevels kLevelsOnDevice = kNormalLevels;

// A group needs the two counters of its signs.
constexpr int kCountersAhead = 2, kTurns = kSide / kCountersAhead;

// -- levels ----------------------------------------------------------------------------------------------

// The levels in shared memory, by code.
struct CodeLevels {
  static constexpr int kFewBits = 2;  // the most bits of `pairs`

  float signed_levels[2 << kMaxBits];  // those of `bits` bits begin at first(bits)

  // The first stage of the transform of two numbers a and b: a + b and a - b. The entry's bits are the even plane's bits of a
  // and b, followed by the odd plane's.
  struct alignas(8) Pair {
    float sum, difference;
  };
  Pair pairs[kFewBits][16];

  __host__ __device__ static constexpr int first(int bits) { return (1 << bits) - 2; }
};

__device__ inline float signed_level(int code, int bits) {
  const int half = 1 << (bits - 1), index = code % half;
  const float level = kLevelsOnDevice.levels[levels_begin(bits) + index];
  return code >= half ? -level : level;
}

// Fills the tables. Every thread of a block calls it.
__device__ void fill(CodeLevels& levels) {
  for (int i = threadIdx.x; i < CodeLevels::first(kMaxBits + 1); i += kThreads) {
    int bits = 1;
    while (i >= CodeLevels::first(bits + 1)) ++bits;
    levels.signed_levels[i] = signed_level(i - CodeLevels::first(bits), bits);
  }
  for (int i = threadIdx.x; i < CodeLevels::kFewBits * 16; i += kThreads) {
    const int bits = i / 16 + 1, mask = (1 << bits) - 1;
    const float a = signed_level(((i & 1) | (i >> 1 & 2)) & mask, bits);
    const float b = signed_level(((i >> 1 & 1) | (i >> 2 & 2)) & mask, bits);
    levels.pairs[bits - 1][i % 16] = {a + b, a - b};
  }
}

// -- codes -----------------------------------------------------------------------------------------------

// The codes of a group.
struct PackedGroup {
  const uint32_t* words;  // begins with the block of the first element
  int m;                  // elements
  int shift;              // the first element's place in its block
  int bits;

  // Returns the bits of 32 elements in a plane. No word beyond the block of the last element is read.
  __device__ uint32_t word(int block, int plane) const {
    const int left = m - block * kBlock;
    if (left <= 0 || plane >= bits) return 0;
    const uint32_t* from = words + block * bits + plane;
    if (shift == 0) return *from;
    const uint32_t next = shift + left > kBlock ? from[bits] : 0u;
    return __funnelshift_r(*from, next, shift);
  }
};

// Reads a column of codes.
__device__ Planes read_planes(const PackedGroup& group, int most_bits) {
  const int lane = lane_of_group();
  Planes planes = {};
#pragma unroll
  for (int pair = 0; pair < kMaxBits / 2; ++pair) {
    if (2 * pair >= most_bits) break;
    planes.pairs[pair] = transposed_planes(exchange_planes(group.word(lane / 2, 2 * pair + lane % 2)));
  }
  return planes;
}

// Returns a column of levels of codes with 1 or 2 bits, after the first stage of the transform.
__device__ void decode_few(float* values, uint32_t planes, const CodeLevels::Pair* pairs) {
  const Octet entries = transposed({planes, 0});
#pragma unroll
  for (int j = 0; j < kSide / 2; ++j) {
    const uint32_t entry = (j < 4 ? entries.low : entries.high) >> (j % 4 * 8) & 0xFFu;
    const CodeLevels::Pair pair = pairs[entry];
    values[j] = pair.sum;
    values[j + kSide / 2] = pair.difference;
  }
}

// Returns a column of levels.
__device__ void decode_many(float* values, const Planes& planes, const float* signed_levels) {
  uint32_t codes[kSide];
  unpack_codes(planes, codes);
#pragma unroll
  for (int j = 0; j < kSide; ++j) values[j] = signed_levels[codes[j]];
}

// -- values ----------------------------------------------------------------------------------------------

// Returns x, or the closest number that T can represent as a finite one.
template <class T>
__device__ float representable(float x) {
  return std::is_same_v<T, Float16> ? within_float16(x) : x;
}

// Returns the value of an element after the affine map.
__device__ float mapped(float x, const Affine& affine, int64_t entry) {
  return x * scale_at(affine, entry) + shift_at(affine, entry);
}

// Reads four neighboring entries of a vector; without a vector, four times `none`.
__device__ void read_four(float* values, const float* vector, int64_t entry, float none) {
  uint4 four = {bits_of(none), bits_of(none), bits_of(none), bits_of(none)};
  if (vector) four = *reinterpret_cast<const uint4*>(vector + entry);
  values[0] = float_of(four.x), values[1] = float_of(four.y), values[2] = float_of(four.z), values[3] = float_of(four.w);
}

// Applies the affine map to a row of a full group whose elements lie side by side, if the group has one entry, or if neighbors
// have neighboring entries that can be read four at a time. If not, it returns false.
__device__ bool map_row(float* values, const Affine& affine, const Entries& entries) {
  if (all(entries.are_one(kFullGroup))) {
    const int64_t entry = entries.of(0);
    const float scale = scale_at(affine, entry), shift = shift_at(affine, entry);
#pragma unroll
    for (int k = 0; k < kSide; ++k) values[k] = values[k] * scale + shift;
    return true;
  }
  int64_t entry = entries.of(lane_of_group() * kSide);
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(affine.scale) | reinterpret_cast<uintptr_t>(affine.shift);
  const bool in_fours = entries.are_neighbors(4) && (affine.index.count | entry) % 4 == 0 && addresses % sizeof(uint4) == 0;
  if (!all(in_fours)) return false;
#pragma unroll
  for (int k = 0; k < kSide; k += 4) {
    float scales[4], shifts[4];
    read_four(scales, affine.scale, entry, 1.0f);
    read_four(shifts, affine.shift, entry, -0.0f);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[k + i] = values[k + i] * scales[i] + shifts[i];
    entry = entries.after(entry, 4);
  }
  return true;
}

// The registers that a row of T fills, and its vectors of 16 bytes.
template <class T>
constexpr int kRowWords = kSide * sizeof(T) / 4;
template <class T>
constexpr int kRowVectors = kRowWords<T> / 4;

// Writes the rows of a full group to memory that is aligned to vectors. Rows change lanes before, so that the lanes side by
// side write side by side; float64 is written directly.
template <class T>
__device__ void store_vectors(const uint32_t* words, T* out, Workspace& own) {
  const int lane = lane_of_group();
  auto* to = reinterpret_cast<uint4*>(out);
  uint4 vectors[kRowVectors<T>];
#pragma unroll
  for (int i = 0; i < kRowVectors<T>; ++i) {
    vectors[i].x = words[4 * i], vectors[i].y = words[4 * i + 1];
    vectors[i].z = words[4 * i + 2], vectors[i].w = words[4 * i + 3];
  }
  if constexpr (sizeof(T) == 8) {
#pragma unroll
    for (int i = 0; i < kRowVectors<T>; ++i) to[lane * kRowVectors<T> + i] = vectors[i];
  } else {
    // A vector of padding after every four vectors keeps lanes out of each other's banks.
    auto* staged = reinterpret_cast<uint4*>(own.numbers);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRowVectors<T>; ++i) {
      const int place = lane * kRowVectors<T> + i;
      staged[place + place / 4] = vectors[i];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRowVectors<T>; ++i) {
      const int place = i * kSide + lane;
      to[place] = staged[place + place / 4];
    }
  }
}

// Writes a row of values of a group of m elements, which it changes.
template <class T>
__device__ void store_row(float* values, const Affine& affine, T* out, const GroupPlace& place, int m,
                          Workspace& own) {
  const bool are_neighbors = m == kFullGroup && place.contiguous();
  T* const first = out + (are_neighbors ? place.of(0) : 0);
  const bool is_aligned = all(are_neighbors && reinterpret_cast<uintptr_t>(first) % sizeof(uint4) == 0);
  if (is_aligned && (!affine.exists() || map_row(values, affine, {affine.index, place.of(0)}))) {
    uint32_t words[kRowWords<T>];
#pragma unroll
    for (int k = 0; k < kSide; k += 2) {
      const float low = representable<T>(values[k]), high = representable<T>(values[k + 1]);
      set_pair<T>(words, k, static_cast<Wide<T>>(low), static_cast<Wide<T>>(high));
    }
    return store_vectors(words, first, own);
  }
  put_row(values, own);
  const Entries entries(affine.index, affine.exists() && place.contiguous() && m > 0 ? place.of(0) : 0);
#pragma unroll 1
  for (int i = lane_of_group(); i < m; i += kSide) {
    const float x = affine.exists() ? mapped(own.at(i), affine, entries.of(i)) : own.at(i);
    store_one(representable<T>(x), out + place.of(i));
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    dequantize_kernel(const __grid_constant__ Streams uniform, const __grid_constant__ GroupMap map, const int64_t* order,
                      const int64_t* counts, const uint32_t* packed, const uint16_t* ranges,
                      const __grid_constant__ Affine affine, T* out) {
  __shared__ Streams streams;
  __shared__ CodeLevels levels;
  __shared__ Workspace workspaces[kGroupsOfBlock];
  fill(levels);
  share_streams(streams, uniform, counts);
  Workspace& own = workspaces[threadIdx.x / kSide];
  const uint64_t seed = load_seed(ranges + uniform.groups * columns(streams.fp32_min));

  int turn = 0;  // the place of the next group's random words; 0: there are none yet
#pragma unroll 1
  for (int64_t pair = first_pair_of_warp(); 2 * pair < streams.groups; pair += pairs_apart()) {
    const LocatedGroup of = locate(streams, map, pair);
    const Stream& stream = streams.of[of.stream];
    const int m = of.length, bits = stream.bits, most_bits = larger(bits);
    const GroupScale found = load_scale(ranges, streams.fp32_min, m > 0 ? of.number : 0);
    const uint32_t* words = packed + stream.first_word + word_index(block_of(of.first), 0, bits);
    const Planes planes = read_planes({words, m, lane_of(of.first), bits}, most_bits);
    float values[kSide];
    const bool are_full = all(m == kFullGroup);
    if (are_full && !any(found.is_twice)) {
      if (most_bits <= CodeLevels::kFewBits) {
        decode_few(values, planes.pairs[0], levels.pairs[bits - 1]);
      } else {
        decode_many(values, planes, levels.signed_levels + CodeLevels::first(bits));
        transform_stage<kSide / 2>(values);
      }
      if (turn == 0) put_random_ahead<kCountersAhead>(own, seed, of.number);
      rotate_back(values, own, own.random + 4 * kCountersAhead * turn, found.scale);
      turn = (turn + 1) % kTurns;
    } else {
      turn = 0;
      decode_many(values, planes, levels.signed_levels + CodeLevels::first(bits));
      put_random_of_group(own, seed, of.number);
      if (are_full) {
        rotate_full_back(values, own, own.random, found.scale, found.is_twice);
      } else {
        put_column(values, own);
        rotate_back_in_memory(own, own.random, m, found.scale, found.is_twice);
        get_row(values, own);
      }
    }
#pragma unroll
    for (int k = 0; k < kSide; ++k) values[k] = found.mean + values[k];
    store_row(values, affine, out, place_of(of, streams, order), m, own);
  }
}

}  // namespace

void dequantize_rotated(const Quantized& of, const int32_t* packed, const uint16_t* ranges, const Affine& affine,
                        void* out, int dtype, int device, void* stream) {
  if (of.groups <= 0) return;
  const DeviceScope scope(device);
  const Streams uniform = uniform_streams(of);
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    launch(dequantize_kernel<T>, device, stream, pair_count(of.groups), kLaunchedBlocks, uniform,
           group_map(uniform, of.counts), of.order, of.counts, reinterpret_cast<const uint32_t*>(packed), ranges, affine,
           static_cast<T*>(out));
  });
}

}  // namespace fewbit::cuda
