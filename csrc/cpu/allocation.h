// The choice of bits under a budget: problem (10) of ActNN, solved by the greedy algorithm of that paper.
#pragma once

#include <cstdint>

namespace fewbit {

// Chooses bits[i] from `least` to `most` such that the sum of elements[i] * bits[i] is at most `budget` and the sum of
// variances[8 i + bits[i] - 1] is small. This number is the variance that rounding tensor i to bits[i] adds. All tensors
// start with `most`. The tensor that loses least per element gives up a bit, until the budget is met. Bits left over go to
// the tensors that gain most per element. Among equal tensors the one with the lower index is first. With a heap of n
// tensors this takes O(n log n). Variances are 0 or more and not NaN; the budget is at least least * elements.
void allocate(const double* variances, const int64_t* elements, int64_t n, int64_t budget, int least, int most,
              uint8_t* bits);

// Divides samples + extra bits among the samples of a tensor, so that rounding adds the least variance: widths (samples,), each 1 to 8.
//
// gains: (7,) by how much each bit beyond the first lowers the variance, descending. squares (samples,): the numbers to which the
// variances are proportional; those that are not finite count as 0.
void share_bits(const float* gains, const float* squares, int64_t samples, int64_t extra, uint8_t* widths);

}  // namespace fewbit
