"""A norm's result restored from the quantised copy of what the norm made of its input.

y = x~ weight + bias is linear in the normalised input x~, so that with x~^ exact in expectation y^ is as
well. A layer that keeps y for the gradient of its weight can therefore keep the copy that the norm before it
keeps anyway, and two vectors that exist already.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fewbit.runtime.quantiser import Kept, Recipe


class Affine(NamedTuple):
    """How y is restored from (packed, ranges, weight, bias), of which the last may be None.

    channels: the shape in which weight and bias broadcast to y; None: as they are.
    """

    normalised: Recipe
    dtype: torch.dtype
    channels: tuple[int, ...] | None = None

    def restore(self, tensors, dtype: torch.dtype | None = None) -> torch.Tensor:
        """y in the size of x; dtype: that of y unless given."""
        packed, ranges, weight, bias = tensors
        y = self.normalised.restore((packed, ranges))
        if weight is not None:
            y.mul_(self._placed(weight))
        if bias is not None:
            y.add_(self._placed(bias))
        return y.to(dtype or self.dtype)

    def _placed(self, vector):
        return vector if self.channels is None else vector.view(self.channels)


def offer(quantiser, y, kept: Kept, weight, bias, channels=None) -> None:
    """Layers of the same model that are about to keep y find what the norm has kept."""
    if quantiser.session is None or kept.one is not None:
        return
    recipe = Affine(kept.recipe, y.dtype, channels)
    quantiser.session.add(y, quantiser.key, Kept((*kept.tensors, weight, bias), recipe))
