// The group quantizer. Groups of 256 elements that lie side by side are quantized in pairs, two in a warp. All others take a
// warp for each group, 256 elements at a time.

#include "common/philox.h"
#include "common/quantize.h"
#include "cuda/dispatch.h"
#include "cuda/extremes.h"
#include "cuda/groups.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/pairs.h"
#include "cuda/tile.h"

namespace fewbit::cuda {
namespace {

// Writes the words of a part of m elements that begins `shift` bits after the begin of a block, at `words`. Lane i mod 32
// writes word i of the part. whole: no block has elements of two groups; otherwise all words were zero, and bits from other
// threads stay.
template <int Slots>
__device__ void store_words(const int32_t* codes, int m, int shift, int bits, bool whole, int lane, uint32_t* words) {
  const int blocks = (shift + m + kBlock - 1) / kBlock;
  uint32_t own[Slots] = {};
  for (int plane = 0; plane < bits; ++plane) {
    uint32_t before = 0;
#pragma unroll
    for (int j = 0; j <= kPerLane; ++j) {
      const uint32_t vote = j < kPerLane ? __ballot_sync(kAllLanes, codes[j < kPerLane ? j : 0] >> plane & 1) : 0u;
      const uint32_t word = __funnelshift_l(before, vote, shift);
      before = vote;
#pragma unroll
      for (int slot = 0; slot < Slots; ++slot) {
        if (lane + 32 * slot == j * bits + plane) own[slot] = word;
      }
    }
  }
  const int count = blocks * bits;
  const int shared_begin = whole || shift == 0 ? 0 : bits;
  const int shared_end = whole || (shift + m) % kBlock == 0 ? count : count - bits;
#pragma unroll
  for (int slot = 0; slot < Slots; ++slot) {
    const int i = lane + 32 * slot;
    if (i >= count) continue;
    if (i < shared_begin || i >= shared_end) {
      atomicOr(words + i, own[slot]);
    } else {
      words[i] = own[slot];
    }
  }
}

// The memory of a launch's results, and what its groups have in common.
struct Quantizer {
  const Streams& streams;
  uint64_t seed;
  bool whole;
  uint32_t* packed;
  uint16_t* ranges;

  __device__ uint32_t* words_of(const Stream& stream, int64_t element) const {
    return packed + stream.first_word + word_index(block_of(element), 0, stream.bits);
  }
};

// Quantizes any group.
template <bool Normalized, class T>
__device__ void quantize_group(const Quantizer& by, int64_t number, const int64_t* order, const T* x,
                               const Normalization& normalization) {
  const int lane = threadIdx.x % 32;
  const Streams& streams = by.streams;
  const Stream& stream = stream_of(streams, number);
  const Group group = group_at(streams, stream, number - stream.first_group);
  const GroupPlace place(streams, stream, order, group);
  const int length = group.length, bits = stream.bits;

  float values[kPerLane] = {};
  const Extremes extremes = extremes_of<Normalized>(values, x, normalization, place, length, lane);
  const GroupLimits limits = limits_of(extremes.least, extremes.greatest, true, bits);
  if (lane == 0) store_limits(limits, number, by.ranges);

  const float most = most_of(bits);
  for (int begin = 0; begin < length; begin += kDrawBlock) {
    if (length > kDrawBlock) read_part<Normalized>(values, x, normalization, place, begin, length, lane);
    const uint64_t counter = first_counter(number, begin / kDrawBlock, streams.group_size) + lane;
    const PhiloxWords draws = philox_words(by.seed, counter);
    int32_t codes[kPerLane];
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const uint32_t draw = j % 2 ? draws.words[j / 2] >> 16 : draws.words[j / 2] & 0xFFFFu;
      const bool exists = is_kept(limits) && begin + 32 * j + lane < length;
      codes[j] = exists ? code_of(values[j], limits, most, draw) : 0;
    }
    const int64_t first = group.first + begin;
    const int shift = lane_of(first), m = length - begin < kDrawBlock ? length - begin : kDrawBlock;
    uint32_t* words = by.words_of(stream, first);
    if (bits <= 4 && shift == 0) {
      store_words<1>(codes, m, 0, bits, by.whole, lane, words);
    } else {
      store_words<3>(codes, m, shift, bits, by.whole, lane, words);
    }
  }
}

// -- full groups -----------------------------------------------------------------------------------------

// A lane has 8 neighbors of each half of a group. The draws of neighbors come from different counters, so the lanes of a group
// exchange random words in shared memory. A vector of padding after every eight vectors keeps lanes out of each other's banks.
struct alignas(16) GroupDraws {
  uint4 words[kDrawCounters + kDrawCounters / 8];

  __device__ void make(uint64_t seed, uint64_t first) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kDrawCounters; i += kSide) {
      // The first counter of a group is a multiple of their number, so that the sum has no carry.
      const uint32_t counter = static_cast<uint32_t>(i + lane_of_group());
      const PhiloxWords random = philox_words(seed, first >> 32 << 32 | (static_cast<uint32_t>(first) | counter));
      uint4 vector;
      vector.x = random.words[0], vector.y = random.words[1], vector.z = random.words[2], vector.w = random.words[3];
      words[counter + counter / 8] = vector;
    }
    __syncwarp();
  }

  // Returns the draw of the i-th neighbor of a lane in a half of the group.
  __device__ uint32_t of(int half, int i) const {
    const int lane = lane_of_group();
    return reinterpret_cast<const uint16_t*>(words)[(lane % 4 * 9 + i) * 8 + half * 4 + lane / 4];
  }
};

// Reads 8 neighbors from memory that is aligned to vectors.
template <class T>
__device__ void read_neighbors(float* values, const T* from) {
  constexpr int kWords = 2 * sizeof(T);
  uint32_t words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; i += 4) {
    const uint4 vector = reinterpret_cast<const uint4*>(from)[i / 4];
    words[i] = vector.x, words[i + 1] = vector.y, words[i + 2] = vector.z, words[i + 3] = vector.w;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = static_cast<float>(value<T>(words, i));
}

// Returns the limits of a group in all its lanes.
__device__ inline GroupLimits limits_of_full(const float (&values)[2][8], int bits) {
  const float infinity = float_of(0x7F800000u);
  float least = infinity, greatest = -infinity;
  bool is_clean = true;
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    const float x = values[i / 8][i % 8];
    least = fminf(least, x), greatest = fmaxf(greatest, x);
    is_clean = is_clean && fabsf(x) < infinity;
  }
#pragma unroll
  for (int step = kSide / 2; step > 0; step /= 2) {
    least = fminf(least, other_lanes(least, step));
    greatest = fmaxf(greatest, other_lanes(greatest, step));
  }
  return limits_of(least, greatest, !any_of_group(!is_clean), bits);
}

// Returns four codes, one in each byte. scaled: the codes times 65536, and remainders.
__device__ inline uint32_t four_codes(const uint32_t* scaled) {
  return __byte_perm(__byte_perm(scaled[0], scaled[1], 0x0062), __byte_perm(scaled[2], scaled[3], 0x0062), 0x5410);
}

// Quantizes two groups of 256 elements that lie side by side, aligned to vectors and to blocks of the packed format.
template <class T, class Normalize>
__device__ void quantize_pair(const Quantizer& by, const LocatedGroup& of, const T* from, GroupDraws& draws,
                              const Normalize& normalize) {
  const Streams& streams = by.streams;
  const Stream& stream = streams.of[of.stream];
  const int bits = stream.bits, lane = lane_of_group();
  float values[2][8];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    read_neighbors(values[half], from + half * (kDrawBlock / 2) + lane * 8);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[half][i] = normalize(values[half][i]);
  }
  const GroupLimits limits = limits_of_full(values, bits);
  if (lane == 0) store_limits(limits, of.number, by.ranges);
  draws.make(by.seed, first_counter(of.number, 0, kDrawBlock));

  const float most = most_of(bits);
  const uint32_t kept = is_kept(limits) ? 0xFFFFFFFFu : 0u;
  const bool has_high = larger(bits) > 4;
  const int plane = lane % 4;
  uint32_t* words = by.words_of(stream, of.first) + (lane / 4 * bits + plane);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t scaled[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      scaled[i] = static_cast<uint32_t>(scaled_code_of(values[half][i], limits, most, draws.of(half, i)));
    }
    const Octet planes = transposed({four_codes(scaled) & kept, four_codes(scaled + 4) & kept});
    uint32_t* const to = words + half * (kDrawBlock / 2 / kBlock) * bits;
    const uint32_t low = exchange_bytes<1>(planes.low, lane);
    if (plane < bits) to[0] = low;
    if (!has_high) continue;
    const uint32_t high = exchange_bytes<1>(planes.high, lane);
    if (plane + 4 < bits) to[4] = high;
  }
}

// -- kernels ---------------------------------------------------------------------------------------------

template <class T, bool Normalized>
__global__ void __launch_bounds__(kThreads, 3)
    quantize_kernel(const __grid_constant__ Streams uniform, const __grid_constant__ GroupMap map, const int64_t* order,
                    const int64_t* counts, const T* x, const __grid_constant__ Normalization normalization,
                    const int64_t* seed_address, int64_t seed_number, bool whole, uint32_t* packed, uint16_t* ranges) {
  __shared__ Streams streams;
  __shared__ GroupDraws draws[kGroupsOfBlock];
  share_streams(streams, uniform, counts);
  const Quantizer by = {streams, seed_from(seed_address, seed_number), whole, packed, ranges};
  for (int64_t pair = first_pair_of_warp(); 2 * pair < streams.groups; pair += pairs_apart()) {
    const LocatedGroup of = locate(streams, map, pair);
    int64_t begin = 0;
    bool is_full = is_full_at(begin, of, streams, order) && of.first % kBlock == 0;
    const T* const from = x + begin;
    is_full = is_full && reinterpret_cast<uintptr_t>(from) % sizeof(uint4) == 0;
    float mean = 0.0f, rstd = 1.0f;
    if (Normalized && is_full) {
      const Entries entries(normalization.index, begin);
      is_full = entries.are_one(kDrawBlock);
      mean = mean_at(normalization, entries.of(0)), rstd = normalization.rstd[entries.of(0)];
    }
    if (all(is_full)) {
      const auto normalize = [&](float value) { return Normalized ? (value - mean) * rstd : value; };
      quantize_pair(by, of, from, draws[threadIdx.x / kSide], normalize);
    } else {
#pragma unroll 1
      for (int64_t number = 2 * pair; number < 2 * pair + 2 && number < streams.groups; ++number) {
        quantize_group<Normalized>(by, number, order, x, normalization);
      }
    }
  }
}

}  // namespace

void quantize(const Quantized& of, const void* x, int dtype, const Normalization& normalization, const Seed& seed,
              int32_t* packed, uint16_t* ranges, int device, void* stream) {
  const int64_t words = of.words, groups = of.groups;
  if (groups <= 0 && words <= 0) return;
  const DeviceScope scope(device);
  const auto on = static_cast<cudaStream_t>(stream);
  // Streams of one width, whose sizes are known here, fill all words. Groups share blocks only if groups begin inside blocks.
  const bool whole = of.features < kLeastFeatures || of.features % kBlock == 0;
  if (!whole || of.counts) {
    check(cudaMemsetAsync(packed, 0, static_cast<size_t>(words) * sizeof(uint32_t), on), "clearing packed codes");
  }
  if (of.counts) {
    const size_t bytes = static_cast<size_t>(groups) * kColumns * sizeof(uint16_t);
    check(cudaMemsetAsync(ranges, 0, bytes, on), "clearing ranges");
  }
  if (groups <= 0) return;
  const Streams uniform = uniform_streams(of);
  with_quantized_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto kernel = normalization.exists() ? quantize_kernel<T, true> : quantize_kernel<T, false>;
    launch(kernel, device, stream, pair_count(groups), kWaves, uniform, group_map(uniform, of.counts), of.order, of.counts,
           static_cast<const T*>(x), normalization, address_of(seed), seed.number, whole, reinterpret_cast<uint32_t*>(packed), ranges);
  });
}

}  // namespace fewbit::cuda
