// Bits for compressed tensors under a budget: Prob. (10) of ActNN, by its greedy algorithm.
#pragma once

#include <cstdint>

namespace fewbit {

// Chooses bits[i] from least to most, with sum of elements[i] * bits[i] at most `budget`, for a small sum of
// sensitivity[i] / (2^bits[i] - 1)^2, or at_one[i] where bits[i] is 1. All start with `most`; whichever loses least per element gives up a bit,
// until the budget is met; what that overshot goes to those that gain most per element. The lower index first
// among equals. O(n log n) for a heap of n. sensitivity, at_one: not NaN, 0 or more; budget: not below least * elements.
void allocate(const double* sensitivity, const double* at_one, const int64_t* elements, int64_t n, int64_t budget,
              int least, int most, uint8_t* bits);

}  // namespace fewbit
