// The division of a tile of elements, and of the words of the packed format, among the lanes of a warp.
//
// Lanes side by side read and write 16 bytes each in global memory. A lane therefore has groups of 8 elements: 8 neighbors of
// a 16-bit type (one vector) or of float64 (4 vectors), or twice 4 neighbors of float32 (2 vectors, 128 elements apart). A
// lane's share of a word is then a byte, or a nibble in each of two words. Exchanges between lanes turn shares into words and
// back; each exchange is its own inverse.
//
// Every lane of a warp takes part in an exchange, even if its elements are beyond the end.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/planes.h"
#include "cuda/number.h"

namespace fewbit::cuda {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// The planes of 8 elements: bit i of byte p of `low` is bit p of element i; `high` has the planes from 4 on. After
// `transposed`, byte i of `low` is the code of element i, and `high` has the elements from 4 on.
struct Octet {
  uint32_t low, high;
};

// -- inside a lane ---------------------------------------------------------------------------------------

// Transposes an 8 x 8 matrix of bits (Warren, Hacker's Delight, 7-3), which turns planes into codes and codes into planes.
__host__ __device__ inline Octet transposed(Octet m) {
  const auto within = [](uint32_t v) {
    uint32_t t = (v ^ (v >> 7)) & 0x00AA00AAu;
    v ^= t ^ (t << 7);
    t = (v ^ (v >> 14)) & 0x0000CCCCu;
    return v ^ t ^ (t << 14);
  };
  const uint32_t low = within(m.low), high = within(m.high);
  return {(low & 0x0F0F0F0Fu) | (high << 4 & 0xF0F0F0F0u), (low >> 4 & 0x0F0F0F0Fu) | (high & 0xF0F0F0F0u)};
}

// -- between lanes ---------------------------------------------------------------------------------------

// Transposes 4 x 4 bytes over 4 lanes, Step lanes apart: byte j of the i-th lane and byte i of the j-th change places.
template <int Step>
__device__ inline uint32_t exchange_bytes(uint32_t own, int lane) {
  uint32_t other = __shfl_xor_sync(kAllLanes, own, Step);
  own = __byte_perm(own, other, lane & Step ? 0x3715 : 0x6240);
  other = __shfl_xor_sync(kAllLanes, own, 2 * Step);
  return __byte_perm(own, other, lane & (2 * Step) ? 0x3276 : 0x5410);
}

// Transposes 2 x 2 nibbles of every byte over 2 neighboring lanes.
__device__ inline uint32_t exchange_nibbles(uint32_t own, int lane) {
  const uint32_t other = __shfl_xor_sync(kAllLanes, own, 1);
  return lane & 1 ? (other >> 4 & 0x0F0F0F0Fu) | (own & 0xF0F0F0F0u)
                  : (own & 0x0F0F0F0Fu) | (other << 4 & 0xF0F0F0F0u);
}

// -- tiles -----------------------------------------------------------------------------------------------

// A tile of elements of type T: float, double, Float16, Bfloat16, or uint8_t for codes, whose vectors have 8 bytes. A lane has
// four vectors, which is enough to keep loads in flight and to share index arithmetic among many elements.
template <class T>
struct Tile {
  static constexpr bool kNibbles = sizeof(T) == 4;
  static constexpr int kVectors = 4;
  static constexpr int kPerVector = sizeof(T) == 1 ? 8 : 16 / sizeof(T);
  static constexpr int kGroups = kVectors * kPerVector / 8;
  static constexpr int kVectorsPerGroup = kVectors / kGroups;
  static constexpr int kElements = 32 * kVectors * kPerVector;
  static constexpr int kWordsPerVector = sizeof(T) == 1 ? 2 : 4;  // registers
  static constexpr int kRegisters = kVectors * kWordsPerVector;
  using Vector = std::conditional_t<kWordsPerVector == 2, uint2, uint4>;

  // Returns the place in the tile of the first element of a lane's v-th vector.
  __host__ __device__ static int vector_start(int v, int lane) {
    if (sizeof(T) == 8) return lane * 8 + v * kPerVector;
    return (v * 32 + lane) * kPerVector;
  }
  // Returns the place in the tile of the i-th element of a lane's group.
  __host__ __device__ static int element(int group, int lane, int i) {
    return vector_start(group * kVectorsPerGroup + i / kPerVector, lane) + i % kPerVector;
  }

  // Converts a lane's planes of a group to the word (of planes 0-3 or 4-7) that the lane reads or writes, and back.
  __device__ static uint32_t to_word(uint32_t planes, int lane) {
    if constexpr (kNibbles) return exchange_bytes<2>(exchange_nibbles(planes, lane), lane);
    return exchange_bytes<1>(planes, lane);
  }
  __device__ static uint32_t from_word(uint32_t word, int lane) {
    if constexpr (kNibbles) return exchange_nibbles(exchange_bytes<2>(word, lane), lane);
    return exchange_bytes<1>(word, lane);
  }
  // Returns the plane, of four, of the word that a lane reads or writes.
  __host__ __device__ static int plane(int lane) { return kNibbles ? lane >> 1 & 3 : lane & 3; }
  // Returns the block in the tile of the word that a lane reads or writes.
  __host__ __device__ static int block(int group, int lane) {
    return group * 8 + (kNibbles ? (lane & 1) * 4 + (lane >> 3) : lane >> 2);
  }
};

template <class T>
int64_t tile_count(int64_t n) {
  return n / Tile<T>::kElements + (n % Tile<T>::kElements != 0);
}

// A lane's view of a tile of n elements. A warp works on several tiles:
// for (Place<T> place(n, aligned); place.exists(); place.advance()) ...
template <class T>
struct Place {
  int64_t n;
  int64_t start;  // the tile's first element
  int lane;
  int left;       // the number of elements of the tile that exist
  bool aligned;   // true if vectors are aligned

  __device__ Place(int64_t n, bool aligned)
      : n(n),
        start((static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32) * Tile<T>::kElements),
        lane(threadIdx.x % 32),
        aligned(aligned) {
    look();
  }
  __device__ bool exists() const { return start < n; }
  __device__ void advance() {
    start += static_cast<int64_t>(gridDim.x) * (blockDim.x / 32) * Tile<T>::kElements;
    look();
  }
  __device__ bool vectors() const { return aligned && left == Tile<T>::kElements; }

 private:
  __device__ void look() {
    left = n - start < Tile<T>::kElements ? static_cast<int>(n - start) : Tile<T>::kElements;
  }
};

// A lane's elements of a tile, in the format of memory.
template <class T>
struct Fragment {
  uint32_t words[Tile<T>::kRegisters];

  // `group` returns the words that hold a group's elements.
  static constexpr int kPerGroup = Tile<T>::kRegisters / Tile<T>::kGroups;
  __host__ __device__ const uint32_t* group(int g) const { return words + g * kPerGroup; }
  __host__ __device__ uint32_t* group(int g) { return words + g * kPerGroup; }
};

// `value` returns the i-th value of a group, and `set_pair` writes two neighbors.
template <class T>
__host__ __device__ Wide<T> value(const uint32_t* group, int i) {
  if constexpr (sizeof(T) == 2) {
    return T::widen(i % 2 ? group[i / 2] >> 16 : group[i / 2] & 0xFFFFu);
  } else if constexpr (sizeof(T) == 4) {
    return float_of(group[i]);
  } else {
    const uint64_t bits = static_cast<uint64_t>(group[2 * i + 1]) << 32 | group[2 * i];
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
  }
}

template <class T>
__host__ __device__ void set_pair(uint32_t* group, int i, Wide<T> first, Wide<T> second) {
  if constexpr (sizeof(T) == 2) {
    group[i / 2] = T::narrow_pair(first, second);
  } else if constexpr (sizeof(T) == 4) {
    group[i] = bits_of(first);
    group[i + 1] = bits_of(second);
  } else {
    memcpy(group + 2 * i, &first, sizeof first);
    memcpy(group + 2 * i + 2, &second, sizeof second);
  }
}

// -- global memory ---------------------------------------------------------------------------------------

enum class Cache { normal, streaming };  // streaming: evicted first, for data that is not used again soon

template <Cache cache, class V>
__device__ V load(const V* address) {
  if constexpr (cache == Cache::streaming) return __ldcs(address);
  return *address;
}
template <Cache cache, class V>
__device__ void store(V* address, V vector) {
  if constexpr (cache == Cache::streaming) {
    __stcs(address, vector);
  } else {
    *address = vector;
  }
}

// The integer of T's size.
template <class T>
using Bits = std::conditional_t<
    sizeof(T) == 1, uint8_t,
    std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>>;

// Access to the bits of element j of a lane's vector. `put` needs words that were zero.
template <class T>
__host__ __device__ void put(uint32_t* words, int j, Bits<T> bits) {
  if constexpr (sizeof(T) == 8) {
    words[2 * j] = static_cast<uint32_t>(bits);
    words[2 * j + 1] = static_cast<uint32_t>(bits >> 32);
  } else {
    constexpr int kPerWord = 4 / sizeof(T);
    words[j / kPerWord] |= static_cast<uint32_t>(bits) << (j % kPerWord * 8 * sizeof(T));
  }
}
template <class T>
__host__ __device__ Bits<T> get(const uint32_t* words, int j) {
  if constexpr (sizeof(T) == 8) {
    return static_cast<uint64_t>(words[2 * j + 1]) << 32 | words[2 * j];
  } else {
    constexpr int kPerWord = 4 / sizeof(T);
    return static_cast<Bits<T>>(words[j / kPerWord] >> (j % kPerWord * 8 * sizeof(T)));
  }
}

// Reads a lane's elements of a tile. If the tile is cut or vectors are not aligned, elements are moved one by one, and those
// that do not exist are zero.
template <Cache cache, class T>
__device__ void load_tile(Fragment<T>& fragment, const T* data, const Place<T>& place) {
  using tile = Tile<T>;
  data += place.start + tile::vector_start(0, place.lane);
  if (place.vectors()) {
#pragma unroll
    for (int v = 0; v < tile::kVectors; ++v) {
      const auto* address = reinterpret_cast<const typename tile::Vector*>(data + tile::vector_start(v, 0));
      const typename tile::Vector vector = load<cache>(address);
      uint32_t* words = fragment.words + v * tile::kWordsPerVector;
      words[0] = vector.x, words[1] = vector.y;
      if constexpr (tile::kWordsPerVector == 4) words[2] = vector.z, words[3] = vector.w;
    }
    return;
  }
#pragma unroll
  for (int w = 0; w < tile::kRegisters; ++w) fragment.words[w] = 0;
  const int left = place.left - tile::vector_start(0, place.lane);
#pragma unroll
  for (int v = 0; v < tile::kVectors; ++v) {
#pragma unroll
    for (int j = 0; j < tile::kPerVector; ++j) {
      const int i = tile::vector_start(v, 0) + j;
      if (i < left) put<T>(fragment.words + v * tile::kWordsPerVector, j, reinterpret_cast<const Bits<T>*>(data)[i]);
    }
  }
}

template <Cache cache, class T>
__device__ void store_tile(const Fragment<T>& fragment, T* data, const Place<T>& place) {
  using tile = Tile<T>;
  data += place.start + tile::vector_start(0, place.lane);
  if (place.vectors()) {
#pragma unroll
    for (int v = 0; v < tile::kVectors; ++v) {
      const uint32_t* words = fragment.words + v * tile::kWordsPerVector;
      typename tile::Vector vector;
      vector.x = words[0], vector.y = words[1];
      if constexpr (tile::kWordsPerVector == 4) vector.z = words[2], vector.w = words[3];
      store<cache>(reinterpret_cast<typename tile::Vector*>(data + tile::vector_start(v, 0)), vector);
    }
    return;
  }
  const int left = place.left - tile::vector_start(0, place.lane);
#pragma unroll
  for (int v = 0; v < tile::kVectors; ++v) {
#pragma unroll
    for (int j = 0; j < tile::kPerVector; ++j) {
      const int i = tile::vector_start(v, 0) + j;
      if (i < left) reinterpret_cast<Bits<T>*>(data)[i] = get<T>(fragment.words + v * tile::kWordsPerVector, j);
    }
  }
}

// Fills a fragment with copies of one element.
template <class T>
__device__ void splat(Fragment<T>& fragment, const T* element) {
  const Bits<T> bits = *reinterpret_cast<const Bits<T>*>(element);
#pragma unroll
  for (int w = 0; w < Tile<T>::kRegisters; ++w) fragment.words[w] = 0;
#pragma unroll
  for (int v = 0; v < Tile<T>::kVectors; ++v) {
#pragma unroll
    for (int j = 0; j < Tile<T>::kPerVector; ++j) {
      put<T>(fragment.words + v * Tile<T>::kWordsPerVector, j, bits);
    }
  }
}

template <class T>
bool is_aligned(const T* data) {
  return reinterpret_cast<uintptr_t>(data) % sizeof(typename Tile<T>::Vector) == 0;
}

// These functions read and write the planes of a lane's groups in the packed words of a tile, up to the last block. Bits of
// elements that do not exist are written as zeros, which is the format's padding.
template <class T>
__device__ void load_planes(Octet* planes, const uint32_t* packed, int bits, const Place<T>& place) {
  using tile = Tile<T>;
  const int lane = place.lane;
  packed += place.start / kBlock * bits + (tile::block(0, lane) * bits + tile::plane(lane));
  const int left = place.left - tile::block(0, lane) * kBlock;
#pragma unroll
  for (int g = 0; g < tile::kGroups; ++g) {
    const uint32_t* words = packed + g * 8 * bits;
    const int count = g * 8 * kBlock < left ? bits - tile::plane(lane) : 0;  // planes from the lane's first on
    planes[g].low = count > 0 ? __ldcs(words) : 0;
    planes[g].high = count > 4 ? __ldcs(words + 4) : 0;
  }
#pragma unroll
  for (int g = 0; g < tile::kGroups; ++g) {
    planes[g].low = tile::from_word(planes[g].low, lane);
    if (bits > 4) planes[g].high = tile::from_word(planes[g].high, lane);
  }
}

template <class T>
__device__ void store_planes(Octet* planes, uint32_t* packed, int bits, const Place<T>& place) {
  using tile = Tile<T>;
  const int lane = place.lane;
  if (place.left < tile::kElements) {
#pragma unroll
    for (int g = 0; g < tile::kGroups; ++g) {
      uint32_t exists = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) exists |= tile::element(g, lane, i) < place.left ? 0x01010101u << i : 0;
      planes[g].low &= exists;
      planes[g].high &= exists;
    }
  }
  packed += place.start / kBlock * bits + (tile::block(0, lane) * bits + tile::plane(lane));
  const int left = place.left - tile::block(0, lane) * kBlock;
#pragma unroll
  for (int g = 0; g < tile::kGroups; ++g) {
    uint32_t* words = packed + g * 8 * bits;
    const int count = g * 8 * kBlock < left ? bits - tile::plane(lane) : 0;
    const uint32_t low = tile::to_word(planes[g].low, lane);
    if (count > 0) __stcs(words, low);
    if (bits > 4) {
      const uint32_t high = tile::to_word(planes[g].high, lane);
      if (count > 4) __stcs(words + 4, high);
    }
  }
}

}  // namespace fewbit::cuda
