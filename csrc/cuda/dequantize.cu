// The group dequantizer. Groups of 256 elements that lie side by side are dequantized in pairs, two in a warp. All others take a
// warp for each group, 256 elements at a time.

#include "common/quantize.h"
#include "cuda/dispatch.h"
#include "cuda/groups.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/pairs.h"
#include "cuda/tile.h"

namespace fewbit::cuda {
namespace {

// A lane has 8 elements of a part, in runs of neighbors that fill vectors of 16 bytes.
template <class T>
struct Runs {
  static constexpr int kLength = sizeof(T) == 4 ? 4 : 8;
  static constexpr int kCount = 8 / kLength;

  // Returns the place of the first element of a run within the part.
  __device__ static int start(int run, int lane) { return run * (kDrawBlock / kCount) + lane * kLength; }
};

// Reads the bits of `length` elements of each plane, from element `first` of a stream on, into the bytes of an octet from bit
// `to` on. Only `exist` elements exist, and no word beyond the block of the last one is read.
__device__ inline void add_planes(Octet& octet, const uint32_t* words, int64_t first, int length, int exist, int bits,
                                  int to) {
  words += word_index(block_of(first), 0, bits);
  const int shift = lane_of(first);
  const bool two = shift + (exist < length ? exist : length) > kBlock;
  const uint32_t mask = (1u << length) - 1;
#pragma unroll
  for (int plane = 0; plane < kMaxBits; ++plane) {
    if (plane >= bits) break;
    uint32_t planes = words[plane] >> shift;
    if (two) planes |= words[plane + bits] << (kBlock - shift);
    (plane < 4 ? octet.low : octet.high) |= (planes & mask) << (plane % 4 * 8 + to);
  }
}

// Applies the affine map to a run that begins with element `first` of the part. entries: those of the part's elements.
template <class T>
__device__ void map_run(float* values, const ValueMap& value_map, const Entries& entries, int first, int exist) {
#pragma unroll
  for (int i = 0; i < Runs<T>::kLength; ++i) {
    if (i >= exist) continue;
    const int64_t entry = entries.of(first + i);
    values[i] = values[i] * scale_at(value_map, entry) + shift_at(value_map, entry);
  }
}

template <class T>
__device__ float representable(float x) {
  return x;
}

template <>
__device__ float representable<Float16>(float x) {
  return within_float16(x);
}

// Writes a run of values, as vectors if they are aligned.
template <class T>
__device__ void store_run(const float* values, T* out, bool vectors, int exist) {
  constexpr int kWords = Runs<T>::kLength * sizeof(T) / 4;
  uint32_t words[kWords];
#pragma unroll
  for (int i = 0; i < Runs<T>::kLength; i += 2) {
    set_pair<T>(words, i, static_cast<Wide<T>>(values[i]), static_cast<Wide<T>>(values[i + 1]));
  }
  if (vectors) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      uint4 vector;
      vector.x = words[i], vector.y = words[i + 1], vector.z = words[i + 2], vector.w = words[i + 3];
      reinterpret_cast<uint4*>(out)[i / 4] = vector;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < Runs<T>::kLength; ++i) {
    if (i < exist) reinterpret_cast<Bits<T>*>(out)[i] = get<T>(words, i);
  }
}

// The data that all groups of a launch share.
template <class T>
struct Dequantizer {
  const Streams& streams;
  const int64_t* order;
  const uint32_t* packed;
  const uint16_t* ranges;
  const ValueMap& value_map;
  T* out;
};

// Returns the value of the i-th element of a lane.
__device__ inline float value_of(const Octet& codes, int i, const GroupLimits& limits, float unit) {
  const uint32_t code = (i < 4 ? codes.low : codes.high) >> (i % 4 * 8) & 0xFFu;
  return restored(static_cast<int32_t>(code), limits.minimum, limits.range, unit);
}

// Dequantizes any group.
template <bool Mapped, class T>
__device__ void dequantize_group(const Dequantizer<T>& by, int64_t number) {
  const int lane = threadIdx.x % 32;
  const Streams& streams = by.streams;
  const Stream& stream = stream_of(streams, number);
  const Group group = group_at(streams, stream, number - stream.first_group);
  const GroupPlace place(streams, stream, by.order, group);
  const GroupLimits limits = load_limits(by.ranges, number);
  const uint32_t* words = by.packed + stream.first_word;
  const float unit = unit_of(stream.bits);
  for (int begin = 0; begin < group.length; begin += kDrawBlock) {
    Octet planes = {0, 0};
#pragma unroll
    for (int run = 0; run < Runs<T>::kCount; ++run) {
      const int i = begin + Runs<T>::start(run, lane), exist = group.length - i;
      if (exist > 0) {
        add_planes(planes, words, group.first + i, Runs<T>::kLength, exist, stream.bits, run * Runs<T>::kLength);
      }
    }
    const Octet codes = transposed(planes);
    const Entries entries(by.value_map.index, Mapped ? place.of(begin) : 0);
#pragma unroll
    for (int run = 0; run < Runs<T>::kCount; ++run) {
      const int first = begin + Runs<T>::start(run, lane), exist = group.length - first;
      if (exist <= 0) continue;
      float values[Runs<T>::kLength];
#pragma unroll
      for (int i = 0; i < Runs<T>::kLength; ++i) values[i] = value_of(codes, run * Runs<T>::kLength + i, limits, unit);
      if (Mapped) map_run<T>(values, by.value_map, entries, first - begin, exist);
#pragma unroll
      for (int i = 0; i < Runs<T>::kLength; ++i) values[i] = representable<T>(values[i]);
      if (place.contiguous()) {
        T* to = by.out + place.of(first);
        const bool vectors = exist >= Runs<T>::kLength && reinterpret_cast<uintptr_t>(to) % sizeof(uint4) == 0;
        store_run<T>(values, to, vectors, exist);
      } else {
#pragma unroll
        for (int i = 0; i < Runs<T>::kLength; ++i) {
          if (i < exist) store_one(values[i], by.out + place.of(first + i));
        }
      }
    }
  }
}

// -- full groups -----------------------------------------------------------------------------------------

// Reads the bits of a run of that many elements in each plane into the bytes of an octet from bit `to` on. The run is within one
// byte of each word: `bytes` is that of the first plane, and the run begins with its bit number `shift`.
template <int Length>
__device__ void add_bytes(Octet& octet, const uint8_t* bytes, int shift, int bits, bool has_high, int to) {
#pragma unroll
  for (int plane = 0; plane < kMaxBits; ++plane) {
    if (plane == 4 && !has_high) break;
    uint32_t byte = plane < bits ? bytes[plane * sizeof(uint32_t)] : 0u;
    if (Length < 8) byte = byte >> shift & ((1u << Length) - 1);
    (plane < 4 ? octet.low : octet.high) |= byte << (plane % 4 * 8 + to);
  }
}

// Dequantizes two groups of 256 elements that lie side by side from `out` on, aligned to vectors and to bytes of the packed format.
template <class T, class Map>
__device__ void dequantize_pair(const Dequantizer<T>& by, const LocatedGroup& of, T* out, const Map& map) {
  constexpr int kLength = Runs<T>::kLength;
  const Stream& stream = by.streams.of[of.stream];
  const GroupLimits limits = load_limits(by.ranges, of.number);
  const float unit = unit_of(stream.bits);
  const bool has_high = larger(stream.bits) > 4;
  const int64_t first = of.first + lane_of_group() * kLength;
  const uint32_t* words = by.packed + stream.first_word + word_index(block_of(first), 0, stream.bits);
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(words) + lane_of(first) / 8;
  out += lane_of_group() * kLength;
  Octet planes[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int run = 0; run < Runs<T>::kCount; ++run) {
      add_bytes<kLength>(planes[half], bytes, lane_of(first) % 8, stream.bits, has_high, run * kLength);
      bytes += kSide * kLength / 8 * stream.bits;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Octet codes = has_high ? transposed(planes[half]) : transposed({planes[half].low, 0});
#pragma unroll
    for (int run = 0; run < Runs<T>::kCount; ++run) {
      float values[kLength];
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        values[i] = representable<T>(map(value_of(codes, run * kLength + i, limits, unit)));
      }
      store_run<T>(values, out, true, kLength);
      out += kSide * kLength;
    }
  }
}

// -- kernels ---------------------------------------------------------------------------------------------

template <class T, bool Mapped>
__global__ void __launch_bounds__(kThreads, 4)
    dequantize_kernel(const __grid_constant__ Streams uniform, const __grid_constant__ GroupMap map, const int64_t* order,
                      const int64_t* counts, const uint32_t* packed, const uint16_t* ranges,
                      const __grid_constant__ ValueMap value_map, T* out) {
  __shared__ Streams streams;
  share_streams(streams, uniform, counts);
  const Dequantizer<T> by = {streams, order, packed, ranges, value_map, out};
  for (int64_t pair = first_pair_of_warp(); 2 * pair < streams.groups; pair += pairs_apart()) {
    const LocatedGroup of = locate(streams, map, pair);
    int64_t begin = 0;
    bool is_full = is_full_at(begin, of, streams, order) && of.first % 8 == 0;
    T* const to = out + begin;
    is_full = is_full && reinterpret_cast<uintptr_t>(to) % sizeof(uint4) == 0;
    float scale = 1.0f, shift = -0.0f;
    if (Mapped && is_full) {
      const Entries entries(value_map.index, begin);
      is_full = entries.are_one(kDrawBlock);
      scale = scale_at(value_map, entries.of(0)), shift = shift_at(value_map, entries.of(0));
    }
    if (all(is_full)) {
      dequantize_pair(by, of, to, [&](float value) { return Mapped ? value * scale + shift : value; });
    } else {
#pragma unroll 1
      for (int64_t number = 2 * pair; number < 2 * pair + 2 && number < streams.groups; ++number) {
        dequantize_group<Mapped>(by, number);
      }
    }
  }
}

}  // namespace

void dequantize(const Quantized& of, const int32_t* packed, const uint16_t* ranges, const ValueMap& value_map, void* out,
                int dtype, int device, void* stream) {
  const int64_t groups = of.groups;
  if (groups <= 0) return;
  const DeviceScope scope(device);
  const Streams uniform = uniform_streams(of);
  with_quantized_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto kernel = value_map.is_affine() ? dequantize_kernel<T, true> : dequantize_kernel<T, false>;
    launch(kernel, device, stream, pair_count(groups), kWaves, uniform, group_map(uniform, of.counts), of.order, of.counts,
           reinterpret_cast<const uint32_t*>(packed), ranges, value_map, static_cast<T*>(out));
  });
}

}  // namespace fewbit::cuda
