"""The staircase of a code with shared randomness: the states of the code, sorted by their means.

Encoder and decoder share a random number h in {0, ..., H-1}. The decoder restores the level R[h][c] from the code c. A
*state* chooses one code for every h. The mean of a state is the mean of the H levels that these codes restore. The
states are numbered such that their means ascend. In state 0 all codes are 0. A *transition* leads from one state to the
next, and raises the code of one h by 1. To encode a number z, the encoder takes the two states whose means are next to
z, and draws one of them such that the mean of the draw is z. It sends the drawn state's code for the shared h. So the
restored number has the mean z.

The slope of the transition of h from c to c + 1 is that of the line through the points (R, R**2) of its two levels:
R[h][c] + R[h][c+1]. If the transitions are sorted by slope, the variance is the smallest that is possible with the
given levels. Proof: let E be the mean over h and over the encoder's draws. Among all encoders with E R = z, the one
with the least E R**2 is wanted. Its point (z, E R**2) lies on the lower convex hull of a set: the mean over h (the
Minkowski sum, divided by H) of the sets {(R[h][c], R[h][c]**2)}. The lower hull of such a sum consists of the edges of
the lower hulls of all these sets, sorted by slope. The points of one h lie on a parabola, so the edges of their lower
hull join neighboring levels.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Staircase(NamedTuple):
    """The N = H (K-1) + 1 states of a code.

    Attributes:
        means: float64 (N,), ascending: the mean of every state.
        codes: int64 (N, H), the code of every state for every h.
        slopes: float64 (N-1,), ascending: half the slope of every transition, (R[h][c] + R[h][c+1]) / 2.
    """

    means: np.ndarray
    codes: np.ndarray
    slopes: np.ndarray


def build_staircase(levels) -> Staircase:
    """Return the staircase of a code.

    Args:
        levels: float64 (H, K), the levels R[h][c]. Every row ascends.
    """
    levels = np.asarray(levels, np.float64)
    rows, columns = levels.shape
    middle = 0.5 * (levels[:, 1:] + levels[:, :-1])
    order = np.argsort(middle, axis=None, kind="stable")
    codes = np.zeros((len(order) + 1, rows), np.int64)
    codes[np.arange(1, len(codes)), order // (columns - 1)] = 1
    codes = np.cumsum(codes, axis=0)
    means = levels[np.arange(rows), codes].mean(axis=1)
    return Staircase(means, codes, middle.ravel()[order])


def draw_codes(levels, z, shared, noise) -> np.ndarray:
    """Draw a code for every number.

    Args:
        levels: float64 (H, K), the levels R[h][c].
        z: Numbers of any shape. A number outside the means of the staircase gets the nearest mean.
        shared: The shared random numbers h, integers in [0, H), in the shape of z.
        noise: The encoder's own random numbers, uniform in [0, 1), in the shape of z.

    Returns:
        int64 of z's shape. The decoder restores levels[shared, code].
    """
    stairs = build_staircase(levels)
    z = np.clip(np.asarray(z, np.float64), stairs.means[0], stairs.means[-1])
    below = np.searchsorted(stairs.means, z, side="right") - 1
    below = np.clip(below, 0, len(stairs.means) - 2)
    gap = stairs.means[below + 1] - stairs.means[below]
    state = below + (noise * gap < z - stairs.means[below])
    return stairs.codes[state, shared]


def draw_variance(levels, z) -> np.ndarray:
    """Return, for every number z, the variance of the restored number over the shared and the encoder's randomness.

    Args:
        levels: float64 (H, K), the levels R[h][c].
        z: Numbers of any shape, between the least and the greatest mean of the staircase.
    """
    levels = np.asarray(levels, np.float64)
    means, codes, _ = build_staircase(levels)
    spread = levels[np.arange(len(levels)), codes].var(axis=1)
    z = np.asarray(z, np.float64)
    below = np.clip(np.searchsorted(means, z, side="right") - 1, 0, len(means) - 2)
    # The variance of the draw between two states is added to the mean of the variances within the states.
    share = (z - means[below]) / (means[below + 1] - means[below])
    own = (z - means[below]) * (means[below + 1] - z)
    return own + spread[below] + share * (spread[below + 1] - spread[below])
