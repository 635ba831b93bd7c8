// The dequantizer of rotated copies: two groups a warp. Most groups are full, aligned, rotated once, and have codes of few bits.
// They are transformed by products of matrices, one group after the other. All others are transformed as in rotation.h.

#include "common/normal_levels.h"
#include "common/rotate.h"
#include "cuda/dispatch.h"
#include "cuda/groups.h"
#include "cuda/hadamard.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/rotated_planes.h"
#include "cuda/rotation.h"
#include "cuda/row_store.h"

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

// Returns a column of levels.
__device__ void decode(float* values, const Planes& planes, const float* signed_levels) {
  uint32_t codes[kSide];
  unpack_codes(planes, codes);
#pragma unroll
  for (int j = 0; j < kSide; ++j) values[j] = signed_levels[codes[j]];
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
