// The groups of a quantized tensor, as warps work on them.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/quantize.h"
#include "common/streams.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/number.h"
#include "cuda/tile.h"

namespace fewbit::cuda {

// Returns the streams if all samples have one width. Otherwise it returns what does not depend on the widths, with the
// numbers of available words and groups.
inline Streams uniform_streams(const Quantized& of) {
  Streams streams = one_stream(of.samples, of.features, of.group_size, of.bits);
  if (of.counts) {
    streams.words = of.words;
    streams.groups = of.groups;
  }
  return streams;
}

// Returns true if streams of counts need no more words and groups than there are.
__device__ inline bool fits(const Streams& streams, const Streams& most) {
  int64_t samples = 0;
  for (int i = 0; i < streams.count; ++i) samples += streams.of[i].samples;
  return samples == most.of[0].samples && streams.words <= most.words && streams.groups <= most.groups;
}

// Writes the streams of a launch to shared memory: the given ones, or those of counts that only the device knows. Every
// thread of a block calls it.
__device__ inline void share_streams(Streams& shared, const Streams& uniform, const int64_t* counts) {
  if (threadIdx.x == 0) {
    if (counts) {
      clear(shared, uniform.features, uniform.group_size);
      append_mixed(shared, counts);
      if (!fits(shared, uniform)) __trap();
    } else {
      shared = uniform;
    }
  }
  __syncthreads();
}

static __device__ int64_t zero = 0;

// Returns the address of a number to which Seed::number is added. A choice in the kernel would take more registers.
inline const int64_t* address_of(const Seed& seed) {
  if (seed.address) return seed.address;
  void* address = nullptr;
  check(cudaGetSymbolAddress(&address, zero), "finding a variable on the device");
  return static_cast<const int64_t*>(address);
}

__device__ inline uint64_t seed_from(const int64_t* address, int64_t number) {
  return static_cast<uint64_t>(*address) + static_cast<uint64_t>(number);
}

// A warp takes every groups_apart()-th group.
__device__ inline int64_t first_group_of_warp() {
  return static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
}
__device__ inline int64_t groups_apart() { return static_cast<int64_t>(gridDim.x) * (blockDim.x / 32); }

// Return a / b and a % b for numbers that are not negative. A 64-bit division takes about a hundred instructions, a 32-bit one
// twenty.
__device__ inline int64_t quotient(int64_t a, int64_t b) {
  if ((a | b) >> 32 == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

__device__ inline int64_t modulo(int64_t a, int64_t b) {
  if ((a | b) >> 32 == 0) return static_cast<uint32_t>(a) % static_cast<uint32_t>(b);
  return a % b;
}

// A divisor of many numbers. Numbers below 2^31 are multiplied by a factor that the host computes.
class Divisor {
 public:
  explicit Divisor(int64_t by) : by_(by), factor_(0), shift_(0) {
    if (by >> 31 != 0) return;  // all quotients are 0
    while (int64_t{1} << shift_ < by) ++shift_;
    factor_ = static_cast<uint32_t>(quotient_up(int64_t{1} << (31 + shift_), by));
  }

  __device__ int64_t quotient(int64_t a) const {
    if (a >> 31 != 0) return a / by_;
    return quotient(static_cast<uint32_t>(a));
  }

  // Does the same for a number below 2^31.
  __device__ uint32_t quotient(uint32_t a) const {
    return static_cast<uint32_t>(uint64_t{2 * a} * factor_ >> 32) >> shift_;
  }

 private:
  int64_t by_;
  uint32_t factor_;
  int shift_;
};

// The places of a group's elements in the tensor.
class GroupPlace {
 public:
  // order: the samples by stream; null if they are in order already.
  __device__ GroupPlace(const Streams& streams, const Stream& stream, const int64_t* order, const Group& group)
      : base_(group.first), order_(nullptr), features_(static_cast<int>(streams.features)), inside_(0) {
    if (!order) return;
    order += stream.first_sample;
    if (by_sample(streams)) {
      base_ = order[group.sample] * streams.features + (group.first - group.sample * streams.features);
    } else {
      const int64_t sample = quotient(group.first, streams.features);
      order_ = order + sample;
      inside_ = static_cast<int>(group.first - sample * streams.features);
    }
  }

  // Returns true if elements lie side by side, from of(0) on.
  __device__ bool contiguous() const { return !order_; }

  // Returns the place of the group's i-th element.
  __device__ int64_t of(int i) const {
    if (!order_) return base_ + i;
    const int from = inside_ + i, sample = from / features_;
    return order_[sample] * features_ + (from - sample * features_);
  }

 private:
  int64_t base_;
  const int64_t* order_;  // begins with the sample of the first element; null if elements are contiguous
  int features_, inside_;
};

// The entries of a part of a group whose elements lie side by side.
class Entries {
 public:
  __device__ Entries(const VectorIndex& index, int64_t element) : count_(index.count) {
    const int64_t number = quotient(element, index.inner), left = index.inner - (element - number * index.inner);
    entry_ = modulo(number, index.count);
    inner_ = index.inner < kDrawBlock ? static_cast<unsigned>(index.inner) : kDrawBlock;
    left_ = left < kDrawBlock ? static_cast<unsigned>(left) : kDrawBlock;
  }

  // Returns true if the part's first n elements have the same entry.
  __device__ bool are_one(unsigned n) const { return n <= left_; }

  // Returns the entry of the part's i-th element.
  __device__ int64_t of(unsigned i) const {
    if (i < left_) return entry_;
    const int64_t entry = entry_ + 1 + (inner_ == 1 ? i - left_ : (i - left_) / inner_);
    if (entry < count_) return entry;
    const unsigned beyond = static_cast<unsigned>(entry - count_);
    return beyond < count_ ? beyond : beyond % static_cast<unsigned>(count_);
  }

  // Returns true if neighboring elements have neighboring entries, the last of which is followed by the first, and if there are
  // at least n entries.
  __device__ bool are_neighbors(int n) const { return inner_ == 1 && count_ >= n; }

  // Returns the entry of the element `step` elements after one with this entry, where are_neighbors(step).
  __device__ int64_t after(int64_t entry, int step) const {
    return entry + step < count_ ? entry + step : entry + step - count_;
  }

 private:
  int64_t count_, entry_;
  unsigned inner_, left_;  // at most the length of a part
};

// Returns the entry of any element.
__device__ inline int64_t entry_of(const VectorIndex& index, int64_t element) {
  return element / index.inner % index.count;
}

// -- elements --------------------------------------------------------------------------------------------

__host__ __device__ inline float as_float(float x) { return x; }
__host__ __device__ inline float as_float(Float16 x) { return Float16::widen(x.bits); }
__host__ __device__ inline float as_float(Bfloat16 x) { return Bfloat16::widen(x.bits); }

__host__ __device__ inline void store_one(float x, float* to) { *to = x; }
__host__ __device__ inline void store_one(float x, Float16* to) {
  to->bits = static_cast<uint16_t>(Float16::narrow_pair(x, x));
}
__host__ __device__ inline void store_one(float x, Bfloat16* to) {
  to->bits = static_cast<uint16_t>(Bfloat16::narrow_pair(x, x));
}

}  // namespace fewbit::cuda
