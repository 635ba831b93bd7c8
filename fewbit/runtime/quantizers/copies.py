"""Save and load several quantized tensors, called copies, in the context of one autograd Function.

A *spec* is all information except the tensors that is needed to dequantize a saved tensor. `SavedTensors` are the
tensors of one copy together with their spec.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from fewbit.runtime.format import layout
from fewbit.runtime.format.buffers import seed_on
from fewbit.runtime.format.channels import Normalization
from fewbit.runtime.interop.tensor_kinds import is_plain
from fewbit.runtime.ops import quantizer_ops
from fewbit.runtime.quantizers.spec import QuantizedTensorSpec, SavedTensors


class UnquantizedSpec(NamedTuple):
    """The spec of a tensor that is saved unchanged."""

    @property
    def count(self) -> int:
        """The number of saved tensors."""
        return 1

    def for_consumer(self, name: str) -> UnquantizedSpec:
        """Return this spec for the layer `name`, which reads a tensor that another layer saved."""
        return self

    def dequantize(self, tensors, dtype=None) -> Tensor:
        """Return the one saved tensor, converted to `dtype` unless `dtype` is None."""
        (tensor,) = tensors
        return tensor if dtype is None else tensor.to(dtype)


def unquantized(x: Tensor) -> SavedTensors:
    """Return SavedTensors that contain x itself, so that `save` can treat x like a quantized copy."""
    return SavedTensors((x,), UnquantizedSpec())


def quantized(
    x: Tensor,
    seed: int | Tensor,
    bits: int,
    group_size: int,
    kind: str,
    channels: int = 0,
) -> SavedTensors:
    """Return a quantized copy of a dense tensor in eager mode. No policy and no cache takes part.

    Args:
        x: an ordinary, meta or fake tensor, in the order of its memory (`spec.in_storage_order`).
        seed: the seed from which the elements are rounded: an int, or (1,) int64 on x's device.
        bits: the bits per element, 1 to 8.
        group_size: the number of elements in a group.
        kind: the kind of the copy, "uniform" or "rotated".
        channels: the number of channels that have a mean and a scale of their own (`channels_of`).
    """
    stride = tuple(layout.by_sample_stride(x))
    if is_plain(x):
        normalize = with_channels(x, None, channels)
        tensors = quantizer_ops.quantize(x, seed, bits, group_size, normalize, kind=kind)
        tensors = (*tensors, normalize.channels) if channels else tensors
    else:
        settings = bits, group_size, kind, channels
        tensors = quantizer_ops.quantize_op(x, stride, seed_on(x.device, seed), *settings)
        tensors = tensors[: 3 if channels else 2]
    spec = QuantizedTensorSpec(bits, group_size, tuple(x.shape), stride, x.dtype, kind=kind)
    return SavedTensors(tuple(tensors), spec._replace(has_channels=channels > 0))


def with_channels(x: Tensor, normalize: Normalization | None, channels: int):
    """Return `normalize` with the means and scales of the channels of x, if it has some."""
    if not channels:
        return normalize
    numbers = quantizer_ops.channel_statistics(x, channels, normalize)
    return (normalize or Normalization())._replace(channels=numbers)


def save(ctx, y: Tensor, copies: Iterable[SavedTensors | None], *others: Tensor | None) -> Tensor:
    """Save copies for the backward pass.

    Args:
        ctx: the context of an autograd Function. `save` sets the attribute `ctx.specs`, which `load` reads.
        y: the Function's result.
        copies: the quantized copies. A copy that no gradient needs is None.
        *others: tensors that are saved unchanged.

    Returns:
        y. While a compiler traces, y is made to depend on the copies, so that the compiled forward pass computes them.
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
    """Return what `save` saved: (list of the dequantized copies, tuple of the tensors that were saved unchanged).

    Args:
        ctx: the context that was given to `save`.
        dtype: the dtype of the dequantized copies. If None, each copy has the dtype of the tensor that was quantized.
    """
    saved = ctx.saved_tensors
    start = len(saved) - sum(count for _, count in ctx.specs)
    others, values = saved[:start], []
    for spec, count in ctx.specs:
        values.append(spec.dequantize(saved[start : start + count], dtype) if count else None)
        start += count
    return values, others
