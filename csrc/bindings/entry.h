// The checks of the arguments of entries. std::invalid_argument becomes ValueError.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "bindings/buffer.h"
#include "common/dtype.h"
#include "common/fixed_point.h"
#include "common/planes.h"
#include "common/rotate.h"
#include "common/streams.h"
#include "common/table.h"
#include "cpu/kernels.h"

namespace fewbit::bindings {

// The numbers of the buffers' dtypes that DType does not have.
constexpr int kInt32 = 4, kUint8 = 5, kInt64 = 6;
constexpr const char* kItemNames[] = {"float32", "float64", "float16", "bfloat16", "int32", "uint8", "int64"};
constexpr int kItems = sizeof kItemNames / sizeof *kItemNames;

[[noreturn]] inline void refuse(const char* what, const std::string& expected, const std::string& got) {
  throw std::invalid_argument(std::string(what) + ": expected " + expected + ", got " + got);
}

inline void check_size(int64_t n) {
  // With more elements the number of packed words would overflow.
  if (n < 0 || n > INT64_MAX / 16) refuse("n", "a number of elements, 0 or more", std::to_string(n));
}

inline void check_bits(int bits) {
  if (bits < 1 || bits > kMaxBits) refuse("bits", "1 to 8", std::to_string(bits));
}

// The shape of a quantized tensor and the settings of its copy. If the samples have different numbers of bits, `bits` is not
// used.
struct CopyShape {
  int64_t samples, features;
  int group_size, bits;
  CopyKind kind;

  int64_t elements() const { return samples * features; }

  bool is_rotated() const { return kind != CopyKind::uniform; }

  // The streams of a tensor whose samples all have `bits`.
  Streams streams() const { return one_stream(samples, features, group_size, bits); }

  int64_t words() const { return streams().words; }
  int64_t rows() const { return streams().groups + seed_rows(is_rotated()); }
};

// Checks the arguments. Throws std::invalid_argument.
CopyShape copy_shape(int64_t samples, int64_t features, int group_size, int bits, int kind);

// The checks of the buffers of one call.
class Entry {
 public:
  // device: the device of all buffers.
  Entry(const char* name, int device) : name_(name), device_(device) {}

  // Returns the address of a buffer of exactly n elements.
  template <class T>
  T* exactly(const char* name, const Buffer& buffer, int64_t n, int item) const {
    if (buffer.count != n || !is_usable(buffer, item)) refuse_buffer(name, buffer, n, item, "");
    return reinterpret_cast<T*>(buffer.address);
  }

  // Returns the address of a buffer that has n elements or more.
  template <class T>
  T* at_least(const char* name, const Buffer& buffer, int64_t n, int item) const {
    if (buffer.count < n || !is_usable(buffer, item)) refuse_buffer(name, buffer, n, item, " or more");
    return reinterpret_cast<T*>(buffer.address);
  }

  // Returns the address of a seed, which is valid as long as the argument exists.
  const int64_t* seed(const char* name, const SeedArgument& seed) const {
    if (!seed.is_value) return exactly<const int64_t>(name, seed.buffer, 1, kInt64);
    if (device_ >= 0) wrong(name, "a tensor" + place_of(device_), "a number");
    return &seed.value;
  }

  // Returns the address of the seed if the table's codes are drawn, else null.
  const int64_t* seed(const OwnedTable& table, const SeedArgument& given) const {
    if (table.get().unbiased()) return seed("seed", given);
    if (given.is_value) wrong("seed", "none, as the table is not unbiased", "a number");
    if (given.buffer.exists) wrong("seed", "none, as the table is not unbiased", described(given.buffer));
    return nullptr;
  }

  // Returns the dtype of a buffer of numbers, and checks that its words can be counted.
  DType floating(const char* name, const Buffer& buffer) const {
    if (!buffer.exists || buffer.item < 0 || buffer.item > 3) {
      wrong(name, "float32, float64, float16 or bfloat16", described(buffer));
    }
    check_size(buffer.count);
    return static_cast<DType>(buffer.item);
  }

  // Returns the same for a kernel that computes in float32.
  DType narrow(const char* name, const Buffer& buffer) const {
    const DType dtype = floating(name, buffer);
    if (dtype == DType::float64) wrong(name, "float32, float16 or bfloat16", described(buffer));
    return dtype;
  }

  // Returns the address of the packed words of n elements.
  uint32_t* packed(const char* name, const Buffer& buffer, int64_t n, int bits) const {
    check_size(n);
    return exactly<uint32_t>(name, buffer, packed_words(n, bits), kInt32);
  }

  // Checks that n elements can use vectors of `count` entries, and returns the rule by which each element finds its entry.
  VectorIndex index(const char* name, int64_t count, int64_t inner, int64_t n) const {
    if (n > 0 && (count < 1 || inner < 1 || count > n / inner || n % (count * inner) != 0)) {
      wrong(name, "entries * inner to divide the number of elements, " + std::to_string(n),
            std::to_string(count) + " * " + std::to_string(inner));
    }
    return {count, inner};
  }

  // Returns an empty normalization if both vectors are None.
  Normalization normalization(const Buffer& mean, const Buffer& rstd, int64_t inner, int64_t n) const {
    if (!mean.exists && !rstd.exists) return {};
    const int64_t entries = rstd.exists ? rstd.count : mean.count;
    const auto* scales = exactly<const float>("rstd", rstd, entries, 0);
    return {vector("mean", mean, entries), scales, index("rstd", entries, inner, n), {}};
  }

  // scattered: true if groups run across samples that do not lie side by side.
  ValueMap value_map(const Buffer& mask, const Buffer& scale, const Buffer& shift, int64_t inner, const CopyShape& of,
                     bool scattered) const {
    const int64_t n = of.elements();
    const bool is_affine = scale.exists || shift.exists;
    if (mask.exists) {
      if (is_affine) wrong("scale, shift", "none with a mask", "one");
      if (!of.is_rotated()) wrong("mask", "None for uniform copies", described(mask));
      return {nullptr, nullptr, {}, packed("mask", mask, n, 1), {}};
    }
    if (!is_affine) return {};
    if (scattered) wrong("scale, shift", "none for short samples of several widths", "one");
    const int64_t entries = scale.exists ? scale.count : shift.count;
    return {vector("scale", scale, entries), vector("shift", shift, entries), index("scale", entries, inner, n), nullptr, {}};
  }

  // scattered: as for value_map.
  StoredChannels channels(const Buffer& buffer, const CopyShape& of, bool scattered = false) const {
    if (!buffer.exists) return {};
    const int64_t count = buffer.count / 2;
    const auto* numbers = exactly<const uint16_t>("channels", buffer, 2 * count, static_cast<int>(DType::bfloat16));
    if (of.kind != CopyKind::rotated) wrong("channels", "None unless the copy is rotated", described(buffer));
    if (scattered) wrong("channels", "none for short samples of several widths", "some");
    index("channels", count, 1, of.elements());
    return {numbers, count};
  }

  Scale scale(const Buffer& buffer, int64_t inner, int64_t n) const {
    if (!buffer.exists) return {};
    return {vector("scale", buffer, buffer.count), index("scale", buffer.count, inner, n)};
  }

  // Returns the grid for n fixed-point codes of `bits` bits.
  Grid grid(const Buffer& buffer, int64_t inner, int bits, int64_t n) const {
    check_size(n);
    check_bits(bits);
    const int64_t channels = buffer.count / kGridRows;
    if (channels * kGridRows != buffer.count) {
      wrong("grid", std::to_string(kGridRows) + " rows of float32", described(buffer));
    }
    return {exactly<const float>("grid", buffer, buffer.count, 0), index("grid", channels, inner, n)};
  }

  [[noreturn]] void wrong(const char* what, const std::string& expected, const std::string& got) const {
    refuse((std::string(name_) + ": " + what).c_str(), expected, got);
  }

  static std::string described(const Buffer& buffer) {
    if (!buffer.exists) return "none";
    const bool is_known = buffer.item >= 0 && buffer.item < kItems;
    return std::to_string(buffer.count) + " " + (is_known ? kItemNames[buffer.item] : "of no known dtype") +
           place_of(buffer.device) + (buffer.count > 0 && !buffer.address ? " at no address" : "");
  }

 private:
  bool is_usable(const Buffer& buffer, int item) const {
    return buffer.exists && buffer.item == item && buffer.device == device_ && (buffer.address || buffer.count == 0);
  }

  // Returns null for None.
  const float* vector(const char* name, const Buffer& buffer, int64_t entries) const {
    return buffer.exists ? exactly<const float>(name, buffer, entries, 0) : nullptr;
  }

  static std::string place_of(int device) { return device < 0 ? " on the CPU" : " on CUDA device " + std::to_string(device); }

  [[noreturn]] void refuse_buffer(const char* name, const Buffer& buffer, int64_t n, int item, const char* more) const {
    wrong(name, std::to_string(n) + " " + kItemNames[item] + more + place_of(device_), described(buffer));
  }

  const char* name_;
  int device_;
};

// The packed codes and ranges of a quantized tensor. If samples have different numbers of bits, there may be more words and rows
// than needed. In copies that are not uniform, the rows of the seed follow the rows of `groups` groups.
struct Copy {
  uint32_t* packed;
  uint16_t* ranges;
  int64_t words, groups;

  uint16_t* seed_rows() const { return ranges + groups * kColumns; }
};

// Checks the memory of a copy with these streams.
Copy copy_at(const Entry& entry, const Buffer& packed, const Buffer& ranges, const Streams& streams, bool is_mixed,
             bool is_rotated);

// The codes of n elements, and the same packed.
struct Codes {
  int64_t n;
  uint8_t* codes;
  uint32_t* packed;
};

Codes codes_at(const Entry& entry, const Buffer& codes, const Buffer& packed, int bits);

// The checked arguments of `share_bits`.
struct SharedBits {
  const float* squares;
  int64_t samples;
  uint8_t* widths;
};

SharedBits shared_bits(const Entry& entry, const Buffer& squares, int64_t extra, const std::vector<float>& gains, const Buffer& widths);

// A counter of seeds, and the seeds to draw.
struct Seeds {
  int64_t* counter;
  int64_t count;
  int64_t* out;
};

Seeds seeds_at(const Entry& entry, const Buffer& counter, const Buffer& out);

// The checked arguments of an entry for an x or a gradient of n elements.
struct Elements {
  DType dtype;
  int64_t n;
  const void* from;
  void* to;
  uint32_t* packed;
  const int64_t* seed;

  int64_t bytes() const { return n * item_size(dtype); }
};

// Checks the arguments of `encode`.
Elements encoded(const Entry& entry, const OwnedTable& table, const Buffer& x, const Buffer& packed, const SeedArgument& seed);

// Checks the arguments of `decode_mul`. A gradient of one element is used for all elements.
Elements multiplied(const Entry& entry, const OwnedTable& table, const Buffer& grad, const Buffer& packed, const Buffer& out);

// Checks the arguments of `forward`. name: that of the buffer of packed codes.
Elements activated(const Entry& entry, int function, const OwnedTable& table, const Buffer& x, const Buffer& y,
                   const Buffer& packed, const SeedArgument& seed, const char* name = "packed");

// The checked arguments of `channel_statistics`.
struct ChannelEstimate {
  const void* from;
  DType dtype;
  Normalization normalization;
  int64_t rows, channels;
  uint16_t* to;
};

ChannelEstimate channel_estimate(const Entry& entry, const Buffer& x, const Buffer& out, const Buffer& mean, const Buffer& rstd,
                                 int64_t inner);

// Checks that a buffer has the numbers of a tensor of that shape, and returns their dtype.
DType numbers_of(const Entry& entry, const char* name, const Buffer& buffer, const CopyShape& shape);

// Checks the arguments of `grid_fixed`.
void check_fixed(const Entry& entry, const Buffer& gamma, const Buffer& beta, int bits, const Buffer& grid);

template <class T>
T* address_of(const Buffer& buffer) {
  return reinterpret_cast<T*>(buffer.address);
}

}  // namespace fewbit::bindings
