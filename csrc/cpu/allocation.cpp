#include "cpu/allocation.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/planes.h"

namespace fewbit {
namespace {

// A change by one bit of one tensor.
struct Move {
  double key;  // the change of variance per element
  int64_t index;
};

// The tensors: the variances that rounding adds with 1 to 8 bits, and the sizes.
struct Tensors {
  const double* variances;
  const int64_t* elements;

  double variance(int64_t i, int bits) const { return variances[i * kMaxBits + bits - 1]; }

  // Returns the increase of the variance per element if tensor i goes from `bits` to one bit less.
  double loss(int64_t i, int bits) const {
    return (variance(i, bits - 1) - variance(i, bits)) / static_cast<double>(elements[i]);
  }
};

bool is_later_loss(const Move& a, const Move& b) {
  return a.key != b.key ? a.key > b.key : a.index > b.index;
}

bool is_later_gain(const Move& a, const Move& b) {
  return a.key != b.key ? a.key < b.key : a.index > b.index;
}

}  // namespace

void allocate(const double* variances, const int64_t* elements, int64_t n, int64_t budget, int least, int most,
              uint8_t* bits) {
  const Tensors tensors{variances, elements};
  std::fill(bits, bits + n, static_cast<uint8_t>(most));
  std::vector<Move> heap;
  heap.reserve(n);
  int64_t used = 0;
  for (int64_t i = 0; i < n; ++i) {
    used += elements[i] * most;
    if (elements[i] > 0 && most > least) heap.push_back({tensors.loss(i, most), i});
  }
  std::make_heap(heap.begin(), heap.end(), is_later_loss);
  while (used > budget && !heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), is_later_loss);
    const int64_t i = heap.back().index;
    heap.pop_back();
    used -= elements[i];
    if (--bits[i] > least) {
      heap.push_back({tensors.loss(i, bits[i]), i});
      std::push_heap(heap.begin(), heap.end(), is_later_loss);
    }
  }

  int64_t left = budget - used;
  heap.clear();
  for (int64_t i = 0; i < n; ++i) {
    if (bits[i] < most && elements[i] > 0 && elements[i] <= left) {
      heap.push_back({tensors.loss(i, bits[i] + 1), i});
    }
  }
  std::make_heap(heap.begin(), heap.end(), is_later_gain);
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), is_later_gain);
    const int64_t i = heap.back().index;
    heap.pop_back();
    if (elements[i] > left) continue;
    left -= elements[i];
    if (++bits[i] < most) {
      heap.push_back({tensors.loss(i, bits[i] + 1), i});
      std::push_heap(heap.begin(), heap.end(), is_later_gain);
    }
  }
}

void share_bits(const float* gains, const float* squares, int64_t samples, int64_t extra, uint8_t* widths) {
  struct Bit {
    float gain;
    int64_t index;  // level * samples + sample
  };
  std::vector<Bit> bits;
  bits.reserve(static_cast<size_t>(samples) * (kMaxBits - 1));
  for (int level = 0; level < kMaxBits - 1; ++level) {
    for (int64_t n = 0; n < samples; ++n) {
      const float gain = std::isfinite(squares[n]) ? gains[level] * squares[n] : 0.0f;
      bits.push_back({gain, level * samples + n});
    }
  }
  // Equal gains are ordered by level, so that every sample gets its second bit before any gets a third.
  const auto is_better = [](const Bit& a, const Bit& b) { return a.gain != b.gain ? a.gain > b.gain : a.index < b.index; };
  if (extra > 0 && extra < static_cast<int64_t>(bits.size())) std::nth_element(bits.begin(), bits.begin() + extra - 1, bits.end(), is_better);
  std::fill(widths, widths + samples, uint8_t{1});
  for (int64_t i = 0; i < extra; ++i) ++widths[bits[static_cast<size_t>(i)].index % samples];
}

}  // namespace fewbit
