"""Quantizers that round in the backward pass, so that one forward serves many draws.

Rounding changes the tensors that backward restores, and nothing that forward computes. A deferred quantizer saves the tensor
itself. Every backward pass over the same graph rounds the tensor anew, as in another pass, or not at all, as `Noise` decides.
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
    """The choice of the contexts that a backward pass rounds, and of their draws.

    A context is all tensors that one module saves of its inputs. Its name is the module's path.

    Args:
        seed: the seed of all draws.
        path: returns the path of the module that runs now.

    Attributes:
        contexts: {context: number of tensors that it has saved}, in the order of their first.
    """

    def __init__(self, seed: int, path: Callable[[], str]):
        self.seed = seed
        self.path = path
        self.contexts: dict[str, int] = {}
        self._draws, self._again = None, {}

    def defer(self, quantizer: Quantizer) -> Quantizer:
        """Make a quantizer a deferred one, in place, and return it."""
        quantizer.__class__ = DeferredQuantizer
        quantizer.noise = self
        return quantizer

    @contextmanager
    def drawn(self, draws: Mapping[str, object]):
        """Return a context manager for a backward pass.

        Args:
            draws: {context: name of its draws}; other contexts stay exact. Names can be any objects: names with the same
                repr give the same draws.
        """
        with undo_after(lambda: setattr(self, "_draws", None)):
            self._draws, self._again = draws, {}
            yield

    def number_saved(self) -> tuple[str, int]:
        """Count a tensor that is saved now. Return its context and its number in the context.

        Tensors that a checkpoint recomputes in a backward pass have negative numbers, counted anew in every pass.
        """
        path, sign = self.path(), 1 if self._draws is None else -1
        numbers = self.contexts if self._draws is None else self._again
        numbers[path] = numbers.get(path, 0) + 1
        return path, sign * numbers[path]

    def seed_of(self, context: str, number: int) -> int | None:
        """Return the seed of a tensor in the backward pass that runs, an int64; None if the tensor stays exact."""
        draws = (self._draws or {}).get(context)
        if draws is None:
            return None
        text = repr((self.seed, draws, context, number)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), signed=True)


class DeferredQuantizer(Quantizer):
    """A quantizer that rounds in the backward pass. Layers do not share copies."""

    noise: Noise

    def quantize(self, x: torch.Tensor, shared: bool = True, slot: int = 0) -> SavedTensors:
        """Save x itself."""
        return self._save_exactly(x.detach(), False)

    def quantize_normalized(self, x, mean, rstd, inner: int | None) -> SavedTensors:
        """Save (x - mean) rstd itself."""
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
