"""Quantizers that round in the backward pass, so that one forward serves several backward passes with independent rounding.

Rounding changes the tensors that the backward pass restores, and nothing that the forward computes. A deferred quantizer
therefore saves the tensor unchanged. Each backward pass over the same graph then rounds the tensor anew, with the same
random numbers as another pass, or not at all. `Noise` decides which. One set of random numbers for rounding is called a
draw.
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
    """The choice which tensors a backward pass rounds, and with which random numbers.

    The choice is made for contexts. A context is all tensors that one module saves of its inputs. Its name is the module's
    path.

    Args:
        seed: the seed of all random numbers.
        path: a function that returns the path of the module that runs now.

    Attributes:
        contexts: {context: number of tensors that it has saved}, in the order in which contexts first saved a tensor.
    """

    def __init__(self, seed: int, path: Callable[[], str]):
        self.seed = seed
        self.path = path
        self.contexts: dict[str, int] = {}
        self._draws, self._again = None, {}

    def defer(self, quantizer: Quantizer) -> Quantizer:
        """Make a quantizer a deferred one, in place, and return the quantizer."""
        quantizer.__class__ = DeferredQuantizer
        quantizer.noise = self
        return quantizer

    @contextmanager
    def drawn(self, draws: Mapping[str, object]):
        """Return a context manager for a backward pass.

        Args:
            draws: {context: name of the draw with which it is rounded}. Contexts that are not named stay exact. A name can
                be any object. Names with the same repr give the same random numbers.
        """
        with undo_after(lambda: setattr(self, "_draws", None)):
            self._draws, self._again = draws, {}
            yield

    def number_saved(self) -> tuple[str, int]:
        """Count a tensor that is saved now. Return its context, the path of the running module, and its number in the context.

        Tensors that a checkpoint recomputes in a backward pass have negative numbers, which begin anew in every pass.
        """
        path, sign = self.path(), 1 if self._draws is None else -1
        numbers = self.contexts if self._draws is None else self._again
        numbers[path] = numbers.get(path, 0) + 1
        return path, sign * numbers[path]

    def seed_of(self, context: str, number: int) -> int | None:
        """Return the int64 seed for rounding a tensor in the present backward pass, or None if the tensor stays exact.

        Args:
            context: the path of the module that saved the tensor.
            number: the tensor's number, as `number_saved` returned it.
        """
        draws = (self._draws or {}).get(context)
        if draws is None:
            return None
        text = repr((self.seed, draws, context, number)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), signed=True)


class DeferredQuantizer(Quantizer):
    """A quantizer that saves tensors unchanged and rounds them in the backward pass. Every layer saves its own tensors."""

    noise: Noise

    def quantize(self, x: torch.Tensor, shared: bool = True, slot: int = 0) -> SavedTensors:
        """Save x unchanged."""
        return self._save_exactly(x.detach(), False)

    def quantize_normalized(self, x, mean, rstd, inner: int | None) -> SavedTensors:
        """Save (x - mean) rstd without rounding."""
        if mean is not None:
            x = x.to(rstd.dtype) - mean
        x = (x * rstd).to(torch.promote_types(rstd.dtype, torch.float32))
        return self._save_exactly(x, True)

    def _save_exactly(self, x, is_normalized) -> SavedTensors:
        context, number = self.noise.number_saved()
        spec = _Deferred(self, context, is_normalized, tuple(x.shape), x.dtype)
        return SavedTensors((x, torch.tensor(number)), spec)


class _Deferred(NamedTuple):
    """The spec of an exact tensor that becomes a quantized copy in the backward pass, like a `QuantizedTensorSpec`.

    The tensor's number is saved beside the tensor, because one spec may dequantize several tensors.
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
        """Return the values.

        Args:
            tensors: the exact tensor and its number.
            dtype: the dtype of the result; by default that of the layer's tensor.
            affine: as for `QuantizedTensorSpec.dequantize`.
        """
        x, number = tensors
        seed = self.quantizer.noise.seed_of(self.context, number.item())
        values = x.clone() if seed is None else self._rounded(x, seed)
        return map_affine(values, affine).to(dtype or self.dtype)

    def _rounded(self, x, seed: int) -> torch.Tensor:
        quantizer = _Seeded(self.quantizer, seed)
        if self.is_normalized:
            saved = quantizer.quantize_normalized(x, None, torch.ones((), device=x.device), None)
        else:
            saved = quantizer.quantize(x)
        return saved.spec.dequantize(saved.tensors, self.dtype)


class _Seeded(Quantizer):
    """A quantizer that rounds as a deferred one does, with a given seed. It has the deferred one's settings and selector."""

    def __init__(self, like: Quantizer, seed: int):
        vars(self).update(vars(like), context=None, _given=seed)

    def _seed(self, x, *_):
        return torch.tensor([self._given], dtype=torch.int64, device=x.device)
