// The codes of exactly unbiased copies: drawn such that the restored number has the rotated number as its mean.
#pragma once

#include <cstdint>

#include "../common/quantize.h"
#include "../common/rotate.h"
#include "../common/unbiased.h"
#include "draws.h"
#include "rotations.h"
#include "signs.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {
namespace {

class UnbiasedCodes {
 public:
  UnbiasedCodes(const Coding& coding, int bits)
      : keys_(coding.seed), code_(unbiased_code(coding.codes, bits)), of_bits_(kOfBits[bits - 1]) {}

  // Computes the words of a group that has codes. Returns the number to store for its scale.
  uint16_t encode(const float* values, int m, int64_t group, const Remainders& of, float rms, Signs& signs,
                  uint32_t* words) const {
    alignas(64) float y[kFullGroup];
    rotate_remainders(values, m, group, of, rotates_twice(m, false), signs, y);
    float greatest = 0.0f;
    for (int i = 0; i < m; ++i) {
      const float magnitude = __builtin_fabsf(y[i]);
      greatest = magnitude > greatest ? magnitude : greatest;
    }
    const uint16_t scale = unbiased_scale(greatest, code_.inverse_limit, rms, of.factor);
    const Draws shared(keys_, shared_counter(group)), own(keys_, own_counter(group));
    of_bits_.draw(y, blocks_of(m), code_, inverse_scale(scale, of.factor), shared, own, words);
    return scale;
  }

  // Dequantizes the m numbers of a group to `out`. What follows, up to whole blocks, is undefined.
  void restore(const uint32_t* words, int m, int64_t number, const GroupScale& group, Signs& signs, float* out) const {
    alignas(64) float y[kFullGroup];
    of_bits_.look_up(words, blocks_of(m), code_, Draws(keys_, shared_counter(number)), y);
    restore_elements(y, m, number, group, rotates_twice(m, false), signs, out);
  }

 private:
  // 16 random bits for each of the numbers of a group.
  class Draws {
   public:
    Draws(const DrawKeys& keys, uint64_t counter) { draw_words(keys, counter, words_); }

    uint32_t of(int block, int lane) const {
      return words_[block / 2 * kDrawCounters + lane] >> (block % 2 * 16) & 0xFFFFu;
    }

   private:
    alignas(64) uint32_t words_[4 * kDrawCounters];
  };

  template <int BITS>
  static void draw(const float* y, int blocks, const UnbiasedCode& code, float inverse, const Draws& shared,
                   const Draws& own, uint32_t* words) {
    for (int block = 0; block < blocks; ++block, y += kBlock, words += BITS) {
      // One step of the search for all numbers of the block, then the next step: the numbers are independent, so the processor need
      // not wait for a result.
      int rows[kBlock], places[kBlock];
      float z[kBlock], shares[kBlock];
      for (int i = 0; i < kBlock; ++i) {
        rows[i] = places[i] = row_of(shared.of(block, i), BITS);
        z[i] = y[i] * inverse;
        shares[i] = own_share(own.of(block, i));
      }
#pragma GCC unroll 8
      for (int step = 1 << (BITS - 1); step > 0; step /= 2) {
        for (int i = 0; i < kBlock; ++i) places[i] = next_place(code, places[i], step, z[i], shares[i]);
      }
      uint8_t codes[kBlock];
      for (int i = 0; i < kBlock; ++i) codes[i] = static_cast<uint8_t>(places[i] - rows[i]);
      pack_block<BITS>(codes, words);
    }
  }

  template <int BITS>
  static void look_up_levels(const uint32_t* words, int blocks, const UnbiasedCode& code, const Draws& shared, float* y) {
    for (int block = 0; block < blocks; ++block, y += kBlock, words += BITS) {
      uint8_t codes[kBlock];
      unpack_block<BITS>(words, codes);
      for (int i = 0; i < kBlock; ++i) y[i] = code.levels[row_of(shared.of(block, i), BITS) + codes[i]];
    }
  }

  struct OfBits {
    void (*draw)(const float* y, int blocks, const UnbiasedCode& code, float inverse, const Draws& shared,
                 const Draws& own, uint32_t* words);
    void (*look_up)(const uint32_t* words, int blocks, const UnbiasedCode& code, const Draws& shared, float* y);
  };

  template <int BITS>
  static constexpr OfBits of_bits = {draw<BITS>, look_up_levels<BITS>};

  static constexpr OfBits kOfBits[] = {of_bits<1>, of_bits<2>, of_bits<3>, of_bits<4>,
                                       of_bits<5>, of_bits<6>, of_bits<7>, of_bits<8>};

  const DrawKeys keys_;
  const UnbiasedCode code_;
  const OfBits& of_bits_;
};

}  // namespace
}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
