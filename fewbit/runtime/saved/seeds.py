"""Where the seeds of one forward come from."""

from __future__ import annotations

import hashlib
from itertools import count

import torch

from fewbit.runtime.interop.tensor_kinds import is_plain


class Seeds:
    """Seeds of the tensors that the layers of one model keep, each a hash of what it is for.

    They start from the state of torch's generator for the CPU and draw nothing from it. What dropout draws is then what
    it would draw without us, also where a checkpoint makes a region again, having put torch's generator back, and
    quantizes another number of tensors. Nor does it matter in which order, or pass, tensors are quantized. salt: of up
    to 16 bytes; what differs in it has nothing in common.
    """

    def __init__(self, salt: bytes = b""):
        state = b""
        # (Under a transform or a tracer it cannot be read, and nothing is kept.)
        if not torch.jit.is_tracing() and is_plain(generator := torch.get_rng_state()):
            state = generator.numpy()
        self.start = hashlib.blake2b(state, digest_size=16, salt=salt).digest()
        self._counts = {}

    def next(self, device: torch.device, *purpose) -> torch.Tensor:
        """(1,) int64 on that device: another one each time. purpose: of anything that has a repr."""
        return self.of(device, *purpose, self.number(*purpose))

    def number(self, *purpose) -> int:
        """How often it was asked for that before."""
        # (In one step, as several threads may run backward passes at once.)
        return next(self._counts.setdefault(purpose, count()))

    def of(self, device: torch.device, *purpose) -> torch.Tensor:
        """(1,) int64 on that device: the same one each time. The host does not wait for the device."""
        text = repr((device.index or 0, *purpose)).encode()
        value = hashlib.blake2b(text, digest_size=8, key=self.start).digest()
        value = int.from_bytes(value, "big", signed=True)
        return torch.full((1,), value, dtype=torch.int64, device=device)
