"""The seeds from which tensors are rounded in one forward pass."""

from __future__ import annotations

import hashlib
from itertools import count

import torch

from fewbit.runtime.interop.tensor_kinds import is_plain


class Seeds:
    """Seeds of the tensors that the layers of one model save. Each seed is a hash of the *purpose* that the caller names.

    Seeds are derived from the state of torch's generator for the CPU but draw nothing from the generator. Dropout
    therefore draws the numbers that it would draw without fewbit. The same holds in the recomputation of a checkpointed
    region, which restores torch's generator and may quantize another number of tensors. The order in which tensors are
    quantized does not matter.

    Args:
        salt: up to 16 bytes. Seeds with different salts have nothing in common.
    """

    def __init__(self, salt: bytes = b""):
        state = b""
        # Under a transform or a tracer the state cannot be read, and nothing is saved.
        if not torch.jit.is_tracing() and is_plain(generator := torch.get_rng_state()):
            state = generator.numpy()
        self.start = hashlib.blake2b(state, digest_size=16, salt=salt).digest()
        self._counts = {}

    def next(self, device: torch.device, *purpose) -> torch.Tensor:
        """Return a new seed: each call with the same purpose returns another one.

        Args:
            device: the device of the seed.
            purpose: values with a repr, which say what the seed is for.

        Returns:
            (1,) int64.
        """
        return self.of(device, *purpose, self.number(*purpose))

    def number(self, *purpose) -> int:
        """Return how often `number` was called with the same purpose before."""
        # One atomic step, since several threads may run backward passes at once.
        return next(self._counts.setdefault(purpose, count()))

    def of(self, device: torch.device, *purpose) -> torch.Tensor:
        """Return the seed of a purpose, (1,) int64: the same one in each call. The host does not wait for the device."""
        text = repr((device.index or 0, *purpose)).encode()
        value = hashlib.blake2b(text, digest_size=8, key=self.start).digest()
        value = int.from_bytes(value, "big", signed=True)
        return torch.full((1,), value, dtype=torch.int64, device=device)
