"""The figures that fewbit's tables are compared with, as they are printed.

G. Novikov, D. Bershatsky, J. Gusak, A. Shonenkov, D. Dimitrov, I. Oseledets: Few-bit Backward:
Quantized Gradients of Activation Functions for Memory Footprint Reduction. ICML 2023, PMLR 202.
"""

from __future__ import annotations

import numpy as np

from fewbit import functions

CITATION = "Few-bit Backward (Novikov et al., ICML 2023), Table 3"

# The integral of (f' - q)^2 over this domain, uniform weight, printed with four decimals.
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

# The paper's equation (9) lets breaks lie on n + 1 points. It does not say how many it used for its
# table; 1000 intervals give all of its digits. The optimum over all breaks is lower: it rounds to one
# unit less in the last digit for SELU at one bit and SiLU at two.
CELLS = 1000

# f' is even: the paper quantizes f'(|x|), 2^bits intervals on one half of the domain.
PARITY = frozenset({"sigmoid", "tanh"})


def printed_error(function, bits):
    """The paper's figure for a function's canonical name, or None if it has none."""
    return TABLE_3.get(function, {}).get(bits)


def counterpart(table):
    """The paper's figure for exactly the problem that a table solves, or None.

    The same function and parameters, size, weight, domain and objective; either form.
    """
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
    """Whether an error, rounded as the paper rounds, is the printed figure."""
    return round(error, DECIMALS) == printed


def discrete_optimum(function, bits, cells=CELLS):
    """The optimum of the paper's own discrete problem: 2^bits intervals that start and end on a grid.

    On the paper's domain, cut into ``cells`` equal parts; of |x| for a function in PARITY. Kinks are
    to lie on the grid (those of the paper's functions are at 0), or the integrals lose accuracy.
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
