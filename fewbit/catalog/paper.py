"""The errors that the paper prints.

G. Novikov, D. Bershatsky, J. Gusak, A. Shonenkov, D. Dimitrov, I. Oseledets: Few-bit Backward:
Quantized Gradients of Activation Functions for Memory Footprint Reduction. ICML 2023, PMLR 202.
"""

from __future__ import annotations

import numpy as np

from fewbit import functions

CITATION = "Few-bit Backward (Novikov et al., ICML 2023), Table 3"

# The figures are the integral of (f' - q)^2 over this domain with uniform weight, printed with four decimals.
DOMAIN = (-10.0, 10.0)
DECIMALS = 4

TABLE_3 = {
    "relu": {1: 0.0},
    "gelu": {1: 0.1410, 2: 0.0406, 3: 0.0119, 4: 0.0031},
    "silu": {1: 0.2150, 2: 0.0479, 3: 0.0170, 4: 0.0045},
    "sigmoid": {1: 0.0181, 2: 0.0038, 3: 0.0009, 4: 0.0002},
    "tanh": {1: 0.1584, 2: 0.0319, 3: 0.0073, 4: 0.0017},
    "selu": {1: 0.2554, 2: 0.1010, 3: 0.0184, 4: 0.0039},
    "softplus": {1: 0.2902, 2: 0.0541, 3: 0.0121, 4: 0.0029},
}

# In the paper's equation (9), q changes only at points of a grid of n cells. The paper does not give n for its table.
# With n = 1000, fewbit reproduces all printed digits. Without the grid the optimum is lower: for SELU with one bit and
# for SiLU with two bits, the last printed digit would be smaller by one.
CELLS = 1000

# For functions with an even f' the paper quantizes f'(|x|), with 2^bits intervals on one half of the domain.
PARITY = frozenset({"sigmoid", "tanh"})


def printed_error(function, bits):
    """Return the error that the paper prints for a canonical name, or None."""
    return TABLE_3.get(function, {}).get(bits)


def counterpart(table):
    """Return the error that the paper prints for a table's problem in any form, or None."""
    printed = printed_error(table.function, table.bits)
    if printed is None or (
        table.domain != DOMAIN
        or table.weight != {"kind": "uniform"}
        or table.objective != "mse"
        or table.tails != "free"
        or table.parameters != dict(functions.get(table.function).parameters)
        or (len(table.levels) < 2**table.bits and not table.exact)
    ):
        return None
    return printed


def same_digits(error, printed):
    """Return whether an error, rounded to four decimals, is the printed one."""
    return round(error, DECIMALS) == printed


def discrete_optimum(function, bits, cells=CELLS):
    """Return the least error of 2^bits intervals with ends on a grid of `cells`, which must contain the kinks (the paper's eq. 9).

    For the functions in PARITY, the intervals divide only x >= 0, and the error counts both halves.
    """
    from fewbit.solver.partition import partition

    low, high = (0.0, DOMAIN[1]) if function in PARITY else DOMAIN
    nodes, weights = np.polynomial.legendre.leggauss(8)
    width = (high - low) / cells
    centers = low + width * (np.arange(cells) + 0.5)
    slope = functions.get(function).derivative(centers[:, None] + 0.5 * width * nodes)
    means = slope @ weights / 2
    within = width * ((slope - means[:, None]) ** 2 @ weights / 2).sum()
    between = partition(means, 2**bits, np.full(cells, width), form="intervals").cost
    return float(within + between) * (2 if function in PARITY else 1)
