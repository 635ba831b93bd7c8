"""Where the seeds of one forward come from."""

from __future__ import annotations

import hashlib

import torch


class Seeds:
    """Seeds of the tensors that the layers of one model keep, one after the other.

    From generators of our own, which start from the state of torch's without drawing from it. What dropout draws is
    then what it would draw without us, also where a checkpoint makes a region again, having put torch's generator
    back, and draws another number of seeds. stream: another one gives independent draws from the same state, as
    measurements need that leave dropout alike.
    """

    def __init__(self, stream: int = 0):
        salt = stream.to_bytes(8)  # of 0 it is none
        state = torch.get_rng_state().numpy()
        state = hashlib.blake2b(state, digest_size=8, salt=salt).digest()
        self._start = int.from_bytes(state) >> 1
        self._generators = {}
        self._unused = {}

    def draw(self, device: torch.device) -> torch.Tensor:
        """(1,) int64 on that device."""
        seed = self._unused.pop(device, None)
        if seed is not None:
            return seed
        generator = self._generators.get(device)
        if generator is None:
            generator = torch.Generator(device).manual_seed(self._start)
            self._generators[device] = generator
        return torch.randint(
            -(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device, generator=generator
        )

    def give_back(self, seed: torch.Tensor) -> None:
        """The next tensor gets this seed: what it was drawn for is not kept.

        Which tensors are kept in one pass with what makes them differs from forward to forward; draws do not.
        """
        self._unused[seed.device] = seed
