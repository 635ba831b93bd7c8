// The choice of an element type by the number of a dtype.

#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include "cuda/number.h"

namespace fewbit::cuda {

template <class T>
struct Type {
  using type = T;
};

// Calls call(Type<T>) for the element type T of that number.
template <class Call>
void with_type(int dtype, Call&& call) {
  switch (static_cast<DType>(dtype)) {
    case DType::float32: return call(Type<float>());
    case DType::float64: return call(Type<double>());
    case DType::float16: return call(Type<Float16>());
    case DType::bfloat16: return call(Type<Bfloat16>());
  }
  throw std::runtime_error("expected a dtype number from 0 to 3, got " + std::to_string(dtype));
}

// Does the same for the types that the group quantizer has, which are all but float64.
template <class Call>
void with_quantized_type(int dtype, Call&& call) {
  with_type(dtype, [&](auto type) {
    if constexpr (std::is_same_v<typename decltype(type)::type, double>) {
      throw std::runtime_error("expected float32, float16 or bfloat16, got float64");
    } else {
      call(type);
    }
  });
}

}  // namespace fewbit::cuda
