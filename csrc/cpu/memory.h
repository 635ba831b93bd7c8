// Advice to the system on memory that a kernel is going to write.
#pragma once

#include <cstdint>

namespace fewbit {

// The bytes at `address` will all be written: large new memory then comes in huge pages. Faulting in 4 KiB pages
// one by one takes several times as long as any kernel here. Changes no result, and nothing beyond these bytes.
void will_write(void* address, int64_t bytes);

}  // namespace fewbit
