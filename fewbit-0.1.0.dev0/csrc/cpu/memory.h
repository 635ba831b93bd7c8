// Advice to the system about memory that a kernel is going to write.
#pragma once

#include <cstdint>

namespace fewbit {

// Tells the system that all bytes at `address` will be written, so that large new memory comes in huge pages. To fault in
// pages of 4 KiB one by one takes several times as long as any kernel here. No result and no other memory is changed.
void will_write(void* address, int64_t bytes);

}  // namespace fewbit
