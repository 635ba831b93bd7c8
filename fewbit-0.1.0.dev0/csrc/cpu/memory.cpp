#include "memory.h"

#ifdef __linux__
#include <sys/mman.h>

namespace fewbit {
namespace {

constexpr uintptr_t kHugePage = uintptr_t{1} << 21;
constexpr int64_t kWorthwhile = int64_t{4} << 20;

}  // namespace

void will_write(void* address, int64_t bytes) {
  if (bytes < kWorthwhile) return;
  // Only whole huge pages are advised, since the others also hold memory that is not going to be written.
  const uintptr_t start = reinterpret_cast<uintptr_t>(address);
  const uintptr_t first = (start + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = (start + static_cast<uintptr_t>(bytes)) / kHugePage * kHugePage;
  // If the system has no huge pages, the call fails without harm.
  if (first < last) (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

}  // namespace fewbit
#else
namespace fewbit {
void will_write(void*, int64_t) {}
}  // namespace fewbit
#endif
