"""The seeds of compiled models in plain torch: the numbers of the generator SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""

from __future__ import annotations

import torch

_STEP = -7046029254386353131
"""2^64 / golden ratio, as a signed number."""
_FACTORS = -4658895280553007687, -7723592293110705685
_SHIFTS = 30, 27, 31


def draw_seeds(counter: torch.Tensor, count: int) -> torch.Tensor:
    """Draw (count,) int64 seeds from a counter, (1,) int64, and advance the counter in place."""
    numbers = torch.arange(1, count + 1, dtype=torch.int64, device=counter.device)
    seeds = counter + numbers * _STEP
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        # torch's shift of int64 repeats the sign.
        seeds = (seeds ^ (seeds >> shift & 2 ** (64 - shift) - 1)) * factor
    counter += (count * _STEP + 2**63) % 2**64 - 2**63
    return seeds
