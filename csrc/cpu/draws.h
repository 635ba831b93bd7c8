// The random numbers of a group, for a block of 256 elements at a time: Philox over vectors of 64-bit lanes.
#pragma once

#include <cstdint>
#include <cstring>

#include "../common/philox.h"
#include "../common/quantize.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {

// The key made from the seed in each round, widened to lanes.
struct DrawKeys {
  uint64_t first[kPhiloxRounds], second[kPhiloxRounds];

  explicit DrawKeys(uint64_t seed) {
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round, k0 += kPhiloxWeyl0, k1 += kPhiloxWeyl1) {
      first[round] = k0;
      second[round] = k1;
    }
  }
};

// Writes word w of counter `counter` + i to words[32 w + i], for the kDrawCounters counters from `counter` on.
//
// A lane holds a 32-bit word; its upper half is never read. Even and odd counters are in separate vectors, so that products
// need no shuffles. `product(a, b)` multiplies the lower halves of lanes.
inline void draw_words(const DrawKeys& keys, uint64_t counter, uint32_t* words) {
  constexpr int kLanes = sizeof(Lanes) / sizeof(uint64_t);
  constexpr int kVectors = kLanes == 8 ? 4 : 2;  // as many as registers hold, even and odd in turn
  const Lanes multiplier0 = Lanes{} + uint64_t{kPhiloxMultiplier0};
  const Lanes multiplier2 = Lanes{} + uint64_t{kPhiloxMultiplier2};
  // `counter` is a multiple of kDrawCounters, so all counters have the same upper word. The last two words are 0. One of the
  // two products is therefore 0 in the first round, and the same for all counters in the second.
  const uint64_t upper = (counter >> 32) ^ keys.first[0];
  const uint64_t same = uint64_t{kPhiloxMultiplier0} * static_cast<uint32_t>(upper);
  Lanes even;
  for (int lane = 0; lane < kLanes; ++lane) even[lane] = static_cast<uint32_t>(counter) + 2 * lane;
  for (int i = 0; i < kDrawCounters; i += kVectors * kLanes) {
    Lanes c0[kVectors], c1[kVectors], c2[kVectors], c3[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const Lanes lower = even + (uint64_t{0} + i + v / 2 * 2 * kLanes + v % 2);
      const Lanes product0 = product(lower, multiplier0);
      const Lanes product2 = product((product0 >> 32) ^ keys.second[0], multiplier2);
      c0[v] = (product2 >> 32) ^ keys.first[1];
      c1[v] = product2;
      c2[v] = product0 ^ ((same >> 32) ^ keys.second[1]);
      c3[v] = Lanes{} + same;
    }
#pragma GCC unroll 8
    for (int round = 2; round < kPhiloxRounds; ++round) {
      for (int v = 0; v < kVectors; ++v) {
        const Lanes product0 = product(c0[v], multiplier0), product2 = product(c2[v], multiplier2);
        c0[v] = (product2 >> 32) ^ c1[v] ^ keys.first[round];
        c2[v] = (product0 >> 32) ^ c3[v] ^ keys.second[round];
        c1[v] = product2;
        c3[v] = product0;
      }
    }
    for (int v = 0; v < kVectors; v += 2) {
      const Lanes* all[] = {c0 + v, c1 + v, c2 + v, c3 + v};
      for (int word = 0; word < 4; ++word) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        const Lanes both = all[word][0] << 32 | (all[word][1] & uint64_t{0xFFFFFFFFu});
#else
        const Lanes both = all[word][1] << 32 | (all[word][0] & uint64_t{0xFFFFFFFFu});
#endif
        memcpy(words + word * kDrawCounters + i + v * kLanes, &both, sizeof both);
      }
    }
  }
}

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
