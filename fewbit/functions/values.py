"""Functions that only the solver uses: their tables are quantizers of numbers."""

from __future__ import annotations

import math

import numpy as np

from fewbit.functions.function import Function, domain_around, make_function, named


@named(module=None)
def value() -> Function:
    """The function x**2 / 2: tables of its derivative x are scalar quantizers, for a normal weight those of Lloyd (1982) and Max (1960)."""
    return make_function(
        lambda x: 0.5 * x * x,
        np.copy,
        slopes=(-math.inf, math.inf),
        domain=domain_around(),
        reference="the number itself; Max, IRE Transactions on Information Theory 6, 1960",
    )
