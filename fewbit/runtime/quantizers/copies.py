"""Save and load several quantized tensors, called copies, in the context of one autograd Function.

A *spec* is everything but the tensors that is needed to dequantize a saved tensor. `SavedTensors` are tensors and spec.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from fewbit.runtime.quantizers.spec import SavedTensors


class UnquantizedSpec(NamedTuple):
    """The spec of a tensor that is saved unchanged."""

    def dequantize(self, tensors, dtype=None) -> Tensor:
        """Return the saved tensor, converted to dtype if one is given."""
        (tensor,) = tensors
        return tensor if dtype is None else tensor.to(dtype)


def unquantized(x: Tensor) -> SavedTensors:
    """Return x itself as SavedTensors."""
    return SavedTensors((x,), UnquantizedSpec())


def save(ctx, y: Tensor, copies: Iterable[SavedTensors | None], *others: Tensor | None) -> Tensor:
    """Save copies for the backward pass.

    Args:
        ctx: the context of an autograd Function. Its attribute `specs` is set for `load`.
        y: the Function's result.
        copies: the quantized copies. A copy that no gradient needs is None.
        *others: tensors that are saved unchanged.

    Returns:
        y. If a compiler traces, y is made to depend on the copies, so that they are computed in the forward pass.
    """
    ctx.specs, tensors = [], []
    for copy in copies:
        if copy is None:
            ctx.specs.append((None, 0))
            continue
        ctx.specs.append((copy.spec, len(copy.tensors)))
        tensors += copy.tensors
        y = copy.tie(y)
    ctx.save_for_backward(*others, *tensors)
    return y


def load(ctx, dtype=None) -> tuple[list[Tensor | None], tuple[Tensor | None, ...]]:
    """Return the dequantized copies that `save` got, followed by the other tensors.

    Args:
        ctx: the context that `save` got.
        dtype: the dtype of the dequantized copies; None: each in its own dtype.
    """
    saved = ctx.saved_tensors
    start = len(saved) - sum(count for _, count in ctx.specs)
    others, values = saved[:start], []
    for spec, count in ctx.specs:
        values.append(spec.dequantize(saved[start : start + count], dtype) if count else None)
        start += count
    return values, others
