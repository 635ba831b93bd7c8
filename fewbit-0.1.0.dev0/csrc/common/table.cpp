#include "table.h"

#include <atomic>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace fewbit {
namespace {

constexpr size_t kReadable = 16;  // entries that a vector load may read at any place of a table
constexpr size_t kMostEntries = 1 << 20;

[[noreturn]] void refuse(const std::string& what, const std::string& expected, const std::string& got) {
  throw std::invalid_argument(what + ": expected " + expected + ", got " + got);
}

std::string at(const char* name, size_t i) { return std::string(name) + "[" + std::to_string(i) + "]"; }

template <class T>
void check_length(const char* name, const std::vector<T>& array, size_t length) {
  if (array.size() != length) {
    refuse(name, std::to_string(length) + " entries", std::to_string(array.size()));
  }
}

template <class T>
void check_finite(const char* name, const std::vector<T>& array) {
  for (size_t i = 0; i < array.size(); ++i) {
    if (!std::isfinite(array[i])) refuse(at(name, i), "a finite number", std::to_string(array[i]));
  }
}

template <class T>
void check_ascending(const char* name, const std::vector<T>& array, bool strictly) {
  for (size_t i = 1; i < array.size(); ++i) {
    if (strictly ? !(array[i] > array[i - 1]) : !(array[i] >= array[i - 1])) {
      refuse(at(name, i),
             (strictly ? "more than " : "at least ") + std::to_string(array[i - 1]),
             std::to_string(array[i]));
    }
  }
}

template <class T>
void check_breaks(const char* breaks_name, const std::vector<T>& breaks, const char* flips_name,
                  const std::vector<uint8_t>& flips, int bits) {
  check_length(flips_name, flips, breaks.size());
  if (breaks.size() > kMostEntries) {
    refuse(breaks_name, "at most " + std::to_string(kMostEntries) + " entries", std::to_string(breaks.size()));
  }
  check_finite(breaks_name, breaks);
  // Breaks that differ in float64 may be equal in float32. Both flips apply then.
  check_ascending(breaks_name, breaks, false);
  for (size_t i = 0; i < flips.size(); ++i) {
    if (flips[i] >> bits) {
      refuse(at(flips_name, i), "below " + std::to_string(1 << bits), std::to_string(flips[i]));
    }
  }
}

void check_knots(const TableArrays& arrays, int bits) {
  const size_t n = arrays.points.size(), levels = arrays.levels.size();
  if (n == 0) {
    check_length("origins", arrays.origins, 0);
    check_length("values", arrays.values, 0);
    check_length("slopes", arrays.slopes, 0);
    check_length("levels", arrays.levels, 0);
    check_length("inverse_gaps", arrays.inverse_gaps, 0);
    return;
  }
  if (n < 2 || n > kMostEntries) {
    refuse("points", "2 to " + std::to_string(kMostEntries) + " entries", std::to_string(n));
  }
  if (levels < 2 || levels > size_t{1} << bits) {
    refuse("levels", "2 to " + std::to_string(1 << bits) + " entries", std::to_string(levels));
  }
  check_length("origins", arrays.origins, n);
  check_length("values", arrays.values, n);
  check_length("slopes", arrays.slopes, n - 1);
  check_length("inverse_gaps", arrays.inverse_gaps, levels - 1);
  check_ascending("points", arrays.points, false);
  check_finite("origins", arrays.origins);
  check_finite("values", arrays.values);
  check_finite("slopes", arrays.slopes);
  check_finite("levels", arrays.levels);
  check_finite("inverse_gaps", arrays.inverse_gaps);
  // Levels that differ in float64 may be equal in float32.
  check_ascending("levels", arrays.levels, false);
}

// Returns the number of halvings that find a place among that many limits.
int steps_for(size_t count) {
  int steps = 0;
  while ((size_t{1} << steps) - 1 < count) ++steps;
  return steps;
}

// Returns the place that the outcomes of a search lead to. The first outcome is the lowest bit of `path` and the highest bit
// of the place.
size_t place_of(size_t path, int steps) {
  size_t place = 0;
  for (int step = 0; step < steps; ++step) place |= (path >> step & 1) << (steps - 1 - step);
  return place;
}

template <class T>
std::vector<T> pad(const std::vector<T>& limits, int steps) {
  std::vector<T> padded(limits);
  padded.resize((size_t{1} << steps) - 1, std::numeric_limits<T>::infinity());
  return padded;
}

}  // namespace

OwnedTable::OwnedTable(int64_t bits, int64_t initial, TableArrays arrays) : arrays_(std::move(arrays)) {
  if (bits < 1 || bits > 8) refuse("bits", "1 to 8", std::to_string(bits));
  if (initial < 0 || initial >> bits) {
    refuse("initial", "0 to " + std::to_string((1 << bits) - 1), std::to_string(initial));
  }
  const int planes = static_cast<int>(bits);
  check_breaks("breaks32", arrays_.breaks32, "flips32", arrays_.flips32, planes);
  check_breaks("breaks64", arrays_.breaks64, "flips64", arrays_.flips64, planes);
  check_length("lut32", arrays_.lut32, size_t{1} << planes);
  check_length("lut64", arrays_.lut64, size_t{1} << planes);
  check_knots(arrays_, planes);

  static std::atomic<uint64_t> next_id{1};
  table_.id = next_id++;
  table_.bits = planes;
  table_.initial = static_cast<uint32_t>(initial);
  table_.breaks32 = derive(arrays_.breaks32, arrays_.flips32, derived32_);
  table_.breaks64 = derive(arrays_.breaks64, arrays_.flips64, derived64_);
  table_.lut32 = arrays_.lut32.data();
  table_.lut64 = arrays_.lut64.data();
  if (!arrays_.points.empty()) derive_knots();
}

template <class T>
Breaks<T> OwnedTable::derive(const std::vector<T>& values, const std::vector<uint8_t>& flips,
                             Derived<T>& derived) const {
  Breaks<T> breaks{};
  breaks.count = static_cast<int>(values.size());
  breaks.values = values.data();
  breaks.flips = flips.data();
  for (int plane = 0; plane < table_.bits; ++plane) {
    breaks.plane_begin[plane] = static_cast<int>(derived.by_plane.size());
    for (size_t i = 0; i < values.size(); ++i) {
      if (flips[i] >> plane & 1) derived.by_plane.push_back(values[i] + T{0});
    }
  }
  for (int plane = table_.bits; plane <= 8; ++plane) {
    breaks.plane_begin[plane] = static_cast<int>(derived.by_plane.size());
  }
  breaks.by_plane = derived.by_plane.data();

  breaks.steps = steps_for(values.size());
  derived.padded = pad(values, breaks.steps);
  uint8_t code = static_cast<uint8_t>(table_.initial);
  derived.codes.push_back(code);
  for (uint8_t flip : flips) derived.codes.push_back(code ^= flip);
  derived.codes.resize(size_t{1} << breaks.steps, code);  // NaN is beyond the padding too
  breaks.padded = derived.padded.data();
  breaks.codes = derived.codes.data();

  for (int step = 0; step < breaks.steps; ++step) {
    const size_t half = size_t{1} << (breaks.steps - 1 - step);
    for (size_t path = 0; path < size_t{1} << step; ++path) {
      derived.reversed.push_back(derived.padded[place_of(path, breaks.steps) + half - 1]);
    }
  }
  for (size_t path = 0; path < derived.codes.size(); ++path) {
    derived.reversed_codes.push_back(derived.codes[place_of(path, breaks.steps)]);
  }
  derived.reversed.resize(derived.reversed.size() + kReadable);
  derived.reversed_codes.resize(derived.reversed_codes.size() + kReadable);
  breaks.reversed = derived.reversed.data();
  breaks.reversed_codes = derived.reversed_codes.data();
  return breaks;
}

void OwnedTable::derive_knots() {
  Knots& knots = table_.knots;
  knots.count = static_cast<int>(arrays_.points.size());
  knots.points = arrays_.points.data();
  knots.origins = arrays_.origins.data();
  knots.values = arrays_.values.data();
  knots.slopes = arrays_.slopes.data();
  knots.n_levels = static_cast<int>(arrays_.levels.size());
  knots.levels = arrays_.levels.data();
  knots.inverse_gaps = arrays_.inverse_gaps.data();
  knots.point_steps = steps_for(arrays_.points.size());
  padded_points_ = pad(arrays_.points, knots.point_steps);
  knots.padded_points = padded_points_.data();
  knots.level_steps = steps_for(arrays_.levels.size());
  padded_levels_ = pad(arrays_.levels, knots.level_steps);
  knots.padded_levels = padded_levels_.data();
}

}  // namespace fewbit
