// A table as the kernels use it: constants in host memory, checked once.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace fewbit {

// The breaks, at which the code changes, for inputs compared in T. All comparisons are strict, x > b. NaN is beyond all:
// code(x) = initial ^ XOR over j with not (x <= values[j]) of flips[j].
template <class T>
struct Breaks {
  int count;             // m >= 0
  const T* values;       // (m,) ascending, finite
  const uint8_t* flips;  // (m,) planes that change, below 2**bits

  // The breaks by plane: those that flip plane p are by_plane[plane_begin[p]] .. by_plane[plane_begin[p + 1]]. A break at -0
  // is stored as 0, which is the same limit.
  int plane_begin[9];
  const T* by_plane;

  // The breaks for a search of `steps` halvings: 2**steps - 1 breaks, padded with +inf, and 2**steps codes.
  int steps;
  const T* padded;
  const uint8_t* codes;

  // The same search by vector permutations: step s reads reversed[2**s - 1 + path]. Bit t of path is set if x was beyond the
  // break of step t. 16 entries can be read at each place.
  const T* reversed;
  const int32_t* reversed_codes;  // (2**steps,) by path, and 16 readable
};

// Constants of a draw (docs/reference/table_schema.md, "A draw"). count is 0 for tables that are not unbiased.
struct Knots {
  int count;                  // n
  const float* points;        // (n,) ascending, strict: x is beyond a point if x > point
  const float* origins;       // (n,) the points as the formula subtracts them
  const float* values;        // (n,)
  const float* slopes;        // (n - 1,)
  int n_levels;               // K >= 2
  const float* levels;        // (K,) ascending
  const float* inverse_gaps;  // (K - 1,)

  // The limits padded with +inf to 2**steps - 1 entries, for a search of `steps` halvings.
  int point_steps;
  const float* padded_points;
  int level_steps;
  const float* padded_levels;
};

struct Table {
  uint64_t id;  // different for every table of a process
  int bits;     // 1 to 8
  uint32_t initial;
  Breaks<float> breaks32;
  Breaks<double> breaks64;
  const float* lut32;   // (2**bits,) the level of each code
  const double* lut64;  // (2**bits,)
  Knots knots;

  bool unbiased() const { return knots.count > 0; }
};

// The arrays that a table is made from.
struct TableArrays {
  std::vector<float> breaks32;
  std::vector<uint8_t> flips32;
  std::vector<double> breaks64;
  std::vector<uint8_t> flips64;
  std::vector<float> lut32;
  std::vector<double> lut64;
  // For unbiased tables; else all empty.
  std::vector<float> points, origins, values, slopes, levels, inverse_gaps;
};

// A table and the memory it points to.
class OwnedTable {
 public:
  // Throws std::invalid_argument with one line, "expected ..., got ...".
  OwnedTable(int64_t bits, int64_t initial, TableArrays arrays);
  OwnedTable(const OwnedTable&) = delete;
  OwnedTable& operator=(const OwnedTable&) = delete;

  const Table& get() const { return table_; }

 private:
  template <class T>
  struct Derived {
    std::vector<T> by_plane, padded, reversed;
    std::vector<uint8_t> codes;
    std::vector<int32_t> reversed_codes;
  };
  template <class T>
  Breaks<T> derive(const std::vector<T>& values, const std::vector<uint8_t>& flips, Derived<T>& derived) const;
  void derive_knots();

  TableArrays arrays_;
  Derived<float> derived32_;
  Derived<double> derived64_;
  std::vector<float> padded_points_, padded_levels_;
  Table table_{};
};

}  // namespace fewbit
