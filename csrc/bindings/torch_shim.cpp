#include "bindings/torch_shim.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <iterator>

#include "bindings/entry.h"

namespace fewbit::bindings {

namespace {

Shim found;
bool is_loaded = false;

struct Failure {
  bool is_refused = false;
  std::string text;
};
thread_local Failure failure;

template <class F>
bool find(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace

int item_of(int32_t dtype) {
  const auto* item = std::find(std::begin(found.of_items), std::end(found.of_items), dtype);
  return item == std::end(found.of_items) ? -1 : static_cast<int>(item - found.of_items);
}

const Shim* shim() { return is_loaded ? &found : nullptr; }

bool load_shim(const std::string& path) {
  if (is_loaded) return true;
  void* const library = dlopen(path.c_str(), RTLD_NOLOAD | RTLD_LAZY);
  if (!library) return false;
  Shim& f = found;
  bool all = find(library, "torch_get_mutable_data_ptr", f.get_data_ptr) && find(library, "aoti_torch_get_numel", f.get_numel) &&
             find(library, "aoti_torch_get_dim", f.get_dim) && find(library, "aoti_torch_get_sizes", f.get_sizes) &&
             find(library, "aoti_torch_get_dtype", f.get_dtype) && find(library, "aoti_torch_get_device_type", f.get_device_type) &&
             find(library, "aoti_torch_get_device_index", f.get_device_index) &&
             find(library, "aoti_torch_is_contiguous", f.is_contiguous) &&
             find(library, "aoti_torch_empty_strided", f.empty_strided) &&
             find(library, "aoti_torch_delete_tensor_object", f.delete_tensor) &&
             find(library, "torch_call_dispatcher", f.call) && find(library, "aoti_torch_library_init_impl", f.library) &&
             find(library, "torch_library_impl", f.implement);
  const auto find_number = [&](const std::string& name, int32_t& number) {
    int32_t (*function)() = nullptr;
    all = all && find(library, name.c_str(), function);
    if (all) number = function();
  };
  for (int item = 0; item < kItems; ++item) find_number(std::string("aoti_torch_dtype_") + kItemNames[item], f.of_items[item]);
  find_number("aoti_torch_dtype_bool", f.boolean);
  find_number("aoti_torch_device_type_cpu", f.cpu);
  find(library, "torch_exception_get_what_without_backtrace", f.message);
  return is_loaded = all;
}

void set_failure(bool is_refused, const std::string& text) { failure = {is_refused, text}; }

void throw_failure() {
  const Failure kept = std::exchange(failure, {});
  if (kept.is_refused) throw std::invalid_argument(kept.text);
  if (!kept.text.empty()) throw std::runtime_error(kept.text);
  check(1);
  throw std::logic_error("expected an error of torch");
}

OpTensor OpTensor::empty(const OpTensor& like, const std::vector<int64_t>& sizes, int32_t dtype) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0; step *= std::max<int64_t>(sizes[i], 1)) strides[i] = step;
  int32_t type = 0, index = 0;
  check(shim()->get_device_type(like.handle_, &type));
  check(shim()->get_device_index(like.handle_, &index));
  Handle made = nullptr;
  const auto dims = static_cast<int64_t>(sizes.size());
  // Trainers recognize a lack of memory by these words of torch.
  const char* const lack = type == shim()->cpu ? "DefaultCPUAllocator: can't allocate memory" : "CUDA out of memory.";
  check(shim()->empty_strided(dims, sizes.data(), strides.data(), dtype, type, index, &made), lack);
  return OpTensor(made);
}

Buffer OpTensor::buffer() const {
  const Shim& torch = *shim();
  Buffer buffer;
  void* address = nullptr;
  int32_t type = 0, index = 0;
  check(torch.get_data_ptr(handle_, &address));
  check(torch.get_numel(handle_, &buffer.count));
  const int32_t dtype = this->dtype();
  check(torch.get_device_type(handle_, &type));
  check(torch.get_device_index(handle_, &index));
  buffer.exists = true;
  buffer.address = reinterpret_cast<uintptr_t>(address);
  buffer.item = dtype == torch.boolean ? kUint8 : item_of(dtype);
  buffer.device = type == torch.cpu ? -1 : index;  // the CPU may have the index 0
  return buffer;
}

bool OpTensor::is_contiguous() const {
  bool result = false;
  check(shim()->is_contiguous(handle_, &result));
  return result;
}

int32_t OpTensor::dtype() const {
  int32_t result = 0;
  check(shim()->get_dtype(handle_, &result));
  return result;
}

const int64_t* OpTensor::sizes() const {
  int64_t* result = nullptr;
  check(shim()->get_sizes(handle_, &result));
  return result;
}

int64_t OpTensor::dims() const {
  int64_t result = 0;
  check(shim()->get_dim(handle_, &result));
  return result;
}

}  // namespace fewbit::bindings
