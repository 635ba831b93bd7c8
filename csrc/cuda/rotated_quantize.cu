// The quantizer of rotated and masked copies, also in one pass with a ReLU, and the energies of groups: two groups a warp.

#include <algorithm>
#include <type_traits>

#include "common/functions.h"
#include "common/normal_levels.h"
#include "common/rotate.h"
#include "cuda/channels.h"
#include "cuda/dispatch.h"
#include "cuda/groups.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/rotated_groups.h"
#include "cuda/rotated_planes.h"
#include "cuda/rotation.h"

namespace fewbit::cuda {
namespace {

// Lanes look up levels by codes of their own, for which constant memory would be slow.
__device__ const NormalLevels kLevelsOnDevice = kNormalLevels;

// A group needs the two counters of its signs and that of its scale, whose place is the third. The last lane has nothing to do.
constexpr int kCountersAhead = 3, kTurns = kSide / kCountersAhead, kPlaceOfScale = 2;

// -- codes -----------------------------------------------------------------------------------------------

constexpr int kMostBitsInRegisters = 4;  // for which the thresholds of a group are in registers

// Encodes a row of rotated numbers with 1 or 2 bits, and multiplies their magnitudes by the levels.
__device__ Planes encode_few(float* y, int bits, float rms) {
  constexpr float kBreak = kNormalLevels.breaks[breaks_begin(2)];
  constexpr float kOne = kNormalLevels.levels[levels_begin(1)];
  constexpr float kLow = kNormalLevels.levels[levels_begin(2)], kHigh = kNormalLevels.levels[levels_begin(2) + 1];
  const float threshold = bits == 2 ? kBreak * rms : float_of(0x7F800000u), low = bits == 2 ? kLow : kOne;
  uint32_t above = 0, negative = 0;
#pragma unroll
  for (int k = kSide - 1; k >= 0; --k) {
    // The sign of the level is its bit of the plane, so that one instruction moves it.
    const float level = fabsf(y[k]) > threshold ? -kHigh : low;
    above = __funnelshift_l(bits_of(level), above, 1);
    negative = __funnelshift_l(bits_of(y[k]), negative, 1);
    y[k] = fabsf(y[k]) * fabsf(level);
  }
  return {{bits == 2 ? above | negative << kSide : negative}};
}

// The breaks and levels of one number of bits.
template <int Bits>
struct FewLevels {
  float breaks[(1 << (Bits - 1)) - 1] = {}, levels[1 << (Bits - 1)] = {};

  constexpr FewLevels() {
    for (int i = 0; i < (1 << (Bits - 1)) - 1; ++i) breaks[i] = kNormalLevels.breaks[breaks_begin(Bits) + i];
    for (int i = 0; i < 1 << (Bits - 1); ++i) levels[i] = kNormalLevels.levels[levels_begin(Bits) + i];
  }
};

// Does the same for 3 or 4 bits. Each comparison halves the levels that are left, and the thresholds between them.
template <int Bits>
__device__ Planes encode_some(float* y, float rms) {
  constexpr int kHalf = 1 << (Bits - 1);
  constexpr FewLevels<Bits> kTable;
  uint32_t planes[Bits] = {};
#pragma unroll
  for (int k = kSide - 1; k >= 0; --k) {
    float thresholds[kHalf - 1], levels[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf - 1; ++i) thresholds[i] = kTable.breaks[i] * rms;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) levels[i] = kTable.levels[i];
    const float magnitude = fabsf(y[k]);
    // The sign of a number that is chosen is the bit of the plane, so that one instruction moves it.
#pragma unroll
    for (int plane = Bits - 2; plane >= 0; --plane) {
      const int step = 1 << plane;
      const bool is_above = magnitude > fabsf(thresholds[step - 1]);
      const int middle = step / 2 - 1;  // the next threshold
#pragma unroll
      for (int i = 0; i < step - 1; ++i) {
        const float upper = thresholds[i + step];
        thresholds[i] = is_above ? (i == middle ? -upper : upper) : thresholds[i];
      }
#pragma unroll
      for (int i = 0; i < step; ++i) {
        const float upper = levels[i + step];
        levels[i] = is_above ? (step == 1 ? -upper : upper) : levels[i];
      }
      planes[plane] = __funnelshift_l(bits_of(step == 1 ? levels[0] : thresholds[step == 1 ? 0 : middle]), planes[plane], 1);
    }
    planes[Bits - 1] = __funnelshift_l(bits_of(y[k]), planes[Bits - 1], 1);
    y[k] = magnitude * fabsf(levels[0]);
  }
  Planes all = {};
#pragma unroll
  for (int plane = 0; plane < Bits; ++plane) all.pairs[plane / 2] |= planes[plane] << (plane % 2 * kSide);
  return all;
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

// -- groups ----------------------------------------------------------------------------------------------

// The state with which a block quantizes groups.
struct Quantizer {
  const Streams& streams;
  const NormalLevels& table;
  Workspace& own;
  const uint64_t& seed;
  bool is_masked;
  bool whole;  // no block of elements belongs to two groups
  uint32_t* packed;
  uint16_t* ranges;

  // Encodes a row, writes the codes, and returns the sum of the group's magnitudes times their levels. are_full: both groups of
  // the warp have 256 elements, and values.
  __device__ float encode(float* y, const LocatedGroup& of, const Remainders& found, bool are_full) const {
    const Stream& stream = streams.of[of.stream];
    const int bits = stream.bits;
    uint32_t* words = packed + stream.first_word + word_index(block_of(of.first), 0, bits);
    if (are_full && whole && all(bits <= 2)) {
      store_full<2>(encode_few(y, bits, root_mean_square(found.energy, kFullGroup)), words, bits);
    } else {
      const int most_bits = larger(bits);
      const float rms = root_mean_square(found.energy, of.length);
      const bool has_codes = has_values(found.energy, found.mean) && found.energy > 0.0f;
      const Planes planes = encode_many(y, bits, most_bits, rms, own, table);
      store_planes(planes, {words, of.length, lane_of(of.first), bits}, most_bits, whole, has_codes);
    }
    put_row(y, own);
    get_column(y, own);
    return sum_of_group(y);
  }

  // Does the same for full groups of few bits, which no other group shares blocks with. words: those of the warp's first group.
  __device__ float encode_full(float* y, const Remainders& found, uint32_t* words, int bits) const {
    words += threadIdx.x / kSide % 2 * (kFullGroup / kBlock) * bits;
    const float rms = root_mean_square(found.energy, kFullGroup);
    if (bits <= 2) {
      store_full<2>(encode_few(y, bits, rms), words, bits);
    } else if (bits == 3) {
      store_full<3>(encode_some<3>(y, rms), words, 3);
    } else {
      store_full<4>(encode_some<4>(y, rms), words, 4);
    }
    put_row(y, own);
    get_column(y, own);
    return sum_of_group(y);
  }

  // Writes mean and scale.
  __device__ void store(int64_t number, const Remainders& found, float inner, uint32_t rounding, bool has_spike) const {
    if (!has_values(found.energy, found.mean)) return store_no_scale(number, ranges);
    const uint16_t scale = stored_scale(found.energy, inner, found.factor, rounding, has_spike);
    store_scale(found.mean, scale, number, ranges);
  }

  static constexpr int kPending = 3;  // numbers of a group
  static_assert(kPending * kTurns <= kSide);

  // Keeps what `store` needs for a full group whose factor is 1.
  __device__ void keep(int turn, const Remainders& found, float inner, bool has_spike) const {
    float* const pending = own.pending + kPending * turn;
    // The energy of a group with a spike is greater than 0.
    pending[0] = has_spike ? -found.energy : found.energy, pending[1] = found.mean, pending[2] = inner;
  }

  // Writes mean and scale of the last `turns` groups, in a lane for each. A lane after the other would take more instructions.
  // pair: that after the last of these groups.
  __device__ void store_kept(int turns, int64_t pair) const {
    __syncwarp();
    const int turn = lane_of_group_now();
    if (turn < turns) {
      const float* const pending = own.pending + kPending * turn;
      const Remainders found = {kFullGroup, pending[1], 1.0f, fabsf(pending[0]), 0.0f};
      const int64_t number = 2 * (pair - (turns - turn) * pairs_apart()) + threadIdx.x / kSide % 2;
      store(number, found, pending[2], own.random[4 * (kCountersAhead * turn + kPlaceOfScale)],
            pending[0] < 0.0f);
    }
    __syncwarp();
  }
};

// The kernel quantizes the elements of x as they are, normalized, without what their channels have in common (also normalized before, if
// there is a normalization), or those of relu(x).
enum class Source { as_is, normalized, channels, relu };

// The result of a ReLU, and its mask: a bit for each element, 0 where the result is 0. A vector of 16 bytes has the elements of a
// byte of the mask, or of half a byte if they are float32.
template <class T>
struct ReluResult {
  static constexpr int kVector = 16 / sizeof(T);

  T* y;
  uint8_t* mask;

  // Returns the part of the result that begins with an element whose number is a multiple of kBlock.
  __host__ __device__ ReluResult from(int64_t element) const { return {y + element, mask + element / 8}; }

  // Writes the ReLU of a vector of elements, and returns it. Every lane calls it, for vectors side by side.
  __device__ uint4 put(const uint4& elements, int vector) const {
    const Relu relu(0.0, 0.0);
    uint32_t words[4] = {elements.x, elements.y, elements.z, elements.w}, bits = 0;
#pragma unroll
    for (int k = 0; k < kVector; k += 2) {
      const float low = value<T>(words, k), high = value<T>(words, k + 1);
      bits |= (low <= 0.0f ? 0u : 1u << k) | (high <= 0.0f ? 0u : 2u << k);
      set_pair<T>(words, k, relu(low), relu(high));
    }
    const uint4 found = {words[0], words[1], words[2], words[3]};
    reinterpret_cast<uint4*>(y)[vector] = found;
    if (kVector == 8) {
      mask[vector] = static_cast<uint8_t>(bits);
    } else {
      bits |= __shfl_xor_sync(kAllLanes, bits, 1) << 4;
      if (vector % 2 == 0) mask[vector / 2] = static_cast<uint8_t>(bits);
    }
    return found;
  }

  // Writes the ReLU of a pair of groups. Afterwards all lanes of the warp can read it.
  __device__ void put_pair(const T* x) const {
#pragma unroll 1
    for (int vector = threadIdx.x % 32; vector < 2 * kFullGroup / kVector; vector += 32) {
      put(reinterpret_cast<const uint4*>(x)[vector], vector);
    }
    __syncwarp();
  }
};

// Rotates a full group: a column becomes a row. turn: the place of its random words. If turn is 0, the random words of the next
// kTurns groups are made first.
__device__ void rotate_full(float* values, const Quantizer& by, int turn, int64_t number, bool has_spike) {
  Workspace& own = by.own;
  if (turn == 0) put_random_ahead<kCountersAhead>(own, by.seed, number, 2 * pairs_apart());
  rotate(values, own, own.random + 4 * kCountersAhead * turn);
  if (any(has_spike)) rotate_again(values, own, by.seed, number, has_spike);
}

// Rotates any group: a column becomes a row. The group's random words stay in its workspace.
__device__ void rotate_any(float* values, const Quantizer& by, const LocatedGroup& of, bool has_spike) {
  Workspace& own = by.own;
  put_random_of_group(own, by.seed, of.number);
  put_column(values, own);
  rotate_in_memory(own, own.random, of.length, has_spike);
  get_row(values, own);
}

// Two groups of a plain tensor in shared memory, where they arrive while the warp works on the two groups before.
template <class T>
struct alignas(16) Staged {
  static constexpr bool kExists = FEWBIT_PAIR_INSTRUCTIONS;
  static constexpr int kVector = 16 / sizeof(T), kGroup = kExists ? kFullGroup + kSide : kVector;  // other banks for the second group

  T elements[2 * kGroup];

  // Begins to copy the elements of both groups. Every lane of the warp calls it.
  __device__ void copy(const T* from) {
#if FEWBIT_PAIR_INSTRUCTIONS
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) {
      const int place = (i * 32 + threadIdx.x % 32) * kVector;
      ptx::copy_async(elements + i * 32 * kVector / kFullGroup * kSide + place, from + place);
    }
#endif
  }

  // Waits for the copies and replaces the elements by their ReLU, which is also written to memory, with its mask.
  __device__ void activate(const ReluResult<T>& result) {
#if FEWBIT_PAIR_INSTRUCTIONS
    ptx::wait_for_copies();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) {
      const int vector = i * 32 + threadIdx.x % 32;
      auto* const at = reinterpret_cast<uint4*>(elements + i * 32 * kVector / kFullGroup * kSide + vector * kVector);
      *at = result.put(*at, vector);
    }
    __syncwarp();
#endif
  }

  // Waits for the copies and reads a column. Afterwards other elements may be copied.
  __device__ void read(float* values) const {
#if FEWBIT_PAIR_INSTRUCTIONS
    ptx::wait_for_copies();
    __syncwarp();
    read_neighbors(values, elements + threadIdx.x / kSide % 2 * kGroup);
    __syncwarp();
#endif
  }
};

// Normalizes a column of a plain group. entries: in runs of kSide.
__device__ void normalize_plain(float* values, const Normalization& by, const PlainEntries& entries, uint32_t group) {
  if (entries.kind == EntryKind::rows) {
    const uint32_t entry = entries.of_group(group);
    const float mean = mean_at(by, entry), rstd = by.rstd[entry];
#pragma unroll
    for (int j = 0; j < kSide; ++j) values[j] = (values[j] - mean) * rstd;
  } else {
    const uint32_t end = entries.count * kSide;
    uint32_t entry = entries.of(group * kSide) * kSide + lane_of_group();
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      values[j] = (values[j] - mean_at(by, entry)) * by.rstd[entry];
      entry += kSide;
      if (entry >= end) entry -= end;
    }
  }
}

// Takes the channels out of a column of a plain group.
__device__ void take_out_plain(float* values, const ChannelMap& channels, uint32_t group) {
  const auto* words = reinterpret_cast<const uint32_t*>(channels.stored.numbers);
  const uint32_t end = channels.plain.count * kSide;
  uint32_t channel = channels.plain.of(group * kSide) * kSide + lane_of_group();
#pragma unroll
  for (int j = 0; j < kSide; ++j) {
    values[j] = taken_out(values[j], numbers_of(words[channel]));
    channel += kSide;
    if (channel >= end) channel -= end;
  }
}

// Quantizes plain groups from `pair` on. It stops at the first pair that may need a factor (remainders_of_full), or after the last
// pair. If Staged exists, the elements of `pair` are on their way to shared memory before the call; when it stops, those of the next
// pair are. Returns the number of groups whose scales are kept.
template <Source Of, class T>
__device__ int quantize_plain(const Quantizer& by, const T* x, const Normalization& normalization, const PlainEntries& entries,
                              const ChannelMap& channels, const ReluResult<T>& relu, int64_t& pair, int64_t end, int bits,
                              Staged<T>& staged) {
  int turn = 0;
#pragma unroll 1
  for (; pair < end; pair += pairs_apart()) {
    const int64_t number = 2 * pair + threadIdx.x / kSide % 2;
    float values[kSide];
    Remainders found;
    if constexpr (Staged<T>::kExists) {
      if constexpr (Of == Source::relu) staged.activate(relu.from(pair * (2 * kFullGroup)));
      staged.read(values);
      const int64_t next = pair + pairs_apart();
      if (next < end) staged.copy(x + next * (2 * kFullGroup));
    } else if constexpr (Of == Source::relu) {
      relu.from(pair * (2 * kFullGroup)).put_pair(x + pair * (2 * kFullGroup));
      read_neighbors(values, relu.y + number * kFullGroup);
    } else {
      read_neighbors(values, x + number * kFullGroup);
    }
    const bool is_normalized = Of == Source::normalized || (Of == Source::channels && normalization.exists());
    if (is_normalized) normalize_plain(values, normalization, entries, static_cast<uint32_t>(number));
    if (Of == Source::channels) take_out_plain(values, channels, static_cast<uint32_t>(number));
    if (!remainders_of_full(found, values, by.is_masked)) break;
    const bool has_spike = may_be_spiky(found) && is_spiky(found, values);
    if (turn == kTurns) {
      by.store_kept(turn, pair);
      turn = 0;
    }
    rotate_full(values, by, turn, number, has_spike);
    uint32_t* const words = by.packed + pair * (2 * kFullGroup / kBlock) * bits;
    by.keep(turn++, found, by.encode_full(values, found, words, bits), has_spike);
  }
  return turn;
}

// -- kernels ---------------------------------------------------------------------------------------------

// Plain: is_plain_tensor() is true, codes have at most kMostBitsInRegisters bits and share no word with those of another group, and x
// is aligned to 16 bytes. Of: if it is `channels` and Plain is false, the kernel takes channels out only if there are some. If it is `relu`, the kernel computes the ReLU of the pairs of full groups; the ReLU of all other elements is in memory already.
// entries: those of the normalization, in runs of kSide.
template <class T, bool Plain, Source Of>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    quantize_kernel(const __grid_constant__ Streams uniform, const __grid_constant__ GroupMap map, const int64_t* order,
                    const int64_t* counts, const T* x, const __grid_constant__ Normalization normalization,
                    const __grid_constant__ PlainEntries entries, const __grid_constant__ ChannelMap channels,
                    const __grid_constant__ ReluResult<T> relu, const int64_t* seed_address, int64_t seed_number, bool is_masked, bool whole, uint32_t* packed, uint16_t* ranges) {
  __shared__ Streams streams;
  __shared__ NormalLevels table;
  __shared__ Workspace workspaces[kGroupsOfBlock];
  __shared__ Staged<T> staged[Plain ? kWarps : 1];
#pragma unroll 1
  for (int i = threadIdx.x; i < static_cast<int>(sizeof table / sizeof(float)); i += kThreads) {
    reinterpret_cast<float*>(&table)[i] = reinterpret_cast<const float*>(&kLevelsOnDevice)[i];
  }
  __shared__ uint64_t seed;  // in a register, it would be joined by twenty keys that the compiler computes ahead
  if (threadIdx.x == 0) seed = seed_from(seed_address, seed_number);
  share_streams(streams, uniform, Plain ? nullptr : counts);
  const Quantizer by = {streams, table, workspaces[threadIdx.x / kSide], seed, is_masked, Plain || whole, packed, ranges};
  if (blockIdx.x == 0 && threadIdx.x == 0) store_seed(seed, ranges + uniform.groups * kColumns);

  const StoredChannels no_channels = {};
  int turn = 0;  // groups whose scales are kept; the next group's random words follow theirs, unless there are none
  int64_t pair = first_pair_of_warp();
  if constexpr (Plain && Staged<T>::kExists) {
    if (pair < plain_pair_count(map)) staged[threadIdx.x / 32].copy(x + pair * (2 * kFullGroup));
  }
#pragma unroll 1
  for (;; pair += pairs_apart()) {
    if constexpr (Plain) {
      turn = quantize_plain<Of>(by, x, normalization, entries, channels, relu, pair, plain_pair_count(map), uniform.of[0].bits,
                                staged[threadIdx.x / 32]);
    }
    const LocatedGroup of = locate(streams, Plain ? GroupMap{0, map.end, true} : map, pair);
    // Made again where it is needed, which takes fewer registers.
    const auto elements = [&] {
      return GroupElements<T>(Of == Source::relu ? relu.y : x, normalization, Of == Source::channels ? channels.stored : no_channels,
                              place_of(of, streams, Plain ? nullptr : order), of.length);
    };
    float values[kSide];
    Remainders found;
    int64_t begin = 0;
    bool are_full = all(is_full_at(begin, of, streams, Plain ? nullptr : order));
    if (are_full) {
      const bool is_changed = Of == Source::normalized || Of == Source::channels;
      if (is_changed && (normalization.exists() || channels.exists())) {
        elements().read_full(values, by.own);
      } else {
        read_neighbors(values, (Of == Source::relu ? relu.y : x) + begin);
      }
      are_full = remainders_of_full(found, values, is_masked);
    }
    if (!are_full && 2 * pair < streams.groups) found = remainders_of(values, elements(), is_masked, by.own);
    const bool is_quick = !Plain && are_full;
    if (turn == kTurns || !is_quick) {
      by.store_kept(turn, pair);
      if (2 * pair >= streams.groups) break;
      turn = 0;
    }
    const bool has_spike = (!is_quick || may_be_spiky(found)) && is_spiky(found, values);
    if (is_quick) {
      rotate_full(values, by, turn, of.number, has_spike);
    } else {
      rotate_any(values, by, of, has_spike);
    }
    const float inner = by.encode(values, of, found, are_full);
    if (is_quick) {
      by.keep(turn++, found, inner, has_spike);
    } else {
      const int64_t number = 2 * pair + threadIdx.x / kSide % 2;  // made again, which takes fewer registers
      const uint32_t random = by.own.random[4 * kRoundingCounter];
      if (lane_of_group() == 0 && number < streams.groups) by.store(number, found, inner, random, has_spike);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    squares_kernel(const __grid_constant__ Streams streams, const __grid_constant__ GroupMap map, const T* x,
                   const __grid_constant__ Normalization normalization, const __grid_constant__ StoredChannels channels, bool is_masked,
                   float* out) {
  __shared__ Workspace workspaces[kGroupsOfBlock];
#pragma unroll 1
  for (int64_t pair = first_pair_of_warp(); 2 * pair < streams.groups; pair += pairs_apart()) {
    const LocatedGroup of = locate(streams, map, pair);
    const GroupPlace place = place_of(of, streams, nullptr);
    const GroupElements<T> elements(x, normalization, channels, place, of.length);
    float values[kSide];
    const Remainders found = remainders_of(values, elements, is_masked, workspaces[threadIdx.x / kSide]);
    const float of_channels = elements.mean_square_scale();
    if (lane_of_group() > 0 || of.length == 0) continue;
    const float back = inverse_rescue(found.factor);
    float energy = found.energy * back * back * of_channels;
    if (is_masked) energy = energy * static_cast<float>(found.count) / static_cast<float>(of.length);
    out[of.number] = has_values(found.energy, found.mean) ? energy : float_of(0x7FC00000u);
  }
}

// Computes the ReLU of the last elements, fewer than those of a pair.
template <class T>
__global__ void __launch_bounds__(kThreads) relu_kernel(const T* x, int n, T* y, uint8_t* mask) {
  const int byte = threadIdx.x;
  if (byte >= (n + kBlock - 1) / kBlock * (kBlock / 8)) return;
  uint32_t bits = 0;
  for (int i = byte * 8; i < byte * 8 + 8 && i < n; ++i) {
    const float element = as_float(x[i]);
    bits |= element <= 0.0f ? 0u : 1u << (i % 8);
    store_one(Relu(0.0, 0.0)(element), y + i);
  }
  mask[byte] = static_cast<uint8_t>(bits);
}

// Quantizes relu(x) if `relu` is not null, and else x. If `relu` is given and x is not plain, it returns false and does nothing.
template <class T>
bool quantize_as(const Quantized& of, bool is_masked, const T* x, const Normalization& normalization, const StoredChannels& stored,
                 const Seed& seed, const ReluResult<T>* relu, int32_t* packed, uint16_t* ranges, int device, void* stream) {
  // A copy without groups has a seed nevertheless.
  const int64_t pairs = std::max(pair_count(of.groups), int64_t{1});
  const Streams uniform = uniform_streams(of);
  const GroupMap map = group_map(uniform, of.counts);
  PlainEntries entries;
  const ChannelMap channels = channel_map(stored, of.groups, kSide);
  const bool is_plain = is_plain_tensor(of, map) && is_whole(of) && of.bits <= kMostBitsInRegisters && is_vector_aligned(x) &&
                        (!relu || is_vector_aligned(relu->y)) && is_plain_map(channels) &&
                        find_entries(entries, normalization.index, normalization.exists(), of.groups, kSide);
  auto kernel = quantize_kernel<T, false, Source::channels>;
  if (relu) {
    if (!is_plain) return false;
    kernel = quantize_kernel<T, true, Source::relu>;
    const int64_t end = plain_pair_count(map) * (2 * kFullGroup);
    const ReluResult<T> last = relu->from(end);
    if (end < map.end) launch(relu_kernel<T>, device, stream, 1, 1, x + end, static_cast<int>(map.end - end), last.y, last.mask);
  } else if (is_plain && channels.exists()) {
    kernel = quantize_kernel<T, true, Source::channels>;
  } else if (is_plain) {
    kernel = normalization.exists() ? quantize_kernel<T, true, Source::normalized> : quantize_kernel<T, true, Source::as_is>;
  }
  clear(of, packed, ranges, stream);
  launch(kernel, device, stream, pairs, kLaunchedBlocks, uniform, map, of.order, of.counts, x, normalization, entries,
         channels, relu ? *relu : ReluResult<T>{},
         address_of(seed), seed.number, is_masked, is_whole(of), reinterpret_cast<uint32_t*>(packed), ranges);
  return true;
}

}  // namespace

void quantize_rotated(const Quantized& of, bool is_masked, const void* x, int dtype, const Normalization& normalization,
                      const StoredChannels& channels, const Seed& seed, int32_t* packed, uint16_t* ranges, int device, void* stream) {
  const DeviceScope scope(device);
  with_quantized_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    quantize_as<T>(of, is_masked, static_cast<const T*>(x), normalization, channels, seed, nullptr, packed, ranges, device,
                   stream);
  });
}

bool relu_quantized(const Quantized& of, const void* x, int dtype, const Seed& seed, void* y, int32_t* mask, int32_t* packed,
                    uint16_t* ranges, int device, void* stream) {
  const DeviceScope scope(device);
  bool is_done = false;
  with_quantized_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const ReluResult<T> relu = {static_cast<T*>(y), reinterpret_cast<uint8_t*>(mask)};
    is_done = quantize_as<T>(of, true, static_cast<const T*>(x), {}, {}, seed, &relu, packed, ranges, device, stream);
  });
  return is_done;
}

void squares_rotated(const Streams& streams, bool is_masked, const void* x, int dtype, const Normalization& normalization,
                     const StoredChannels& channels, float* out, int device, void* stream) {
  if (streams.groups <= 0) return;
  const DeviceScope scope(device);
  with_quantized_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    launch(squares_kernel<T>, device, stream, pair_count(streams.groups), kLaunchedBlocks, streams, group_map(streams, false),
           static_cast<const T*>(x), normalization, channels, is_masked, out);
  });
}

}  // namespace fewbit::cuda
