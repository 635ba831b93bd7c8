// The dequantizer of rotated copies: two groups a warp. Most groups are full and aligned, and have codes of few bits.
// They are transformed by products of matrices, one group after the other. All others are transformed as in rotation.h.

#include <type_traits>

#include "common/normal_levels.h"
#include "common/rotate.h"
#include "cuda/channels.h"
#include "cuda/dispatch.h"
#include "cuda/groups.h"
#include "cuda/hadamard.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/rotated_neighbors.h"
#include "cuda/rotated_planes.h"
#include "cuda/rotation.h"
#include "cuda/row_store.h"

namespace fewbit::cuda {
namespace {

// -- products of matrices --------------------------------------------------------------------------------

// Returns the number that the lanes of the i-th group have.
__device__ inline float of_group(float own, int i) { return float_of(__shfl_sync(kAllLanes, bits_of(own), i * kSide, 32)); }
__device__ inline int64_t of_group(int64_t own, int i) {
  const uint32_t low = __shfl_sync(kAllLanes, static_cast<uint32_t>(own), i * kSide, 32);
  const uint32_t high = __shfl_sync(kAllLanes, static_cast<uint32_t>(own >> 32), i * kSide, 32);
  return static_cast<int64_t>(static_cast<uint64_t>(high) << 32 | low);
}

// The means of a warp's two groups, the factors of their transforms, and whether they are rotated twice.
struct PairScale {
  float means[2], factors[2];
  bool are_twice[2];
};

// Returns those of groups that are rotated once.
__device__ inline PairScale scale_of_pair(const GroupScale& own) {
  const float factor = own.scale * inverse_root(kFullGroup);
  return {{of_group(own.mean, 0), of_group(own.mean, 1)}, {of_group(factor, 0), of_group(factor, 1)}, {false, false}};
}

// -- plain tensors ---------------------------------------------------------------------------------------

// The first pairs of groups of a tensor, if their places, codes and entries need little arithmetic.
struct PlainPairs {
  int64_t count = 0;
  PlainEntries entries;  // in runs of a lane's neighbors
};

inline PlainPairs plain_pairs(const Quantized& of, const GroupMap& groups, const void* packed,
                              const void* ranges, const ValueMap& value_map, const ChannelMap& channels, const void* out) {
  PlainPairs found = {};
  const bool is_plain = is_plain_tensor(of, groups) && of.bits <= kMostProductBits && is_vector_aligned(packed) && is_vector_aligned(ranges) &&
                        is_vector_aligned(out) && is_vector_aligned(value_map.scale) && is_vector_aligned(value_map.shift) &&
                        find_entries(found.entries, value_map.index, value_map.is_affine(), of.groups, kNeighbors) &&
                        is_plain_map(channels) && !(channels.exists() && found.entries.kind == EntryKind::rows);
  if (is_plain) found.count = plain_pair_count(groups);
  return found;
}

// Returns those of a plain pair, from the two groups' rows of ranges.
__device__ inline PairScale scale_of_rows(const uint2& rows) {
  const uint32_t words[2] = {rows.x, rows.y};
  PairScale of;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    of.means[i] = float_of(words[i] << 16), of.factors[i] = float_of(words[i] & 0x7FFF0000u) * inverse_root(kFullGroup);
    of.are_twice[i] = words[i] >> 31 != 0;
  }
  return of;
}

// The codes of a pair in shared memory, where they arrive while the warp works on the pair before.
struct alignas(16) PlainCodes {
  uint32_t words[2][2 * kFullGroup / kBlock * kMostProductBits];  // alternately
};

// Loads the codes and ranges of plain pairs for a warp. Each pair is loaded before the warp dequantizes the pair before it.
class PlainInput {
 public:
  __device__ PlainInput(PlainCodes& codes, const uint32_t* packed, const uint16_t* ranges, int bits)
      : codes_(codes), packed_(packed), rows_(reinterpret_cast<const uint2*>(ranges)), bits_(bits), turn_(0) {}

  // Loads a pair, after words() of the pair before it, if there is one.
  __device__ void load(int64_t pair) {
    next_ = rows_[pair];
#if FEWBIT_PAIR_INSTRUCTIONS
    const int vector = threadIdx.x % 32, words = 2 * kFullGroup / kBlock * bits_;
    if (4 * vector < words) ptx::copy_async(codes_.words[turn_] + 4 * vector, packed_ + pair * words + 4 * vector);
#endif
    turn_ ^= 1;
  }

  // Return what was loaded.
  __device__ uint2 rows() const { return next_; }
  __device__ const uint32_t* words() const {
#if FEWBIT_PAIR_INSTRUCTIONS
    ptx::wait_for_copies();
    __syncwarp();
#endif
    return codes_.words[turn_ ^ 1];
  }

 private:
  PlainCodes& codes_;
  const uint32_t* const packed_;
  const uint2* const rows_;  // of ranges: for each pair, a word of each group
  const int bits_;
  int turn_;  // of the next pair
  uint2 next_;
};

// The map of values in a group that is transformed by products. rows, features: as in EntryKind. In the last two, channels are put in
// before.
enum class MapKind { none, rows, features, mask, channels, channels_features };

// Calls call(std::integral_constant<MapKind, ...>) for a map. entries: those of scale and shift, not of rows if there are channels.
template <class Call>
void with_map(const ValueMap& value_map, EntryKind entries, bool has_channels, Call&& call) {
  if (has_channels && entries == EntryKind::none) {
    call(std::integral_constant<MapKind, MapKind::channels>());
  } else if (has_channels) {
    call(std::integral_constant<MapKind, MapKind::channels_features>());
  } else if (value_map.mask) {
    call(std::integral_constant<MapKind, MapKind::mask>());
  } else if (entries == EntryKind::none) {
    call(std::integral_constant<MapKind, MapKind::none>());
  } else if (entries == EntryKind::rows) {
    call(std::integral_constant<MapKind, MapKind::rows>());
  } else {
    call(std::integral_constant<MapKind, MapKind::features>());
  }
}

// A plain kernel maps values by these. entries: those of the affine map, in runs of a lane's neighbors.
struct PlainMap {
  const PlainEntries& entries;
  const ValueMap& value_map;
  const ChannelMap& channels;
};

// Returns the first entry of a lane's neighbors, for features.
__device__ inline uint32_t entry_of_lane(const PlainEntries& entries, uint32_t group) {
  return entries.of(group * 32 + threadIdx.x % 32) * kNeighbors;
}

// The numbers by which a lane maps its neighbors in a group. They are loaded before the neighbors are computed.
template <MapKind Kind>
class LaneMap {
 public:
  // group: the number of a plain group. place: that of its first element.
  __device__ LaneMap(const PlainMap& by, uint32_t group, int64_t) {
    const auto& [entries, value_map, channels] = by;
    if constexpr (Kind == MapKind::rows) {
      const uint32_t entry = entries.of_group(group);
      scales_[0] = scale_at(value_map, entry), shifts_[0] = shift_at(value_map, entry);
    } else {
      const uint32_t entry = entry_of_lane(entries, group);
#pragma unroll
      for (int k = 0; k < kNumbers; k += 4) {
        read_four(scales_ + k, value_map.scale, entry + k, 1.0f);
        read_four(shifts_ + k, value_map.shift, entry + k, -0.0f);
      }
    }
  }

  __device__ void apply(float* values) const {
#pragma unroll
    for (int k = 0; k < kNeighbors; ++k) values[k] = values[k] * scales_[k % kNumbers] + shifts_[k % kNumbers];
  }

 private:
  static constexpr int kNumbers = Kind == MapKind::rows ? 1 : kNeighbors;
  float scales_[kNumbers], shifts_[kNumbers];
};

template <>
class LaneMap<MapKind::none> {
 public:
  __device__ LaneMap(const PlainMap&, uint32_t, int64_t) {}
  __device__ void apply(float*) const {}
};

template <>
class LaneMap<MapKind::mask> {
 public:
  // place: a multiple of kNeighbors.
  __device__ LaneMap(const PlainMap& by, uint32_t, int64_t place)
      : bits_(reinterpret_cast<const uint8_t*>(by.value_map.mask)[place / kNeighbors + threadIdx.x % 32]) {}

  __device__ void apply(float* values) const {
#pragma unroll
    for (int k = 0; k < kNeighbors; ++k) values[k] *= factor_of_bit(bits_, k);
  }

 private:
  static_assert(kNeighbors == 8, "a byte of the mask");
  uint32_t bits_;
};

template <>
class LaneMap<MapKind::channels> {
 public:
  __device__ LaneMap(const PlainMap& by, uint32_t group, int64_t) {
    const uint32_t channel = entry_of_lane(by.channels.plain, group);
#pragma unroll
    for (int k = 0; k < kNeighbors; k += 4) {
      const uint4 four = reinterpret_cast<const uint4*>(by.channels.stored.numbers)[(channel + k) / 4];
      words_[k] = four.x, words_[k + 1] = four.y, words_[k + 2] = four.z, words_[k + 3] = four.w;
    }
  }

  __device__ void apply(float* values) const {
#pragma unroll
    for (int k = 0; k < kNeighbors; ++k) values[k] = put_in(values[k], numbers_of(words_[k]));
  }

 private:
  uint32_t words_[kNeighbors];
};

template <>
class LaneMap<MapKind::channels_features> {
 public:
  __device__ LaneMap(const PlainMap& by, uint32_t group, int64_t place)
      : by_(by), group_(group), channels_(by, group, place) {}

  // Loads scales and shifts only here, because there are not enough registers for them before.
  __device__ void apply(float* values) const {
    channels_.apply(values);
    LaneMap<MapKind::features>(by_, group_, 0).apply(values);
  }

 private:
  const PlainMap& by_;
  uint32_t group_;
  LaneMap<MapKind::channels> channels_;
};

// -- pairs -----------------------------------------------------------------------------------------------

// Dequantizes a group by products. words: its codes. signs: its signs, in bytes. number: that of the group, which is used if the map
// has entries or channels, or the group is rotated twice. place: that of its first element in `out`.
template <MapKind Kind, class T>
__device__ void dequantize_group(float mean, float factor, bool is_twice, const uint32_t* words, int bits,
                                 const float* signed_levels, const uint8_t* signs, const uint64_t& seed,
                                 const PlainMap& by, int64_t number, T* out, int64_t place, uint32_t part) {
  const LaneMap<Kind> map(by, static_cast<uint32_t>(number), place);
  float values[kNeighbors];
  transform(values, read_levels(words, bits, signed_levels), part);
  if (is_twice) rotate_neighbors_back(values, seed, number);
  const uint32_t negative = signs[threadIdx.x % 32];
#pragma unroll
  for (int k = 0; k < kNeighbors; ++k) values[k] = mean + values[k] * (negative & (1u << k) ? -factor : factor);
  map.apply(values);
  uint32_t words_of_values[kNeighborWords<T>];
  narrow<T, kNeighbors>(words_of_values, values);
  store_neighbor_words(words_of_values, out + place);
}

// Dequantizes the two groups of a warp. words: the codes of the first group, followed by those of the second one. signs: those of the
// first group, sizeof(Workspace) before those of the second one. first: the number of the first group. places: those of the groups.
template <MapKind Kind, class T>
__device__ void dequantize_pair(const PairScale& scale, const uint32_t* words, int bits, const float* signed_levels,
                                const uint8_t* signs, const uint64_t& seed, const PlainMap& by, int64_t first, T* out,
                                const int64_t* places, uint32_t part) {
  dequantize_group<Kind>(scale.means[0], scale.factors[0], scale.are_twice[0], words, bits, signed_levels, signs, seed, by, first, out,
                         places[0], part);
  dequantize_group<Kind>(scale.means[1], scale.factors[1], scale.are_twice[1], words + (kFullGroup / kBlock) * bits, bits,
                         signed_levels, signs + sizeof(Workspace), seed, by, first + 1, out, places[1], part);
}

// Plain: the tensor has plain pairs, whose map is of this kind.
template <class T, bool Plain, MapKind Kind>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    dequantize_kernel(const __grid_constant__ Streams uniform, const __grid_constant__ GroupMap map, const int64_t* order,
                      const int64_t* counts, const uint32_t* packed, const uint16_t* ranges,
                      const __grid_constant__ ValueMap value_map, const __grid_constant__ ChannelMap channels,
                      const __grid_constant__ PlainPairs plain, T* out) {
  __shared__ Streams streams;
  __shared__ CodeLevels levels;
  __shared__ Workspace workspaces[kGroupsOfBlock];
  __shared__ PlainCodes inputs[Plain ? kWarps : 1];
  __shared__ uint64_t seed;  // in a register, it would be joined by twenty keys that the compiler computes ahead
  fill(levels);
  if (threadIdx.x == 0) seed = load_seed(ranges + uniform.groups * kColumns);
  share_streams(streams, uniform, Plain ? nullptr : counts);
  Workspace& own = workspaces[threadIdx.x / kSide];
  const PlainMap by = {plain.entries, value_map, channels};
  // The shuffle keeps the compiler from computing the part again in each turn.
  const uint32_t part = __shfl_xor_sync(kAllLanes, part_of_transform(), 0);
  const auto* signs = reinterpret_cast<const uint8_t*>(workspaces[threadIdx.x / 32 * 2].random);
  constexpr int kSignsOfTurn = 4 * kCountersAhead * sizeof(uint32_t);

  int turn = 0;  // the place of the next group's random words; 0: there are none yet
#pragma unroll 1
  for (int64_t pair = first_pair_of_warp();; pair += pairs_apart()) {
    if constexpr (Plain && kHasProducts) {
      const int bits = uniform.of[0].bits;
      PlainInput input(inputs[threadIdx.x / 32], packed, ranges, bits);
      if (pair < plain.count) input.load(pair);
#pragma unroll 1
      for (; pair < plain.count; pair += pairs_apart()) {
        const uint2 rows = input.rows();
        const uint32_t* words = input.words();
        const int64_t next = pair + pairs_apart();
        if (next < plain.count) input.load(next);
        if (turn == 0) put_random_ahead<kCountersAhead>(own, seed, 2 * pair + threadIdx.x / kSide % 2, 2 * pairs_apart());
        const int64_t places[] = {pair * (2 * kFullGroup), pair * (2 * kFullGroup) + kFullGroup};
        const PairScale scale = scale_of_rows(rows);
        const auto dequantize = [&](const PairScale& of, int of_bits) {
          dequantize_pair<Kind>(of, words, of_bits, levels.of(of_bits), signs + kSignsOfTurn * turn, seed, by, 2 * pair, out,
                                places, part);
        };
        // Few pairs have a group that is rotated twice. For those of the others that have 2 bits, the compiler knows the levels.
        if (any(scale.are_twice[0] || scale.are_twice[1])) {
          dequantize(scale, bits);
        } else {
          const PairScale once = {{scale.means[0], scale.means[1]}, {scale.factors[0], scale.factors[1]}, {false, false}};
          bits == 2 ? dequantize(once, 2) : dequantize(once, bits);
        }
        turn = (turn + 1) % kTurns;
      }
    }
    if (2 * pair >= streams.groups) break;
    const LocatedGroup of = locate(streams, Plain ? GroupMap{0, map.end, true} : map, pair);
    const Stream& stream = streams.of[of.stream];
    const int m = of.length, bits = stream.bits, most_bits = larger(bits);
    const GroupScale found = load_scale(ranges, m > 0 ? of.number : 0);
    const uint32_t* words = packed + stream.first_word + word_index(block_of(of.first), 0, bits);
    int64_t begin = 0;
    bool is_quick = kHasProducts && !Plain && !value_map.is_affine() && !channels.exists() && !found.is_twice && bits == most_bits && bits <= kMostProductBits;
    is_quick = is_quick && is_full_at(begin, of, streams, order) && of.first % kBlock == 0 && begin % kNeighbors == 0;
    const auto addresses = reinterpret_cast<uintptr_t>(words) | reinterpret_cast<uintptr_t>(out + begin);
    if (all(is_quick && addresses % sizeof(uint4) == 0)) {
      if (turn == 0) put_random_ahead<kCountersAhead>(own, seed, of.number, 2 * pairs_apart());
      const int64_t places[] = {of_group(begin, 0), of_group(begin, 1)};
      words -= threadIdx.x / kSide % 2 * (kFullGroup / kBlock) * bits;
      const auto dequantize = [&](auto map) {
        dequantize_pair<decltype(map)::value>(scale_of_pair(found), words, bits, levels.of(bits), signs + kSignsOfTurn * turn,
                                              seed, by, 0, out, places, part);
      };
      if (value_map.mask) {
        dequantize(std::integral_constant<MapKind, MapKind::mask>());
      } else {
        dequantize(std::integral_constant<MapKind, MapKind::none>());
      }
      turn = (turn + 1) % kTurns;
      continue;
    }
    const Planes planes = read_planes({words, m, lane_of(of.first), bits}, most_bits);
    float values[kSide];
    decode(values, planes, levels.of(bits));
    const bool are_full = all(m == kFullGroup);
    if (are_full && !any(found.is_twice)) {
      if (turn == 0) put_random_ahead<kCountersAhead>(own, seed, of.number, 2 * pairs_apart());
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
    store_row(values, value_map, channels.stored, out, place_of(of, streams, order), m, own);
  }
}

}  // namespace

void dequantize_rotated(const Quantized& of, const int32_t* packed, const uint16_t* ranges, const ValueMap& value_map,
                        const StoredChannels& stored, void* out, int dtype, int device, void* stream) {
  if (of.groups <= 0) return;
  const DeviceScope scope(device);
  const Streams uniform = uniform_streams(of);
  const GroupMap map = group_map(uniform, of.counts);
  const ChannelMap channels = channel_map(stored, of.groups, kNeighbors);
  const PlainPairs plain = plain_pairs(of, map, packed, ranges, value_map, channels, out);
  with_quantized_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    auto kernel = dequantize_kernel<T, false, MapKind::none>;
    if (plain.count > 0) {
      with_map(value_map, plain.entries.kind, channels.exists(), [&](auto map) { kernel = dequantize_kernel<T, true, decltype(map)::value>; });
    }
    launch(kernel, device, stream, pair_count(of.groups), kLaunchedBlocks, uniform,
           map, of.order, of.counts, reinterpret_cast<const uint32_t*>(packed), ranges, value_map, channels, plain,
           static_cast<T*>(out));
  });
}

}  // namespace fewbit::cuda
