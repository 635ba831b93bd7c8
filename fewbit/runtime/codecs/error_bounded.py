"""The codec `error-bounded`: prediction and entropy coding by SZ3 (Liang et al., IEEE TBD 2023; docs/concepts/codecs.md)."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

from fewbit.extras import needed_for
from fewbit.runtime.codecs.payload import (
    Codec,
    Payload,
    exact,
    largest,
    left_over,
    smaller,
)

SHARE = 1 - 2.0**-10
"""The bound that SZ3 gets, divided by the codec's own, because SZ3's errors can exceed it by a rounding."""
LEAST = 2.0**-18
"""The least bound, divided by the tensor's largest magnitude, with which the tensor becomes smaller."""
MOST_DIMS = 4


class ErrorBounded(Codec):
    """A codec that compresses with SZ3 on the host; it needs `pip install 'fewbit[codecs]'`.

    The error of each element is at most the square root of the bound; a tensor that fails this check is saved exactly.
    SZ3 rounds to nearest, so values are not exact in expectation. The seed is not used.
    """

    name = "error-bounded"

    def _compress(self, x, limits, seed) -> Payload:
        imagecodecs = library()
        if not x.numel():
            return exact(x)
        magnitude = largest(x, len(limits) > 1)
        most = left_over(limits, magnitude, x.dtype).sqrt()
        if not bool((magnitude.isfinite() & (most > LEAST * magnitude)).all()):
            return exact(x)
        # With a step as long as the largest magnitude, all values become zero, so a longer step gains nothing.
        steps = torch.where(magnitude > 0, torch.minimum(most, magnitude), 1.0).to(x.device)
        scaled = _scaled(x, steps.reciprocal())
        if not bool(scaled.isfinite().all()):
            return exact(x)
        array = scaled.reshape(_shape(x.shape)).cpu().numpy()
        encoded = imagecodecs.sz3_encode(array, mode=imagecodecs.SZ3.MODE.ABS, abs=SHARE)
        data = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(x.device)
        payload = smaller(x, (data, steps), Predicted(tuple(x.shape), x.dtype))
        return payload if _holds(x, payload, limits) else exact(x)


class Predicted(NamedTuple):
    """The spec of a tensor that SZ3 compressed.

    The payload's tensors are SZ3's output, 1-D uint8, and the steps of the tensor or of each channel, (1,) or (C,)
    float64, by which elements were divided.
    """

    size: tuple[int, ...]
    dtype: torch.dtype
    codec = ErrorBounded.name
    count = 2

    def dequantize(self, tensors) -> torch.Tensor:
        data, steps = tensors
        as_numpy = torch.empty(0, dtype=_computed_in(self.dtype)).numpy().dtype
        array = library().sz3_decode(data.cpu().numpy().tobytes(), _shape(self.size), as_numpy)
        scaled = torch.from_numpy(array).reshape(self.size).to(data.device)
        return _scaled(scaled, steps).to(self.dtype)


def library():
    """Return imagecodecs. Raise MissingPackageError if it is not installed."""
    with needed_for("the codec error-bounded"):
        import imagecodecs
    return imagecodecs


def _holds(x, payload: Payload, limits) -> bool:
    values = payload.spec.dequantize(payload.tensors)
    return bool(
        (_scaled((values.double() - x.double()).abs(), 1 / limits.sqrt().to(x.device)) <= 1).all()
    )


def _scaled(x, factors) -> torch.Tensor:
    factors = factors.to(_computed_in(x.dtype))
    if len(factors) > 1:
        factors = factors.view(-1, *(1,) * (x.dim() - 2))
    return (x.to(factors.dtype) * factors).contiguous()


def _computed_in(dtype):
    return torch.promote_types(dtype, torch.float32)


def _shape(size) -> tuple[int, ...]:
    """Return `size` with leading dimensions merged until at most 4 are left, as SZ3 needs."""
    size = tuple(size) or (1,)
    if len(size) <= MOST_DIMS:
        return size
    return prod(size[: 1 - MOST_DIMS]), *size[1 - MOST_DIMS :]
