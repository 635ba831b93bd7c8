"""Several quantized tensors in the context of one autograd Function."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from fewbit.runtime.quantizers.spec import SavedTensors


class UnquantizedSpec(NamedTuple):
    """The spec of a tensor that is saved as it is."""

    def dequantize(self, tensors, dtype=None) -> Tensor:
        """Return the tensor in dtype, or in its own."""
        (tensor,) = tensors
        return tensor if dtype is None else tensor.to(dtype)


def unquantized(x: Tensor) -> SavedTensors:
    """Return x itself as SavedTensors."""
    return SavedTensors((x,), UnquantizedSpec())


def save(ctx, y: Tensor, copies: Iterable[SavedTensors | None], *others: Tensor | None) -> Tensor:
    """Save copies for the backward pass.

    Args:
        ctx: the context of an autograd Function; gets `specs`.
        y: the Function's result.
        copies: the copies, each None if no gradient needs it.
        *others: tensors that are saved as they are.

    Returns:
        y, tied to the copies if a compiler traces.
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
    """Return the dequantized copies that `save` got, and the other tensors. dtype: of the copies; their own unless given."""
    saved = ctx.saved_tensors
    start = len(saved) - sum(count for _, count in ctx.specs)
    others, values = saved[:start], []
    for spec, count in ctx.specs:
        values.append(spec.dequantize(saved[start : start + count], dtype) if count else None)
        start += count
    return values, others
