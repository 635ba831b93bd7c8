// The activation functions that kernels compute themselves. They map float to float without branches.
//
// On hosts the error of f(x) is at most 2 ulp of f(x) plus ulp(1) |x| / 4 for every float x, and never above the largest error
// of torch's own function. On devices the float32 error is at most 4 times the first bound, because exp2 and reciprocal have
// errors of up to 2 ulp each. The first bound holds there too if the result is rounded to 16 bits. Piecewise linear functions
// equal torch's to the bit, since x / 6 is computed as torch does it on that device. Infinities, NaN and the sign of zero are
// as torch's. If torch's scalar and vector code differ, gelu(+inf) is inf, as in the scalar code, and softshrink returns 0 and
// not -0, as in the vector code.
//
// A functor is made from two doubles, the function's parameters in the order of fewbit/functions/__init__.py.
#pragma once

#include "host_device.h"
#include "math.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {

FEWBIT_HD inline float magnitude(float x) { return __builtin_fabsf(x); }

// --- x times a gate ---

struct Gelu {
  static constexpr const char* name = "gelu";
  static constexpr int n_parameters = 0;
  FEWBIT_HD Gelu(double, double) {}
  FEWBIT_HD float operator()(float x) const { return times_normal(x); }
};

// Returns x / (1 + e^-z). e: e^-|z|, where z has the sign of x.
FEWBIT_HD inline float times_sigmoid(float x, Power e) {
  return over_1_plus(x * (x < 0.0f ? e : Power{1}), e);
}

struct GeluTanh {
  static constexpr const char* name = "gelu_tanh";
  static constexpr int n_parameters = 0;
  FEWBIT_HD GeluTanh(double, double) {}
  FEWBIT_HD float operator()(float x) const {
    // The result is x sigmoid(z) with z = sqrt(8 / pi) (x + 0.044715 x^3). In base 2, -|z| log2(e) = |x| (a + b x^2).
    constexpr double scale = -1.5957691216057308 * kLog2E;
    const Power a = static_cast<Power>(scale), b = static_cast<Power>(0.044715 * scale);
    const float t = magnitude(x);
#if FEWBIT_DEVICE_MATH
    return times_sigmoid(x, exp2_device(t * multiply_add(b, t * t, a)));
#else
    const Power inside = t > 11.0f ? 11.0f : t;
    const Power rate = multiply_add(b, inside * inside, a);
#if FEWBIT_FUSED_MULTIPLY_ADD
    return times_sigmoid(x, exp2_reduced(reduce(inside, rate)));
#else
    return times_sigmoid(x, t > 11.0f ? 0.0 : exp2_double(inside * rate));
#endif
#endif
  }
};

struct QuickGelu {
  static constexpr const char* name = "quick_gelu";
  static constexpr int n_parameters = 0;
  Decay decay;
  FEWBIT_HD QuickGelu(double, double) : decay(1.702 * kLog2E) {}
  FEWBIT_HD float operator()(float x) const { return times_sigmoid(x, decay(-magnitude(x))); }
};

struct Silu {
  static constexpr const char* name = "silu";
  static constexpr int n_parameters = 0;
  Gate gate;
  FEWBIT_HD Silu(double, double) : gate(kLog2E) {}
  FEWBIT_HD float operator()(float x) const { return gate(x); }
};

struct Mish {
  static constexpr const char* name = "mish";
  static constexpr int n_parameters = 0;
  Decay decay;
  FEWBIT_HD Mish(double, double) : decay(kLog2E) {}
  FEWBIT_HD float operator()(float x) const {
    // tanh(log(1 + w)) = w (w + 2) / (w (w + 2) + 2) with w = e^x. If x > 0, both are divided by w^2.
#if FEWBIT_DEVICE_MATH
    using Number = float;
    const Number e = decay(-magnitude(x));
#else
    using Number = double;
    const Number e = decay.wide(-magnitude(x));
#endif
    const Number square = e * e;
    const Number over = multiply_add(Number{2}, e, x < 0.0f ? square : Number{1});
    const Number under = multiply_add(Number{2}, x < 0.0f ? Number{1} : square, over);
    return static_cast<float>(divide(x * over, under));
  }
};

// --- sigmoids ---

struct Tanh {
  static constexpr const char* name = "tanh";
  static constexpr int n_parameters = 0;
  FEWBIT_HD Tanh(double, double) {}
  FEWBIT_HD float operator()(float x) const { return tanh_rounded(x); }
};

struct Sigmoid {
  static constexpr const char* name = "sigmoid";
  static constexpr int n_parameters = 0;
  Decay decay;
  FEWBIT_HD Sigmoid(double, double) : decay(kLog2E) {}
  FEWBIT_HD float operator()(float x) const {
    const Power e = decay(-magnitude(x));
    return over_1_plus(x < 0.0f ? e : Power{1}, e);
  }
};

struct Softplus {
  static constexpr const char* name = "softplus";
  static constexpr int n_parameters = 2;
  float beta, threshold;
  Decay decay;
  Split inverse;
  FEWBIT_HD Softplus(double beta, double threshold)
      : beta(static_cast<float>(beta)),
        threshold(static_cast<float>(threshold)),
        decay(beta * kLog2E),
        inverse(1.0 / beta) {}
  FEWBIT_HD float operator()(float x) const {
    // The result is max(x, 0) + log(1 + e^-|beta x|) / beta.
    const float linear = x > 0.0f ? x : 0.0f;
#if FEWBIT_DEVICE_MATH
    const float log = log1p_unit(decay(-magnitude(x)));
    const float y = multiply_add(log, inverse.high, multiply_add(log, inverse.low, linear));
#else
    const double log = log1p_unit(decay.wide(-magnitude(x)));
    const double y = multiply_add(log, inverse.whole, static_cast<double>(linear));
#endif
    return x * beta > threshold ? x : static_cast<float>(y);
  }
};

// --- exponential linear units ---

// Computes positive * x above 0 and negative * (e^(x / scale) - 1) below.
struct ExponentialLinear {
  Expm1::Result positive, negative;
  Expm1 expm1;
  FEWBIT_HD ExponentialLinear(double positive, double negative, double scale)
      : positive(static_cast<Expm1::Result>(positive)),
        negative(static_cast<Expm1::Result>(negative)),
        expm1(scale) {}
  FEWBIT_HD float operator()(float x) const {
    return static_cast<float>(x < 0.0f ? negative * expm1(x) : x * positive);
  }
};

struct Selu : ExponentialLinear {
  static constexpr const char* name = "selu";
  static constexpr int n_parameters = 0;
  static constexpr double scale = 1.0507009873554805, alpha = 1.6732632423543773;
  FEWBIT_HD Selu(double, double) : ExponentialLinear(scale, scale * alpha, 1.0) {}
};

struct Elu : ExponentialLinear {
  static constexpr const char* name = "elu";
  static constexpr int n_parameters = 1;
  FEWBIT_HD Elu(double alpha, double) : ExponentialLinear(1.0, alpha, 1.0) {}
};

struct Celu : ExponentialLinear {
  static constexpr const char* name = "celu";
  static constexpr int n_parameters = 1;
  FEWBIT_HD Celu(double alpha, double) : ExponentialLinear(1.0, alpha, alpha) {}
};

// --- piecewise linear and quadratic: torch's own operations ---

// Returns x clipped to [low, high].
FEWBIT_HD inline float clamp(float x, float low, float high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

// Returns y / 6. torch divides on a CPU and multiplies by 1 / 6 on CUDA.
FEWBIT_HD inline float sixth(float y) {
#if FEWBIT_DEVICE_MATH
  return y * (1.0f / 6.0f);
#else
  return y / 6.0f;
#endif
}

struct Hardswish {
  static constexpr const char* name = "hardswish";
  static constexpr int n_parameters = 0;
  FEWBIT_HD Hardswish(double, double) {}
  FEWBIT_HD float operator()(float x) const { return sixth(x * clamp(x + 3.0f, 0.0f, 6.0f)); }
};

struct Relu {
  static constexpr const char* name = "relu";
  static constexpr int n_parameters = 0;
  FEWBIT_HD Relu(double, double) {}
  FEWBIT_HD float operator()(float x) const { return x < 0.0f ? 0.0f : x; }
};

struct Relu6 {
  static constexpr const char* name = "relu6";
  static constexpr int n_parameters = 0;
  FEWBIT_HD Relu6(double, double) {}
  FEWBIT_HD float operator()(float x) const { return clamp(x, 0.0f, 6.0f); }
};

struct LeakyRelu {
  static constexpr const char* name = "leaky_relu";
  static constexpr int n_parameters = 1;
  float slope;
  FEWBIT_HD LeakyRelu(double slope, double) : slope(static_cast<float>(slope)) {}
  FEWBIT_HD float operator()(float x) const { return x * (x > 0.0f ? 1.0f : slope); }
};

struct Threshold {
  static constexpr const char* name = "threshold";
  static constexpr int n_parameters = 2;
  float threshold, value;
  FEWBIT_HD Threshold(double threshold, double value)
      : threshold(static_cast<float>(threshold)), value(static_cast<float>(value)) {}
  FEWBIT_HD float operator()(float x) const { return x <= threshold ? value : x; }
};

struct Hardtanh {
  static constexpr const char* name = "hardtanh";
  static constexpr int n_parameters = 2;
  float low, high;
  FEWBIT_HD Hardtanh(double low, double high)
      : low(static_cast<float>(low)), high(static_cast<float>(high)) {}
  FEWBIT_HD float operator()(float x) const { return clamp(x, low, high); }
};

struct Hardsigmoid {
  static constexpr const char* name = "hardsigmoid";
  static constexpr int n_parameters = 0;
  FEWBIT_HD Hardsigmoid(double, double) {}
  FEWBIT_HD float operator()(float x) const { return sixth(clamp(x + 3.0f, 0.0f, 6.0f)); }
};

struct Hardshrink {
  static constexpr const char* name = "hardshrink";
  static constexpr int n_parameters = 1;
  float lambd;
  FEWBIT_HD Hardshrink(double lambd, double) : lambd(static_cast<float>(lambd)) {}
  FEWBIT_HD float operator()(float x) const { return magnitude(x) <= lambd ? 0.0f : x; }
};

struct Softshrink {
  static constexpr const char* name = "softshrink";
  static constexpr int n_parameters = 1;
  float lambd;
  FEWBIT_HD Softshrink(double lambd, double) : lambd(static_cast<float>(lambd)) {}
  FEWBIT_HD float operator()(float x) const {
    const float shrunk = x > lambd ? x - lambd : x + lambd;
    return magnitude(x) <= lambd ? 0.0f : shrunk;
  }
};

// The number of a function is its place in this list.
#define FEWBIT_FUNCTIONS(X)                                                                      \
  X(Gelu) X(GeluTanh) X(QuickGelu) X(Silu) X(Mish) X(Tanh) X(Sigmoid) X(Softplus) X(Selu) X(Elu) \
  X(Celu) X(Hardswish) X(Relu) X(Relu6) X(LeakyRelu) X(Threshold) X(Hardtanh) X(Hardsigmoid)     \
  X(Hardshrink) X(Softshrink)

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
