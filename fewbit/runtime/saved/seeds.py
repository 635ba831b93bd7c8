"""The seeds from which tensors are rounded in one forward pass."""

from __future__ import annotations

import hashlib
from itertools import count

import torch

from fewbit.runtime.interop.tensor_kinds import is_plain


class Seeds:
    """The seeds of the tensors that the layers of one model save in one forward pass.

    Each seed is a hash of the state of torch's CPU generator and of a *purpose*: values that say what the seed is for,
    such as the name of a layer. The order in which tensors are quantized therefore does not matter. Nothing is drawn
    from the generator, so dropout draws the same numbers as without fewbit. A checkpoint, which restores the generator
    when it recomputes a region, gets the same dropout too, even if the recomputation quantizes another number of
    tensors.

    Args:
        salt: up to 16 bytes, which are hashed too. Different salts give independent seeds.
    """

    def __init__(self, salt: bytes = b""):
        state = b""
        # Under a transform or a tracer the generator's state cannot be read, but fewbit saves nothing there.
        if not torch.jit.is_tracing() and is_plain(generator := torch.get_rng_state()):
            state = generator.numpy()
        self.start = hashlib.blake2b(state, digest_size=16, salt=salt).digest()
        self._counts = {}

    def next(self, device: torch.device, *purpose) -> torch.Tensor:
        """Return a seed for a purpose. Each call with the same purpose returns another seed.

        Args:
            device: the device of the seed.
            *purpose: values that say what the seed is for. The repr of the values is hashed.

        Returns:
            (1,) int64.
        """
        return self.of(device, *purpose, self.number(*purpose))

    def number(self, *purpose) -> int:
        """Return how often `number` was called with the same purpose before."""
        # One atomic step, since several threads may run backward passes at once.
        return next(self._counts.setdefault(purpose, count()))

    def of(self, device: torch.device, *purpose) -> torch.Tensor:
        """Return the seed of a purpose, (1,) int64, the same in each call. The host does not wait for the device."""
        text = repr((device.index or 0, *purpose)).encode()
        value = hashlib.blake2b(text, digest_size=8, key=self.start).digest()
        value = int.from_bytes(value, "big", signed=True)
        return torch.full((1,), value, dtype=torch.int64, device=device)
