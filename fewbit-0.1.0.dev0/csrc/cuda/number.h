// The number types of the kernels, and how two 16-bit floats share a 32-bit register: a "pair", the lower
// element in the lower half.
//
// Pairs use the instructions that the hardware has for them. On sm_75, which lacks them, and on hosts, the bit arithmetic of
// common/dtype.h computes the same results, apart from the bits of a NaN. The emulation in csrc/tests has functions that
// compute what the instructions do, and is tested with and without them.

#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "common/dtype.h"

namespace fewbit::cuda {

#ifndef FEWBIT_PAIR_INSTRUCTIONS
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define FEWBIT_PAIR_INSTRUCTIONS 1
#else
#define FEWBIT_PAIR_INSTRUCTIONS 0
#endif
#endif

#ifdef __CUDA_ARCH__
#if FEWBIT_PAIR_INSTRUCTIONS
// Instructions on pairs, with the names of the PTX instructions. They support subnormals. A minimum of NaN and a number is
// the number. -0 is less than +0.
namespace ptx {
#define FEWBIT_INSTRUCTION(name, instruction, T, kind)             \
  __device__ inline uint32_t name(T a, T b) {                      \
    uint32_t pair;                                                 \
    asm(instruction " %0, %1, %2;" : "=r"(pair) : kind(a), kind(b)); \
    return pair;                                                   \
  }
FEWBIT_INSTRUCTION(cvt_rn_f16x2_f32, "cvt.rn.f16x2.f32", float, "f")
FEWBIT_INSTRUCTION(cvt_rn_bf16x2_f32, "cvt.rn.bf16x2.f32", float, "f")
FEWBIT_INSTRUCTION(min_f16x2, "min.f16x2", uint32_t, "r")
FEWBIT_INSTRUCTION(min_bf16x2, "min.bf16x2", uint32_t, "r")
FEWBIT_INSTRUCTION(sub_rn_f16x2, "sub.rn.f16x2", uint32_t, "r")
#undef FEWBIT_INSTRUCTION
__device__ inline uint32_t fma_rn_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t pair;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  return pair;
}

// Multiply a matrix of 16 x 16 numbers by one of 16 x 8, all in float16. The PTX manual says which of them a lane has.
__device__ inline void mma_m16n8k16_f16(uint32_t* product, const uint32_t* a, const uint32_t* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%8, %8};"
      : "=r"(product[0]), "=r"(product[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(0u));
}
__device__ inline void mma_m16n8k16_f32(float* product, const uint32_t* a, const uint32_t* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(product[0]), "=f"(product[1]), "=f"(product[2]), "=f"(product[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
}

// Copies 16 bytes to shared memory without waiting for them. Both addresses are aligned to 16 bytes. A lane that has waited for its
// copies sees them, and other lanes of the warp do after a __syncwarp.
__device__ inline void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
               :
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(from)
               : "memory");
}
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
}  // namespace ptx
#endif
#elif FEWBIT_PAIR_INSTRUCTIONS
namespace ptx = cuda_emulation::ptx;
#endif

struct Float16 {
  static constexpr uint32_t kInfinity = 0x7C00;
  uint16_t bits;

  static __host__ __device__ float widen(uint32_t bits) {
#ifdef __CUDA_ARCH__
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<uint16_t>(bits)));
    return x;
#else
    return widen_float16(static_cast<uint16_t>(bits));
#endif
  }

  static __host__ __device__ uint32_t narrow_pair(float low, float high) {
#if FEWBIT_PAIR_INSTRUCTIONS
    return ptx::cvt_rn_f16x2_f32(high, low);
#else
    return narrow_float16(low) | static_cast<uint32_t>(narrow_float16(high)) << 16;
#endif
  }

#if FEWBIT_PAIR_INSTRUCTIONS
  static __device__ uint32_t minimum(uint32_t a, uint32_t b) { return ptx::min_f16x2(a, b); }
  static __device__ uint32_t difference(uint32_t a, uint32_t b) { return ptx::sub_rn_f16x2(a, b); }
#endif
};

struct Bfloat16 {
  static constexpr uint32_t kInfinity = 0x7F80;
  uint16_t bits;

  static __host__ __device__ float widen(uint32_t bits) { return float_of(bits << 16); }

  static __host__ __device__ uint32_t narrow_pair(float low, float high) {
#if FEWBIT_PAIR_INSTRUCTIONS
    return ptx::cvt_rn_bf16x2_f32(high, low);
#else
    return narrow_bfloat16(low) | static_cast<uint32_t>(narrow_bfloat16(high)) << 16;
#endif
  }

#if FEWBIT_PAIR_INSTRUCTIONS
  static __device__ uint32_t minimum(uint32_t a, uint32_t b) { return ptx::min_bf16x2(a, b); }
  // a - b is computed as a + b * -1, because sm_80 has no bfloat16 subtraction. The product is exact.
  static __device__ uint32_t difference(uint32_t a, uint32_t b) { return ptx::fma_rn_bf16x2(b, 0xBF80BF80u, a); }
#endif
};

// The type in which comparisons and products are computed.
template <class T>
struct WideOf {
  using type = float;
};
template <>
struct WideOf<double> {
  using type = double;
};
template <class T>
using Wide = typename WideOf<T>::type;

template <class T>
constexpr bool kIsPair = sizeof(T) == 2;

// -- the comparison that encodes -------------------------------------------------------------------------
//
// x > b is the sign of b - x. The subtraction never rounds a nonzero difference to zero, because subnormals are not flushed.
// Breaks are finite and never -0, so equal values give +0. NaN is replaced by +inf first, which is beyond all breaks.

// Returns a register of x with NaN replaced by +inf.
template <class T>
__host__ __device__ uint32_t nan_to_infinity(uint32_t x) {
  if constexpr (kIsPair<T>) {
#if FEWBIT_PAIR_INSTRUCTIONS
    return T::minimum(x, T::kInfinity * 0x10001u);
#else
    const uint32_t low = x & 0xFFFFu, high = x >> 16;
    return ((low & 0x7FFFu) > T::kInfinity ? T::kInfinity : low) |
           ((high & 0x7FFFu) > T::kInfinity ? T::kInfinity : high) << 16;
#endif
  } else {
    return bits_of(fminf(float_of(x), float_of(0x7F800000u)));
  }
}

// Returns a register whose sign bits are set if x > b. Its other bits have no meaning.
template <class T>
__host__ __device__ uint32_t beyond_bits(uint32_t x, uint32_t b) {
  if constexpr (kIsPair<T>) {
#if FEWBIT_PAIR_INSTRUCTIONS
    return T::difference(b, x);
#else
    const uint32_t low = bits_of(T::widen(b & 0xFFFFu) - T::widen(x & 0xFFFFu));
    const uint32_t high = bits_of(T::widen(b >> 16) - T::widen(x >> 16));
    return (high & 0x80000000u) | (low >> 16 & 0x8000u);
#endif
  } else {
    return bits_of(float_of(b) - float_of(x));
  }
}

}  // namespace fewbit::cuda
