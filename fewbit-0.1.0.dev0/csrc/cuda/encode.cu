// The packed codes of x.

#include <type_traits>

#include "cuda/dispatch.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/search.h"
#include "cuda/thresholds.h"
#include "cuda/tile.h"

namespace fewbit::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(kThreads)
    encode_by_thresholds(const __grid_constant__ Thresholds thresholds, const T* x, int64_t n, bool aligned,
                         uint32_t* packed) {
  for (Place<T> place(n, aligned); place.exists(); place.advance()) {
    Fragment<T> fragment;
    load_tile<Cache::normal>(fragment, x, place);
    Octet planes[Tile<T>::kGroups];
    encode_linear(fragment, thresholds, planes);
    store_planes<T>(planes, packed, thresholds.bits, place);
  }
}

template <class T, int Capacity>
__global__ void __launch_bounds__(kThreads)
    encode_by_search(const __grid_constant__ Pieces<Wide<T>, Capacity> pieces, const T* x, int64_t n, bool aligned,
                     uint32_t* packed) {
  using Shared = SharedPieces<Wide<T>, Capacity>;
  __shared__ typename Shared::Storage storage;
  const Shared shared(pieces, storage);
  for (Place<T> place(n, aligned); place.exists(); place.advance()) {
    Fragment<T> fragment;
    load_tile<Cache::normal>(fragment, x, place);
    Octet planes[Tile<T>::kGroups];
#pragma unroll
    for (int g = 0; g < Tile<T>::kGroups; ++g) planes[g] = transposed(shared.template codes<T>(fragment.group(g)));
    store_planes<T>(planes, packed, pieces.bits, place);
  }
}

// The seed is in device memory, so that no host waits for it and a captured launch reads it anew.
template <class T, int Capacity>
__global__ void __launch_bounds__(kThreads)
    encode_by_draw(const __grid_constant__ DrawConstants<Capacity> constants, const T* x, int64_t n, bool aligned,
                   uint32_t* packed, const int64_t* seed_address) {
  using Shared = SharedKnots<Capacity>;
  __shared__ typename Shared::Storage storage;
  const Shared shared(constants, storage);
  const uint64_t seed = static_cast<uint64_t>(*seed_address);
  for (Place<T> place(n, aligned); place.exists(); place.advance()) {
    Fragment<T> fragment;
    load_tile<Cache::normal>(fragment, x, place);
    Octet planes[Tile<T>::kGroups];
#pragma unroll
    for (int g = 0; g < Tile<T>::kGroups; ++g) {
      planes[g] = transposed(shared.template codes<T>(fragment.group(g), seed, place.start, g, place.lane));
    }
    store_planes<T>(planes, packed, constants.bits, place);
  }
}

// The encoding of x (n,) in the way that the table allows: by thresholds, a search or draws.
template <class T>
class Encode {
 public:
  Encode(const Table& table, const T* x, int64_t n, uint32_t* packed, int device, void* stream)
      : table_(table), x_(x), n_(n), packed_(packed), device_(device), stream_(stream) {}

  void run(const int64_t* seed) const {
    if (table_.unbiased()) return table_.knots.count <= 255 ? draw<255>(seed) : draw<1800>(seed);
    if constexpr (!std::is_same_v<T, double>) {
      Thresholds thresholds;
      if (make_thresholds<T>(table_, thresholds)) {
        return launch(encode_by_thresholds<T>, device_, stream_, tiles(), kWaves, thresholds, x_, n_,
                      is_aligned(x_), packed_);
      }
      search<400>(table_.breaks32);
    } else {
      search<400>(table_.breaks64);
    }
  }

 private:
  int64_t tiles() const { return tile_count<T>(n_); }

  template <int Capacity>
  void search(const Breaks<Wide<T>>& breaks) const {
    if constexpr (Capacity == 400) {
      if (breaks.count > Capacity) return search<3600>(breaks);
    }
    require_capacity(breaks.count, Capacity, "breaks");
    static_assert(sizeof(Pieces<Wide<T>, Capacity>) <= kMostParameterBytes - 64);
    const Pieces<Wide<T>, Capacity> pieces(table_, breaks);
    launch(encode_by_search<T, Capacity>, device_, stream_, tiles(), kOneWave, pieces, x_, n_, is_aligned(x_),
           packed_);
  }

  template <int Capacity>
  void draw(const int64_t* seed) const {
    require_capacity(table_.knots.count, Capacity, "knots");
    static_assert(sizeof(DrawConstants<Capacity>) <= kMostParameterBytes - 64);
    const DrawConstants<Capacity> constants(table_);
    launch(encode_by_draw<T, Capacity>, device_, stream_, tiles(), kOneWave, constants, x_, n_, is_aligned(x_),
           packed_, seed);
  }

  const Table& table_;
  const T* x_;
  int64_t n_;
  uint32_t* packed_;
  int device_;
  void* stream_;
};

}  // namespace

void encode(const Table& table, const void* x, int dtype, int64_t n, int32_t* packed, const int64_t* seed,
            int device, void* stream) {
  if (n <= 0) return;
  if (table.unbiased() && seed == nullptr) throw std::runtime_error("expected a seed for an unbiased table");
  const DeviceScope scope(device);
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    Encode<T>(table, static_cast<const T*>(x), n, reinterpret_cast<uint32_t*>(packed), device, stream).run(seed);
  });
}

}  // namespace fewbit::cuda
