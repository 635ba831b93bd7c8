"""Divide the bits of a tensor among its samples so that rounding adds the least variance in total."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch

from fewbit.config import MIN_BITS
from fewbit.runtime.format.distortion import BITS, relative_distortion


def share_bits(squares: torch.Tensor, total: int, kind: str) -> torch.Tensor:
    """Return the bits, (N,) uint8, of each of N samples, `total` in all, with which rounding adds the least variance.

    The variance is the sum of square * distortion(kind, bits). Each further bit of a sample lowers it by less than the
    bit before, so single bits are added where they lower it most. The host does not wait for a device.

    `squares` is (N,) float32, see `quantizer_ops.squares`, possibly times the sample's squared gradient norm. `total`
    is from N to 8 N.
    """
    samples = len(squares)
    extra = total - MIN_BITS * samples
    widths = torch.full_like(squares, MIN_BITS, dtype=torch.int64)
    if extra > 0:
        # If keys are equal, for example all 0, every sample gets its second bit before any sample gets a third.
        gains = torch.tensor(gains_of(kind), dtype=torch.float32, device=squares.device)
        keys = gains[:, None] * squares.nan_to_num(0.0, 0.0, 0.0)
        best = keys.flatten().argsort(descending=True, stable=True)[:extra]
        widths.index_add_(0, best % samples, torch.ones_like(best))
    return widths.to(torch.uint8)


@lru_cache(maxsize=64)
def gains_of(kind: str) -> tuple[float, ...]:
    """Return by how much each bit beyond the first lowers the variance, relative to that at 1 bit."""
    shares = [relative_distortion(kind, bits) for bits in BITS]
    return tuple(before - after for before, after in pairwise(shares))
