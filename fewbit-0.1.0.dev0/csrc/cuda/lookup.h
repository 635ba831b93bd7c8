// The entries of vectors over a tensor (VectorIndex) for the elements that a lane has in a tile.

#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "common/quantize.h"
#include "cuda/groups.h"
#include "cuda/tile.h"

namespace fewbit::cuda {

// A lane's elements are runs of this many neighbors. The first element's place in the tensor is a multiple of it.
template <class T>
constexpr int kRun = sizeof(T) == 4 ? 4 : 8;

// The entries of a run: one for all elements; one for each, which can be read four at a time; or any other.
enum class Spread { one, neighbors, any };

// The facts about an index by which kernels find the entries of runs. The host computes them, because divisions are slow on
// devices.
struct Lookup {
  static constexpr int kMostEntries = 1 << 30;
  static constexpr int kMostInner = 1 << 30;  // more elements than a tile has, so that larger numbers need not be told apart

  VectorIndex index;
  Spread spread;
  Divisor by_inner, by_count;
  int count, inner;                   // those of the index, but `inner` at most kMostInner
  int entries_apart, elements_apart;  // the step from a lane's run to its next one, in entries modulo count, and elements
};

// vectors: those that are read with the index.
template <class T>
Lookup lookup_of(const VectorIndex& index, std::initializer_list<const float*> vectors) {
  constexpr int64_t kStep = 32 * kRun<T>;
  bool in_fours = index.inner == 1 && index.count % 4 == 0;
  for (const float* vector : vectors) in_fours = in_fours && reinterpret_cast<uintptr_t>(vector) % sizeof(uint4) == 0;
  if (index.count >= Lookup::kMostEntries) {
    throw std::runtime_error("expected vectors of fewer than " + std::to_string(Lookup::kMostEntries) + " entries, got " +
                             std::to_string(index.count));
  }
  Lookup lookup = {index, Spread::any, Divisor(index.inner), Divisor(index.count)};
  if (in_fours) lookup.spread = Spread::neighbors;
  if (index.count == 1 || index.inner % kRun<T> == 0) lookup.spread = Spread::one;
  lookup.count = static_cast<int>(index.count);
  lookup.inner = static_cast<int>(std::min<int64_t>(index.inner, Lookup::kMostInner));
  lookup.entries_apart = static_cast<int>(kStep / index.inner % index.count);
  lookup.elements_apart = static_cast<int>(kStep % index.inner);
  return lookup;
}

// The entries of kCount neighbors. `read` reads them from a vector.
template <int N>
struct OneEntry {
  static constexpr int kCount = N;
  int entry;

  __device__ void read(float* to, const float* vector) const {
    const float value = vector[entry];
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = value;
  }
};

struct NeighborEntries {
  static constexpr int kCount = 4;
  int entry;

  __device__ void read(float* to, const float* vector) const {
    const uint4 four = *reinterpret_cast<const uint4*>(vector + entry);
    to[0] = float_of(four.x), to[1] = float_of(four.y), to[2] = float_of(four.z), to[3] = float_of(four.w);
  }
};

struct AnyEntries {
  static constexpr int kCount = 2;  // more would need more registers
  int entries[kCount];

  __device__ void read(float* to, const float* vector) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = vector[entries[i]];
  }
};

// The entries of a lane's runs in a tile, one run after the other.
template <class T>
class RunEntries {
 public:
  __device__ RunEntries(const Lookup& by, const Place<T>& place) : by_(by), entry_(0), inside_(0) {
    if (by.index.count == 1) return;
    const int64_t element = place.start + place.lane * kRun<T>, number = by.by_inner.quotient(element);
    entry_ = static_cast<int>(number - by.by_count.quotient(number) * by.index.count);
    const int64_t left = by.index.inner - (element - number * by.index.inner);
    inside_ = left < by.inner ? by.inner - static_cast<int>(left) : 0;
  }

  // Calls call(entries, i) for the next run, with the entries of its elements from the i-th on.
  template <class Call>
  __device__ void next(const Call& call) {
    if (by_.spread == Spread::one) {
      call(OneEntry<kRun<T>>{entry_}, 0);
      advance(by_.entries_apart, by_.elements_apart);
      return;
    }
    const int entry = entry_, inside = inside_;
    if (by_.spread == Spread::neighbors) {
#pragma unroll
      for (int i = 0; i < kRun<T>; i += NeighborEntries::kCount) {
        call(NeighborEntries{entry_}, i);
        advance(NeighborEntries::kCount, 0);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kRun<T>; i += AnyEntries::kCount) {
        AnyEntries any;
#pragma unroll
        for (int& each : any.entries) each = entry_, advance(0, 1);
        call(any, i);
      }
    }
    entry_ = entry, inside_ = inside;
    advance(by_.entries_apart, by_.elements_apart);
  }

 private:
  // Moves on by at most the number of entries, and at most the elements of an entry.
  __device__ void advance(int entries, int elements) {
    entry_ += entries, inside_ += elements;
    if (inside_ >= by_.inner) inside_ -= by_.inner, ++entry_;
    if (entry_ >= by_.count) entry_ -= by_.count;
  }

  const Lookup& by_;
  int entry_;
  int inside_;  // the place of the run's first element among the elements with its entry
};

}  // namespace fewbit::cuda
