// A checksum of memory, which changes if any byte changes.
#pragma once

#include <cstdint>

namespace fewbit {

// Returns the checksum of `bytes` bytes. It does not depend on `threads`, and differs if two words change places.
uint64_t checksum(const void* data, int64_t bytes, int threads);

}  // namespace fewbit
