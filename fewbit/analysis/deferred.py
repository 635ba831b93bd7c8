"""Quantizers that round in the backward pass, so that several backward passes can round the tensors of one forward.

One set of random numbers is called a *draw*.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

from fewbit.config import MASKED, ROTATED
from fewbit.runtime.format.channels import Statistics, map_affine
from fewbit.runtime.interop.tensor_kinds import is_eager
from fewbit.runtime.quantizers.quantizer import Quantizer
from fewbit.runtime.quantizers.spec import SavedTensors


class Noise:
    """Decides which tensors a backward pass rounds, and with which random numbers.

    All tensors that one module saves of its inputs, a *context* named by the module's path, are rounded together or not at
    all. `path()` is the path of the module that runs now. `contexts` is {name: number of tensors saved in it}, in the order
    of the first tensors.
    """

    def __init__(self, seed: int, path: Callable[[], str]):
        self.seed = seed
        self.path = path
        self.contexts: dict[str, int] = {}
        self._draws, self._again = None, {}

    def defer(self, quantizer: Quantizer) -> Quantizer:
        """Turn a quantizer into a deferred quantizer in place, and return it."""
        quantizer.__class__ = DeferredQuantizer
        quantizer.noise = self
        return quantizer

    @contextmanager
    def drawn(self, draws: Mapping[str, object]):
        """Round the contexts {name: name of a draw} in backward passes within the block.

        Names of draws with the same repr give the same random numbers.
        """
        self._draws, self._again = draws, {}
        try:
            yield
        finally:
            self._draws = None

    def number_saved(self) -> tuple[str, int]:
        """Count a tensor that is saved now. Return (name of its context, its number there).

        Those that a checkpoint recomputes get -1, -2, -3 ... in every backward pass.
        """
        path, sign = self.path(), 1 if self._draws is None else -1
        numbers = self.contexts if self._draws is None else self._again
        numbers[path] = numbers.get(path, 0) + 1
        return path, sign * numbers[path]

    def seed_of(self, context: str, number: int) -> int | None:
        """Return the int64 seed for rounding a tensor in this backward pass, or None if it stays exact."""
        draws = (self._draws or {}).get(context)
        if draws is None:
            return None
        text = repr((self.seed, draws, context, number)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), signed=True)


class DeferredQuantizer(Quantizer):
    """A quantizer that saves tensors unchanged, never shared, and rounds them in the backward pass."""

    noise: Noise

    def quantize(
        self,
        x: torch.Tensor,
        shared: bool = True,
        slot: int = 0,
        usual: str = ROTATED,
        features: tuple[int, ...] | None = None,
        extra_bits: int = 0,
        recomputes: bool = True,
    ) -> SavedTensors:
        kind = self.kind_of(usual)
        if kind == ROTATED and shared and self.context is not None and is_eager(x):
            saving = self.context.saving(x)
            copies = None if saving.is_region else saving.shared
            if copies is not None and copies.get_mask(x) is not None:
                kind = MASKED
        how = {"slot": slot, "features": features, "extra_bits": extra_bits}
        return self._save_exactly(x.detach(), False, kind, how)

    def quantize_normalized(
        self, x, statistics: Statistics, features: tuple[int, ...] | None = None
    ) -> SavedTensors:
        values, how = statistics.normalized(x), {"features": features}
        return self._save_exactly(values, True, self.kind_of(ROTATED), how)

    def _save_exactly(self, x, is_normalized, kind, how) -> SavedTensors:
        context, number = self.noise.number_saved()
        spec = _Deferred(self, context, is_normalized, kind, how, tuple(x.shape), x.dtype)
        return SavedTensors((x, torch.tensor(number)), spec)


class _Deferred(NamedTuple):
    """The spec of a tensor that is saved unchanged, beside its number, and rounded in the backward pass."""

    quantizer: DeferredQuantizer
    context: str
    is_normalized: bool
    kind: str
    how: dict
    size: tuple[int, ...]
    dtype: torch.dtype

    count = 2

    def dequantize(self, tensors, dtype: torch.dtype | None = None, affine=None) -> torch.Tensor:
        """Return the values of the tensor, rounded if the present backward pass rounds the tensor's context."""
        x, number = tensors
        seed = self.quantizer.noise.seed_of(self.context, number.item())
        values = x.clone() if seed is None else self._rounded(x, seed)
        return map_affine(values, affine).to(dtype or self.dtype)

    def _rounded(self, x, seed: int) -> torch.Tensor:
        quantizer = _Seeded(self.quantizer, seed, self.kind)
        if self.is_normalized:
            one = torch.ones((), device=x.device)
            saved = quantizer.quantize_normalized(x, Statistics(None, one, None), **self.how)
        else:
            saved = quantizer.quantize(x, **self.how)
        values = saved.spec.dequantize(saved.tensors, self.dtype)
        # The mask of a masked copy says where x is 0.
        return values.mul_(x != 0) if self.kind == MASKED else values


class _Seeded(Quantizer):
    """A quantizer that rounds at once, with a given seed and with the settings of a deferred quantizer."""

    def __init__(self, like: Quantizer, seed: int, kind: str):
        vars(self).update(vars(like), context=None, kind=kind, _given=seed)

    def _seed_alone(self, x):
        return torch.tensor([self._given], dtype=torch.int64, device=x.device)
