// The inner loops of rotated copies for instruction sets whose registers do not hold a full group.
//
// A transform has two passes over memory, of which each loads and stores every number once. The first pass does the stages
// with distances of 128, 64 and 32 on 8 rows at a time, the second one does the others on a block at a time. The instruction
// set provides Row, a vector of kLanesOfRow floats; Indices, a vector of as many int32; and the functions on them.
#pragma once

#include <cstdint>
#include <cstring>

#include "../common/planes.h"
#include "../common/rotate.h"
#include "rotate_one_by_one.h"
#include "rotate_tables.h"

namespace fewbit {
inline namespace FEWBIT_NAMESPACE {
namespace {

constexpr int kRowsOfBlock = kBlock / kLanesOfRow;
constexpr int kBlocksOfGroup = kFullGroup / kBlock;

inline Row load(const float* x) {
  Row row;
  memcpy(&row, x, sizeof row);
  return row;
}

inline void put(Row row, float* x) { memcpy(x, &row, sizeof row); }

// The sum, the smallest and the largest number of a group.
struct GroupSum {
  float sum, least, greatest;
};

// Adds row i + COUNT / 2 to row i, then COUNT / 4 ..., and returns the first row.
template <int COUNT>
FEWBIT_INLINE Row add_rows(Row* rows) {
  if constexpr (COUNT > 1) {
#pragma GCC unroll 8
    for (int i = 0; i < COUNT / 2; ++i) rows[i] = rows[i] + rows[i + COUNT / 2];
    return add_rows<COUNT / 2>(rows);
  }
  return rows[0];
}

// Returns the sum of kFullGroup numbers whose rows are row(block, place), in the order of docs/concepts/quantizer.md.
template <class RowAt>
FEWBIT_INLINE float sum_of_rows(const RowAt& row) {
  Row places[kRowsOfBlock];
  for (int place = 0; place < kRowsOfBlock; ++place) {
    Row blocks[kBlocksOfGroup];
#pragma GCC unroll 8
    for (int block = 0; block < kBlocksOfGroup; ++block) blocks[block] = row(block, place);
    places[place] = add_rows<kBlocksOfGroup>(blocks);
  }
  return add_lanes(add_rows<kRowsOfBlock>(places));
}

// Returns the sum and the extremes of kFullGroup numbers. Extremes are those of the numbers that are not NaN.
inline GroupSum sum_of_group(const float* x) {
  Row low = Row{} + __builtin_inff(), high = Row{} - __builtin_inff();
  const float sum = sum_of_rows([&](int block, int place) __attribute__((always_inline)) {
    const Row row = load(x + kBlock * block + kLanesOfRow * place);
    low = lower_of(row, low);
    high = higher_of(row, high);
    return row;
  });
  float least = low[0], greatest = high[0];
  for (int lane = 1; lane < kLanesOfRow; ++lane) {
    least = low[lane] < least ? low[lane] : least;
    greatest = high[lane] > greatest ? high[lane] : greatest;
  }
  return {sum, least, greatest};
}

// Returns the sum of the squares of kFullGroup numbers x - shift.
inline float energy_of_group(const float* x, float shift) {
  return sum_of_rows([&](int block, int place) __attribute__((always_inline)) {
    const Row v = load(x + kBlock * block + kLanesOfRow * place) - shift;
    return v * v;
  });
}

// -- Transforms ------------------------------------------------------------------------------------------------

// Does the stages with distances of whole rows.
template <int COUNT>
FEWBIT_INLINE void transform_rows(Row* rows) {
  if constexpr (COUNT > 1) {
#pragma GCC unroll 8
    for (int i = 0; i < COUNT / 2; ++i) {
      const Row a = rows[i], b = rows[i + COUNT / 2];
      rows[i] = a + b;
      rows[i + COUNT / 2] = a - b;
    }
    transform_rows<COUNT / 2>(rows);
    transform_rows<COUNT / 2>(rows + COUNT / 2);
  }
}

// Does the first pass. row(block, place) returns the numbers.
template <class RowAt>
FEWBIT_INLINE void transform_blocks(const RowAt& row, float* y) {
#pragma GCC unroll 8
  for (int place = 0; place < kRowsOfBlock; ++place) {
    Row blocks[kBlocksOfGroup];
#pragma GCC unroll 8
    for (int block = 0; block < kBlocksOfGroup; ++block) blocks[block] = row(block, place);
    transform_rows<kBlocksOfGroup>(blocks);
#pragma GCC unroll 8
    for (int block = 0; block < kBlocksOfGroup; ++block) put(blocks[block], y + kBlock * block + kLanesOfRow * place);
  }
}

// Does the second pass for one block.
FEWBIT_INLINE void transform_block(const float* y, Row* rows) {
#pragma GCC unroll 8
  for (int i = 0; i < kRowsOfBlock; ++i) rows[i] = load(y + kLanesOfRow * i);
  transform_rows<kRowsOfBlock>(rows);
#pragma GCC unroll 8
  for (int i = 0; i < kRowsOfBlock; ++i) rows[i] = transform_lanes(rows[i]);
}

// Transforms `size` numbers, a power of two up to kFullGroup.
inline void transform(float* y, int size) {
  if (size < kBlock) return transform_one_by_one(y, size);
  for (int half = size / 2; half >= kBlock; half /= 2) {
    for (int begin = 0; begin < size; begin += 2 * half) {
      for (int i = begin; i < begin + half; i += kLanesOfRow) {
        const Row a = load(y + i), b = load(y + i + half);
        put(a + b, y + i);
        put(a - b, y + i + half);
      }
    }
  }
  for (int begin = 0; begin < size; begin += kBlock) {
    Row rows[kRowsOfBlock];
    transform_block(y + begin, rows);
    for (int i = 0; i < kRowsOfBlock; ++i) put(rows[i], y + begin + kLanesOfRow * i);
  }
}

// -- Codes -----------------------------------------------------------------------------------------------------

// Computes codes from rotated numbers, a row at a time, by comparison with every break.
template <int BITS, bool IS_SEARCHED = (BITS > kMostComparedBits)>
class Coder {
 public:
  // rms: the root mean square of the group.
  explicit Coder(float rms) {
    for (int i = 0; i < kBreaks; ++i) breaks_[i] = Row{} + kNormalLevels.breaks[breaks_begin(BITS) + i] * rms;
    for (int i = 0; i < kBreaks; ++i) {
      const float* levels = kNormalLevels.levels + levels_begin(BITS) + i;
      steps_[i] = Indices{} + static_cast<int32_t>(bits_of(levels[0]) ^ bits_of(levels[1]));
    }
  }

  // Returns the magnitudes times their levels. index: the numbers of the levels.
  FEWBIT_INLINE Row code(Row y, Indices& index) const {
    const Row magnitude = reinterpret_cast<Row>(reinterpret_cast<Indices>(y) & 0x7FFFFFFF);
    Indices level = Indices{} + static_cast<int32_t>(bits_of(kNormalLevels.levels[levels_begin(BITS)]));
    index = Indices{};
#pragma GCC unroll 8
    for (int i = 0; i < kBreaks; ++i) {
      // Lanes of `beyond` are 0 or -1. If a number is beyond a break, it is also beyond those before.
      const Indices beyond = magnitude > breaks_[i];
      level ^= beyond & steps_[i];
      index -= beyond;
    }
    return magnitude * reinterpret_cast<Row>(level);
  }

 private:
  static constexpr int kBreaks = (1 << (BITS - 1)) - 1;
  Row breaks_[kBreaks + 1];
  Indices steps_[kBreaks + 1];
};

// Does the same for many bits by a binary search. look_up_lanes<STEP>(values, index) reads values[index] of each lane, with
// indices below 2^STEP.
template <int BITS>
class Coder<BITS, true> {
 public:
  explicit Coder(float rms) {
    for (int i = 0; i < SearchBreaks<BITS>::kCount; ++i) breaks_[i] = kSearchBreaks<BITS>.values[i] * rms;
  }

  FEWBIT_INLINE Row code(Row y, Indices& index) const {
    const Row magnitude = reinterpret_cast<Row>(reinterpret_cast<Indices>(y) & 0x7FFFFFFF);
    index = Indices{};
    search<0>(magnitude, index);
    return magnitude * look_up_lanes<BITS - 1>(kPositiveLevels<BITS>.values, index);
  }

 private:
  template <int STEP>
  FEWBIT_INLINE void search(Row magnitude, Indices& index) const {
    if constexpr (STEP < BITS - 1) {
      const Indices beyond = magnitude > look_up_lanes<STEP>(breaks_ + (1 << STEP), index);
      index = index + index - beyond;
      search<STEP + 1>(magnitude, index);
    }
  }

  alignas(64) float breaks_[SearchBreaks<BITS>::kCount + 8] = {};  // 8 entries can be read from any step on
};

// Computes the words of the rows of a block. products: the magnitudes times their levels.
template <int BITS>
FEWBIT_INLINE void code_block(const Coder<BITS>& coder, const Row* rows, uint32_t* words, float* products) {
  Indices indices[kRowsOfBlock];
#pragma GCC unroll 8
  for (int i = 0; i < kRowsOfBlock; ++i) put(coder.code(rows[i], indices[i]), products + kLanesOfRow * i);
  put_planes<BITS>(rows, indices, words);
}

inline float sum_of_products(const float* products) {
  return sum_of_rows([=](int block, int place) __attribute__((always_inline)) {
    return load(products + kBlock * block + kLanesOfRow * place);
  });
}

// Computes the words of `blocks` blocks of rotated numbers, followed by zeros up to kFullGroup. Returns the sum of the
// magnitudes times their levels.
template <int BITS>
inline float code_blocks(const float* y, int blocks, float rms, uint32_t* words) {
  const Coder<BITS> coder(rms);
  alignas(64) float products[kFullGroup] = {};
  for (int block = 0; block < blocks; ++block, words += BITS) {
    Row rows[kRowsOfBlock];
    memcpy(rows, y + kBlock * block, sizeof rows);
    code_block<BITS>(coder, rows, words, products + kBlock * block);
  }
  return sum_of_products(products);
}

// Rotates the numbers x - shift of a full group and computes their words. Returns the same sum.
template <int BITS>
inline float code_full_group(const float* x, float shift, const uint64_t* signs, float rms, uint32_t* words) {
  alignas(64) float y[kFullGroup], products[kFullGroup];
  const RowSigns of_rows(signs, inverse_root(kFullGroup));
  transform_blocks(
      [&](int block, int place) __attribute__((always_inline)) {
        return of_rows.times(load(x + kBlock * block + kLanesOfRow * place) - shift, block, place);
      },
      y);
  const Coder<BITS> coder(rms);
  for (int block = 0; block < kBlocksOfGroup; ++block, words += BITS) {
    Row rows[kRowsOfBlock];
    transform_block(y + kBlock * block, rows);
    code_block<BITS>(coder, rows, words, products + kBlock * block);
  }
  return sum_of_products(products);
}

// -- Values ----------------------------------------------------------------------------------------------------

// Writes the levels of the codes of `blocks` blocks, with their signs.
template <int BITS>
inline void levels_of_blocks(const uint32_t* words, int blocks, float* y) {
  look_up<BITS>(words, kCodeLevels<BITS>.values, y, blocks);
}

// Dequantizes a full group that was rotated once.
template <int BITS>
inline void restore_full_group(const uint32_t* words, const uint64_t* signs, float mean, float scale, float* out) {
  alignas(64) float y[kFullGroup];
  levels_of_blocks<BITS>(words, kBlocksOfGroup, y);
  transform_blocks([&](int block, int place) __attribute__((always_inline)) {
    return load(y + kBlock * block + kLanesOfRow * place);
  }, y);
  const RowSigns of_rows(signs, scale * inverse_root(kFullGroup));
  for (int block = 0; block < kBlocksOfGroup; ++block) {
    Row rows[kRowsOfBlock];
    transform_block(y + kBlock * block, rows);
#pragma GCC unroll 8
    for (int i = 0; i < kRowsOfBlock; ++i) {
      put(mean + of_rows.times(rows[i], block, i), out + kBlock * block + kLanesOfRow * i);
    }
  }
}

}  // namespace
}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit
