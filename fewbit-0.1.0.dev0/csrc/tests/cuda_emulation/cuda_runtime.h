// An emulation on the CPU of the part of CUDA that csrc/cuda uses. The .cu files compile with a host compiler if this
// directory is first in the include path. The emulation is slow, and exact about what threads may assume of each other.
//
// Threads of a block are fibers. A fiber runs until it shuffles, synchronizes or ends. All lanes of a warp must
// then have stopped at a shuffle with the same lane mask: a lane that misses one ends the program. Fibers are switched by
// _longjmp, because swapcontext calls the operating system each time.

#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "pair_instructions.h"

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __CUDA_ARCH_LIST__ 800, 900
#define CUDART_VERSION 13000

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

// -- fibers ----------------------------------------------------------------------------------------------

namespace cuda_emulation {

enum class State { ready, at_shuffle, at_barrier, done };

struct Fiber {
  static constexpr size_t kStack = 128 * 1024;
  ucontext_t context;  // with which the fiber begins
  jmp_buf place;       // where it goes on
  bool has_begun = false;
  std::unique_ptr<char[]> stack{new char[kStack]};
  State state = State::done;
  int shuffles = 0;
  uint32_t slots[2] = {};  // the lane's values, alternately, so that a slow reader still finds the last one
  std::vector<std::pair<void*, const void*>> copies;  // those that the lane has not waited for
};

inline std::vector<Fiber> fibers;
inline jmp_buf scheduler;
inline unsigned current = 0;
inline std::function<void()> body;
inline bool trapped = false;

// The settings: the multiprocessors, driver and capability that the device claims, and the blocks that run.
inline int multiprocessors = 4;
inline int driver = 13000, capability = 90;
inline unsigned first_block = 0, last_block = ~0u;
// True: the lanes of a warp run in descending order, and copies to shared memory happen at once; else they happen as late as they may.
inline bool is_reversed = false;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "CUDA emulation: %s (block %u, thread %u)\n", what, blockIdx.x, current);
  std::abort();
}

inline void pause(State state) {
  Fiber& fiber = fibers[current];
  fiber.state = state;
  if (_setjmp(fiber.place) == 0) _longjmp(scheduler, 1);
}

// The main function of a fiber: runs a thread of each block.
inline void enter() {
  for (;;) {
    body();
    pause(State::done);
  }
}

inline void resume(unsigned thread) {
  current = thread;
  threadIdx.x = thread;
  Fiber& fiber = fibers[thread];
  if (_setjmp(scheduler) != 0) return;
  if (fiber.has_begun) _longjmp(fiber.place, 1);
  fiber.has_begun = true;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = Fiber::kStack;
  makecontext(&fiber.context, enter, 0);
  setcontext(&fiber.context);
}

// Runs a warp until all its lanes wait at a barrier or have ended.
inline void run_warp(unsigned first) {
  for (;;) {
    for (unsigned i = 0; i < 32; ++i) {
      const unsigned lane = first + (is_reversed ? 31 - i : i);
      if (fibers[lane].state != State::done) resume(lane);
    }
    const Fiber& reference = fibers[first];
    for (unsigned lane = first; lane < first + 32; ++lane) {
      if (fibers[lane].state != reference.state || fibers[lane].shuffles != reference.shuffles) {
        current = lane;
        fail("lanes of a warp stopped at different places");
      }
    }
    if (reference.state != State::at_shuffle) return;
  }
}

inline void run_block(unsigned threads) {
  if (fibers.size() < threads) fibers = std::vector<Fiber>(threads);
  for (unsigned thread = 0; thread < threads; ++thread) {
    Fiber& fiber = fibers[thread];
    fiber.state = State::ready;
    fiber.shuffles = 0;
    fiber.copies.clear();
  }
  do {
    for (unsigned warp = 0; warp < threads; warp += 32) run_warp(warp);
    for (unsigned warp = 0; warp < threads; warp += 32) {
      if (fibers[warp].state != fibers[0].state) fail("a warp missed a barrier");
    }
  } while (fibers[0].state != State::done);
}

}  // namespace cuda_emulation

// -- in kernels ------------------------------------------------------------------------------------------

inline void __syncthreads() { cuda_emulation::pause(cuda_emulation::State::at_barrier); }

// Ends the kernel with an error, which cudaLaunchKernelEx returns. A device would report it later.
[[noreturn]] inline void __trap() {
  using namespace cuda_emulation;
  trapped = true;
  // The threads never go on, so all begin anew in the next block.
  for (Fiber& fiber : fibers) fiber.state = State::done, fiber.has_begun = false;
  _longjmp(scheduler, 1);
}

inline uint32_t __shfl_xor_sync(unsigned mask, uint32_t value, int lane_mask) {
  using namespace cuda_emulation;
  if (mask != 0xFFFFFFFFu) fail("expected a shuffle of all lanes");
  const unsigned self = current;
  const int slot = fibers[self].shuffles++ & 1;
  fibers[self].slots[slot] = value;
  pause(State::at_shuffle);
  return fibers[self ^ static_cast<unsigned>(lane_mask)].slots[slot];
}

inline uint32_t __shfl_sync(unsigned mask, uint32_t value, int source, int width) {
  using namespace cuda_emulation;
  if (mask != 0xFFFFFFFFu) fail("expected a shuffle of all lanes");
  const unsigned self = current, of_width = static_cast<unsigned>(width);
  const int slot = fibers[self].shuffles++ & 1;
  fibers[self].slots[slot] = value;
  pause(State::at_shuffle);
  return fibers[self / of_width * of_width + static_cast<unsigned>(source) % of_width].slots[slot];
}

// A vote is a shuffle in which every lane reads the values of all lanes.
inline uint32_t __ballot_sync(unsigned mask, int predicate) {
  using namespace cuda_emulation;
  if (mask != 0xFFFFFFFFu) fail("expected a vote of all lanes");
  const unsigned self = current;
  const int slot = fibers[self].shuffles++ & 1;
  fibers[self].slots[slot] = predicate != 0;
  pause(State::at_shuffle);
  uint32_t votes = 0;
  for (unsigned lane = 0; lane < 32; ++lane) votes |= fibers[self / 32 * 32 + lane].slots[slot] << lane;
  return votes;
}

inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == 0xFFFFFFFFu; }

namespace cuda_emulation::ptx {

// Returns the number in row `row` and column `column` of the product of two matrices that the lanes of a warp hold, as the PTX
// manual's figures for mma.m16n8k16 show. The sum is in double, so it is exact for the numbers that the tests use.
class Product {
 public:
  Product(const uint32_t* a, const uint32_t* b) {
    for (int i = 0; i < 6; ++i) {
      const unsigned self = current;
      const int slot = fibers[self].shuffles++ & 1;
      fibers[self].slots[slot] = i < 4 ? a[i] : b[i - 4];
      pause(State::at_shuffle);
      for (unsigned lane = 0; lane < 32; ++lane) registers_[i][lane] = fibers[self / 32 * 32 + lane].slots[slot];
    }
  }

  // Returns the i-th of the four numbers of this lane: two neighbors in a row, then those eight rows below.
  double of(int i) const {
    const unsigned lane = current % 32, row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double sum = 0.0;
    for (unsigned k = 0; k < 16; ++k) sum += a(row, k) * b(k, column);
    return sum;
  }

 private:
  double a(unsigned row, unsigned k) const {
    return half(registers_[row / 8 + k / 8 * 2][row % 8 * 4 + k % 8 / 2], k);
  }
  double b(unsigned k, unsigned column) const { return half(registers_[4 + k / 8][column * 4 + k % 8 / 2], k); }
  static double half(uint32_t pair, unsigned k) { return widen(kFloat16, pair >> k % 2 * 16 & 0xFFFFu); }

  uint32_t registers_[6][32];
};

inline void mma_m16n8k16_f16(uint32_t* product, const uint32_t* a, const uint32_t* b) {
  const Product of(a, b);
  for (int i = 0; i < 2; ++i) product[i] = narrow(kFloat16, of.of(2 * i)) | narrow(kFloat16, of.of(2 * i + 1)) << 16;
}
inline void mma_m16n8k16_f32(float* product, const uint32_t* a, const uint32_t* b) {
  const Product of(a, b);
  for (int i = 0; i < 4; ++i) product[i] = static_cast<float>(of.of(i));
}

inline void copy_async(void* to, const void* from) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16 != 0) fail("a copy is not aligned");
  if (is_reversed) {
    std::memcpy(to, from, 16);
  } else {
    fibers[current].copies.emplace_back(to, from);
  }
}
inline void wait_for_copies() {
  for (const auto& [to, from] : fibers[current].copies) std::memcpy(to, from, 16);
  fibers[current].copies.clear();
}

}  // namespace cuda_emulation::ptx

// Lets all lanes arrive, as a shuffle does.
inline void __syncwarp() { __shfl_xor_sync(0xFFFFFFFFu, 0, 0); }

inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    if (selector >> (4 * i) & 8) cuda_emulation::fail("byte_perm with a sign is not emulated");
    result |= static_cast<uint32_t>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xFF) << (8 * i);
  }
  return result;
}

// Rounds up. NaN becomes 0, and numbers beyond the range become its ends.
inline int32_t __float2int_ru(float x) {
  if (std::isnan(x)) return 0;
  return static_cast<int32_t>(std::fmin(std::fmax(std::ceil(static_cast<double>(x)), INT32_MIN), INT32_MAX));
}

inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t shift) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  return static_cast<uint32_t>(both << (shift & 31) >> 32);
}

inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  return static_cast<uint32_t>(both >> (shift & 31));
}

template <class T>
T __ldcs(const T* address) {
  if (reinterpret_cast<uintptr_t>(address) % sizeof(T) != 0) cuda_emulation::fail("misaligned load");
  return *address;
}
template <class T>
void __stcs(T* address, T value) {
  if (reinterpret_cast<uintptr_t>(address) % sizeof(T) != 0) cuda_emulation::fail("misaligned store");
  *address = value;
}

inline int __popc(uint32_t x) {
  int count = 0;
  for (; x != 0; x &= x - 1) ++count;
  return count;
}

inline uint32_t atomicAdd(uint32_t* address, uint32_t value) {
  const uint32_t old = *address;
  *address += value;
  return old;
}

inline uint32_t atomicOr(uint32_t* address, uint32_t value) {
  const uint32_t old = *address;
  *address |= value;
  return old;
}

// -- the host's side -------------------------------------------------------------------------------------

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidDevice = 101, cudaErrorLaunchFailure = 719 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76
};
using cudaStream_t = struct CUstream_st*;

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

namespace cuda_emulation {
inline int device = 0;
}

inline cudaError_t cudaGetDevice(int* device) {
  *device = cuda_emulation::device;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device > 1) return cudaErrorInvalidDevice;
  cuda_emulation::device = device;
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t) {
  if (bytes > 0) std::memset(address, value, bytes);
  return cudaSuccess;
}
template <class T>
cudaError_t cudaGetSymbolAddress(void** address, T& symbol) {
  *address = &symbol;
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorLaunchFailure) return "unspecified launch failure";
  return error == cudaSuccess ? "no error" : "invalid device ordinal";
}
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = cuda_emulation::driver;
  return cudaSuccess;
}
inline cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 2;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount        ? cuda_emulation::multiprocessors
           : attribute == cudaDevAttrComputeCapabilityMajor ? cuda_emulation::capability / 10
                                                              : cuda_emulation::capability % 10;
  return cudaSuccess;
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  using namespace cuda_emulation;
  if (config->gridDim.x == 0 || config->blockDim.x % 32 != 0) fail("invalid launch configuration");
  gridDim = config->gridDim;
  blockDim = config->blockDim;
  body = [&] { kernel(arguments...); };
  const unsigned end = last_block < gridDim.x - 1 ? last_block : gridDim.x - 1;
  trapped = false;
  for (blockIdx.x = first_block; blockIdx.x <= end && !trapped; ++blockIdx.x) run_block(blockDim.x);
  return trapped ? cudaErrorLaunchFailure : cudaSuccess;
}
