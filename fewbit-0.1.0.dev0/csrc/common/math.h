// The elementary functions that functions.h uses. They have no branches and call no library, so that loops vectorize.
//
// csrc/tools/fit_polynomials.py makes the polynomials. Selections are written `x > limit ? limit : x`: a NaN fails every
// comparison and so passes through.
//
// Devices use their own exp2 and reciprocal, and shorter formulas in float if hosts compute in double.
// FEWBIT_DEVICE_MATH=1 selects the device's formulas on a host, for tests. There exp2 and reciprocal are exact, apart from the
// relative errors FEWBIT_EXP2_ERROR and FEWBIT_DIVIDE_ERROR, by which a test emulates a device's approximations.
#pragma once

#include <cstdint>
#include <cstring>

#include "dtype.h"
#include "host_device.h"

// nvcc compiles a source once for the host, which makes the functors, and once for each device. The members of a functor depend
// on these macros, so they must have the same values in all these passes: __CUDACC__ is defined in all, __CUDA_ARCH__ is not.
#ifndef FEWBIT_DEVICE_MATH
#ifdef __CUDACC__
#define FEWBIT_DEVICE_MATH 1
#else
#define FEWBIT_DEVICE_MATH 0
#endif
#endif

#ifndef FEWBIT_EXP2_ERROR
#define FEWBIT_EXP2_ERROR 0.0f
#define FEWBIT_DIVIDE_ERROR 0.0f
#endif

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {

constexpr double kLog2E = 1.4426950408889634;  // log2(e)
// log(2) = kLog2High + kLog2Low; n kLog2High is exact for |n| < 2^8.
constexpr float kLog2High = 0x1.62e4p-1f, kLog2Low = 0x1.7f7d1cp-20f;

#if defined(__FMA__) || defined(__aarch64__) || defined(__CUDACC__)
#define FEWBIT_FUSED_MULTIPLY_ADD 1
#else
#define FEWBIT_FUSED_MULTIPLY_ADD 0
#endif

// The type of powers of two inside a function. float is accurate enough only with a device's exp2 or with a fused
// multiply-add, which makes products exact.
#if FEWBIT_DEVICE_MATH || FEWBIT_FUSED_MULTIPLY_ADD
using Power = float;
#else
using Power = double;
#endif

// Returns a * b + c, rounded once if the processor can.
FEWBIT_HD inline float multiply_add(float a, float b, float c) {
#if FEWBIT_FUSED_MULTIPLY_ADD
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

FEWBIT_HD inline double multiply_add(double a, double b, double c) {
#if FEWBIT_FUSED_MULTIPLY_ADD
  return __builtin_fma(a, b, c);
#else
  return a * b + c;
#endif
}

FEWBIT_HD inline uint64_t bits_of(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

FEWBIT_HD inline double double_of(uint64_t bits) {
  double x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// Returns c[k] + c[k+1] x + c[k+2] x^2 + ...
template <int k = 0, class T, int n>
FEWBIT_HD inline T horner(const T (&c)[n], T x) {
  if constexpr (k + 1 == n) {
    return c[k];
  } else {
    return multiply_add(horner<k + 1>(c, x), x, c[k]);
  }
}

// Returns the same, computed from even and odd powers. It takes two more multiplications, but the chain of dependent ones is
// half as long.
template <int k, int n>
FEWBIT_HD inline float every_second(const float (&c)[n], float square) {
  if constexpr (k + 2 >= n) {
    return c[k];
  } else {
    return multiply_add(every_second<k + 2>(c, square), square, c[k]);
  }
}

template <int n>
FEWBIT_HD inline float even_odd(const float (&c)[n], float x) {
  const float square = x * x;
  return multiply_add(every_second<1>(c, square), x, every_second<0>(c, square));
}

// A double constant, also as two floats: high + low.
struct Split {
  double whole;
  float high, low;
  FEWBIT_HD explicit Split(double x)
      : whole(x), high(static_cast<float>(x)), low(static_cast<float>(x - static_cast<float>(x))) {}
};

// --- powers of two ---

// A real number as a whole number n and a fraction in [-1/2, 1/2].
struct Reduced {
  float shifted;  // 1.5 * 2^23 + n: the last bits of its pattern are n
  float fraction;
};

constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number

// Returns a * b, |a * b| < 2^21. With a fused multiply-add, only the fraction is rounded.
FEWBIT_HD inline Reduced reduce(float a, float b) {
  const float shifted = multiply_add(a, b, kShift);
  return {shifted, multiply_add(a, b, kShift - shifted)};
}

// Returns 2^(n + offset), which must be a normal float.
FEWBIT_HD inline float power_of_two(float shifted, int offset) {
  return float_of((bits_of(shifted) << 23) + (static_cast<uint32_t>(offset + 127) << 23));
}

// Returns 2^f - 1 for |f| <= 1/2, with a relative error below 1e-7.
FEWBIT_HD inline float exp2_minus_1(float f) {
  // A polynomial for (2^f - 1) / f, |f| <= 1/2.
  constexpr float kExp2[6] = {
      0.693147182f,
      0.240226492f,
      0.0555036739f,
      0.00961831119f,
      0.00133873872f,
      0.000153820118f,
  };
  return f * horner(kExp2, f);
}

// Returns the same in double, with a relative error below 1e-11.
FEWBIT_HD inline double exp2_minus_1(double f) {
  // The same polynomial in double.
  constexpr double kExp2Double[8] = {
      0.69314718055687663,
      0.24022650696489328,
      0.055504109060069209,
      0.0096181289424851508,
      0.0013333478814194187,
      0.00015403629621827764,
      1.5303609857331399e-05,
      1.3215470077416808e-06,
  };
  return f * horner(kExp2Double, f);
}

// Returns 2^(n + f) with gradual underflow, for n in [-191, 0].
FEWBIT_HD inline float exp2_reduced(Reduced p) {
  // The scaling takes two steps, because 2^n alone may be below the smallest normal float.
  return (1.0f + exp2_minus_1(p.fraction)) * power_of_two(p.shifted, 65) * 0x1p-65f;
}

// Returns a 2^(n + f) + b, n as above. If b is 0, only the last step rounds.
FEWBIT_HD inline float exp2_multiply_add(float a, Reduced p, float b) {
  const float scaled = a * (power_of_two(p.shifted, 65) * 0x1p-65f);
  const float q = exp2_minus_1(p.fraction);
  const float mantissa = 1.0f + q;
  const float lost = q - (mantissa - 1.0f);
  return multiply_add(scaled, mantissa, multiply_add(scaled, lost, b));
}

// Returns 2^p - 1 for p in (-1000, 0]. The relative error stays small as p goes to 0.
FEWBIT_HD inline double exp2_minus_1_double(double p) {
  constexpr double shift = 0x1.8p52;  // as kShift
  const double shifted = p + shift;
  const double power = double_of((bits_of(shifted) << 52) + (uint64_t{1023} << 52));
  return multiply_add(power, exp2_minus_1(p - (shifted - shift)), power - 1.0);
}

// Returns 2^p for p in (-1000, 0].
FEWBIT_HD inline double exp2_double(double p) {
  constexpr double shift = 0x1.8p52;
  const double shifted = p + shift;
  const double power = double_of((bits_of(shifted) << 52) + (uint64_t{1023} << 52));
  return multiply_add(power, exp2_minus_1(p - (shifted - shift)), power);
}

#if FEWBIT_DEVICE_MATH
// Returns 2^p, with an error of about two units in the last place. Results below 2^-126 become zero.
FEWBIT_HD inline float exp2_device(float p) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(p));
  return y;
#else
  return __builtin_exp2f(p) * (1.0f + FEWBIT_EXP2_ERROR);
#endif
}
#endif

// The exponent of a decay in base 2: x times a constant, clipped where 2^(x * rate) no longer changes a result.
struct Exponent {
  Split rate;
  float end;

  // rate: above 0, in powers of two per unit of x; depth: the exponent at which it is clipped.
  FEWBIT_HD Exponent(double rate, double depth) : rate(rate < 1e38 ? rate : 1e38) {
    end = depth / rate < 1e38 ? static_cast<float>(-depth / rate) : -1e38f;
  }

  FEWBIT_HD float cut(float x) const { return x < end ? end : x; }

  FEWBIT_HD Reduced reduced(float x) const {
    const float inside = cut(x);
    const Reduced p = reduce(inside, rate.high);
    return {p.shifted, multiply_add(inside, rate.low, p.fraction)};
  }
};

// Computes 2^(x * rate) for x <= 0.
struct Decay {
  Exponent exponent;

  FEWBIT_HD explicit Decay(double rate) : exponent(rate, 152.0) {}

  FEWBIT_HD Power operator()(float x) const {
#if FEWBIT_DEVICE_MATH
    return exp2_device(x * exponent.rate.high);
#elif FEWBIT_FUSED_MULTIPLY_ADD
    return exp2_reduced(exponent.reduced(x));
#else
    return wide(x);
#endif
  }

  // The clipped end is zero and not only tiny: an infinite x times zero is NaN, as in torch.
  FEWBIT_HD double wide(float x) const {
    const double power = exp2_double(exponent.cut(x) * exponent.rate.whole);
    return x < exponent.end ? 0.0 : power;
  }
};

// --- quotients ---

// Returns a / b for b in [1, 8].
FEWBIT_HD inline float divide(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdividef(a, b);
#elif FEWBIT_DEVICE_MATH
  return a / b * (1.0f + FEWBIT_DIVIDE_ERROR);
#else
  return a / b;
#endif
}

// Returns the same with a relative error below 1e-14, by a Newton step from the float's quotient.
FEWBIT_HD inline double divide(double a, double b) {
  const double guess = 1.0f / static_cast<float>(b);
  return a * (guess * multiply_add(-b, guess, 2.0));
}

// Returns a / (1 + e) for e in [0, 1].
FEWBIT_HD inline float over_1_plus(float a, float e) {
  const float b = 1.0f + e;
#if FEWBIT_DEVICE_MATH
  return divide(a, b);
#else
  // The rounding errors of b and of 1 / b are added back. They vanish if a is huge.
  const float lost = e - (b - 1.0f);
  const float inverse = 1.0f / b;
  const float rest = multiply_add(-lost, inverse, multiply_add(-b, inverse, 1.0f));
  const float finite = a > 1e30f ? 1e30f : a;
  return multiply_add(a, inverse, finite * inverse * rest);
#endif
}

FEWBIT_HD inline float over_1_plus(double a, double e) { return static_cast<float>(divide(a, 1.0 + e)); }

// --- x sigmoid(z) ---

// Computes x / (1 + 2^(-x rate)) in few operations. The power overflows at about the same x as torch's, so that infinities
// are as torch's.
struct Gate {
  Decay decay;
#if FEWBIT_FUSED_MULTIPLY_ADD && !FEWBIT_DEVICE_MATH
  float last;             // above last, 2^(-x rate) is too small to change 1
  float first, infinite;  // below first, the power is computed at `infinite`, where it is infinite

  FEWBIT_HD explicit Gate(double rate)
      : decay(rate),
        last(static_cast<float>(62.0 / rate)),
        first(static_cast<float>(-127.4 / rate)),
        infinite(static_cast<float>(-128.25 / rate)) {}

  FEWBIT_HD float operator()(float x) const {
    const float below = x > last ? last : x;
    const float inside = below < first ? infinite : below;
    const Split& rate = decay.exponent.rate;
    const Reduced p = reduce(-inside, rate.high);
    const float q = exp2_minus_1(multiply_add(-inside, rate.low, p.fraction));
    // The sum is 1 + 2^n (1 + q). Near 0, where accuracy matters most, 1 + 2^n is exact.
    const float power = power_of_two(p.shifted, -64) * 0x1p64f;
    const float sum = multiply_add(power, q, 1.0f + power);
    const float y = x / sum;
    // The rounding error of the sum matters for x in (1, 65), where the sum is close to 1. Beyond 65 there is none.
    const float lost = multiply_add(power, q, 1.0f - sum + power);
    return __builtin_fabsf(x - 33.0f) < 32.0f ? multiply_add(-y, lost, y) : y;
  }
#else
  FEWBIT_HD explicit Gate(double rate) : decay(rate) {}

  FEWBIT_HD float operator()(float x) const {
    const Power e = decay(-__builtin_fabsf(x));
    return over_1_plus(x * (x < 0.0f ? e : Power{1}), e);
  }
#endif
};

// --- logarithm ---

// Returns log(1 + e) for 0 <= e <= 1, with a relative error below 1e-7.
FEWBIT_HD inline float log1p_unit(float e) {
  // A polynomial in e - 1/2 for (log(1 + e) / e - 1) / e, 0 <= e <= 1, on devices.
  constexpr float kLog1p[9] = {
      -0.378139555f,
      0.179224908f,
      -0.0932322294f,
      0.0510884672f,
      -0.0288988128f,
      0.0166627094f,
      -0.0102157742f,
      0.00691299746f,
      -0.0032363832f,
  };
  return multiply_add(e, e * horner(kLog1p, e - 0.5f), e);
}

// Returns the same with a relative error below 1e-10.
FEWBIT_HD inline double log1p_unit(double e) {
  // A polynomial for (log(1 + e) / e - 1) / e, 0 <= e <= 1, on hosts.
  constexpr double kLog1pDouble[12] = {
      -0.49999999556765662,
      0.33333302128699016,
      -0.24999227467372276,
      0.19990303018588915,
      -0.16594263393867004,
      0.13934123034276258,
      -0.11324876845909426,
      0.082959968731207825,
      -0.049942635946115053,
      0.022163763987127584,
      -0.0062552854559087432,
      0.00082776008106040825,
  };
  return multiply_add(e, e * horner(kLog1pDouble, e), e);
}

// --- the normal distribution ---

// Returns x Phi(x). The absolute error of Phi is below 1e-7. For x < 0 its relative error is below 1e-3 down to x = -11, on
// devices below 4e-3 down to x = -5.5.
FEWBIT_HD inline float times_normal(float x) {
  const float t = __builtin_fabsf(x);
#if FEWBIT_DEVICE_MATH
  // A polynomial for log2(2 Phi(-t)) / t, 0 <= t <= 5.5, on devices.
  constexpr float kGeluShort[8] = {
      -1.15110612f,
      -0.459196806f,
      -0.0525418147f,
      0.00714615081f,
      -0.000213756823f,
      -0.000148521387f,
      3.01622495e-05f,
      -1.95310326e-06f,
  };
  const float tail = exp2_device(t * horner(kGeluShort, t));
  return 0.5f * x * (x < 0.0f ? tail : 2.0f - tail);
#else
  // A polynomial for log2(2 Phi(-t)) / t, 0 <= t <= 11, on hosts.
  constexpr float kGelu[12] = {
      -1.15110493f,
      -0.459213734f,
      -0.0524632633f,
      0.00697674369f,
      -1.81786199e-05f,
      -0.000277274492f,
      7.94158113e-05f,
      -1.27385065e-05f,
      1.29602051e-06f,
      -8.25949726e-08f,
      3.00814262e-09f,
      -4.77684593e-11f,
  };
  // The result is max(x, 0) - t Phi(-t). The product with 0 makes minus infinity NaN, as in torch.
  const float linear = x > 0.0f ? x : 0.0f * x;
  const float inside = t > 14.5f ? 14.5f : t;
#if FEWBIT_FUSED_MULTIPLY_ADD
  const float y = exp2_multiply_add(-0.5f * inside, reduce(inside, even_odd(kGelu, inside)), linear);
#else
  const double rate = horner<1>(kGelu, inside) * static_cast<double>(inside) + kGelu[0];
  const double tail = t > 14.5f ? 0.0 : exp2_double(inside * rate);
  const float y = static_cast<float>(linear - 0.5 * inside * tail);
#endif
  return __builtin_copysignf(y, x);
#endif
}

// --- e^z - 1, tanh ---

// Computes e^(x / scale) - 1 for x <= 0. Results for positive x have no meaning.
struct Expm1 {
#if FEWBIT_DEVICE_MATH
  using Result = float;
#else
  using Result = double;  // torch's own is correctly rounded on most processors
#endif
  Exponent exponent;
  Split inverse;

  FEWBIT_HD explicit Expm1(double scale) : exponent(kLog2E / scale, 64.0), inverse(1.0 / scale) {}

  FEWBIT_HD Result operator()(float x) const {
#if FEWBIT_DEVICE_MATH
    // x / scale = n log(2) + r, and e^r - 1 = r + r^2 (...): near 0 only the last step rounds.
    // A polynomial for (e^r - 1 - r) / r^2, |r| <= log(2) / 2, on devices.
    constexpr float kExpm1[5] = {
        0.49999997f,
        0.16666542f,
        0.0416674316f,
        0.00836687349f,
        0.00138718577f,
    };
    const float inside = exponent.cut(x);
    const float z = multiply_add(inside, inverse.high, inside * inverse.low);
    const float shifted = multiply_add(z, static_cast<float>(kLog2E), kShift);
    const float minus_n = kShift - shifted;
    const float r = multiply_add(minus_n, kLog2Low, multiply_add(minus_n, kLog2High, z));
    const float power = power_of_two(shifted, 0);
    return multiply_add(power, multiply_add(r, r * horner(kExpm1, r), r), power - 1.0f);
#else
    return exp2_minus_1_double(exponent.cut(x) * exponent.rate.whole);
#endif
  }
};

FEWBIT_HD inline float tanh_rounded(float x) {
  const float t = __builtin_fabsf(x);
#if FEWBIT_DEVICE_MATH
  // A polynomial in s = x^2 for (tanh(x) / x - 1) / s, |x| <= 0.65, on devices.
  constexpr float kTanh[5] = {
      -0.333332598f,
      0.133308291f,
      -0.0536879115f,
      0.0204690564f,
      -0.0055147768f,
  };
  const float s = x * x;
  const float near = multiply_add(t, s * horner(kTanh, s), t);
  const float e = exp2_device(t * static_cast<float>(-2.0 * kLog2E));
  const float far = multiply_add(-2.0f * e, divide(1.0f, 1.0f + e), 1.0f);
  return __builtin_copysignf(t < 0.65f ? near : far, x);
#else
  const float inside = t > 20.0f ? 20.0f : t;
  const double m = exp2_minus_1_double(inside * (-2.0 * kLog2E));
  return __builtin_copysignf(static_cast<float>(divide(-m, 2.0 + m)), x);
#endif
}

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
