// The ops of compiled models (fewbit/runtime/ops/dense_ops.py), which torch's dispatcher calls without Python.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "bindings/entry.h"
#include "bindings/torch_shim.h"
#include "common/planes.h"

namespace fewbit::bindings {

constexpr uint64_t kShimVersion = (uint64_t{2} << 56) | (uint64_t{11} << 48);  // the version of torch whose interface this is
constexpr int kBfloat16 = static_cast<int>(DType::bfloat16);

// An argument that is still torch's: nothing is deleted when this goes out of scope.
class Borrowed {
 public:
  explicit Borrowed(Value value) : tensor_(reinterpret_cast<Handle>(value)) {}
  ~Borrowed() { tensor_.leave(); }
  const OpTensor* operator->() const { return &tensor_; }
  const OpTensor& operator*() const { return tensor_; }

 private:
  OpTensor tensor_;
};

inline void delete_tensor(Value value) { shim()->delete_tensor(reinterpret_cast<Handle>(value)); }
inline void delete_string(Value value) { shim()->delete_string(reinterpret_cast<Handle>(value)); }
inline void delete_list(Value value) { shim()->delete_list(reinterpret_cast<Handle>(value)); }

inline CopyKind kind_of(Value value) {
  const char* name = nullptr;
  check(shim()->string_data(reinterpret_cast<Handle>(value), &name));
  return !std::strcmp(name, "uniform") ? CopyKind::uniform : !std::strcmp(name, "rotated") ? CopyKind::rotated : CopyKind::masked;
}

inline std::vector<int64_t> numbers_of(Value value) {
  auto* const list = reinterpret_cast<Handle>(value);
  size_t count = 0;
  check(shim()->list_size(list, &count));
  std::vector<int64_t> numbers(count);
  for (size_t i = 0; i < count; ++i) {
    Value item = 0;
    check(shim()->list_item(list, i, &item));
    numbers[i] = static_cast<int64_t>(item);
  }
  return numbers;
}

// Returns the shape of a copy of a tensor of these sizes: dimension 0 is that of the samples.
inline CopyShape shape_of(const int64_t* sizes, int64_t dims, int group_size, int bits, CopyKind kind) {
  int64_t features = 1;
  for (int64_t i = 1; i < dims; ++i) features *= sizes[i];
  return copy_shape(dims ? sizes[0] : 1, features, group_size, bits, static_cast<int>(kind));
}

inline bool is_narrow(int item) { return item >= 0 && item <= kBfloat16 && item != static_cast<int>(DType::float64); }

inline int32_t dtype_of(int item) { return shim()->of_items[item]; }

inline void in_python(const char* op, Value* stack) { check(shim()->call(op, "", stack, kShimVersion)); }

// The ops of one device type.
//
// Device: `Cpu` or `Cuda`. Its entries check the arguments. They do not use Python.
template <class Device>
class Ops {
 public:
  // Registers the ops with torch's dispatcher, for "CPU" or "CUDA". A call with unusual arguments runs the op's implementation in
  // Python, "<name>_in_python". Returns false, and does nothing, unless `load_shim` has found torch's interface.
  //
  // step: the table whose code of a number x is 1 if x > 0, else 0. Neither it nor the device is ever deleted.
  static bool add(const char* key, const Device& device, const OwnedTable& step) {
    if (!shim()) return false;
    device_ = new Device(device);
    step_ = &step;
    Handle library = nullptr;
    check(shim()->library("fewbit", key, __FILE__, __LINE__, &library));
    const auto implement = [&](const char* op, Boxed function) { check(shim()->implement(library, op, function, kShimVersion)); };
    implement("quantize_dense", quantize_dense);
    implement("dequantize_dense", dequantize_dense);
    implement("pack", pack);
    implement("unpack", unpack);
    implement("pack_mask", pack_mask);
    implement("unpack_mask", unpack_mask);
    return true;
  }

 private:
  // quantize_dense(Tensor x, Tensor seed, int bits, int group_size, str kind, SymInt channels) -> (Tensor, Tensor, Tensor)
  static void quantize_dense(Value* stack, uint64_t, uint64_t) {
    const Borrowed x(stack[0]), seed(stack[1]);
    const Buffer from = x->buffer();
    if (stack[5] || !is_narrow(from.item) || !x->is_contiguous()) return in_python("fewbit::quantize_dense_in_python", stack);
    const auto bits = static_cast<int>(stack[2]), group_size = static_cast<int>(stack[3]);
    const CopyShape shape = shape_of(x->sizes(), x->dims(), group_size, bits, kind_of(stack[4]));
    OpTensor packed = OpTensor::empty(*x, {shape.words()}, dtype_of(kInt32));
    OpTensor ranges = OpTensor::empty(*x, {shape.rows(), kColumns}, dtype_of(kBfloat16));
    OpTensor channels = OpTensor::empty(*x, {0, kColumns}, dtype_of(kBfloat16));
    device_->quantize_alike(from, shape, {0, false, seed->buffer()}, packed.buffer(), ranges.buffer());
    delete_tensor(stack[0]);
    delete_tensor(stack[1]);
    delete_string(stack[4]);
    stack[0] = packed.release();
    stack[1] = ranges.release();
    stack[2] = channels.release();
  }

  // dequantize_dense(Tensor packed, Tensor ranges, int bits, int group_size, SymInt[] size, ScalarType dtype, str kind,
  //                  Tensor? channels) -> Tensor
  static void dequantize_dense(Value* stack, uint64_t, uint64_t) {
    const Borrowed packed(stack[0]), ranges(stack[1]);
    const auto dtype = static_cast<int32_t>(stack[5]);
    if (stack[7] || !is_narrow(item_of(dtype))) return in_python("fewbit::dequantize_dense_in_python", stack);
    const std::vector<int64_t> size = numbers_of(stack[4]);
    const auto bits = static_cast<int>(stack[2]), group_size = static_cast<int>(stack[3]);
    const CopyShape shape = shape_of(size.data(), static_cast<int64_t>(size.size()), group_size, bits, kind_of(stack[6]));
    OpTensor out = OpTensor::empty(*packed, size, dtype);
    device_->dequantize_alike(packed->buffer(), ranges->buffer(), shape, out.buffer());
    delete_tensor(stack[0]);
    delete_tensor(stack[1]);
    delete_list(stack[4]);
    delete_string(stack[6]);
    stack[0] = out.release();
  }

  // pack(Tensor codes, int bits) -> Tensor
  static void pack(Value* stack, uint64_t, uint64_t) {
    const Borrowed codes(stack[0]);
    const Buffer from = codes->buffer();
    const auto bits = static_cast<int>(stack[1]);
    if (!codes->is_contiguous()) return in_python("fewbit::pack_in_python", stack);
    check_bits(bits);
    OpTensor packed = OpTensor::empty(*codes, {packed_words(from.count, bits)}, dtype_of(kInt32));
    device_->pack(from, bits, packed.buffer());
    delete_tensor(stack[0]);
    stack[0] = packed.release();
  }

  // unpack(Tensor packed, int bits, SymInt n) -> Tensor
  static void unpack(Value* stack, uint64_t, uint64_t) {
    const Borrowed packed(stack[0]);
    const auto n = static_cast<int64_t>(stack[2]);
    check_size(n);
    OpTensor codes = OpTensor::empty(*packed, {n}, dtype_of(kUint8));
    device_->unpack(packed->buffer(), static_cast<int>(stack[1]), codes.buffer());
    delete_tensor(stack[0]);
    stack[0] = codes.release();
  }

  // pack_mask(Tensor mask) -> Tensor. The mask is boolean, or a number that is not negative.
  static void pack_mask(Value* stack, uint64_t, uint64_t) {
    const Borrowed mask(stack[0]);
    const Buffer from = mask->buffer();
    if (!mask->is_contiguous()) return in_python("fewbit::pack_mask_in_python", stack);
    check_size(from.count);
    OpTensor packed = OpTensor::empty(*mask, {packed_words(from.count, 1)}, dtype_of(kInt32));
    if (from.item == kUint8) {
      device_->pack(from, 1, packed.buffer());
    } else {
      device_->encode(*step_, from, packed.buffer(), {});
    }
    delete_tensor(stack[0]);
    stack[0] = packed.release();
  }

  // unpack_mask(Tensor packed, SymInt n, *, ScalarType dtype) -> Tensor
  static void unpack_mask(Value* stack, uint64_t, uint64_t) {
    const Borrowed packed(stack[0]);
    const auto n = static_cast<int64_t>(stack[1]);
    const auto dtype = static_cast<int32_t>(stack[2]);
    const bool is_boolean = dtype == shim()->boolean;
    const Buffer codes = packed->buffer();
    // The number 1, by which the levels are multiplied, is in the host's memory.
    const bool is_float = codes.device < 0 && dtype == dtype_of(static_cast<int>(DType::float32));
    if (!is_boolean && !is_float) return in_python("fewbit::unpack_mask_in_python", stack);
    check_size(n);
    OpTensor mask = OpTensor::empty(*packed, {n}, dtype);
    if (is_boolean) {
      device_->unpack(codes, 1, mask.buffer());
    } else {
      const float one = 1;
      device_->decode_mul(*step_, {true, reinterpret_cast<uintptr_t>(&one), 1, 0, -1}, codes, mask.buffer());
    }
    delete_tensor(stack[0]);
    stack[0] = mask.release();
  }

  static inline const Device* device_ = nullptr;
  static inline const OwnedTable* step_ = nullptr;
};

}  // namespace fewbit::bindings
