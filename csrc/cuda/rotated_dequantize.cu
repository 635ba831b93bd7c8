// The dequantizer of rotated copies: two groups a warp. Most groups are full, aligned, rotated once, and have codes of few bits.
// They are transformed by products of matrices, one group after the other. All others are transformed as in rotation.h.

#include <type_traits>

#include "common/normal_levels.h"
#include "common/rotate.h"
#include "cuda/dispatch.h"
#include "cuda/groups.h"
#include "cuda/hadamard.h"
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
  float signed_levels[2 << kMaxBits];  // those of `bits` bits begin at first(bits)

  __host__ __device__ static constexpr int first(int bits) { return (1 << bits) - 2; }
  __device__ const float* of(int bits) const { return signed_levels + first(bits); }
};

__device__ inline float signed_level(int code, int bits) {
  const int half = 1 << (bits - 1), index = code % half;
  const float level = kLevelsOnDevice.levels[levels_begin(bits) + index];
  return code >= half ? -level : level;
}

// Fills the table. Every thread of a block calls it.
__device__ void fill(CodeLevels& levels) {
  for (int i = threadIdx.x; i < CodeLevels::first(kMaxBits + 1); i += kThreads) {
    int bits = 1;
    while (i >= CodeLevels::first(bits + 1)) ++bits;
    levels.signed_levels[i] = signed_level(i - CodeLevels::first(bits), bits);
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

// Returns a column of levels.
__device__ void decode(float* values, const Planes& planes, const float* signed_levels) {
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

// Returns true if neighbors have neighboring entries that can be read four at a time. place: that of the group.
__device__ bool are_fours(const Affine& affine, const Entries& entries, int64_t place) {
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(affine.scale) | reinterpret_cast<uintptr_t>(affine.shift);
  return entries.are_neighbors(4) && (affine.index.count | place) % 4 == 0 && addresses % sizeof(uint4) == 0;
}

// Returns true if map_neighbors can apply the affine map, if there is one, to a full group whose elements lie side by side.
__device__ bool can_map(const Affine& affine, int64_t place) {
  if (!affine.exists()) return true;
  const Entries entries(affine.index, place);
  return entries.are_one(kFullGroup) || are_fours(affine, entries, place);
}

// Applies the affine map to neighbors from element `first` of the group on.
template <int Length>
__device__ void map_neighbors(float* values, const Affine& affine, int64_t place, int first) {
  const Entries entries(affine.index, place);
  if (all(entries.are_one(kFullGroup))) {
    const int64_t entry = entries.of(0);
    const float scale = scale_at(affine, entry), shift = shift_at(affine, entry);
#pragma unroll
    for (int k = 0; k < Length; ++k) values[k] = values[k] * scale + shift;
    return;
  }
  int64_t entry = entries.of(first);
#pragma unroll
  for (int k = 0; k < Length; k += 4) {
    float scales[4], shifts[4];
    read_four(scales, affine.scale, entry, 1.0f);
    read_four(shifts, affine.shift, entry, -0.0f);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[k + i] = values[k + i] * scales[i] + shifts[i];
    entry = entries.after(entry, 4);
  }
}

// Rounds neighbors to T.
template <class T, int Length>
__device__ void narrow(uint32_t* words, const float* values) {
#pragma unroll
  for (int k = 0; k < Length; k += 2) {
    const float low = representable<T>(values[k]), high = representable<T>(values[k + 1]);
    set_pair<T>(words, k, static_cast<Wide<T>>(low), static_cast<Wide<T>>(high));
  }
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
  const bool is_aligned = are_neighbors && reinterpret_cast<uintptr_t>(first) % sizeof(uint4) == 0;
  if (all(is_aligned && can_map(affine, place.of(0)))) {
    if (affine.exists()) map_neighbors<kSide>(values, affine, place.of(0), lane_of_group() * kSide);
    uint32_t words[kRowWords<T>];
    narrow<T, kSide>(words, values);
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

// -- products of matrices --------------------------------------------------------------------------------

// The elements of a lane in a group that is transformed by products.
constexpr int kNeighbors = kFullGroup / 32;

// Returns the number that the lanes of the i-th group have.
__device__ inline float of_group(float own, int i) { return float_of(__shfl_sync(kAllLanes, bits_of(own), i * kSide, 32)); }
__device__ inline int64_t of_group(int64_t own, int i) {
  const uint32_t low = __shfl_sync(kAllLanes, static_cast<uint32_t>(own), i * kSide, 32);
  const uint32_t high = __shfl_sync(kAllLanes, static_cast<uint32_t>(own >> 32), i * kSide, 32);
  return static_cast<int64_t>(static_cast<uint64_t>(high) << 32 | low);
}

// Writes the neighbors of a lane, which fill vectors. Two lanes exchange halves of float32, so that each access fills sectors.
template <class T>
__device__ void store_neighbors(float* values, T* out) {
  const int lane = threadIdx.x % 32;
  constexpr int kVectors = kNeighbors * sizeof(T) / sizeof(uint4);
  uint32_t words[4 * kVectors];
  narrow<T, kNeighbors>(words, values);
  auto* to = reinterpret_cast<uint4*>(out) + lane * kVectors;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t got = __shfl_xor_sync(kAllLanes, lane % 2 ? words[i] : words[i + 4], 1);
      (lane % 2 ? words[i] : words[i + 4]) = got;
    }
    to -= lane % 2;
  }
  constexpr int kApart = sizeof(T) == 4 ? 2 : 1;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    to[i * kApart] = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
  }
}

// Dequantizes the groups of a warp by products. signs: those of the first group, sizeof(Workspace) before those of the second.
// words: the codes of the first group, followed by those of the second one.
template <bool Mapped, class T>
__device__ void dequantize_pair(const GroupScale& found, const uint32_t* words, int bits, const float* signed_levels,
                                const uint8_t* signs, const Affine& affine, T* out, int64_t begin, uint32_t part) {
  const int lane = threadIdx.x % 32;
#pragma unroll (Mapped ? 1 : 2)
  for (int i = 0; i < 2; ++i) {
    const float mean = of_group(found.mean, i), factor = of_group(found.scale * inverse_root(kFullGroup), i);
    const int64_t place = of_group(begin, i);
    float values[kNeighbors];
    transform(values, read_levels(words + i * (kFullGroup / kBlock) * bits, bits, signed_levels), part);
    const uint32_t negative = signs[i * sizeof(Workspace) + lane];
#pragma unroll
    for (int k = 0; k < kNeighbors; ++k) values[k] = mean + values[k] * (negative & (1u << k) ? -factor : factor);
    if (Mapped) map_neighbors<kNeighbors>(values, affine, place, lane * kNeighbors);
    store_neighbors(values, out + place);
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
  __shared__ uint64_t seed;  // in a register, it would be joined by twenty keys that the compiler computes ahead
  fill(levels);
  if (threadIdx.x == 0) seed = load_seed(ranges + uniform.groups * columns(uniform.fp32_min));
  share_streams(streams, uniform, counts);
  Workspace& own = workspaces[threadIdx.x / kSide];
  // The shuffle keeps the compiler from computing the part again in each turn.
  const uint32_t part = __shfl_xor_sync(kAllLanes, part_of_transform(), 0);

  int turn = 0;  // the place of the next group's random words; 0: there are none yet
#pragma unroll 1
  for (int64_t pair = first_pair_of_warp(); 2 * pair < streams.groups; pair += pairs_apart()) {
    const LocatedGroup of = locate(streams, map, pair);
    const Stream& stream = streams.of[of.stream];
    const int m = of.length, bits = stream.bits, most_bits = larger(bits);
    const GroupScale found = load_scale(ranges, streams.fp32_min, m > 0 ? of.number : 0);
    const uint32_t* words = packed + stream.first_word + word_index(block_of(of.first), 0, bits);
    int64_t begin = 0;
    bool is_quick = kHasProducts && !found.is_twice && bits == most_bits && bits <= kMostProductBits;
    is_quick = is_quick && is_full_at(begin, of, streams, order) && of.first % kBlock == 0;
    const auto addresses = reinterpret_cast<uintptr_t>(words) | reinterpret_cast<uintptr_t>(out + begin);
    is_quick = is_quick && addresses % sizeof(uint4) == 0 && can_map(affine, begin);
    if (all(is_quick)) {
      if (turn == 0) put_random_ahead<kCountersAhead>(own, seed, of.number);
      const auto* signs = reinterpret_cast<const uint8_t*>(workspaces[threadIdx.x / 32 * 2].random + 4 * kCountersAhead * turn);
      turn = (turn + 1) % kTurns;
      words -= threadIdx.x / kSide % 2 * (kFullGroup / kBlock) * bits;
      if (affine.exists()) {
        dequantize_pair<true>(found, words, bits, levels.of(bits), signs, affine, out, begin, part);
      } else {
        dequantize_pair<false>(found, words, bits, levels.of(bits), signs, affine, out, begin, part);
      }
      continue;
    }
    const Planes planes = read_planes({words, m, lane_of(of.first), bits}, most_bits);
    float values[kSide];
    decode(values, planes, levels.of(bits));
    const bool are_full = all(m == kFullGroup);
    if (are_full && !any(found.is_twice)) {
      if (turn == 0) put_random_ahead<kCountersAhead>(own, seed, of.number);
      transform_stage<kSide / 2>(values);
      rotate_back(values, own, own.random + 4 * kCountersAhead * turn, found.scale);
      turn = (turn + 1) % kTurns;
    } else {
      turn = 0;
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
