"""The exactly unbiased codes with shared randomness of `fewbit.table.staircase`, in the form in which copies use them.

To encode a number z, the encoder draws one of the two states of the staircase whose means are next to z. For a given
value h of the shared random number, a code is therefore above c if and only if

    z > mean[h][c] + u * gap[h][c],

where u is the encoder's own random number, uniform in [0, 1). Here mean[h][c] is the mean of the state before the
transition of h from c to c + 1, and gap[h][c] is the distance from there to the mean of the state after it. The right
side ascends with c. So the code is the number of values c for which the inequality holds.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from fewbit.catalog.normal_levels import unbiased_levels
from fewbit.config import MAX_BITS, MIN_BITS
from fewbit.table.staircase import build_staircase


class UnbiasedCode(NamedTuple):
    """The code for one number of bits.

    Attributes:
        inverse_limit: 1 / T, rounded to float32. The code is unbiased for numbers from -T to T, where T is the mean of
            the last state of the staircase.
        levels: float32 (H, K), the level that is restored from each code, for each value of the shared random number. H
            is a power of two, and K is 2**bits.
        means: float32 (H, K), the numbers mean[h][c]. The last column has no meaning.
        gaps: float32 (H, K), the numbers gap[h][c]. The last column has no meaning.
    """

    inverse_limit: float
    levels: np.ndarray
    means: np.ndarray
    gaps: np.ndarray


@cache
def unbiased_code(bits: int) -> UnbiasedCode:
    """Return the code of a number of bits, from the shipped table of the function `value`.

    Means and gaps belong to the levels after these have been rounded to float32. So the code with
    rounded levels is still exactly unbiased.

    Args:
        bits: the bits of a code, 1 to 8.

    Raises:
        TableError: no table with this number of bits is shipped.
    """
    levels = np.array(unbiased_levels(bits), np.float32)
    stairs = build_staircase(levels)
    means, gaps = np.zeros(levels.shape, np.float32), np.zeros(levels.shape, np.float32)
    # Transition number i of the staircase raises the code of row[i] from column[i].
    steps = np.diff(stairs.codes, axis=0)
    row = steps.argmax(axis=1)
    column = np.take_along_axis(stairs.codes[:-1], row[:, None], axis=1)[:, 0]
    means[row, column] = stairs.means[:-1]
    gaps[row, column] = np.diff(stairs.means)
    return UnbiasedCode(float(np.float32(1.0 / stairs.means[-1])), levels, means, gaps)


@cache
def packed_codes() -> np.ndarray:
    """Return the codes of all numbers of bits in one float32 vector, as the compiled kernels read them.

    The vector begins with 1 / T for 1 to 8 bits. The levels, means and gaps of each number of bits follow, row by
    row, starting with 1 bit.
    """
    codes = [unbiased_code(bits) for bits in range(MIN_BITS, MAX_BITS + 1)]
    limits = np.array([code.inverse_limit for code in codes], np.float32)
    parts = [part.ravel() for code in codes for part in (code.levels, code.means, code.gaps)]
    return np.concatenate([limits, *parts])
