"""Several processes that train one model: what each of them holds in a step, and the choice that all of them take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from fewbit.errors import FewbitError, InputError
from fewbit.printable import one_line, shorten

DDP, FSDP = KINDS = "ddp", "fsdp"
Result = TypeVar("Result")


@dataclass(frozen=True)
class Processes:
    """The processes of a training.

    Attributes:
        kind: DDP, FSDP, or None for a single process.
        precision: the MixedPrecisionPolicy of FSDP, or None.
    """

    kind: str | None = None
    count: int = 1
    precision: object = None

    @classmethod
    def of(cls, parallel) -> Processes:
        """Return the processes of torch.distributed's default group.

        Raises:
            InputError: `parallel` is not one of KINDS or a MixedPrecisionPolicy, or torch.distributed is not initialized.
        """
        if parallel is None:
            return cls()
        precision = parallel if _is_policy(parallel) else None
        kind = FSDP if precision is not None else parallel
        if kind not in KINDS:
            raise InputError(
                f"parallel: expected 'ddp', 'fsdp', a MixedPrecisionPolicy or None, got {shorten(parallel)}"
            )
        if not (dist.is_available() and dist.is_initialized()):
            raise InputError(
                f"parallel: expected torch.distributed to be initialized with {kind!r}, got it uninitialized"
            )
        return cls(kind, dist.get_world_size(), precision)

    @property
    def shards(self) -> int:
        """The number of processes that share weights, gradients and the optimizer's state."""
        return self.count if self.kind == FSDP else 1

    def uses_gloo(self, device: torch.device) -> bool:
        """Return whether gloo exchanges the tensors of a model on this device, in the memory of that device."""
        if device.type == "meta":
            return dist.is_initialized() and dist.get_backend() == dist.Backend.GLOO
        return device.type == "cpu"

    def buckets(self, gradients: int) -> int:
        """Return the bytes of DDP's buckets."""
        return gradients if self.kind == DDP else 0

    def all(self, value) -> list:
        """Return the values of all processes."""
        if self.count == 1:
            return [value]
        found: list = [None] * self.count
        dist.all_gather_object(found, value)
        return found

    def together(self, function: Callable[[], Result]) -> Result:
        """Call a function. If it raises in one process, all processes raise, the others an InputError."""
        error: Exception | None = None
        try:
            result = function()
        except Exception as found:
            error = found
        own = None
        if error is not None:
            own = str(error) if isinstance(error, FewbitError) else one_line(error)
        for rank, text in enumerate(self.all(own)):
            if text is not None:
                raise error or InputError(f"process {rank}: {text}")
        return result


ALONE = Processes()


def _is_policy(value) -> bool:
    if not dist.is_available():
        return False
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return isinstance(value, MixedPrecisionPolicy)
