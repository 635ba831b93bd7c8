"""A normalised tensor restored from the quantised copy of what was normalised.

y = (x - mean) rstd weight + bias is linear in x, so that with x^ exact in expectation y^ is as well. A
layer that keeps y for the gradient of its weight can therefore keep the copy that the norm before it
keeps anyway, and two vectors that exist already.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fewbit.runtime.quantiser import Kept, Recipe


class Normalised(NamedTuple):
    """How y is restored from (packed, ranges, mean, rstd, weight, bias), of which the last may be None.

    channels: where weight and bias go; None: the last dimensions.
    """

    input: Recipe
    dtype: torch.dtype
    channels: tuple[int, ...] | None = None

    def restore(self, tensors, dtype: torch.dtype | None = None) -> torch.Tensor:
        """y in the size of x; dtype: that of y unless given."""
        packed, ranges, mean, rstd, weight, bias = tensors
        y = self.input.restore((packed, ranges), torch.float32)
        if mean is not None:
            y.sub_(self._placed(mean))
        y.mul_(self._placed(rstd))
        if weight is not None:
            y.mul_(self._placed(weight))
        if bias is not None:
            y.add_(self._placed(bias))
        return y.to(dtype or self.dtype)

    def _placed(self, vector):
        return vector if self.channels is None else vector.view(self.channels)


def offer(quantiser, y, kept: Kept, mean, rstd, weight, bias, channels=None) -> None:
    """Layers of the same model that are about to keep y find what the norm kept of its input."""
    session = quantiser.session
    # Statistics of 16 bits would shift the values by more than y's own rounding.
    exact = rstd.dtype in (torch.float32, torch.float64)
    if session is None or kept.one is not None or not exact or type(kept.recipe) is not Recipe:
        return
    recipe = Normalised(kept.recipe, y.dtype, channels)
    session.add(y, quantiser.key, Kept((*kept.tensors, mean, rstd, weight, bias), recipe))
