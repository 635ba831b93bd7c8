// The quantizer of rotated copies, and the energies of groups: two groups a warp, 256 elements of each at a time.

#include "common/normal_levels.h"
#include "common/rotate.h"
#include "cuda/dispatch.h"
#include "cuda/groups.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/rotated_groups.h"
#include "cuda/rotation.h"

namespace fewbit::cuda {
namespace {

// Lanes look up levels by codes of their own, for which constant memory would be slow.
__device__ const NormalLevels kLevelsOnDevice = kNormalLevels;

// The third counter of a group is that of the scale. The counters of a group fill four lanes.
constexpr int kCountersAhead = 4, kTurns = kSide / kCountersAhead;

// -- codes -----------------------------------------------------------------------------------------------

// Encodes a row of rotated numbers with 1 or 2 bits, and multiplies their magnitudes by the levels.
__device__ Planes encode_few(float* y, int bits, float rms) {
  constexpr float kBreak = kNormalLevels.breaks[breaks_begin(2)];
  constexpr float kOne = kNormalLevels.levels[levels_begin(1)];
  constexpr float kLow = kNormalLevels.levels[levels_begin(2)], kHigh = kNormalLevels.levels[levels_begin(2) + 1];
  const float threshold = bits == 2 ? kBreak * rms : float_of(0x7F800000u), low = bits == 2 ? kLow : kOne;
  uint32_t above = 0, negative = 0;
#pragma unroll
  for (int k = kSide - 1; k >= 0; --k) {
    const float magnitude = fabsf(y[k]);
    const bool is_above = magnitude > threshold;
    if (is_above) above |= 1u << k;
    negative = __funnelshift_l(bits_of(y[k]), negative, 1);
    y[k] = magnitude * (is_above ? kHigh : low);
  }
  return {{bits == 2 ? above | negative << kSide : negative}};
}

// Does the same for any bits. The thresholds of the group take the place of the numbers in shared memory.
__device__ Planes encode_many(float* y, int bits, int most_bits, float rms, Workspace& own, const NormalLevels& table) {
  const int half = 1 << (bits - 1);
  __syncwarp();
  for (int i = lane_of_group(); i < half - 1; i += kSide) own.numbers[i] = table.breaks[breaks_begin(bits) + i] * rms;
  __syncwarp();
  int place[kSide] = {};
#pragma unroll 1
  for (int step = 1 << (most_bits - 1) >> 1; step > 0; step >>= 1) {
    if (step >= half) continue;
#pragma unroll
    for (int k = 0; k < kSide; ++k) {
      if (fabsf(y[k]) > own.numbers[place[k] + step - 1]) place[k] += step;
    }
  }
  uint32_t codes[kSide];
#pragma unroll
  for (int k = 0; k < kSide; ++k) {
    codes[k] = static_cast<uint32_t>(place[k]) + (bits_of(y[k]) >> 31 << (bits - 1));
    y[k] = fabsf(y[k]) * table.levels[levels_begin(bits) + place[k]];
  }
  return pack_codes(codes);
}

// -- packing ---------------------------------------------------------------------------------------------

// The place of a part's codes.
struct PackedPart {
  uint32_t* words;  // begins with the block of the first element
  int m;            // elements
  int shift;        // the first element's place in its block
  int bits;

  __device__ int blocks() const { return (shift + m + kBlock - 1) / kBlock; }

  // Stores a word. Its block may have elements of other groups, whose bits stay: all words were zero before.
  __device__ void store_shared(int block, int plane, uint32_t word) const {
    if (block >= blocks() || plane >= bits) return;
    const bool is_shared = (block == 0 && shift > 0) || (block == blocks() - 1 && (shift + m) % kBlock != 0);
    if (is_shared) {
      atomicOr(words + block * bits + plane, word);
    } else {
      words[block * bits + plane] = word;
    }
  }
};

// Writes a part. whole: no block has elements of two groups.
__device__ void store_planes(const Planes& planes, const PackedPart& to, int most_bits, bool whole, bool has_codes) {
  const int lane = lane_of_group(), first = lane * kSide, left = to.m - first;
  const uint32_t exist = !has_codes || left <= 0 ? 0u : left < kSide ? (1u << left) - 1u : 0xFFFFu;
#pragma unroll
  for (int pair = 0; pair < kMaxBits / 2; ++pair) {
    if (2 * pair >= most_bits) break;
    const uint32_t word = exchange_planes(planes.pairs[pair] & exist * 0x10001u);
    const int block = lane / 2, plane = 2 * pair + lane % 2;
    if (whole) {
      if (block * kBlock < to.m && plane < to.bits) to.words[block * to.bits + plane] = word;
      continue;
    }
    const uint32_t neighbor = __shfl_sync(kAllLanes, word, lane - 2, kSide), before = block > 0 ? neighbor : 0u;
    to.store_shared(block, plane, __funnelshift_l(before, word, to.shift));
    if (block == kSide / 2 - 1) to.store_shared(block + 1, plane, __funnelshift_l(word, 0, to.shift));
  }
}

// -- kernels ---------------------------------------------------------------------------------------------

template <class T>
__global__ void __launch_bounds__(kThreads, 3)
    quantize_kernel(const __grid_constant__ Streams uniform, const int64_t* order, const int64_t* counts, const T* x,
                    const __grid_constant__ Normalization normalization, const int64_t* seed_address, bool whole,
                    uint32_t* packed, uint16_t* ranges) {
  __shared__ Streams streams;
  __shared__ NormalLevels table;
  __shared__ Workspace workspaces[kGroupsOfBlock];
  for (int i = threadIdx.x; i < static_cast<int>(sizeof table / sizeof(float)); i += kThreads) {
    reinterpret_cast<float*>(&table)[i] = reinterpret_cast<const float*>(&kLevelsOnDevice)[i];
  }
  share_streams(streams, uniform, counts);
  Workspace& own = workspaces[threadIdx.x / kSide];
  const uint64_t seed = static_cast<uint64_t>(*seed_address);
  const bool fp32_min = streams.fp32_min;
  const int group_size = streams.group_size;
  if (blockIdx.x == 0 && threadIdx.x == 0) store_seed(seed, fp32_min, ranges + uniform.groups * columns(fp32_min));

  const GroupFinder finder(streams, counts);
  int turn = 0;  // the place of the next group's random words; 0: there are none yet
  for (int64_t pair = first_group_of_warp(); 2 * pair < streams.groups; pair += groups_apart()) {
    const int64_t number = number_in(pair);
    const Stream& stream = finder.stream(number);
    const Group group = finder.group(stream, number);
    const GroupElements<T> elements(x, normalization, GroupPlace(streams, stream, order, group), group.length);
    const int length = group.length, bits = stream.bits, most_bits = larger(bits);

    float values[kSide];
    const Remainders found = remainders_of(values, elements, fp32_min, own);
    const bool is_twice = is_rotated_twice(found), is_once = !any(is_twice);
    const bool is_kept = has_values(found.energy, found.mean);
    const float rms = root_mean_square(found.energy, length);
    float inner = 0.0f;
    uint32_t rounding = 0;
#pragma unroll 1
    for (int begin = 0; begin < elements.longest(); begin += kRotatedPart) {
      const int m = part_length(length, begin);
      if (elements.is_long()) read_remainders(values, elements, found, begin, own);
      if (is_once && all(m == kRotatedPart)) {
        const uint32_t* words = own.random;
        if (elements.is_long()) {
          put_random_of_part(own, seed, number, begin / kRotatedPart, group_size);
          if (begin == 0) rounding = words[4 * kRoundingCounter];
        } else {
          if (turn == 0) put_random_ahead<kCountersAhead>(own, seed, pair, group_size);
          words += 4 * kCountersAhead * turn;
          rounding = words[4 * 2];
          turn = (turn + 1) % kTurns;
        }
        multiply_column(values, words, inverse_root(kRotatedPart));
        transform(values);
        put_column(values, own);
        get_row(values, own);
        transform(values);
      } else {
        put_random_of_part(own, seed, number, begin / kRotatedPart, group_size);
        if (begin == 0) rounding = own.random[4 * kRoundingCounter];
        turn = 0;
        put_column(values, own);
        rotate_in_memory(own, own.random + 4 * sign_counter(0, 0), m);
        if (!is_once) rotate_in_memory(own, own.random + 4 * sign_counter(1, 0), is_twice ? m : 0);
        get_row(values, own);
      }

      const Planes planes = most_bits <= 2 ? encode_few(values, bits, rms)
                                           : encode_many(values, bits, most_bits, rms, own, table);
      const int64_t first = group.first + begin;
      uint32_t* words = packed + stream.first_word + word_index(block_of(first), 0, bits);
      store_planes(planes, {words, m, lane_of(first), bits}, most_bits, whole, is_kept && found.energy > 0.0f);
      put_row(values, own);
      get_column(values, own);
      const float sum = sum_of_part(values);
      if (begin < length) inner = begin == 0 ? sum : inner + sum;
    }
    if (lane_of_group() > 0 || length == 0) continue;
    if (is_kept) {
      const uint16_t scale = stored_scale(found.energy, inner, found.factor, rounding, is_twice);
      store_scale(found.mean, scale, fp32_min, number, ranges);
    } else {
      store_no_scale(fp32_min, number, ranges);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    squares_kernel(const __grid_constant__ Streams streams, const T* x,
                   const __grid_constant__ Normalization normalization, float* out) {
  __shared__ Workspace workspaces[kGroupsOfBlock];
  const GroupFinder finder(streams, false);
  for (int64_t pair = first_group_of_warp(); 2 * pair < streams.groups; pair += groups_apart()) {
    const int64_t number = number_in(pair);
    const Group group = finder.group(streams.of[0], number);
    const GroupPlace place(streams, streams.of[0], nullptr, group);
    const GroupElements<T> elements(x, normalization, place, group.length);
    float values[kSide];
    const Remainders found = remainders_of(values, elements, true, workspaces[threadIdx.x / kSide]);
    const float back = inverse_rescue(found.factor);
    const float nan = float_of(0x7FC00000u);
    if (lane_of_group() == 0 && group.length > 0) {
      out[number] = has_values(found.energy, found.mean) ? found.energy * back * back : nan;
    }
  }
}

}  // namespace

void quantize_rotated(const Quantized& of, const void* x, int dtype, const Normalization& normalization,
                      const int64_t* seed, int32_t* packed, uint16_t* ranges, int device, void* stream) {
  const DeviceScope scope(device);
  const auto on = static_cast<cudaStream_t>(stream);
  // Streams of one width, whose sizes are known here, fill all words. Groups share blocks only if groups begin inside blocks.
  const bool whole = of.features < kLeastFeatures || of.features % kBlock == 0;
  if (!whole || of.counts) {
    check(cudaMemsetAsync(packed, 0, static_cast<size_t>(of.words) * sizeof(uint32_t), on), "clearing packed codes");
  }
  if (of.counts) {
    const size_t bytes = static_cast<size_t>(of.groups) * columns(of.fp32_min) * sizeof(uint16_t);
    check(cudaMemsetAsync(ranges, 0, bytes, on), "clearing ranges");
  }
  // A copy without groups has a seed nevertheless.
  const int64_t pairs = std::max(pair_count(of.groups), int64_t{1});
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    launch(quantize_kernel<T>, device, stream, pairs, kOneWave, uniform_streams(of), of.order, of.counts,
           static_cast<const T*>(x), normalization, seed, whole, reinterpret_cast<uint32_t*>(packed), ranges);
  });
}

void squares_rotated(const Streams& streams, const void* x, int dtype, const Normalization& normalization, float* out,
                     int device, void* stream) {
  if (streams.groups <= 0) return;
  const DeviceScope scope(device);
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    launch(squares_kernel<T>, device, stream, pair_count(streams.groups), kOneWave, streams, static_cast<const T*>(x),
           normalization, out);
  });
}

}  // namespace fewbit::cuda
