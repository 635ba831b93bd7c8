// The ops of compiled models (fewbit/runtime/ops/dense_ops.py), which torch's dispatcher calls without Python.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
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

// The arguments of an op, which the op owns: they are deleted when this goes out of scope, also after an exception.
class Arguments {
 public:
  // kinds: a letter for each argument, 't' for a tensor, 'n' for a number. count: the number of arguments on the stack.
  Arguments(Value* stack, uint64_t count, const char* kinds) : stack_(stack), kinds_(kinds) {
    if (count != std::strlen(kinds)) throw std::runtime_error("fewbit's compiled kernels are not of this version: build them again");
    for (size_t i = 0; kinds[i]; ++i) values_.push_back(stack[i]);
  }
  Arguments(const Arguments&) = delete;
  ~Arguments() {
    for (size_t i = 0; i < values_.size(); ++i) {
      if (kinds_[i] == 't') shim()->delete_tensor(reinterpret_cast<Handle>(values_[i]));
    }
  }

  // Calls another op with the same arguments, which owns them from now on.
  void pass_to(const char* op) {
    values_.clear();
    set_failure(false, "");
    if (shim()->call(op, "", stack_, kShimVersion)) throw_failure();
  }

  int int_at(size_t i, const char* name) const {
    const auto value = static_cast<int64_t>(values_[i]);
    if (value < INT32_MIN || value > INT32_MAX) refuse(name, "an integer of 32 bits", std::to_string(value));
    return static_cast<int>(value);
  }

  int64_t size_at(size_t i) const {
    const auto value = static_cast<int64_t>(values_[i]);
    check_size(value);
    return value;
  }

 private:
  Value* stack_;
  const char* kinds_;
  std::vector<Value> values_;
};

// Returns the shape of a copy of a tensor of these sizes: dimension 0 is that of the samples.
inline CopyShape shape_of(const int64_t* sizes, int64_t dims, int group_size, int bits, int kind) {
  int64_t features = 1;
  for (int64_t i = 1; i < dims; ++i) {
    check_size(sizes[i]);
    if (features > 0 && sizes[i] > INT64_MAX / 16 / features) refuse("size", "a number of elements that can be counted", "more");
    features *= sizes[i];
  }
  return copy_shape(dims ? sizes[0] : 1, features, group_size, bits, kind);
}

inline bool is_narrow(int item) { return item >= 0 && item <= kBfloat16 && item != static_cast<int>(DType::float64); }

inline int32_t dtype_of(int item) { return shim()->of_items[item]; }

// The ops of one device type.
//
// Device: `Cpu` or `Cuda`. Its entries check the arguments. They do not use Python.
template <class Device>
class Ops {
 public:
  // Lets the ops run the kernels of a device, and before that registers them with torch's dispatcher, for "CPU" or "CUDA". A call
  // with unusual arguments runs the op's implementation in Python, "<name>_in_python". Returns false, and does nothing, unless
  // `load_shim` has found torch's interface.
  //
  // step: the table whose code of a number x is 1 if x > 0, else 0. Neither it nor the device is ever deleted.
  static bool use(const char* key, const Device& device, const OwnedTable& step) {
    if (!shim()) return false;
    step_ = &step;
    device_ = new Device(device);
    static const bool is_registered = (add(key), true);
    return is_registered;
  }

  // Lets the ops run their implementations in Python.
  static void use_none() { device_ = nullptr; }

 private:
  static void add(const char* key) {
    Handle library = nullptr;
    check(shim()->library("fewbit", key, __FILE__, __LINE__, &library));
    const auto implement = [&](const char* op, Boxed function) { check(shim()->implement(library, op, function, kShimVersion)); };
    implement("quantize_dense", quantize_dense);
    implement("quantize_by_channels", quantize_by_channels);
    implement("dequantize_dense", dequantize_dense);
    implement("dequantize_by_channels", dequantize_by_channels);
    implement("anchor", anchor);
    implement("pack", pack);
    implement("unpack", unpack);
    implement("pack_mask", pack_mask);
    implement("unpack_mask", unpack_mask);
  }

  // quantize_dense(Tensor x, Tensor seed, int bits, int group_size, int kind) -> (Tensor, Tensor)
  static void quantize_dense(Value* stack, uint64_t inputs, uint64_t) {
    Arguments arguments(stack, inputs, "ttnnn");
    const Device* const device = device_;
    if (!device || !is_usual(stack[0])) return arguments.pass_to("fewbit::quantize_dense_in_python");
    quantize(*device, stack, arguments, arguments.int_at(4, "kind"), {});
  }

  // quantize_by_channels(Tensor x, Tensor seed, int bits, int group_size, SymInt count) -> (Tensor, Tensor, Tensor)
  static void quantize_by_channels(Value* stack, uint64_t inputs, uint64_t) {
    Arguments arguments(stack, inputs, "ttnnn");
    const Device* const device = device_;
    const Borrowed x(stack[0]);
    const Buffer from = x->buffer();
    if (!device || !is_usual(stack[0]) || !from.count) return arguments.pass_to("fewbit::quantize_by_channels_in_python");
    OpTensor statistics = OpTensor::empty(*x, {arguments.size_at(4), kColumns}, dtype_of(kBfloat16));
    device->channel_statistics(from, statistics.buffer(), {}, {}, 1);
    quantize(*device, stack, arguments, static_cast<int>(CopyKind::rotated), statistics.buffer());
    stack[2] = statistics.release();
  }

  // dequantize_dense(Tensor packed, Tensor ranges, int bits, int group_size, SymInt samples, SymInt features, ScalarType dtype,
  //                  int kind) -> Tensor
  static void dequantize_dense(Value* stack, uint64_t inputs, uint64_t) {
    Arguments arguments(stack, inputs, "ttnnnnnn");
    const Device* const device = device_;
    if (!device || !is_usual_copy(stack)) return arguments.pass_to("fewbit::dequantize_dense_in_python");
    dequantize(*device, stack, arguments, arguments.int_at(7, "kind"), {});
  }

  // dequantize_by_channels(Tensor packed, Tensor ranges, int bits, int group_size, SymInt samples, SymInt features,
  //                        ScalarType dtype, Tensor statistics) -> Tensor
  static void dequantize_by_channels(Value* stack, uint64_t inputs, uint64_t) {
    Arguments arguments(stack, inputs, "ttnnnnnt");
    const Borrowed statistics(stack[7]);
    const Device* const device = device_;
    if (!device || !is_usual_copy(stack) || !statistics->is_contiguous()) {
      return arguments.pass_to("fewbit::dequantize_by_channels_in_python");
    }
    dequantize(*device, stack, arguments, static_cast<int>(CopyKind::rotated), statistics->buffer());
  }

  // Returns whether the kernels can quantize x.
  static bool is_usual(Value x) {
    const Borrowed from(x);
    return is_narrow(from->buffer().item) && from->is_contiguous();
  }

  // Returns whether the kernels can dequantize a copy whose codes, ranges and dtype are arguments 0, 1 and 6.
  static bool is_usual_copy(const Value* stack) {
    const Borrowed packed(stack[0]), ranges(stack[1]);
    return is_narrow(item_of(static_cast<int32_t>(stack[6]))) && packed->is_contiguous() && ranges->is_contiguous();
  }

  // Quantizes argument 0 with the seed and settings after it. Stores the codes and ranges as results 0 and 1.
  static void quantize(const Device& device, Value* stack, const Arguments& arguments, int kind, const Buffer& statistics) {
    const Borrowed x(stack[0]), seed(stack[1]);
    const int bits = arguments.int_at(2, "bits"), group_size = arguments.int_at(3, "group_size");
    const CopyShape shape = shape_of(x->sizes(), x->dims(), group_size, bits, kind);
    OpTensor packed = OpTensor::empty(*x, {shape.words()}, dtype_of(kInt32));
    OpTensor ranges = OpTensor::empty(*x, {shape.rows(), kColumns}, dtype_of(kBfloat16));
    device.quantize_alike(x->buffer(), shape, {0, false, seed->buffer()}, packed.buffer(), ranges.buffer(), statistics);
    stack[0] = packed.release();
    stack[1] = ranges.release();
  }

  // Dequantizes a copy with the settings in arguments 2 to 6. Stores the values, (samples, features), as result 0.
  static void dequantize(const Device& device, Value* stack, const Arguments& arguments, int kind, const Buffer& statistics) {
    const Borrowed packed(stack[0]), ranges(stack[1]);
    const int64_t sizes[] = {arguments.size_at(4), arguments.size_at(5)};
    const CopyShape shape = shape_of(sizes, 2, arguments.int_at(3, "group_size"), arguments.int_at(2, "bits"), kind);
    OpTensor out = OpTensor::empty(*packed, {sizes[0], sizes[1]}, static_cast<int32_t>(stack[6]));
    device.dequantize_alike(packed->buffer(), ranges->buffer(), shape, out.buffer(), statistics);
    stack[0] = out.release();
  }

  // anchor(Tensor kept) -> Tensor
  static void anchor(Value* stack, uint64_t inputs, uint64_t) {
    Arguments arguments(stack, inputs, "t");
    const Borrowed kept(stack[0]);
    if (!device_.load() || kept->buffer().device >= 0) return arguments.pass_to("fewbit::anchor_in_python");
    OpTensor one = OpTensor::empty(*kept, {}, dtype_of(static_cast<int>(DType::float32)));
    *reinterpret_cast<float*>(one.buffer().address) = 1;
    stack[0] = one.release();
  }

  // pack(Tensor codes, int bits) -> Tensor
  static void pack(Value* stack, uint64_t inputs, uint64_t) {
    Arguments arguments(stack, inputs, "tn");
    const Borrowed codes(stack[0]);
    const Device* const device = device_;
    if (!device || !codes->is_contiguous()) return arguments.pass_to("fewbit::pack_in_python");
    const Buffer from = codes->buffer();
    const int bits = arguments.int_at(1, "bits");
    check_bits(bits);
    OpTensor packed = OpTensor::empty(*codes, {packed_words(from.count, bits)}, dtype_of(kInt32));
    device->pack(from, bits, packed.buffer());
    stack[0] = packed.release();
  }

  // unpack(Tensor packed, int bits, SymInt n) -> Tensor
  static void unpack(Value* stack, uint64_t inputs, uint64_t) {
    Arguments arguments(stack, inputs, "tnn");
    const Borrowed packed(stack[0]);
    const Device* const device = device_;
    if (!device || !packed->is_contiguous()) return arguments.pass_to("fewbit::unpack_in_python");
    OpTensor codes = OpTensor::empty(*packed, {arguments.size_at(2)}, dtype_of(kUint8));
    device->unpack(packed->buffer(), arguments.int_at(1, "bits"), codes.buffer());
    stack[0] = codes.release();
  }

  // pack_mask(Tensor mask) -> Tensor. The mask is boolean, or a floating number that is not negative.
  static void pack_mask(Value* stack, uint64_t inputs, uint64_t) {
    Arguments arguments(stack, inputs, "t");
    const Borrowed mask(stack[0]);
    const bool is_boolean = mask->dtype() == shim()->boolean;
    const Device* const device = device_;
    if (!device || !mask->is_contiguous()) return arguments.pass_to("fewbit::pack_mask_in_python");
    const Buffer from = mask->buffer();
    check_size(from.count);
    OpTensor packed = OpTensor::empty(*mask, {packed_words(from.count, 1)}, dtype_of(kInt32));
    if (is_boolean) {
      device->pack(from, 1, packed.buffer());
    } else {
      device->encode(*step_, from, packed.buffer(), {});
    }
    stack[0] = packed.release();
  }

  // unpack_mask(Tensor packed, SymInt n, *, ScalarType dtype) -> Tensor
  static void unpack_mask(Value* stack, uint64_t inputs, uint64_t) {
    Arguments arguments(stack, inputs, "tnn");
    const Borrowed packed(stack[0]);
    const auto dtype = static_cast<int32_t>(stack[2]);
    const bool is_boolean = dtype == shim()->boolean;
    const Buffer codes = packed->buffer();
    // The number 1, by which the levels are multiplied, is in the host's memory.
    const bool is_float = codes.device < 0 && dtype == dtype_of(static_cast<int>(DType::float32));
    const Device* const device = device_;
    if (!device || !(is_boolean || is_float) || !packed->is_contiguous()) return arguments.pass_to("fewbit::unpack_mask_in_python");
    OpTensor mask = OpTensor::empty(*packed, {arguments.size_at(1)}, dtype);
    if (is_boolean) {
      device->unpack(codes, 1, mask.buffer());
    } else {
      const float one = 1;
      device->decode_mul(*step_, {true, reinterpret_cast<uintptr_t>(&one), 1, 0, -1}, codes, mask.buffer());
    }
    stack[0] = mask.release();
  }

  static inline std::atomic<const Device*> device_ = nullptr;
  static inline const OwnedTable* step_ = nullptr;
};

}  // namespace fewbit::bindings
