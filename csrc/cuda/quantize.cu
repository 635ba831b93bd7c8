// The group quantizer: one warp for each group, 256 elements at a time.

#include "common/philox.h"
#include "common/quantize.h"
#include "cuda/dispatch.h"
#include "cuda/extremes.h"
#include "cuda/groups.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"

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

template <class T, bool Normalized>
__global__ void __launch_bounds__(kThreads, 3)
    quantize_kernel(const __grid_constant__ Streams uniform, const int64_t* order, const int64_t* counts, const T* x,
                    const __grid_constant__ Normalization normalization, const int64_t* seed_address, bool whole,
                    uint32_t* packed, uint16_t* ranges) {
  __shared__ Streams streams;
  share_streams(streams, uniform, counts);
  const int lane = threadIdx.x % 32;
  const uint64_t seed = static_cast<uint64_t>(*seed_address);
  for (int64_t number = first_group_of_warp(); number < streams.groups; number += groups_apart()) {
    const Stream& stream = stream_of(streams, number);
    const Group group = group_at(streams, stream, number - stream.first_group);
    const GroupPlace place(streams, stream, order, group);
    const int length = group.length, bits = stream.bits;

    float values[kPerLane] = {};
    const Extremes extremes = extremes_of<Normalized>(values, x, normalization, place, length, lane);
    const GroupLimits limits = limits_of(extremes.least, extremes.greatest, true, bits, streams.fp32_min);
    if (lane == 0) store_limits(limits, streams.fp32_min, number, ranges);

    const float most = most_of(bits);
    for (int begin = 0; begin < length; begin += kDrawBlock) {
      if (length > kDrawBlock) read_part<Normalized>(values, x, normalization, place, begin, length, lane);
      const uint64_t counter = first_counter(number, begin / kDrawBlock, streams.group_size) + lane;
      const PhiloxWords draws = philox_words(seed, counter);
      int32_t codes[kPerLane];
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const uint32_t draw = j % 2 ? draws.words[j / 2] >> 16 : draws.words[j / 2] & 0xFFFFu;
        const bool exists = is_kept(limits) && begin + 32 * j + lane < length;
        codes[j] = exists ? code_of(values[j], limits, most, draw) : 0;
      }
      const int64_t first = group.first + begin;
      const int shift = lane_of(first), m = length - begin < kDrawBlock ? length - begin : kDrawBlock;
      uint32_t* words = packed + stream.first_word + word_index(block_of(first), 0, bits);
      if (bits <= 4 && shift == 0) {
        store_words<1>(codes, m, 0, bits, whole, lane, words);
      } else {
        store_words<3>(codes, m, shift, bits, whole, lane, words);
      }
    }
  }
}

}  // namespace

void quantize(const Quantized& of, const void* x, int dtype, const Normalization& normalization, const int64_t* seed,
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
    const size_t bytes = static_cast<size_t>(groups) * columns(of.fp32_min) * sizeof(uint16_t);
    check(cudaMemsetAsync(ranges, 0, bytes, on), "clearing ranges");
  }
  if (groups <= 0) return;
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto kernel = normalization.exists() ? quantize_kernel<T, true> : quantize_kernel<T, false>;
    launch(kernel, device, stream, groups, kWaves, uniform_streams(of), of.order, of.counts,
           static_cast<const T*>(x), normalization, seed, whole, reinterpret_cast<uint32_t*>(packed), ranges);
  });
}

}  // namespace fewbit::cuda
