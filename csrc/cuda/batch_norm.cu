// The backward of a batch norm in channels-last order, from the rotated copy of its normalized input: no kernel writes the dequantized
// values to memory.
//
// Element e has channel e % channels. So two groups of 256 elements have the same channels at the same places if their numbers are
// equal modulo phases = channels / gcd(channels, 256). The phase of a group is its number modulo phases. A block works on the groups
// of one phase. Each lane then has the same eight channels in all groups, and keeps their sums or coefficients in registers.

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "common/quantize.h"
#include "common/rotate.h"
#include "cuda/dispatch.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/pairs.h"
#include "cuda/rotated_neighbors.h"
#include "cuda/rotated_planes.h"
#include "cuda/rotation.h"

namespace fewbit::cuda {
namespace {

constexpr int kResident = 3;  // the blocks that fit on a multiprocessor with 80 registers a thread
constexpr int kSums = 2;      // of a channel: that of the gradients, and that of their products with the values

// A copy whose group g has the elements from 256 g on, and the gradient of the batch norm's result.
template <class T>
struct Source {
  const uint32_t* packed;
  const uint16_t* ranges;
  const T* grad;
  uint32_t groups, phases;
  int bits;

  // The rows of ranges, a word for each group.
  __device__ const uint32_t* rows() const { return reinterpret_cast<const uint32_t*>(ranges); }
};

// The inputs, sums and coefficients of all channels: (channels,) each, in device memory.
struct Channels {
  uint32_t count;
  const float* rstd;
  const float* weight;                         // null: all are 1
  float *sum_of_gradients, *sum_of_products;   // the gradients of bias and weight
  float *factors, *scales, *shifts;            // the gradient of the input: factor * gradient + scale * value + shift
};

// The groups that a warp visits. They are counted within the block's phase: the warp visits the groups begin and begin + 1, then those
// `apart` groups later, up to count. There are fewer than 2^24 groups, so that the numbers of elements fit into 32 bits.
struct Walk {
  uint32_t phase, phases, count, begin, apart;

  __device__ Walk(uint32_t groups, uint32_t phases) : phase(blockIdx.x % phases), phases(phases) {
    const uint32_t chunks = gridDim.x / phases, warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0, 32);
    count = (groups - phase + phases - 1) / phases;
    begin = 2 * (blockIdx.x / phases * kWarps + warp);
    apart = 2 * chunks * kWarps;
  }
  // Returns the number of the i-th group of the phase.
  __device__ uint32_t number(uint32_t i) const { return phase + i * phases; }
};

// The codes of two groups in shared memory, where they arrive while a warp works on the two groups before.
constexpr int kWordsOfGroup = kFullGroup / kBlock * kMostProductBits;
struct alignas(16) Codes {
  uint32_t words[2][2 * kWordsOfGroup];  // alternately
};

// Returns what load_scale returns, for the row of ranges of a group in one word.
__device__ inline GroupScale scale_of_row(uint32_t row) {
  return {float_of(row << 16), float_of(row & 0x7FFF0000u), row >> 31 != 0};
}

// Loads the codes and gradients of pairs of groups: the next pair while the warp works on the present one.
template <class T>
class Input {
 public:
  __device__ Input(const Source<T>& from, const Walk& walk, Codes& codes, Workspace* pair)
      : from_(from), walk_(walk), codes_(codes), pair_(pair), turn_(0) {}

  // Begins to load the groups i and i + 1 of the phase. A group that does not exist gets the data of the one before it.
  __device__ void load(uint32_t i) {
    const int lane = threadIdx.x % 32;
    const uint32_t numbers[] = {walk_.number(i), walk_.number(i + 1 < walk_.count ? i + 1 : i)};
#if FEWBIT_PAIR_INSTRUCTIONS
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      auto* const to = reinterpret_cast<uint4*>(pair_[k].numbers);
      const auto* const grad = reinterpret_cast<const uint4*>(from_.grad + numbers[k] * kFullGroup);
#pragma unroll
      for (int j = 0; j < kNeighborVectors<T>; ++j) ptx::copy_async(to + j * 32 + lane, grad + j * 32 + lane);
    }
    const int vector = lane % kSide;
    if (vector < 2 * from_.bits) {
      const uint32_t* const packed = from_.packed + (lane < kSide ? numbers[0] : numbers[1]) * (kFullGroup / kBlock) * from_.bits;
      ptx::copy_async(codes_.words[turn_] + lane / kSide * kWordsOfGroup + 4 * vector, packed + 4 * vector);
    }
#endif
    turn_ ^= 1;
#pragma unroll
    for (int k = 0; k < 2; ++k) rows_[k] = from_.rows()[numbers[k]];
  }

  // Waits for what is being loaded. Returns the codes, kWordsOfGroup for each group.
  __device__ const uint32_t* wait() const {
#if FEWBIT_PAIR_INSTRUCTIONS
    ptx::wait_for_copies();
    __syncwarp();
#endif
    return codes_.words[turn_ ^ 1];
  }

  // Reads the gradients of a lane's neighbors in both groups, and the groups' scales. Afterwards others may be loaded.
  __device__ void read(uint32_t (&grads)[2][kNeighborWords<T>], GroupScale (&scales)[2]) const {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const auto* const vectors = reinterpret_cast<const uint4*>(pair_[k].numbers) + threadIdx.x % 32 * kNeighborVectors<T>;
#pragma unroll
      for (int j = 0; j < kNeighborVectors<T>; ++j) put_vector(grads[k] + 4 * j, vectors[j]);
      scales[k] = scale_of_row(rows_[k]);
    }
    __syncwarp();
  }

  static __device__ void put_vector(uint32_t* words, const uint4& vector) {
    words[0] = vector.x, words[1] = vector.y, words[2] = vector.z, words[3] = vector.w;
  }

 private:
  const Source<T>& from_;
  const Walk& walk_;
  Codes& codes_;
  Workspace* const pair_;  // those of the warp's two groups
  int turn_;
  uint32_t rows_[2];  // of ranges, as they were loaded: arithmetic on a word waits until it has arrived
};

// The shared memory of a block.
struct Shared {
  CodeLevels levels;
  Workspace workspaces[kGroupsOfBlock];
  Codes codes[kHasProducts ? kWarps : 1];
  uint64_t seed;
};

// Calls visit(values, gradients, number) for each group of a warp: a lane's neighbors, the words of their gradients, and the number
// of the group. Every thread of a block calls it.
template <class T, class Visit>
__device__ void visit_groups(const Source<T>& from, const Walk& walk, Shared& shared, Visit&& visit) {
  fill(shared.levels);
  if (threadIdx.x == 0) shared.seed = load_seed(from.ranges + from.groups * kColumns);
  __syncthreads();
  const int lane = threadIdx.x % 32;
  Workspace* const pair = shared.workspaces + threadIdx.x / 32 * 2;
  Workspace& own = pair[lane / kSide];
  constexpr int kWordsOfTurn = 4 * kCountersAhead;

  int turn = 0;  // the place of the next groups' random words; 0: there are none yet
  if constexpr (kHasProducts) {
    // The shuffle keeps the compiler from computing the part again in each turn.
    const uint32_t part = __shfl_xor_sync(kAllLanes, part_of_transform(), 0);
    Input<T> input(from, walk, shared.codes[threadIdx.x / 32], pair);
    if (walk.begin < walk.count) input.load(walk.begin);
#pragma unroll 1
    for (uint32_t i = walk.begin; i < walk.count; i += walk.apart) {
      uint32_t grads[2][kNeighborWords<T>];
      GroupScale scales[2];
      const uint32_t* const words = input.wait();
      input.read(grads, scales);
      if (i + walk.apart < walk.count) input.load(i + walk.apart);
      if (turn == 0) put_random_ahead<kCountersAhead>(own, shared.seed, walk.number(i + lane / kSide), walk.apart * walk.phases);
      const auto visit_group = [&](int k, int bits) {
        float values[kNeighbors];
        transform(values, read_levels(words + k * kWordsOfGroup, bits, shared.levels.of(bits)), part);
        if (scales[k].is_twice) rotate_neighbors_back(values, shared.seed, walk.number(i + k));
        const uint32_t negative = reinterpret_cast<const uint8_t*>(pair[k].random + kWordsOfTurn * turn)[lane];
        const float factor = scales[k].scale * inverse_root(kFullGroup);
#pragma unroll
        for (int j = 0; j < kNeighbors; ++j) values[j] = scales[k].mean + values[j] * (negative & (1u << j) ? -factor : factor);
        visit(values, grads[k], walk.number(i + k));
      };
      const auto visit_pair = [&](int bits) {
        visit_group(0, bits);
        if (i + 1 < walk.count) {
          visit_group(1, bits);
        }
      };
      // With a constant number of bits, the compiler leaves out the branches for other numbers.
      from.bits == 2 ? visit_pair(2) : visit_pair(from.bits);
      turn = (turn + 1) % kTurns;
    }
  } else {
#pragma unroll 1
    for (uint32_t i = walk.begin; i < walk.count; i += walk.apart) {
      const uint32_t number = walk.number(i + lane / kSide < walk.count ? i + lane / kSide : i);
      const GroupScale found = scale_of_row(from.rows()[number]);
      const uint32_t* const words = from.packed + number * (kFullGroup / kBlock) * from.bits;
      float row[kSide];
      decode(row, read_planes({words, kFullGroup, 0, from.bits}, from.bits), shared.levels.of(from.bits));
      put_random_of_group(own, shared.seed, number);
      rotate_full_back(row, own, own.random, found.scale, found.is_twice);
#pragma unroll
      for (int k = 0; k < kSide; ++k) row[k] = found.mean + row[k];
      put_row(row, own);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if (k == 1 && i + 1 == walk.count) break;
        float values[kNeighbors];
        uint32_t grad[kNeighborWords<T>];
        const uint32_t of = walk.number(i + k);
        const auto* const vectors = reinterpret_cast<const uint4*>(from.grad + of * kFullGroup) + lane * kNeighborVectors<T>;
#pragma unroll
        for (int j = 0; j < kNeighborVectors<T>; ++j) Input<T>::put_vector(grad + 4 * j, vectors[j]);
#pragma unroll
        for (int j = 0; j < kNeighbors; ++j) values[j] = pair[k].at(lane * kNeighbors + j);
        visit(values, grad, of);
      }
      __syncwarp();
    }
  }
}

// Returns the channel of a lane's first neighbor in the groups of a phase.
__device__ uint32_t first_channel(uint32_t phase, uint32_t channels) {
  return (phase * kFullGroup + threadIdx.x % 32 * kNeighbors) % channels;
}

// Computes the sums of each block, for the 256 places of its groups. sums: (blocks, kSums, 256).
template <class T>
__global__ void __launch_bounds__(kThreads, kResident) sums_kernel(const __grid_constant__ Source<T> from, float* sums) {
  __shared__ Shared shared;
  const Walk walk(from.groups, from.phases);
  float own[kSums][kNeighbors] = {};
  visit_groups(from, walk, shared, [&](const float* values, const uint32_t* grad, uint32_t) {
#pragma unroll
    for (int k = 0; k < kNeighbors; ++k) {
      const float of = value<T>(grad, k);
      own[0][k] += of;
      own[1][k] = fmaf(of, values[k], own[1][k]);
    }
  });
  __syncthreads();
  // The sums take the place of the workspaces, so that three blocks fit into 100 KiB of shared memory.
  auto* const total = reinterpret_cast<float(*)[kFullGroup]>(shared.workspaces);
  // One warp after the other, so that the order of the sum is always the same.
#pragma unroll 1
  for (int warp = 0; warp < kWarps; ++warp) {
    if (threadIdx.x / 32 == static_cast<unsigned>(warp)) {
#pragma unroll
      for (int s = 0; s < kSums; ++s) {
#pragma unroll
        for (int k = 0; k < kNeighbors; ++k) {
          float& to = total[s][threadIdx.x % 32 * kNeighbors + k];
          to = warp == 0 ? own[s][k] : to + own[s][k];
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    sums[(static_cast<int64_t>(blockIdx.x) * kSums + s) * kFullGroup + threadIdx.x] = total[s][threadIdx.x];
  }
}
static_assert(kThreads == kFullGroup);

// Adds up the sums of the blocks, in a warp for each channel, and computes what depends on them. rows: the elements of a channel.
__global__ void __launch_bounds__(kThreads)
    channels_kernel(const float* sums, uint32_t phases, uint32_t blocks, float rows, const __grid_constant__ Channels of) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t places = phases * kFullGroup / of.count;  // of a channel in the groups of all phases
  for (uint32_t channel = blockIdx.x * kWarps + threadIdx.x / 32; channel < of.count; channel += gridDim.x * kWarps) {
    float found[kSums] = {};
    for (uint32_t i = lane; i < places * (blocks / phases); i += 32) {
      const uint32_t place = channel + i % places * of.count, block = i / places * phases + place / kFullGroup;
#pragma unroll
      for (int s = 0; s < kSums; ++s) found[s] += sums[(static_cast<int64_t>(block) * kSums + s) * kFullGroup + place % kFullGroup];
    }
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
#pragma unroll
      for (int step = 16; step > 0; step /= 2) found[s] += float_of(__shfl_xor_sync(kAllLanes, bits_of(found[s]), step));
    }
    if (lane > 0) continue;
    const float factor = of.rstd[channel] * (of.weight ? of.weight[channel] : 1.0f);
    of.sum_of_gradients[channel] = found[0], of.sum_of_products[channel] = found[1];
    of.factors[channel] = factor;
    of.scales[channel] = -factor * (found[1] / rows), of.shifts[channel] = -factor * (found[0] / rows);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, kResident)
    input_kernel(const __grid_constant__ Source<T> from, const __grid_constant__ Channels of, T* out) {
  __shared__ Shared shared;
  const Walk walk(from.groups, from.phases);
  float factors[kNeighbors], scales[kNeighbors], shifts[kNeighbors];
  const uint32_t channel = first_channel(walk.phase, of.count);
#pragma unroll
  for (int k = 0; k < kNeighbors; ++k) {
    factors[k] = of.factors[channel + k], scales[k] = of.scales[channel + k], shifts[k] = of.shifts[channel + k];
  }
  visit_groups(from, walk, shared, [&](const float* values, const uint32_t* grad, uint32_t number) {
    uint32_t words[kNeighborWords<T>];
#pragma unroll
    for (int k = 0; k < kNeighbors; k += 2) {
      float pair[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        pair[i] = fmaf(factors[k + i], value<T>(grad, k + i), fmaf(scales[k + i], values[k + i], shifts[k + i]));
      }
      set_pair<T>(words, k, pair[0], pair[1]);
    }
    store_neighbor_words(words, out + number * kFullGroup);
  });
}

// Enqueues a kernel in a grid of that many blocks.
template <class... Parameters, class... Arguments>
void launch_blocks(void (*kernel)(Parameters...), int64_t blocks, int device, void* stream, Arguments&&... arguments) {
  launch(kernel, device, stream, blocks * kWarps, kMostBatchNormBlocks, static_cast<Arguments&&>(arguments)...);
}

}  // namespace

int64_t batch_norm_floats(int64_t channels) { return kMostBatchNormBlocks * kSums * kFullGroup + 3 * channels; }

bool batch_norm_backward(const Quantized& of, const BatchNorm& norm, const int32_t* packed, const uint16_t* ranges, const void* grad,
                         int dtype, void* out, int device, void* stream) {
  const int64_t channels = norm.channels;
  const GroupMap map = group_map(uniform_streams(of), of.counts);
  const bool fits = is_plain_tensor(of, map) && of.bits <= kMostProductBits && of.groups > 0 && of.groups >> 24 == 0 &&
                    map.end == of.groups * kFullGroup && channels > 0 && channels % kNeighbors == 0 && map.end % channels == 0 &&
                    is_vector_aligned(packed) && is_vector_aligned(ranges) && is_vector_aligned(grad) && is_vector_aligned(out);
  const int64_t phases = fits ? channels / std::gcd(channels, int64_t{kFullGroup}) : 0;
  if (!fits || phases > kMostBatchNormBlocks) return false;

  const DeviceScope scope(device);
  const int64_t most = std::min(kMostBatchNormBlocks, multiprocessors_of(device) * kResident);
  const int64_t useful = quotient_up(quotient_up(of.groups, phases), 2 * kWarps);  // blocks for each phase
  const int64_t blocks = phases * std::max(int64_t{1}, std::min(most / phases, useful));

  float* const numbers = norm.memory + kMostBatchNormBlocks * kSums * kFullGroup;
  const Channels by = {static_cast<uint32_t>(channels), norm.rstd, norm.weight, norm.grad_bias, norm.grad_weight,
                       numbers, numbers + channels, numbers + 2 * channels};
  with_quantized_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Source<T> from = {reinterpret_cast<const uint32_t*>(packed), ranges, static_cast<const T*>(grad), static_cast<uint32_t>(of.groups),
                            static_cast<uint32_t>(phases), of.bits};
    launch_blocks(sums_kernel<T>, blocks, device, stream, from, norm.memory);
    launch(channels_kernel, device, stream, channels, kOneWave, norm.memory, from.phases, static_cast<uint32_t>(blocks),
           static_cast<float>(map.end / channels), by);
    if (out) launch_blocks(input_kernel<T>, blocks, device, stream, from, by, static_cast<T*>(out));
  });
  return true;
}

}  // namespace fewbit::cuda
