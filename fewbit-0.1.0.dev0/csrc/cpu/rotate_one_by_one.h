// Steps of rotations for groups of any length. Full groups that are rotated once do not need them.
#pragma once

#include <cstdint>

#include "../common/dtype.h"
#include "../common/planes.h"
#include "../common/quantize.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {
namespace {

// Transforms `size` numbers, a power of two.
inline void transform_one_by_one(float* y, int size) {
  for (int half = size / 2; half > 0; half /= 2) {
    for (int begin = 0; begin < size; begin += 2 * half) {
      for (int i = begin; i < begin + half; ++i) {
        const float a = y[i], b = y[i + half];
        y[i] = a + b;
        y[i + half] = a - b;
      }
    }
  }
}

// Multiplies the numbers [begin, end) of a group by factor, or by -factor if their signs are set.
inline void multiply_signed(float* y, int begin, int end, float factor, const uint64_t* signs) {
  alignas(64) float factors[kDrawBlock];
  for (int word = begin / kBlock; word * kBlock < end; ++word) {
    const uint32_t negative = static_cast<uint32_t>(signs[word / 2] >> word % 2 * kBlock);
    for (int i = 0; i < kBlock; ++i) {
      const uint32_t sign = (negative << (kBlock - 1 - i)) & 0x80000000u;
      factors[kBlock * word + i] = float_of(bits_of(factor) ^ sign);
    }
  }
  for (int i = begin; i < end; ++i) y[i] *= factors[i];
}

}  // namespace
}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
