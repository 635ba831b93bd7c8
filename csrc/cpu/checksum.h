// A checksum of memory, which almost certainly changes if the memory changes.
#pragma once

#include <cstdint>

namespace fewbit {

// Returns the checksum of `bytes` bytes. It does not depend on `threads`.
uint64_t checksum(const void* data, int64_t bytes, int threads);

}  // namespace fewbit
