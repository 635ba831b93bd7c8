"""The seeds from which tensors are rounded in one forward pass."""

from __future__ import annotations

import copy
import hashlib
from itertools import count

import torch
from torch import distributed

from fewbit.runtime.interop.tensor_kinds import is_plain
from fewbit.runtime.parallel.process_groups import ProcessGroups
from fewbit.runtime.parallel.shards import running_shard


class Seeds:
    """The seeds of the tensors that the layers of one model save in one forward pass.

    Each seed is a hash of the state of torch's CPU generator and of a *purpose*: values that say what the seed is for,
    such as the name of a layer. The order in which tensors are quantized therefore does not matter. Nothing is drawn
    from the generator, so dropout draws the same numbers as without fewbit. A checkpoint, which restores the generator
    when it recomputes a region, gets the same dropout too, even if the recomputation quantizes another number of
    tensors.

    Args:
        salt: up to 16 bytes, which are hashed too. Different salts give independent seeds.
        groups: the processes that run the forward pass. Processes with different inputs get independent seeds, even if
            the states of their generators are equal. Processes of tensor parallelism get the same seeds, even if the
            states of their generators differ, because they must round replicated tensors alike.
    """

    def __init__(self, salt: bytes = b"", groups: ProcessGroups | None = None):
        state = b""
        # Under a transform or a tracer the generator's state cannot be read, but fewbit saves nothing there.
        if not torch.jit.is_tracing() and is_plain(generator := torch.get_rng_state()):
            state = generator.numpy()
        self.start = hashlib.blake2b(state, digest_size=16, salt=salt).digest()
        self._counts, self._prefix = {}, ()
        self._groups = groups or ProcessGroups()
        self._rank = self._groups.data_rank
        self._agreed = {}  # {device: a random number that all processes of tensor parallelism have}

    def next(self, device: torch.device, *purpose) -> int | torch.Tensor:
        """Return a seed for a purpose. Each call with the same purpose returns another seed.

        The seed also depends on which shard of a DTensor the running layer works on (`running_shard`).

        Args:
            device: the device of the seed.
            *purpose: values that say what the seed is for. The repr of the values is hashed.

        Returns:
            The seed, as `of` returns it.
        """
        return self.of(device, *running_shard(), *purpose, self.number(*purpose))

    def restarted(self, *prefix) -> Seeds:
        """Return other seeds of the same forward pass, which count from 0 again.

        Args:
            *prefix: values that are hashed too. With the same values, the seeds are the same again.
        """
        other = copy.copy(self)
        other._counts, other._prefix = {}, prefix
        return other

    def number(self, *purpose) -> int:
        """Return how often `number` was called with the same purpose before."""
        # One atomic step, since several threads may run backward passes at once.
        return next(self._counts.setdefault(purpose, count()))

    def of(self, device: torch.device, *purpose) -> int | torch.Tensor:
        """Return the seed of a purpose, the same in each call. The host does not wait for the device.

        Returns:
            An int that fits into int64; in a process of tensor parallelism (1,) int64 on the device.
        """
        purpose = *self._prefix, *purpose
        if not self._groups.tensor:
            # The number of the device is constant in a process of tensor parallelism, but not equal in all of them.
            return self._hash(self.start, device.index or 0, *self._rank, *purpose)
        # The device adds the common number, because the host would have to wait for it.
        return self._agreed_number(device) ^ self._hash(b"", *self._rank, *purpose)

    def _agreed_number(self, device) -> torch.Tensor:
        """Return a number that the first process of each tensor-parallel group has drawn, (1,) int64 on the device."""
        if device not in self._agreed:
            number = torch.full((1,), self._hash(self.start), dtype=torch.int64, device=device)
            for group in self._groups.tensor:
                distributed.broadcast(number, distributed.get_global_rank(group, 0), group)
            self._agreed[device] = number
        return self._agreed[device]

    @staticmethod
    def _hash(key: bytes, *values) -> int:
        """Return the hash of the values' repr, an integer that fits into int64."""
        value = hashlib.blake2b(repr(values).encode(), digest_size=8, key=key).digest()
        return int.from_bytes(value, "big", signed=True)
