// Kernel launches: the current device, the size of the grid, and errors.

#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace fewbit::cuda {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// Throws CUDA's own text. The runtime also saves the error for the next cudaGetLastError. That copy is dropped here, because
// an unrelated later call would report it.
inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Makes a device current for a scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device) : device_(device) {
    check(cudaGetDevice(&previous_), "reading the current CUDA device");
    if (previous_ != device_) check(cudaSetDevice(device_), "changing the CUDA device");
  }
  ~DeviceScope() {
    if (previous_ != device_ && cudaSetDevice(previous_) != cudaSuccess) cudaGetLastError();
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int device_;
  int previous_ = 0;
};

inline int64_t multiprocessors_of(int device) {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "reading the number of multiprocessors");
  return count;
}

// Enqueues `kernel` with this many blocks and threads in a block. The device must be current.
template <class... Parameters, class... Arguments>
void launch_blocks(void (*kernel)(Parameters...), void* stream, int64_t blocks, int threads, Arguments&&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = static_cast<cudaStream_t>(stream);
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), "launching a CUDA kernel");
}

// Enqueues `kernel`, whose warps stride over `tiles`, with at most `blocks_per_sm` blocks a multiprocessor: several waves if
// a block has nothing to prepare, one wave if it copies a table first. The device must be current.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int device, void* stream, int64_t tiles, int blocks_per_sm,
            Arguments&&... arguments) {
  const int64_t wanted = (tiles + kWarps - 1) / kWarps;
  const int64_t most = multiprocessors_of(device) * blocks_per_sm;
  launch_blocks(kernel, stream, std::min(wanted, most), kThreads, std::forward<Arguments>(arguments)...);
}

constexpr int kWaves = 64;   // blocks_per_sm without preparation
constexpr int kOneWave = 4;  // the blocks that fit on a multiprocessor with 64 registers a thread

}  // namespace fewbit::cuda
