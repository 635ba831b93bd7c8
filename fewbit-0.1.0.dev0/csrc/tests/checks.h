// The checks and buffers that the tests of the CPU kernels share.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../common/dtype.h"

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);      \
      std::abort();                                                             \
    }                                                                           \
  } while (false)

// A buffer of n elements whose last byte is the last of its memory, aligned to one element and no more.
template <class T>
class Exact {
 public:
  explicit Exact(int64_t n) : memory_(static_cast<char*>(std::malloc((n + 1) * sizeof(T)))), n_(n) {}
  explicit Exact(const std::vector<T>& values) : Exact(static_cast<int64_t>(values.size())) {
    if (n_ > 0) std::memcpy(data(), values.data(), n_ * sizeof(T));
  }
  ~Exact() { std::free(memory_); }
  Exact(const Exact&) = delete;

  T* data() { return reinterpret_cast<T*>(memory_) + 1; }
  T& operator[](int64_t i) { return data()[i]; }
  std::vector<T> values() { return std::vector<T>(data(), data() + n_); }

 private:
  char* memory_;
  int64_t n_;
};

// The conversions between an element of any dtype as it is stored and as a number.
template <class T, fewbit::DType DTYPE>
struct Number;
template <>
struct Number<float, fewbit::DType::float32> {
  static float wide(float x) { return x; }
  static float narrow(float x) { return x; }
};
template <>
struct Number<double, fewbit::DType::float64> {
  static double wide(double x) { return x; }
  static double narrow(double x) { return x; }
};
template <>
struct Number<uint16_t, fewbit::DType::float16> {
  static float wide(uint16_t x) { return fewbit::widen_float16(x); }
  static uint16_t narrow(float x) { return fewbit::narrow_float16(x); }
};
template <>
struct Number<uint16_t, fewbit::DType::bfloat16> {
  static float wide(uint16_t x) { return fewbit::widen_bfloat16(x); }
  static uint16_t narrow(float x) { return fewbit::narrow_bfloat16(x); }
};

template <class T>
bool equal(T a, T b) {
  return std::memcmp(&a, &b, sizeof a) == 0 || (a != a && b != b);
}
