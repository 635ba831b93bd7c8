// Philox4x32-10, the counter-based generator of Salmon et al. (SC 2011), as in fewbit/table/philox.py.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u, kPhiloxMultiplier2 = 0xCD9E8D57u;  // of words 0 and 2
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u, kPhiloxWeyl1 = 0xBB67AE85u;              // of the key's halves

struct PhiloxWords {
  uint32_t words[4];
};

// Computes a round with the halves of its key.
FEWBIT_HD inline void philox_round(uint32_t& c0, uint32_t& c1, uint32_t& c2, uint32_t& c3, uint32_t k0, uint32_t k1) {
  const uint64_t product0 = uint64_t{kPhiloxMultiplier0} * c0, product2 = uint64_t{kPhiloxMultiplier2} * c2;
  c0 = static_cast<uint32_t>(product2 >> 32) ^ c1 ^ k0;
  c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
  c1 = static_cast<uint32_t>(product2);
  c3 = static_cast<uint32_t>(product0);
}

// Computes the four words for the counter (e mod 2^32, e div 2^32, 0, 0) and the key (seed mod 2^32, seed div 2^32).
FEWBIT_HD inline PhiloxWords philox_words(uint64_t seed, uint64_t element) {
  uint32_t c0 = static_cast<uint32_t>(element), c1 = static_cast<uint32_t>(element >> 32);
  uint32_t c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#ifndef __CUDACC__  // nvcc warns of it, and unrolls anyway
#pragma GCC unroll 10
#endif
  for (int round = 0; round < kPhiloxRounds; ++round) {
    philox_round(c0, c1, c2, c3, k0, k1);
    k0 += kPhiloxWeyl0;
    k1 += kPhiloxWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

// Returns the first of the four words.
FEWBIT_HD inline uint32_t philox_word(uint64_t seed, uint64_t element) { return philox_words(seed, element).words[0]; }

// Returns a uniform number in [0, 1): the top 24 bits of the word times 2^-24. The conversion from int32 vectorizes.
FEWBIT_HD inline float uniform_of(uint32_t word) { return static_cast<float>(static_cast<int32_t>(word >> 8)) * 0x1p-24f; }
FEWBIT_HD inline float philox_uniform(uint64_t seed, uint64_t element) { return uniform_of(philox_word(seed, element)); }

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
