// Philox over vectors of 64-bit lanes, and the random numbers of a block of 256 elements of a group.
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

// Computes the words of COUNT vectors of counters: out[w][v] has word w of the counters in vector v, in the lower halves of
// lanes. lower: the counters' lower words. upper: their upper word, which all share. `product(a, b)` multiplies the lower halves
// of lanes, so the upper halves may have any bits.
template <int COUNT>
FEWBIT_INLINE void philox_lanes(const DrawKeys& keys, const Lanes* lower, uint64_t upper, Lanes (*out)[COUNT]) {
  const Lanes multiplier0 = Lanes{} + uint64_t{kPhiloxMultiplier0};
  const Lanes multiplier2 = Lanes{} + uint64_t{kPhiloxMultiplier2};
  // The last two words of the counters are 0. One of the two products is therefore 0 in the first round, and the same for all
  // counters in the second.
  const uint64_t same = uint64_t{kPhiloxMultiplier0} * static_cast<uint32_t>(upper ^ keys.first[0]);
  Lanes c0[COUNT], c1[COUNT], c2[COUNT], c3[COUNT];
  for (int v = 0; v < COUNT; ++v) {
    const Lanes product0 = product(lower[v], multiplier0);
    const Lanes product2 = product((product0 >> 32) ^ keys.second[0], multiplier2);
    c0[v] = (product2 >> 32) ^ keys.first[1];
    c1[v] = product2;
    c2[v] = product0 ^ ((same >> 32) ^ keys.second[1]);
    c3[v] = Lanes{} + same;
  }
#pragma GCC unroll 8
  for (int round = 2; round < kPhiloxRounds; ++round) {
    for (int v = 0; v < COUNT; ++v) {
      const Lanes product0 = product(c0[v], multiplier0), product2 = product(c2[v], multiplier2);
      c0[v] = (product2 >> 32) ^ c1[v] ^ keys.first[round];
      c2[v] = (product0 >> 32) ^ c3[v] ^ keys.second[round];
      c1[v] = product2;
      c3[v] = product0;
    }
  }
  for (int v = 0; v < COUNT; ++v) out[0][v] = c0[v], out[1][v] = c1[v], out[2][v] = c2[v], out[3][v] = c3[v];
}

// Writes word w of counter `counter` + i to words[32 w + i], for the kDrawCounters counters from `counter` on. Even and odd
// counters are in separate vectors, so that products need no shuffles.
inline void draw_words(const DrawKeys& keys, uint64_t counter, uint32_t* words) {
  constexpr int kLanes = sizeof(Lanes) / sizeof(uint64_t);
  constexpr int kVectors = kLanes == 8 ? 4 : 2;  // as many as registers hold, even and odd in turn
  Lanes even;
  for (int lane = 0; lane < kLanes; ++lane) even[lane] = static_cast<uint32_t>(counter) + 2 * lane;
  for (int i = 0; i < kDrawCounters; i += kVectors * kLanes) {
    Lanes lower[kVectors], all[4][kVectors];
    for (int v = 0; v < kVectors; ++v) lower[v] = even + (uint64_t{0} + i + v / 2 * 2 * kLanes + v % 2);
    // `counter` is a multiple of kDrawCounters, so all counters have the same upper word.
    philox_lanes<kVectors>(keys, lower, counter >> 32, all);
    for (int v = 0; v < kVectors; v += 2) {
      for (int word = 0; word < 4; ++word) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        const Lanes both = all[word][v] << 32 | (all[word][v + 1] & uint64_t{0xFFFFFFFFu});
#else
        const Lanes both = all[word][v + 1] << 32 | (all[word][v] & uint64_t{0xFFFFFFFFu});
#endif
        memcpy(words + word * kDrawCounters + i + v * kLanes, &both, sizeof both);
      }
    }
  }
}

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
