// Conversion of codes to bit-planes and back.

#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/tile.h"

namespace fewbit::cuda {
namespace {

using Codes = Tile<uint8_t>;

__global__ void __launch_bounds__(kThreads)
    pack_kernel(const uint8_t* codes, int64_t n, bool aligned, int bits, uint32_t* packed) {
  for (Place<uint8_t> place(n, aligned); place.exists(); place.advance()) {
    Fragment<uint8_t> fragment;
    load_tile<Cache::streaming>(fragment, codes, place);
    Octet planes[Codes::kGroups];
#pragma unroll
    for (int g = 0; g < Codes::kGroups; ++g) planes[g] = transposed({fragment.group(g)[0], fragment.group(g)[1]});
    store_planes(planes, packed, bits, place);
  }
}

__global__ void __launch_bounds__(kThreads)
    unpack_kernel(const uint32_t* packed, int64_t n, int bits, bool aligned, uint8_t* codes) {
  for (Place<uint8_t> place(n, aligned); place.exists(); place.advance()) {
    Octet octets[Codes::kGroups];
    load_planes(octets, packed, bits, place);
    Fragment<uint8_t> fragment;
#pragma unroll
    for (int g = 0; g < Codes::kGroups; ++g) {
      const Octet octet = transposed(octets[g]);
      fragment.group(g)[0] = octet.low, fragment.group(g)[1] = octet.high;
    }
    store_tile<Cache::normal>(fragment, codes, place);
  }
}

}  // namespace

void pack(const uint8_t* codes, int64_t n, int bits, int32_t* packed, int device, void* stream) {
  if (n <= 0) return;
  const DeviceScope scope(device);
  launch(pack_kernel, device, stream, tile_count<uint8_t>(n), kWaves, codes, n, is_aligned(codes), bits,
         reinterpret_cast<uint32_t*>(packed));
}

void unpack(const int32_t* packed, int64_t n, int bits, uint8_t* codes, int device, void* stream) {
  if (n <= 0) return;
  const DeviceScope scope(device);
  launch(unpack_kernel, device, stream, tile_count<uint8_t>(n), kWaves,
         reinterpret_cast<const uint32_t*>(packed), n, bits, is_aligned(codes), codes);
}

}  // namespace fewbit::cuda
