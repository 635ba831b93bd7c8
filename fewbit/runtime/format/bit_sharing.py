"""Divide the bits of a tensor among its samples so that rounding adds the least variance in total."""

from __future__ import annotations

from functools import lru_cache

import torch

from fewbit.config import MAX_BITS, MIN_BITS

_NOISE = [1.0 / (2.0**bits - 1) ** 2 for bits in range(MIN_BITS, MAX_BITS + 1)]
_GAINS = [before - after for before, after in zip(_NOISE, _NOISE[1:], strict=False)]


def share_bits(squares: torch.Tensor, total: int) -> torch.Tensor:
    """Return the bits of each of N samples, `total` bits in all, with which rounding adds the least variance.

    Up to a factor, this variance is the sum of square / (2^bits - 1)^2 over the samples, with `square` from `squares`.
    Each further bit of a sample lowers the sum by less than the bit before. The minimum is therefore reached if every
    sample first gets one bit, and then those `total` - N single bits are added that lower the sum most. No computation
    here waits for a device.

    Args:
        squares: (N,) float32, for each sample the sum over its groups of (number of elements) * range^2, possibly times
            the sample's squared gradient norm.
        total: the sum of all samples' bits, from N to 8 N.

    Returns:
        (N,) uint8, from 1 to 8.
    """
    samples = len(squares)
    extra = total - MIN_BITS * samples
    widths = torch.full_like(squares, MIN_BITS, dtype=torch.int64)
    if extra > 0:
        # If keys are equal, for example all 0, every sample gets its second bit before any sample gets a third.
        keys = _gains(squares.device)[:, None] * squares.nan_to_num(0.0, 0.0, 0.0)
        best = keys.flatten().argsort(descending=True, stable=True)[:extra]
        widths.index_add_(0, best % samples, torch.ones_like(best))
    return widths.to(torch.uint8)


@lru_cache(maxsize=64)
def _gains(device: torch.device) -> torch.Tensor:
    return torch.tensor(_GAINS, dtype=torch.float32, device=device)
