// The part of DLPack 1 (github.com/dmlc/dlpack) that is used here: functions in C that read the tensors of a framework.
#pragma once

#include <cstdint>

namespace fewbit::bindings::dlpack {

constexpr int kCpu = 1, kCuda = 2;  // types of devices

struct TensorView {
  void* data;
  int32_t device_type, device;
  int32_t dims;
  uint8_t kind, bits;
  uint16_t lanes;
  const int64_t* shape;
  const int64_t* strides;
  uint64_t offset;  // of the first element from `data`, in bytes
};

struct Exchange {
  uint32_t version, minor_version;
  const Exchange* older;
  void (*unused[3])();
  int (*view)(void* tensor, TensorView* view);
  int (*stream)(int32_t device_type, int32_t device, void** stream);
};

}  // namespace fewbit::bindings::dlpack
