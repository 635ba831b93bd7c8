// Philox4x32-10, the counter-based generator of Salmon et al. (SC 2011). fewbit/philox.py in C++.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {

// The first of the four words for the counter (e mod 2^32, e div 2^32, 0, 0), key (seed mod, div 2^32).
FEWBIT_HD inline uint32_t philox_word(uint64_t seed, uint64_t element) {
  uint32_t c0 = static_cast<uint32_t>(element), c1 = static_cast<uint32_t>(element >> 32);
  uint32_t c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#ifndef __CUDACC__  // nvcc warns of it, and unrolls anyway
#pragma GCC unroll 10
#endif
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * c0, product2 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(product2 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(product2);
    c3 = static_cast<uint32_t>(product0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c0;
}

// Uniform in [0, 1): the top 24 bits of the word, times 2^-24. Through int32, which vectorises.
FEWBIT_HD inline float philox_uniform(uint64_t seed, uint64_t element) {
  return static_cast<float>(static_cast<int32_t>(philox_word(seed, element) >> 8)) * 0x1p-24f;
}

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
