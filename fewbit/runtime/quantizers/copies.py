"""Save several copies for the backward pass of one autograd Function."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fewbit.runtime.format import layout
from fewbit.runtime.format.channels import Normalization
from fewbit.runtime.format.tensor_checks import seed_on
from fewbit.runtime.interop.tensor_kinds import is_plain
from fewbit.runtime.ops import quantizer_ops, traced_copies
from fewbit.runtime.quantizers.spec import QuantizedTensorSpec, SavedTensors

_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


class UnquantizedSpec(NamedTuple):
    """The spec of a tensor that is saved unchanged."""

    count = 1

    def dequantize(self, tensors, dtype=None) -> Tensor:
        (tensor,) = tensors
        return tensor if dtype is None else tensor.to(dtype)


def unquantized(x: Tensor) -> SavedTensors:
    """Return SavedTensors that contain x itself."""
    return SavedTensors((x,), UnquantizedSpec())


def quantized(
    x: Tensor,
    seed: int | Tensor,
    bits: int,
    group_size: int,
    kind: str,
    channels: int = 0,
) -> SavedTensors:
    """Return a copy of a dense tensor in eager mode, in the order of its memory, without a policy or a cache."""
    stride = tuple(layout.by_sample_stride(x))
    if is_plain(x):
        normalize = with_channels(x, None, channels)
        tensors = quantizer_ops.quantize(x, seed, bits, group_size, normalize, kind=kind)
        tensors = (*tensors, normalize.channels) if channels else tensors
    else:
        settings = bits, group_size, kind, channels
        tensors = traced_copies.quantize(x, stride, seed_on(x.device, seed), *settings)
        tensors = tensors[: 3 if channels else 2]
    spec = QuantizedTensorSpec(bits, group_size, tuple(x.shape), stride, x.dtype, kind=kind)
    return SavedTensors(tuple(tensors), spec._replace(has_channels=channels > 0))


def with_channels(x: Tensor, normalize: Normalization | None, channels: int):
    """Return `normalize` with the numbers of the channels of x."""
    if not channels:
        return normalize
    numbers = quantizer_ops.channel_statistics(x, channels, normalize)
    return (normalize or Normalization())._replace(channels=numbers)


def keep(ctx, result: Tensor, /, **values: SavedTensors | Tensor | None) -> Tensor:
    """Save tensors for the backward pass, which finds them by their names in `Kept`.

    Args:
        ctx: the context of an autograd Function. Its attributes `kept` and `is_observed` are set.
        result: the Function's result.
        **values: copies, and tensors that are saved unchanged; None for what no gradient needs.

    Returns:
        The result, which depends on the copies while a compiler traces.
    """
    tensors, kept, is_observed, begin = (), {}, False, 0
    for name in values:
        value = values[name]
        if type(value) is SavedTensors:
            tensors += value.tensors
            end = len(tensors)
            kept[name], begin = (begin, end, value.spec), end
            is_observed = is_observed or value.is_observed
            if value.trace_anchor is not None:
                result = traced_copies.tie(result, value.trace_anchor)
        elif value is None:
            kept[name] = None
        else:
            kept[name] = begin, None, None
            tensors = (*tensors, value)
            begin += 1
    ctx.kept, ctx.is_observed = kept, is_observed
    ctx.save_for_backward(*tensors)
    return result


def want_result(node, context, y: Tensor) -> None:
    """Let the layer with this autograd node have its exact result y in the backward pass if y is kept anyway (`result_of`)."""
    if context is not None:
        context.saving(y).want_result(node, y)


def result_of(node) -> Tensor | None:
    """Return the exact result that `want_result` has asked for; None if it was not kept, or was changed in place."""
    found = getattr(node, "result", None)
    if found is None:
        return None
    y, version, unpack = found
    if not _keeps_graph():
        del node.result  # as autograd frees saved tensors
    if unpack is not None:
        return unpack(y)
    return y if y._version == version else None


def result_or_copy(ctx, name: str, dtype=None) -> Tensor:
    """Return the result of a layer that `result_of` returns, or else the values of its copy, in `dtype` if given."""
    y = result_of(ctx)
    if y is None:
        return Kept(ctx).values(name, dtype)
    return y if dtype is None else y.to(dtype)


class Kept:
    """The tensors that `keep` has saved, by their names; None if None was saved.

    `tensor` returns one that was saved unchanged, `values` the dequantized values of a copy, each in `dtype` if given,
    and `copy` a copy's spec and tensors. In a checkpointed region they can be read only once.
    """

    __slots__ = ("_kept", "_tensors")

    def __init__(self, ctx):
        self._kept, self._tensors = ctx.kept, ctx.saved_tensors

    def tensor(self, name: str, dtype=None) -> Tensor | None:
        place = self._kept[name]
        if place is None:
            return None
        tensor = self._tensors[place[0]]
        return tensor if dtype is None or tensor.dtype is dtype else tensor.to(dtype)

    def values(self, name: str, dtype=None) -> Tensor | None:
        place = self._kept[name]
        if place is None:
            return None
        begin, end, spec = place
        tensors = self._tensors[begin:end]
        return spec.dequantize(tensors) if dtype is None else spec.dequantize(tensors, dtype)

    def copy(self, name: str):
        place = self._kept[name]
        return None if place is None else (place[2], self._tensors[place[0] : place[1]])
