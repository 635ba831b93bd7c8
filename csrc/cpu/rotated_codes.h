// The codes of rotated copies: the nearest levels of the best table for normal numbers.
#pragma once

#include <cstdint>

#include "../common/quantize.h"
#include "../common/rotate.h"
#include "rotations.h"
#include "signs.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {
namespace {

// The functions of an instruction set for a number of bits.
class RotatedCodes {
 public:
  explicit RotatedCodes(int bits) : kernels_(kOfBits[bits - 1]) {}

  // Computes the words of a group that has codes. Returns the number to store for its scale.
  uint16_t encode(const float* values, int m, int64_t group, const Remainders& of, float rms, Signs& signs,
                  uint32_t* words) const {
    const float inner = words_of(values, m, group, of, rms, signs, words);
    return stored_scale(of.energy, inner, of.factor, signs.rounding(group), of.is_twice());
  }

  // Dequantizes the m numbers of a group to `out`. What follows, up to whole blocks, is undefined.
  void restore(const uint32_t* words, int m, int64_t number, const GroupScale& group, Signs& signs, float* out) const {
    if (m == kFullGroup && !group.is_twice) {
      return kernels_.restore_full_group(words, signs.first(number), group.mean, group.scale, out);
    }
    alignas(64) float y[kFullGroup];
    kernels_.levels_of_blocks(words, blocks_of(m), y);
    restore_elements(y, m, number, group, rotates_twice(m, group.is_twice), signs, out);
  }

 private:
  struct OfBits {
    float (*code_full_group)(const float* x, float shift, const uint64_t* signs, float rms, uint32_t* words);
    float (*code_blocks)(const float* y, int blocks, float rms, uint32_t* words);
    void (*restore_full_group)(const uint32_t* words, const uint64_t* signs, float mean, float scale, float* out);
    void (*levels_of_blocks)(const uint32_t* words, int blocks, float* y);
  };

  template <int BITS>
  static constexpr OfBits of_bits = {code_full_group<BITS>, code_blocks<BITS>, restore_full_group<BITS>,
                                     levels_of_blocks<BITS>};

  static constexpr OfBits kOfBits[] = {of_bits<1>, of_bits<2>, of_bits<3>, of_bits<4>,
                                       of_bits<5>, of_bits<6>, of_bits<7>, of_bits<8>};

  // Returns the sum of magnitudes times their levels.
  float words_of(const float* values, int m, int64_t group, const Remainders& of, float rms, Signs& signs,
                 uint32_t* words) const {
    const bool is_twice = rotates_twice(m, of.is_twice());
    if (m == kFullGroup && of.factor == 1.0f && !is_twice) {
      return kernels_.code_full_group(values, of.mean, signs.first(group), rms, words);
    }
    alignas(64) float y[kFullGroup];
    rotate_remainders(values, m, group, of, is_twice, signs, y);
    return kernels_.code_blocks(y, blocks_of(m), rms, words);
  }

  const OfBits& kernels_;
};

}  // namespace
}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
