// An *entry* is a C++ function that Python calls. This file has the types of those arguments of entries that stand for memory,
// and the functions that return torch's number of threads and current stream. It needs no headers of Python.
#pragma once

#include <cstdint>

namespace fewbit::bindings {

// A buffer, which in Python is a tensor, the tuple (address, number of elements, number of their dtype, device), or None. The
// device is the index of a CUDA device, or -1 for the CPU.
struct Buffer {
  bool exists = false;
  uintptr_t address = 0;
  int64_t count = 0;
  int item = -1;
  int device = -1;
};

// A seed, which in Python is an int, a buffer of one int64, or None.
struct SeedArgument {
  int64_t value = 0;
  bool is_value = false;
  Buffer buffer;
};

// Returns the number of threads that torch uses on the CPU.
int torch_threads();

// Returns torch's current stream of a CUDA device.
void* torch_stream(int device);

}  // namespace fewbit::bindings
