"""The parts that all codecs use: payloads, the check of a codec's arguments, and tensors that are saved exactly."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from math import prod
from numbers import Real
from typing import NamedTuple

import torch

from fewbit.errors import InputError
from fewbit.runtime.format import layout
from fewbit.runtime.format.tensor_checks import FLOATING
from fewbit.runtime.interop.tensor_kinds import is_plain
from fewbit.runtime.quantizers.spec import SavedTensors
from fewbit.runtime.saved import offload
from fewbit.sizes import counted

EXACT = "exact"


class Payload(NamedTuple):
    """A compressed tensor. A layer saves a payload in the form `SavedTensors(*payload)`.

    Args:
        tensors: the tensors for `save_for_backward`.
        spec: plain data with `count`, the number of tensors, and a method `dequantize(tensors)`, which returns values
            with the size and dtype of the compressed tensor, in new memory.
    """

    tensors: tuple[torch.Tensor, ...]
    spec: object

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    @property
    def codec(self) -> str:
        """The name of the codec that made the payload, such as `quant` within `quant+zvc`, or EXACT."""
        return codec_of(self.spec)

    def __repr__(self) -> str:
        spec = self.spec
        size = self.tensors[0].shape if isinstance(spec, Exact) else spec.size
        dense, dtype = prod(size) * spec.dtype.itemsize, str(spec.dtype).removeprefix("torch.")
        times = f", {dense / self.nbytes:.3g} times less" if self.nbytes else ""
        return (
            f"Payload({self.codec}: {tuple(size)} {dtype} in {counted(self.nbytes, 'byte')}{times})"
        )


class Codec(ABC):
    """The base class of codecs, which compress tensors within a bound on the error that each subclass names."""

    name: str

    def compress(self, tensor: torch.Tensor, bound, seed: torch.Tensor | None = None) -> Payload:
        """Compress a tensor within a bound, and return its payload.

        A tensor is saved exactly if a number in it is not finite, if it would not become smaller, or if it cannot be
        compressed within the bound.

        Args:
            tensor: float32, float64, float16 or bfloat16, of any shape and strides, in eager mode.
            bound: the bound on the squared error of an element, at least 0: one number, or (C,) numbers, one for each
                channel (dimension 1).
            seed: (1,) int64 on the tensor's device. By default the random numbers come from torch's generator.

        Raises:
            InputError: an argument is not as described here.
        """
        limits = checked(tensor, bound, seed)
        return self._compress(tensor.detach(), limits, seed)

    @abstractmethod
    def _compress(self, x: torch.Tensor, limits: torch.Tensor, seed) -> Payload:
        pass

    def decompress(self, payload: Payload) -> torch.Tensor:
        """Return the tensor of a payload of any codec, with the compressed tensor's size and dtype, and new memory.

        Raises:
            InputError: `payload` is not a payload.
        """
        if not isinstance(payload, Payload | SavedTensors):
            raise InputError(f"expected a Payload, got {type(payload).__name__}")
        return payload.spec.dequantize(payload.tensors)


class Exact(NamedTuple):
    """The spec of a tensor that is saved exactly."""

    dtype: torch.dtype
    codec = EXACT
    count = 1

    def dequantize(self, tensors) -> torch.Tensor:
        return tensors[0].clone()


def codec_of(spec) -> str:
    """Return `Payload.codec` for a spec."""
    return getattr(spec, "codec", "quant")  # a spec without this attribute is the group quantizer's


def exact(x: torch.Tensor) -> Payload:
    """Return a payload of x itself, or of a copy if x is a part of a larger storage."""
    # A saved part keeps the whole storage in memory. In a model of torch's layers this costs nothing, because other
    # layers save the same storage. Layers of fewbit save few bits instead, so the storage would stay in memory for x
    # alone. Copies of all parts take no more memory than the storage.
    return Payload((x.clone() if layout.is_part(x) else x,), Exact(x.dtype))


def smaller(x: torch.Tensor, tensors, spec) -> Payload:
    """Return the payload of x with these tensors, or the exact one if they are not smaller."""
    payload = Payload(tuple(tensors), spec)
    if payload.nbytes >= x.numel() * x.element_size():
        return exact(x)
    offload.mark(*payload.tensors)
    return payload


def checked(tensor: torch.Tensor, bound, seed=None) -> torch.Tensor:
    """Return the bound, (1,) or (C,) float64 on the CPU, after a check of the arguments of `Codec.compress`."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in FLOATING:
        got = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise InputError(f"expected a tensor of float32, 64, 16 or bfloat16, got {got}")
    if tensor.layout is not torch.strided or tensor.is_nested or not is_plain(tensor):
        raise InputError(
            "expected an ordinary tensor in eager mode (codecs choose sizes by values), got "
            f"{type(tensor).__name__} of layout {tensor.layout}, or a traced one"
        )
    _check_seed(seed, tensor)
    limits = _numbers(bound)
    if limits.dim() == 0:
        limits = limits.reshape(1)
    elif tensor.dim() < 2 or limits.shape != (tensor.shape[1],):
        channels = tensor.shape[1] if tensor.dim() > 1 else "none"
        raise InputError(
            f"expected a bound for each channel ({channels}) of a tensor of shape {tuple(tensor.shape)}, "
            f"got shape {tuple(limits.shape)}"
        )
    if not bool((limits >= 0).all()):
        worst = limits.min().item() if not limits.isnan().any() else math.nan
        raise InputError(f"expected a bound of at least 0, got {worst}")
    return limits.clamp(max=torch.finfo(torch.float64).max)  # infinity would cause NaN later


def _numbers(bound) -> torch.Tensor:
    try:
        numbers = torch.as_tensor(float(bound) if isinstance(bound, Real) else bound)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        numbers = None
    if numbers is None or numbers.is_complex() or isinstance(bound, bool):
        raise InputError(f"expected a number for a bound, or one a channel, got {bound!r:.50}")
    return numbers.detach().to("cpu", torch.float64)


def _check_seed(seed, tensor) -> None:
    if seed is None:
        return
    if not isinstance(seed, torch.Tensor):
        raise InputError(f"expected a tensor for a seed, got {type(seed).__name__}")
    if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != tensor.device:
        raise InputError(
            f"expected one int64 on {tensor.device} for a seed, got {seed.numel()} of {seed.dtype} on {seed.device}"
        )


def largest(x: torch.Tensor, channels: bool) -> torch.Tensor:
    """Return the largest magnitude in a tensor or in each channel, (1,) or (C,) float64 on the CPU."""
    dims = [dim for dim in range(x.dim()) if not channels or dim != 1]
    return x.abs().amax(dims).reshape(-1).to("cpu", torch.float64)


def left_over(limits, magnitude, dtype: torch.dtype, roundings: int = 3) -> torch.Tensor:
    """Subtract the rounding errors of float32 and `dtype` from bounds, float64. Return what is left for quantization.

    The root mean square of a sum of errors is at most the sum of their root mean squares. Rounding to `dtype` moves a
    value by at most half the distance between numbers at the largest `magnitude`, and by no more than the value's error
    before. `roundings` is how often a value is rounded in float32.
    """
    root = limits.sqrt() - roundings * 2.0**-24 * magnitude
    unit = torch.finfo(dtype).eps / 2 * magnitude
    return torch.maximum(root - unit, root - limits.sqrt() / 2).clamp(min=0).square()
