"""`error-bounded`: prediction and entropy coding with a bound on every error (AC-GC, section 5: AutoCuSZ's role).

SZ3 (Liang et al., IEEE TBD 2023) through the package imagecodecs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fewbit.errors import InputError
from fewbit.runtime.codecs.payload import (
    Payload,
    checked,
    exact,
    largest,
    left_over,
    mapped,
    restored,
    smaller,
)

SHARE = 1 - 2.0**-10
"""Of the bound that the library is given: its errors exceed it by float32's rounding."""
LEAST = 2.0**-18
"""Of the greatest magnitude: below such an error nothing is gained."""
MOST_DIMS = 4


class ErrorBounded:
    """SZ3: no element's error exceeds the square root of the (channel's) bound.

    That is checked, element by element, after compressing, and what failed would be kept as it is. Errors are
    rounding to nearest: not unbiased, and zeros stay zero only where the prediction is. On the host: tensors of
    GPUs go there and back. Needs `pip install 'fewbit[codecs]'`; InputError without. The seed is not used.
    """

    name = "error-bounded"

    def compress(self, tensor, bound, seed=None) -> Payload:
        """As `Codec.compress`."""
        limits, library = checked(tensor, bound, seed), _library()
        x = tensor.detach()
        if not x.numel():
            return exact(x)
        magnitude = largest(x, len(limits) > 1)
        most = left_over(limits, magnitude, x.dtype).sqrt()
        if not bool((magnitude.isfinite() & (most > LEAST * magnitude)).all()):
            return exact(x)
        # Beyond the magnitude all is zero, as at it.
        steps = torch.where(magnitude > 0, torch.minimum(most, magnitude), 1.0).to(x.device)
        scaled = _scaled(x, steps.reciprocal())
        if not bool(scaled.isfinite().all()):
            return exact(x)
        array = scaled.reshape(_shape(x.shape)).cpu().numpy()
        encoded = library.sz3_encode(array, mode=library.SZ3.MODE.ABS, abs=SHARE)
        data = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(x.device)
        payload = smaller(x, (data, steps), Predicted(tuple(x.shape), x.dtype))
        return payload if _holds(x, payload, limits) else exact(x)

    def decompress(self, payload: Payload) -> torch.Tensor:
        return restored(payload)


class Predicted(NamedTuple):
    """How the library's bytes become values."""

    size: tuple[int, ...]
    dtype: torch.dtype
    codec = ErrorBounded.name
    count = 2

    def dequantize(self, tensors, dtype: torch.dtype | None = None, affine=None) -> torch.Tensor:
        """The values, contiguous; affine: as for `QuantizedTensorSpec.dequantize`."""
        data, steps = tensors
        wide = _wide(self.dtype)
        as_numpy = torch.empty(0, dtype=wide).numpy().dtype
        array = _library().sz3_decode(data.cpu().numpy().tobytes(), _shape(self.size), as_numpy)
        scaled = torch.from_numpy(array).reshape(self.size).to(data.device)
        values = _scaled(scaled, steps)
        if affine is None:
            return values.to(dtype or self.dtype)
        return mapped(values.to(self.dtype), dtype or self.dtype, affine)


def check_library() -> None:
    """InputError, with what to install, where the package is not there."""
    _library()


def _library():
    try:
        import imagecodecs
    except ImportError:
        raise InputError(
            "expected the package imagecodecs for the codec error-bounded, got none: "
            "pip install 'fewbit[codecs]'"
        ) from None
    return imagecodecs


def _holds(x, payload: Payload, limits) -> bool:
    values = payload.spec.dequantize(payload.tensors)
    return bool(
        (_scaled((values.double() - x.double()).abs(), 1 / limits.sqrt().to(x.device)) <= 1).all()
    )


def _scaled(x, factors) -> torch.Tensor:
    """x times the factor of all or of each channel, in float32 or float64, contiguous."""
    factors = factors.to(_wide(x.dtype))
    if len(factors) > 1:
        factors = factors.view(-1, *(1,) * (x.dim() - 2))
    return (x.to(factors.dtype) * factors).contiguous()


def _wide(dtype):
    return torch.promote_types(dtype, torch.float32)


def _shape(size) -> tuple[int, ...]:
    """The same with 1 to 4 dimensions."""
    size = tuple(size) or (1,)
    first = 1
    for each in size[: 1 - MOST_DIMS]:
        first *= each
    return size if len(size) <= MOST_DIMS else (first, *size[1 - MOST_DIMS :])
