// The dequantizer of rotated copies: two groups a warp.

#include "common/normal_levels.h"
#include "common/rotate.h"
#include "cuda/dispatch.h"
#include "cuda/groups.h"
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
