// Normalization when elements are read, and the map of values when they are written, for a part of a group at a time.
#pragma once

#include <cstdint>
#include <cstring>

#include "../common/quantize.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {

// A walk along the entries of vectors over a tensor. Elements that follow the previous ones cost no division.
class Entries {
 public:
  explicit Entries(const VectorIndex& index) : index_(index) {}

  // Returns true if neighboring elements have neighboring entries, up to the last entry.
  bool neighbors() const { return index_.inner == 1; }

  // Returns true if a part has several runs of one entry each.
  bool short_runs() const { return index_.inner < kDrawBlock; }

  // Calls run(entry, at, length) for the runs of the m elements from number `element` on, `at` elements after the first. All
  // elements of a run have the same entry or, if neighbors() is true, the `length` entries from `entry` on.
  template <class Run>
  void runs(int64_t element, int m, const Run& run) {
    if (element != next_) seek(element);
    next_ = element + m;
    for (int at = 0; at < m;) {
      const int length = left_ < m - at ? static_cast<int>(left_) : m - at;
      run(entry_, at, length);
      at += length;
      left_ -= length;
      if (neighbors()) entry_ += length;
      if (left_ == 0) advance();
    }
  }

 private:
  void seek(int64_t element) {
    const int64_t number = element / index_.inner;
    entry_ = number % index_.count;
    left_ = neighbors() ? index_.count - entry_ : index_.inner - (element - number * index_.inner);
  }

  void advance() {
    if (!neighbors()) ++entry_;
    if (entry_ == index_.count) entry_ = 0;
    left_ = neighbors() ? index_.count : index_.inner;
  }

  const VectorIndex index_;
  int64_t next_ = -1;  // the element that entry_ and left_ (of the element's run) belong to
  int64_t entry_ = 0, left_ = 0;
};

// A buffer with one entry for each element of a part.
class SpreadOut {
 public:
  // Writes one value n times from place `at` on. It writes whole vectors; the next call overwrites the excess.
  void put(int at, int n, float value) {
    const Vector same = value - Vector{};  // the sum of 0 and -0 would be 0
    for (int i = 0; i < n; i += kVector) memcpy(values_ + at + i, &same, sizeof same);
  }

  const float* values() const { return values_; }

 private:
  static constexpr int kVector = 16;
  typedef float Vector __attribute__((vector_size(kVector * sizeof(float))));
  alignas(64) float values_[kDrawBlock + kVector];
};

class Normalizer {
 public:
  explicit Normalizer(const Normalization& by) : by_(by), entries_(by.index), channels_({by.channels.count, 1}) {}

  bool exists() const { return by_.exists() || by_.channels.exists(); }

  // Normalizes the m elements, at most a part, from number `element` on. out may be x.
  void apply(int64_t element, int m, const float* x, float* out) {
    if (by_.exists()) {
      apply_vectors(element, m, x, out);
      x = out;
    }
    if (!by_.channels.exists()) return;
    channels_.runs(element, m, [&](int64_t channel, int at, int length) {
      each(x + at, length, by_.channels.mean + channel, by_.channels.inverse + channel, out + at);
    });
  }

  // Returns the mean square of the scales of m elements from number `element` on.
  float mean_square_scale(int64_t element, int m) {
    double sum = 0.0;  // exact: a square of a bfloat16 has 16 bits
    channels_.runs(element, m, [&](int64_t channel, int, int length) {
      for (int i = 0; i < length; ++i) {
        const double scale = by_.channels.scale[channel + i];
        sum += scale * scale;
      }
    });
    return static_cast<float>(sum / m);
  }

  bool has_channels() const { return by_.channels.exists(); }

 private:
  void apply_vectors(int64_t element, int m, const float* x, float* out) {
    if (entries_.neighbors()) {
      entries_.runs(element, m, [&](int64_t entry, int at, int length) {
        if (by_.mean) {
          each(x + at, length, by_.mean + entry, by_.rstd + entry, out + at);
        } else {
          each(x + at, length, by_.rstd + entry, out + at);
        }
      });
    } else if (entries_.short_runs()) {
      entries_.runs(element, m, [&](int64_t entry, int at, int length) {
        mean_.put(at, length, mean_at(by_, entry));
        rstd_.put(at, length, by_.rstd[entry]);
      });
      each(x, m, mean_.values(), rstd_.values(), out);
    } else {
      entries_.runs(element, m, [&](int64_t entry, int at, int length) {
        one(x + at, length, mean_at(by_, entry), by_.rstd[entry], out + at);
      });
    }
  }

  static void one(const float* x, int n, float mean, float rstd, float* out) {
#pragma GCC ivdep
    for (int i = 0; i < n; ++i) out[i] = (x[i] - mean) * rstd;
  }
  static void each(const float* x, int n, const float* mean, const float* rstd, float* out) {
#pragma GCC ivdep
    for (int i = 0; i < n; ++i) out[i] = (x[i] - mean[i]) * rstd[i];
  }
  static void each(const float* x, int n, const float* rstd, float* out) {
#pragma GCC ivdep
    for (int i = 0; i < n; ++i) out[i] = x[i] * rstd[i];
  }

  const Normalization by_;
  Entries entries_, channels_;
  SpreadOut mean_, rstd_;
};

class Mapper {
 public:
  explicit Mapper(const ValueMap& by) : by_(by), entries_(by.index), channels_({by.channels.count, 1}) {}

  bool exists() const { return by_.is_affine() || by_.mask || by_.channels.exists(); }

  // Maps the m elements, at most a part, from number `element` on, in place.
  void apply(int64_t element, int m, float* x) {
    if (by_.channels.exists()) {
      channels_.runs(element, m, [&](int64_t channel, int at, int length) {
        each(x + at, length, by_.channels.scale + channel, by_.channels.mean + channel);
      });
    }
    if (by_.mask) {
      for (int at = 0; at < m; at += 32) {
        const int count = m - at < 32 ? m - at : 32;
        multiply(x + at, count, mask_bits(by_.mask, element + at, count));
      }
    } else if (by_.is_affine()) {
      apply_affine(element, m, x);
    }
  }

 private:
  void apply_affine(int64_t element, int m, float* x) {
    if (entries_.neighbors()) {
      entries_.runs(element, m, [&](int64_t entry, int at, int length) {
        if (!by_.shift) {
          scale(x + at, length, by_.scale + entry);
        } else if (!by_.scale) {
          shift(x + at, length, by_.shift + entry);
        } else {
          each(x + at, length, by_.scale + entry, by_.shift + entry);
        }
      });
    } else if (entries_.short_runs()) {
      entries_.runs(element, m, [&](int64_t entry, int at, int length) {
        scale_.put(at, length, scale_at(by_, entry));
        shift_.put(at, length, shift_at(by_, entry));
      });
      each(x, m, scale_.values(), shift_.values());
    } else {
      entries_.runs(element, m, [&](int64_t entry, int at, int length) {
        one(x + at, length, scale_at(by_, entry), shift_at(by_, entry));
      });
    }
  }

  static void multiply(float* x, int n, uint32_t bits) {
    for (int i = 0; i < n; ++i) x[i] *= static_cast<float>(static_cast<int>(bits >> i & 1u));
  }
  static void one(float* x, int n, float scale, float shift) {
    for (int i = 0; i < n; ++i) x[i] = x[i] * scale + shift;
  }
  static void each(float* x, int n, const float* scale, const float* shift) {
#pragma GCC ivdep
    for (int i = 0; i < n; ++i) x[i] = x[i] * scale[i] + shift[i];
  }
  static void scale(float* x, int n, const float* scale) {
#pragma GCC ivdep
    for (int i = 0; i < n; ++i) x[i] = x[i] * scale[i];
  }
  static void shift(float* x, int n, const float* shift) {
#pragma GCC ivdep
    for (int i = 0; i < n; ++i) x[i] = x[i] + shift[i];
  }

  const ValueMap by_;
  Entries entries_, channels_;
  SpreadOut scale_, shift_;
};

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
