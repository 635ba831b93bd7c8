// torch's C interface for extensions, which later versions of torch keep. It is found at run time in torch's loaded libraries, so
// that building needs no torch. Its headers are torch/csrc/stable/c/shim.h and torch/csrc/inductor/aoti_torch/c/shim.h.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/buffer.h"
#include "common/dtype.h"

namespace fewbit::bindings {

// An argument or a result of an op: a number, or a handle of an object that its receiver owns.
using Value = uint64_t;
using Handle = void*;
// An op, which replaces its arguments by its results.
using Boxed = void (*)(Value* stack, uint64_t arguments, uint64_t results);

// The functions of the interface. They return 0 if they succeed.
struct Shim {
  int (*get_data_ptr)(Handle tensor, void** result);
  int (*get_numel)(Handle tensor, int64_t* result);
  int (*get_dim)(Handle tensor, int64_t* result);
  int (*get_sizes)(Handle tensor, int64_t** result);
  int (*get_dtype)(Handle tensor, int32_t* result);
  int (*get_device_type)(Handle tensor, int32_t* result);
  int (*get_device_index)(Handle tensor, int32_t* result);
  int (*is_contiguous)(Handle tensor, bool* result);
  int (*empty_strided)(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device_type,
                       int32_t device_index, Handle* result);
  int (*delete_tensor)(Handle tensor);
  int (*call)(const char* op, const char* overload, Value* stack, uint64_t version);
  int (*library)(const char* name_space, const char* key, const char* file, uint32_t line, Handle* result);
  int (*implement)(Handle library, const char* op, Boxed function, uint64_t version);
  const char* (*message)();  // that of the latest error; null in torch 2.11 and 2.12
  int32_t of_items[7];       // torch's numbers of the dtypes of buffers
  int32_t boolean, cpu;      // torch's numbers of this dtype and of this device type
};

// The functions; null unless `load_shim` has found them.
const Shim* shim();

// Looks for the functions in a loaded library and those that it depends on. Returns false if torch lacks one of them.
bool load_shim(const std::string& library);

// The number of torch's dtype among those of buffers, or -1.
int item_of(int32_t dtype);

// Throws if a function of the interface has failed. what: the message if torch has none.
inline void check(int status, const char* what = "a function of torch failed; torch has printed its message") {
  if (!status) return;
  const std::string text = shim()->message ? shim()->message() : what;
  throw std::runtime_error(text.substr(0, text.find('\n')));  // the other lines are addresses in torch's libraries
}

// Keeps the error of an op's implementation in Python for the C++ code of this thread that has called it. torch loses the message
// before torch 2.13. is_refused: true for a ValueError.
void set_failure(bool is_refused, const std::string& text);

// Throws what `set_failure` has kept.
[[noreturn]] void throw_failure();

// A tensor, which is an argument or a result of an op.
class OpTensor {
 public:
  explicit OpTensor(Handle handle) : handle_(handle) {}
  OpTensor(OpTensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  OpTensor& operator=(OpTensor&&) = delete;
  ~OpTensor() {
    if (handle_) shim()->delete_tensor(handle_);
  }

  // Returns a new contiguous tensor on the device of `like`. dtype: torch's number.
  static OpTensor empty(const OpTensor& like, const std::vector<int64_t>& sizes, int32_t dtype);

  // The memory, as entries get it. A bool counts as a uint8; the number of a dtype that entries do not know is -1.
  Buffer buffer() const;

  bool is_contiguous() const;

  // torch's number of the dtype.
  int32_t dtype() const;

  // The sizes, of which there are `dims()`.
  const int64_t* sizes() const;
  int64_t dims() const;

  // Gives the tensor to torch.
  Value release() { return reinterpret_cast<Value>(std::exchange(handle_, nullptr)); }

  // Gives up a tensor that torch still owns.
  void leave() { handle_ = nullptr; }

 private:
  Handle handle_;
};

}  // namespace fewbit::bindings
