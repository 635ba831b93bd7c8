// The emulated CUDA kernels behind a C interface, for tests/backends/test_cuda_kernels.py. Functions return null or the
// text of an error, which stays valid until the next call.

#include <cuda_runtime.h>

#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/kernels.h"

namespace {

template <class Call>
const char* guarded(Call&& call) {
  static std::string text;
  try {
    call();
    return nullptr;
  } catch (const std::exception& error) {
    text = error.what();
    return text.c_str();
  }
}

template <class T>
std::vector<T> copy(const T* data, int64_t n) {
  return std::vector<T>(data, data + n);
}

const fewbit::Table& unwrap(const void* table) { return static_cast<const fewbit::OwnedTable*>(table)->get(); }

}  // namespace

extern "C" {

// Makes a table, which lives until the process ends.
const void* emulated_table(int bits, int initial, int64_t m32, const float* breaks32, const uint8_t* flips32,
                           int64_t m64, const double* breaks64, const uint8_t* flips64, const float* lut32,
                           const double* lut64, int64_t n, const float* points, const float* origins,
                           const float* values, const float* slopes, int64_t levels_count, const float* levels,
                           const float* inverse_gaps) {
  fewbit::TableArrays arrays;
  arrays.breaks32 = copy(breaks32, m32);
  arrays.flips32 = copy(flips32, m32);
  arrays.breaks64 = copy(breaks64, m64);
  arrays.flips64 = copy(flips64, m64);
  arrays.lut32 = copy(lut32, int64_t{1} << bits);
  arrays.lut64 = copy(lut64, int64_t{1} << bits);
  if (n > 0) {
    arrays.points = copy(points, n);
    arrays.origins = copy(origins, n);
    arrays.values = copy(values, n);
    arrays.slopes = copy(slopes, n - 1);
    arrays.levels = copy(levels, levels_count);
    arrays.inverse_gaps = copy(inverse_gaps, levels_count - 1);
  }
  return new fewbit::OwnedTable(bits, initial, std::move(arrays));
}

// Sets the number of multiprocessors of the device, and the first block of every grid that runs.
void emulated_device(int multiprocessors, unsigned first_block) {
  cuda_emulation::multiprocessors = multiprocessors;
  cuda_emulation::first_block = first_block;
}

// Chooses one of two orders in which lanes run and copies happen.
void emulated_order(int is_reversed) { cuda_emulation::is_reversed = is_reversed != 0; }

// Returns why kernels cannot run on such a device; null if they can.
const char* emulated_obstacle(int driver, int capability) {
  cuda_emulation::driver = driver;
  cuda_emulation::capability = capability;
  return guarded([] {
    const auto [possible, reason] = fewbit::cuda::available();
    if (!possible) throw std::runtime_error(reason);
  });
}

int emulated_current_device() { return cuda_emulation::device; }

const char* emulated_pack(const uint8_t* codes, int64_t n, int bits, int32_t* packed) {
  return guarded([&] { fewbit::cuda::pack(codes, n, bits, packed, 1, nullptr); });
}

const char* emulated_unpack(const int32_t* packed, int64_t n, int bits, uint8_t* codes) {
  return guarded([&] { fewbit::cuda::unpack(packed, n, bits, codes, 1, nullptr); });
}

const char* emulated_encode(const void* table, const void* x, int dtype, int64_t n, int32_t* packed,
                            const int64_t* seed) {
  return guarded([&] { fewbit::cuda::encode(unwrap(table), x, dtype, n, packed, seed, 1, nullptr); });
}

const char* emulated_decode_mul(const void* table, const void* grad, int dtype, int64_t n, const int32_t* packed,
                                void* out, int grad_is_scalar) {
  return guarded([&] {
    fewbit::cuda::decode_mul(unwrap(table), grad, dtype, n, packed, out, grad_is_scalar != 0, 1, nullptr);
  });
}

const char* emulated_forward(int function, double p0, double p1, const void* table, const void* x, int dtype, int64_t n,
                             void* y, int32_t* packed, const int64_t* seed) {
  return guarded([&] {
    fewbit::cuda::forward(function, p0, p1, unwrap(table), x, dtype, n, y, packed, seed, 1, nullptr);
  });
}

const char* emulated_quantize(const void* x, int dtype, int64_t samples, int64_t features, int group_size, int bits,
                              const int64_t* order, const int64_t* counts, int fp32_min, int kind, const float* codes,
                              const int64_t* seed_address, int64_t seed_number, int32_t* packed, int64_t words,
                              uint16_t* ranges, int64_t groups,
                              const float* mean, const float* rstd, int64_t entries, int64_t inner) {
  const fewbit::cuda::Quantized of{samples, features, group_size, fp32_min != 0, bits, order, counts, words, groups};
  const fewbit::Normalization by{mean, rstd, {entries, inner}};
  const fewbit::cuda::Seed seed{seed_address, seed_number};
  return guarded([&] {
    if (kind == 0) return fewbit::cuda::quantize(of, x, dtype, by, seed, packed, ranges, 1, nullptr);
    if (kind >= 3) return fewbit::cuda::quantize_unbiased(of, kind == 4, codes, x, dtype, by, seed, packed, ranges, 1, nullptr);
    fewbit::cuda::quantize_rotated(of, kind == 2, x, dtype, by, seed, packed, ranges, 1, nullptr);
  });
}

// done: set to 0 if the kernel has done nothing.
const char* emulated_relu_quantized(const void* x, int dtype, int64_t samples, int64_t features, int group_size, int bits,
                                    int fp32_min, int64_t seed, void* y, int32_t* mask, int32_t* packed, int64_t words,
                                    uint16_t* ranges, int64_t groups, int64_t* done) {
  const fewbit::cuda::Quantized of{samples, features, group_size, fp32_min != 0, bits, nullptr, nullptr, words, groups};
  return guarded([&] {
    *done = fewbit::cuda::relu_quantized(of, x, dtype, {nullptr, seed}, y, mask, packed, ranges, 1, nullptr);
  });
}

// done: set to 0 if the kernels have done nothing. out: null if only the gradients of weight and bias are computed.
const char* emulated_batch_norm_backward(const int32_t* packed, int64_t words, const uint16_t* ranges, int64_t groups, int bits,
                                         int fp32_min, int64_t samples, int64_t features, int group_size, const void* grad,
                                         int dtype, int64_t channels, const float* rstd, const float* weight, void* out,
                                         float* grad_weight, float* grad_bias, int64_t* done) {
  const fewbit::cuda::Quantized of{samples, features, group_size, fp32_min != 0, bits, nullptr, nullptr, words, groups};
  std::vector<float> memory(fewbit::cuda::batch_norm_floats(channels) + 4);
  const auto place = reinterpret_cast<uintptr_t>(memory.data()) % 16 / sizeof(float);
  const fewbit::cuda::BatchNorm norm{channels, rstd, weight, grad_weight, grad_bias, memory.data() + (4 - place) % 4};
  return guarded([&] {
    *done = fewbit::cuda::batch_norm_backward(of, norm, packed, ranges, grad, dtype, out, 1, nullptr);
  });
}

const char* emulated_share_bits(const float* gains, const float* squares, int64_t samples, int64_t extra,
                                uint8_t* widths) {
  fewbit::cuda::Gains by;
  std::copy_n(gains, fewbit::kMaxBits - 1, by.of);
  return guarded([&] { fewbit::cuda::share_bits(by, squares, samples, extra, widths, 1, nullptr); });
}

const char* emulated_order_samples(const uint8_t* widths, int64_t samples, int64_t* order, int64_t* counts) {
  return guarded([&] { fewbit::cuda::order_samples(widths, samples, order, counts, 1, nullptr); });
}

const char* emulated_squares(const void* x, int dtype, int64_t samples, int64_t features, int group_size, int kind,
                             float* out, const float* mean, const float* rstd, int64_t entries, int64_t inner) {
  const fewbit::Streams streams = fewbit::one_stream(samples, features, group_size, false, 1);
  const fewbit::Normalization by{mean, rstd, {entries, inner}};
  return guarded([&] {
    if (kind == 0) return fewbit::cuda::squares(streams, x, dtype, by, out, 1, nullptr);
    fewbit::cuda::squares_rotated(streams, kind == 2 || kind == 4, x, dtype, by, out, 1, nullptr);
  });
}

const char* emulated_dequantize(const int32_t* packed, int64_t words, const uint16_t* ranges, int64_t groups, int bits,
                                const int64_t* order, const int64_t* counts, int fp32_min, int kind, const float* codes,
                                int64_t samples, int64_t features, int group_size, void* out, int dtype,
                                const float* scale, const float* shift, int64_t entries, int64_t inner, const uint32_t* mask) {
  const fewbit::cuda::Quantized of{samples, features, group_size, fp32_min != 0, bits, order, counts, words, groups};
  const fewbit::ValueMap by{scale, shift, {entries, inner}, mask};
  const auto dequantize = kind ? fewbit::cuda::dequantize_rotated : fewbit::cuda::dequantize;
  return guarded([&] {
    if (kind >= 3) {
      return fewbit::cuda::dequantize_unbiased(of, codes, packed, ranges, by, out, dtype, 1, nullptr);
    }
    dequantize(of, packed, ranges, by, out, dtype, 1, nullptr);
  });
}

const char* emulated_grid_fixed(const float* gamma, const float* beta, int64_t n, int bits, float* grid) {
  return guarded([&] { fewbit::cuda::grid_fixed(gamma, beta, n, bits, grid, 1, nullptr); });
}

const char* emulated_encode_fixed(const void* x, const void* y, int dtype, int64_t n, const float* grid,
                                  int64_t channels, int64_t inner, int bits, int32_t* packed, const float* mean,
                                  const float* rstd, int64_t entries, int64_t inner_of_entries) {
  const fewbit::Grid by{grid, {channels, inner}};
  const fewbit::Normalization normalization{mean, rstd, {entries, inner_of_entries}};
  return guarded([&] { fewbit::cuda::encode_fixed(by, normalization, x, y, dtype, n, bits, packed, 1, nullptr); });
}

const char* emulated_decode_fixed(const int32_t* packed, int64_t n, const float* grid, int64_t channels, int64_t inner,
                                  int bits, int activated, float slope, void* out, int dtype, const float* scale,
                                  int64_t entries, int64_t inner_of_entries) {
  const fewbit::Grid by{grid, {channels, inner}};
  const fewbit::Scale times{scale, {entries, inner_of_entries}};
  return guarded([&] {
    fewbit::cuda::decode_fixed(by, times, packed, n, bits, activated != 0, slope, out, dtype, 1, nullptr);
  });
}

const char* emulated_mask_fixed(const void* grad, int dtype, int64_t n, const int32_t* packed, const float* grid,
                                int64_t channels, int64_t inner, int bits, double slope, void* out) {
  const fewbit::Grid by{grid, {channels, inner}};
  return guarded([&] { fewbit::cuda::mask_fixed(by, packed, n, bits, slope, grad, out, dtype, 1, nullptr); });
}

}  // extern "C"
