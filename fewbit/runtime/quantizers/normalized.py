"""The quantized copies of a norm's normalized input, and the norm's result dequantized from such a copy.

A norm layer normalizes its input x to x~ = (x - mean) rstd, where rstd is the reciprocal standard deviation, and
returns y = x~ weight + bias. The norm saves x~ in a quantized form, a copy. A layer after the norm would save y, but
can use the norm's copy of x~ instead, with weight and bias, which exist already. Dequantized values of x~ are exact in
expectation, and y is linear in x~. Values of y that are computed from the copy are therefore exact in expectation too.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from fewbit.config import ROTATED
from fewbit.runtime import backends
from fewbit.runtime.format import layout
from fewbit.runtime.interop.cuda_streams import stream_of
from fewbit.runtime.interop.tensor_kinds import is_plain
from fewbit.runtime.probes import restoring
from fewbit.runtime.quantizers.spec import QuantizedTensorSpec, SavedTensors, flat, unsharded
from fewbit.runtime.saved.sharing import place_of

_IN_KERNELS = torch.float32, torch.float16, torch.bfloat16

MOST_SHARED = 2**14
"""The largest number of elements of a shared constant. For larger tensors, filling takes longer than the launch."""


class AffineResultSpec(NamedTuple):
    """The spec of a norm's result y, which is computed from a copy of the norm's normalized input x~.

    The saved tensors are those of the copy, followed by weight and bias. The bias may be None.

    Args:
        normalized: the spec of the copy of x~.
        dtype: the dtype of y.
        channels: the shape to which weight and bias are viewed so that they broadcast to y; None if they broadcast as
            they are.
    """

    normalized: QuantizedTensorSpec
    dtype: torch.dtype
    channels: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        """The number of saved tensors, with weight and bias."""
        return self.normalized.count + 2

    def dequantize(self, tensors, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return approximate values of y, in the size of x~ and in `dtype`, which is y's dtype unless given."""
        *saved, weight, bias = tensors
        affine = self._placed(weight), self._placed(bias), self._inner()
        return self.normalized.dequantize(saved, dtype or self.dtype, affine)

    def for_consumer(self, name: str) -> AffineResultSpec:
        """Return this spec for the layer `name`, which dequantizes a tensor that another layer saved."""
        return self._replace(normalized=self.normalized.for_consumer(name))

    def _inner(self) -> int | None:
        """Return how many elements that follow each other in memory have the same weight entry; None if that varies."""
        size, stride = self.normalized.size, self.normalized.stride
        if self.channels is not None and stride[1] == 1:
            return 1
        if stride != layout.contiguous_stride(size):
            return None
        return 1 if self.channels is None else math.prod(size[2:])

    def _placed(self, vector):
        return vector if vector is None or self.channels is None else vector.view(self.channels)


def share_result(quantizer, y, saved: SavedTensors, weight, bias, channels=None) -> None:
    """Let other layers of the model use the norm's copy of x~ if they would save the norm's result y.

    Args:
        quantizer: the quantizer of the norm.
        y: the result of the norm.
        saved: the SavedTensors of the norm's normalized input x~.
        weight: the weight of the norm.
        bias: the bias of the norm, or None.
        channels: the shape to which weight and bias are viewed so that they broadcast to y; None if they broadcast as
            they are.
    """
    context = quantizer.context
    # A compiler's copies have an anchor.
    if context is None or saved.trace_anchor is not None:
        return
    copies = context.saving(y).shared
    if copies is None:
        return
    vectors, before = (weight, bias), None
    if context.is_distributed:
        vectors = unsharded(weight, bias)
    elif channels is not None and bias is not None:
        # torch's batch norm does not save the bias, so users may change the bias before backward.
        before = place_of(bias)
    make = partial(_result_copy, saved, *vectors, y.dtype, channels, before)
    copies.put(y, place_of(y), quantizer.key, make)


def _result_copy(saved: SavedTensors, weight, bias, dtype, channels, before) -> SavedTensors | None:
    """Return the copy of a norm's result; None if the bias has changed. Most results of norms are not looked for.

    Args:
        saved: the copy of the normalized input.
        weight: the norm's weight.
        bias: the norm's bias, or None.
        dtype: the dtype of the result.
        channels: as in `share_result`.
        before: `place_of(bias)` when the norm ran, if the copy needs a bias of its own; else None.
    """
    if before is not None:
        if place_of(bias) != before:
            return None
        bias = bias.detach().clone()
    spec = AffineResultSpec(saved.spec, dtype, channels)
    return saved._replace(tensors=(*saved.tensors, weight, bias), spec=spec)


def save_copies(x, mean, rstd, inner, copies, quantizer, features=None):
    """Quantize the normalized input of a norm once or twice.

    Args:
        x: the input of the norm, a floating tensor.
        mean: the mean of x, which broadcasts to x, or None if the norm subtracts no mean.
        rstd: the reciprocal standard deviation of x, which broadcasts to x.
        inner: the number of elements, one after the other in memory, that have the same mean and rstd; None if that
            number varies. See `Quantizer.quantize_normalized`.
        copies: 1, or 2 for two independently rounded copies.
        quantizer: the quantizer of the norm.
        features: the dimensions along which the channels of the normalized input differ (`Quantizer.quantize`); None if it has
            none.

    Returns:
        (SavedTensors of the first copy, those of the second copy or None).
    """
    first = quantizer.quantize_normalized(x, mean, rstd, inner, features)
    if copies == 1:
        return first, None
    return first, quantizer.quantize_normalized(x, mean, rstd, inner, features)


def batch_norm_gradients(spec, saved, inner, grad, rstd, weight, needs_input):
    """Return the gradients of a batch norm's input, weight and bias, without writing dequantized values to memory.

    Args:
        spec: the spec of the copy of the normalized input. The norm has no second copy.
        saved: the tensors of the copy.
        inner: as in `save_copies`.
        grad: the gradient of the norm's result.
        rstd: the reciprocal standard deviation, (C,).
        weight: the norm's weight, (C,), or None.
        needs_input: whether to compute the gradient of the input. If not, None takes its place.

    Returns:
        The three gradients, those of weight and bias in float32. None in place of the three if the copy is not rotated, its
        samples have different bits, it has means and scales of channels, elements adjacent in memory do not have adjacent
        channels, a tensor is not plain or has a dtype that kernels lack, a probe changes the dequantized values, or the backend has no kernel for this copy.
    """
    if inner != 1 or not isinstance(spec, QuantizedTensorSpec) or spec.kind != ROTATED:
        return None
    if spec.has_channels:  # of which the kernels know nothing
        return None
    fits = spec.samples is None and rstd.dtype == torch.float32 and grad.dtype in _IN_KERNELS
    tensors = grad, rstd, *saved, *(() if weight is None else (weight,))
    if not (fits and all(map(is_plain, tensors))) or restoring.is_changed(spec):
        return None
    backend = backends.of(grad)
    if not backend.can_compute_batch_norm(spec.bits, spec.group_size, spec.size):
        return None
    grad = layout.with_stride(grad, spec.stride, by_sample=True)
    copy = *saved, spec.bits, spec.group_size
    found = backend.batch_norm_backward(*copy, grad, rstd, flat(weight), needs_input)
    if found is not None:
        restoring.record(spec)
    return found


def dequantize_copies(kept):
    """Return two dequantized x~, from two independent copies; the same tensor twice if there is one copy.

    Args:
        kept: what the norm has saved (`copies.Kept`), among it "x" and "x2", the results of `save_copies`.
    """
    first, second = kept.values("x"), kept.values("x2")
    return first, first if second is None else second


def dequantize_scaled(kept, rstd, inner, dtype):
    """Return dequantized x~ divided by rstd, an approximation of x - mean.

    torch's own backward functions of norms can be called with this result in place of x, and with 0 in place of the
    mean. They give the same gradients as for x and its mean.

    Args:
        kept: what the norm has saved, as in `dequantize_copies`.
        rstd: the reciprocal standard deviation, which broadcasts to x.
        inner: as in `save_copies`.
        dtype: the dtype of the result.
    """
    spec, tensors = kept.copy("x")
    return spec.dequantize(tensors, dtype, (rstd.to(spec.dtype).reciprocal(), None, inner))


def constant_like(statistic, value: float):
    """Return a tensor like `statistic` that is filled with a value, for torch's functions, which only read it.

    On a GPU, launching the kernel that fills the tensor takes longer than the kernel. The tensor is therefore shared by
    all backward passes that run in one stream, unless it is large. A capture gets a tensor of its own, because its graph
    may be replayed at any time.
    """
    is_shared = statistic.is_cuda and is_plain(statistic) and statistic.numel() <= MOST_SHARED
    if not is_shared or torch.cuda.is_current_stream_capturing():
        return torch.full_like(statistic, value)
    place = statistic.shape, value, statistic.dtype, statistic.device, stream_of(statistic)
    return _constant(*place)


@lru_cache(maxsize=256)
def _constant(shape, value, dtype, device, stream):
    return torch.full(shape, value, dtype=dtype, device=device)


def input_gradient(g, first, second, rstd, dims, centered=True):
    """Return the gradient of a norm's input: (g - mean(g) - x~1 mean(x~2 g)) rstd.

    The term mean(g) is left out if `centered` is false.

    Args:
        g: the gradient of the norm's result, times the weight.
        first: x~1, the dequantized normalized input.
        second: x~2, the dequantized normalized input from an independent copy, or x~1 again if there is one copy.
        rstd: the reciprocal standard deviation, which broadcasts over `dims`.
        dims: the dimensions over which means are taken.
        centered: whether the norm subtracts the mean.
    """
    inner = g - first * (second * g).mean(dims, keepdim=True)
    if centered:
        inner = inner - g.mean(dims, keepdim=True)
    return inner * rstd
