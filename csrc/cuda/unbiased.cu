// The quantizer and the dequantizer of exactly unbiased copies: two groups a warp.

#include <algorithm>

#include "common/rotate.h"
#include "common/unbiased.h"
#include "cuda/dispatch.h"
#include "cuda/groups.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/rotated_groups.h"
#include "cuda/rotated_planes.h"
#include "cuda/rotation.h"
#include "cuda/row_store.h"

namespace fewbit::cuda {
namespace {

// These kernels need 80 registers a thread, so fewer blocks fit on a multiprocessor than in rotation.h.
constexpr int kResident = 3, kLaunched = 6;

// Returns the 16-bit number with this index, 0 to 7, of a counter's words.
__device__ uint32_t half_of(const uint32_t* words, int index) { return words[index / 2] >> (index % 2 * 16) & 0xFFFFu; }

// Fills `draws` with the random numbers of a column. Element i of the group has number i / 32 of counter i % 32. counter: the first of the group.
__device__ void draw_column(uint32_t* draws, uint64_t seed, uint64_t counter) {
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const PhiloxWords random = philox_words(seed, counter + static_cast<unsigned>(side * kSide + lane_of_group()));
#pragma unroll
    for (int index = 0; index < kSide / 2; ++index) draws[2 * index + side] = half_of(random.words, index);
  }
}

// The random numbers of a group: four words for each counter.
struct alignas(16) Draws {
  uint32_t words[4 * kDrawCounters];

  // Every lane of the group calls it.
  __device__ void fill(uint64_t seed, uint64_t counter) {
#pragma unroll 1
    for (int i = lane_of_group(); i < kDrawCounters; i += kSide) {
      const PhiloxWords random = philox_words(seed, counter + static_cast<unsigned>(i));
      uint4 vector;
      vector.x = random.words[0], vector.y = random.words[1], vector.z = random.words[2], vector.w = random.words[3];
      reinterpret_cast<uint4*>(words)[i] = vector;
    }
  }

  // Returns the number of element i.
  __device__ uint32_t of(int i) const { return half_of(words + 4 * (i % kDrawCounters), i / kDrawCounters); }
};

// The shared memory of a group that is quantized, in addition to its Workspace.
struct Drawn {
  Draws shared, own;
  alignas(16) uint8_t codes[kFullGroup];
};

// Rotates a column of a group of m elements. The rotated numbers are in `own.numbers`, with zeros where no elements are.
__device__ void rotate_into_memory(float* values, Workspace& own, uint64_t seed, int64_t number, int m) {
  put_random_of_group(own, seed, number);
  if (all(m == kFullGroup)) {
    rotate(values, own, own.random);
    put_row(values, own);
  } else {
    put_column(values, own);
    rotate_in_memory(own, own.random, m, false);
  }
}

__device__ float greatest_of_group(Workspace& own) {
  float greatest = 0.0f;
#pragma unroll 1
  for (int i = lane_of_group(); i < kFullGroup; i += kSide) greatest = fmaxf(greatest, fabsf(own.at(i)));
#pragma unroll
  for (int step = kSide / 2; step > 0; step /= 2) {
    greatest = fmaxf(greatest, float_of(__shfl_xor_sync(kAllLanes, bits_of(greatest), step)));
  }
  return greatest;
}

// Returns the planes of 16 codes in a row.
__device__ Planes planes_of(const uint8_t* codes) {
  const uint4 four = *reinterpret_cast<const uint4*>(codes);
  const uint32_t words[4] = {four.x, four.y, four.z, four.w};
  uint32_t row[kSide];
#pragma unroll
  for (int k = 0; k < kSide; ++k) row[k] = words[k / 4] >> (k % 4 * 8) & 0xFFu;
  return pack_codes(row);
}

template <class T>
__global__ void __launch_bounds__(kThreads, kResident)
    quantize_kernel(const __grid_constant__ Streams uniform, const __grid_constant__ GroupMap map, const int64_t* order,
                    const int64_t* counts, const T* x, const __grid_constant__ Normalization normalization,
                    const int64_t* seed_address, int64_t seed_number, bool is_masked, const float* all_codes, bool whole, uint32_t* packed,
                    uint16_t* ranges) {
  __shared__ Streams streams;
  __shared__ Workspace workspaces[kGroupsOfBlock];
  __shared__ Drawn all_drawn[kGroupsOfBlock];
  share_streams(streams, uniform, counts);
  Workspace& own = workspaces[threadIdx.x / kSide];
  Drawn& drawn = all_drawn[threadIdx.x / kSide];
  const CopySettings settings = {streams.fp32_min, is_masked};
  const uint64_t seed = seed_from(seed_address, seed_number);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    store_seed(seed, streams.fp32_min, ranges + uniform.groups * columns(streams.fp32_min));
  }
#pragma unroll 1
  for (int64_t pair = first_pair_of_warp(); 2 * pair < streams.groups; pair += pairs_apart()) {
    const LocatedGroup of = locate(streams, map, pair);
    const Stream& stream = streams.of[of.stream];
    const StoredChannels no_channels = {};
    const GroupElements<T> elements(x, normalization, no_channels, place_of(of, streams, order), of.length);
    float values[kSide];
    const Remainders found = remainders_of(values, elements, settings, own);
    rotate_into_memory(values, own, seed, of.number, of.length);

    const UnbiasedCode code = unbiased_code(all_codes, stream.bits);
    const float rms = root_mean_square(found.energy, of.length);
    const uint16_t scale = unbiased_scale(greatest_of_group(own), code.inverse_limit, rms, found.factor);
    const float inverse = inverse_scale(scale, found.factor);
    drawn.shared.fill(seed, shared_counter(of.number));
    drawn.own.fill(seed, own_counter(of.number));
    __syncwarp();
#pragma unroll 1
    for (int i = lane_of_group(); i < kFullGroup; i += kSide) {
      const int row = row_of(drawn.shared.of(i), stream.bits);
      const float z = own.at(i) * inverse, share = own_share(drawn.own.of(i));
      int place = row;
      for (int step = 1 << (stream.bits - 1); step > 0; step /= 2) place = next_place(code, place, step, z, share);
      drawn.codes[i] = static_cast<uint8_t>(place - row);
    }
    __syncwarp();
    const bool are_values = has_values(found.energy, found.mean), has_codes = are_values && found.energy > 0.0f;
    uint32_t* words = packed + stream.first_word + word_index(block_of(of.first), 0, stream.bits);
    const GroupToPack to = {words, of.length, lane_of(of.first), stream.bits};
    store_planes(planes_of(drawn.codes + kSide * lane_of_group()), to, larger(stream.bits), whole, has_codes);
    if (lane_of_group() > 0 || of.length == 0) continue;
    if (are_values) {
      store_scale(found.mean, has_codes ? scale : uint16_t{0}, settings.fp32_min, of.number, ranges);
    } else {
      store_no_scale(settings.fp32_min, of.number, ranges);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, kResident)
    dequantize_kernel(const __grid_constant__ Streams uniform, const __grid_constant__ GroupMap map, const int64_t* order,
                      const int64_t* counts, const uint32_t* packed, const uint16_t* ranges, const float* all_codes,
                      const __grid_constant__ ValueMap value_map, T* out) {
  __shared__ Streams streams;
  __shared__ Workspace workspaces[kGroupsOfBlock];
  share_streams(streams, uniform, counts);
  Workspace& own = workspaces[threadIdx.x / kSide];
  const uint64_t seed = load_seed(ranges + uniform.groups * columns(streams.fp32_min));
#pragma unroll 1
  for (int64_t pair = first_pair_of_warp(); 2 * pair < streams.groups; pair += pairs_apart()) {
    const LocatedGroup of = locate(streams, map, pair);
    const Stream& stream = streams.of[of.stream];
    const int m = of.length;
    const GroupScale found = load_scale(ranges, streams.fp32_min, m > 0 ? of.number : 0);
    const uint32_t* words = packed + stream.first_word + word_index(block_of(of.first), 0, stream.bits);
    uint32_t draws[kSide], codes[kSide];
    unpack_codes(read_planes({words, m, lane_of(of.first), stream.bits}, larger(stream.bits)), codes);
    draw_column(draws, seed, shared_counter(of.number));
    const float* levels = unbiased_code(all_codes, stream.bits).levels;
    float values[kSide];
#pragma unroll
    for (int j = 0; j < kSide; ++j) values[j] = levels[row_of(draws[j], stream.bits) + static_cast<int>(codes[j])];

    put_random_of_group(own, seed, of.number);
    if (all(m == kFullGroup)) {
      transform_stage<kSide / 2>(values);
      rotate_back(values, own, own.random, found.scale);
    } else {
      put_column(values, own);
      rotate_back_in_memory(own, own.random, m, found.scale, false);
      get_row(values, own);
    }
#pragma unroll
    for (int k = 0; k < kSide; ++k) values[k] = found.mean + values[k];
    store_row(values, value_map, {}, out, place_of(of, streams, order), m, own);
  }
}

}  // namespace

void quantize_unbiased(const Quantized& of, bool is_masked, const float* codes, const void* x, int dtype, const Normalization& normalization,
                       const Seed& seed, int32_t* packed, uint16_t* ranges, int device, void* stream) {
  const DeviceScope scope(device);
  const bool whole = is_whole(of);
  clear(of, packed, ranges, stream);
  // A copy without groups has a seed nevertheless.
  const int64_t pairs = std::max(pair_count(of.groups), int64_t{1});
  const Streams uniform = uniform_streams(of);
  with_quantized_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    launch(quantize_kernel<T>, device, stream, pairs, kLaunched, uniform, group_map(uniform, of.counts), of.order,
           of.counts, static_cast<const T*>(x), normalization, address_of(seed), seed.number, is_masked, codes, whole,
           reinterpret_cast<uint32_t*>(packed), ranges);
  });
}

void dequantize_unbiased(const Quantized& of, const float* codes, const int32_t* packed, const uint16_t* ranges,
                         const ValueMap& value_map, void* out, int dtype, int device, void* stream) {
  if (of.groups <= 0) return;
  const DeviceScope scope(device);
  const Streams uniform = uniform_streams(of);
  with_quantized_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    launch(dequantize_kernel<T>, device, stream, pair_count(of.groups), kLaunched, uniform,
           group_map(uniform, of.counts), of.order, of.counts, reinterpret_cast<const uint32_t*>(packed), ranges, codes,
           value_map, static_cast<T*>(out));
  });
}

}  // namespace fewbit::cuda
