// A checksum of memory, which almost certainly changes if the memory changes.
#pragma once

#include <cstdint>

namespace fewbit {

struct Kernels;

// Returns the checksum of `bytes` bytes. It does not depend on `kernels` and `threads`.
uint64_t checksum(const Kernels& kernels, const void* data, int64_t bytes, int threads);

}  // namespace fewbit
