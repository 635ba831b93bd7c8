"""Quantizers that round in the backward pass, so that one forward serves many draws.

Rounding changes what backward restores and nothing that forward computes. A deferred quantizer keeps the tensor
itself, and each backward pass over the same graph rounds it anew, alike, or not at all, as `Noise` says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

from fewbit.runtime.interop.interrupts import undo_after
from fewbit.runtime.quantizers.quantizer import Quantizer
from fewbit.runtime.quantizers.spec import SavedTensors, map_affine


class Noise:
    """Which contexts a backward pass rounds, and with which draws.

    A context is all that one module keeps of its inputs, known by the module's path. path: tells that of the
    module that runs. contexts: how many tensors each has kept, in the order of their first.
    """

    def __init__(self, seed: int, path: Callable[[], str]):
        self.seed = seed
        self.path = path
        self.contexts: dict[str, int] = {}
        self._draws, self._again = None, {}

    def defer(self, quantizer: Quantizer) -> Quantizer:
        """The same object, from now on deferred."""
        quantizer.__class__ = DeferredQuantizer
        quantizer.noise = self
        return quantizer

    @contextmanager
    def drawn(self, draws: Mapping[str, object]):
        """A backward pass. draws: {context: name of its draws}; contexts that are not in there stay exact.

        Equal names, of anything with a repr, give equal draws.
        """
        with undo_after(lambda: setattr(self, "_draws", None)):
            self._draws, self._again = draws, {}
            yield

    def kept(self) -> tuple[str, int]:
        """The context that keeps a tensor now, and the tensor's number among its own.

        What a checkpoint makes again in a pass has negative numbers, counted anew in each.
        """
        path, sign = self.path(), 1 if self._draws is None else -1
        numbers = self.contexts if self._draws is None else self._again
        numbers[path] = numbers.get(path, 0) + 1
        return path, sign * numbers[path]

    def seed_of(self, context: str, number: int) -> int | None:
        """The seed of a tensor in the pass that runs, an int64, or None where that leaves it exact."""
        draws = (self._draws or {}).get(context)
        if draws is None:
            return None
        text = repr((self.seed, draws, context, number)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), signed=True)


class DeferredQuantizer(Quantizer):
    """One that rounds in the backward pass. Every layer rounds for itself: copies are not shared."""

    noise: Noise

    def quantize(self, x: torch.Tensor, shared: bool = True, slot: int = 0) -> SavedTensors:
        """x itself."""
        return self._save_exactly(x.detach(), False)

    def quantize_normalized(self, x, mean, rstd, inner: int | None) -> SavedTensors:
        """(x - mean) rstd itself."""
        if mean is not None:
            x = x.to(rstd.dtype) - mean
        x = (x * rstd).to(torch.promote_types(rstd.dtype, torch.float32))
        return self._save_exactly(x, True)

    def _save_exactly(self, x, is_normalized) -> SavedTensors:
        context, number = self.noise.kept()
        spec = _Deferred(self, context, is_normalized, tuple(x.shape), x.dtype)
        return SavedTensors((x, torch.tensor(number)), spec)


class _Deferred(NamedTuple):
    """How an exact tensor becomes what its quantized copy would be, with the interface of `QuantizedTensorSpec`.

    The tensor's number is kept beside it: one spec may dequantize several.
    """

    quantizer: DeferredQuantizer
    context: str
    is_normalized: bool
    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def count(self) -> int:
        return 2

    def dequantize(self, tensors, dtype: torch.dtype | None = None, affine=None) -> torch.Tensor:
        """The values, in the dtype that was kept unless given; affine: as for `QuantizedTensorSpec.dequantize`."""
        x, number = tensors
        seed = self.quantizer.noise.seed_of(self.context, number.item())
        values = x.clone() if seed is None else self._rounded(x, seed)
        return map_affine(values, affine).to(dtype or self.dtype)

    def _rounded(self, x, seed: int) -> torch.Tensor:
        quantizer = _Seeded(self.quantizer, seed)
        if self.is_normalized:
            kept = quantizer.quantize_normalized(x, None, torch.ones((), device=x.device), None)
        else:
            kept = quantizer.quantize(x)
        return kept.spec.dequantize(kept.tensors, self.dtype)


class _Seeded(Quantizer):
    """A deferred quantizer's own rounding, with a given seed."""

    def __init__(self, like: Quantizer, seed: int):
        super().__init__(like.bits, like.group_size, like.min_dtype)
        self._selector = like._selector
        self._given = seed

    def _seed(self, x, *_):
        return torch.tensor([self._given], dtype=torch.int64, device=x.device)
