"""The bits and seeds of a forward pass of a converted model, and the copies that its layers share."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import torch

from fewbit.runtime.interop.checkpoint import checkpoint_hook, top_hooks
from fewbit.runtime.interop.module_calls import PATH
from fewbit.runtime.ops import library
from fewbit.runtime.parallel import shards
from fewbit.runtime.parallel.process_groups import ProcessGroups
from fewbit.runtime.saved import seeds
from fewbit.runtime.saved.assignment import BitAssignment
from fewbit.runtime.saved.seeds import MASK, STEP, mixed
from fewbit.runtime.saved.sharing import SharedCopies

if TYPE_CHECKING:
    from fewbit.runtime.saved.context import ForwardContext

NO_GROUPS = ProcessGroups()


class Saving:
    """The bits, seeds and shared copies with which layers save tensors in a forward pass, or in one run of a region.

    Args:
        assignment: the bits of all tensors; None if they are fixed.
        start: a hash that no other forward pass has; None if seeds are drawn from torch's generator.
        groups: the processes that run the forward pass. Those of tensor parallelism get the same seeds, others have
            different `start` (docs/decisions/0010).
        shares: whether layers share copies.
        part: 0 in a forward pass, and 1, 2 ... when parts of it run again.

    Attributes:
        shared: `SharedCopies`; None if layers share none.
        has_saved: whether a layer has saved a tensor.
    """

    __slots__ = (
        "__weakref__",
        "_agreed",
        "_counts",
        "assignment",
        "groups",
        "has_saved",
        "part",
        "shared",
        "start",
    )
    # fmt: skip

    is_region = False

    def __init__(self, assignment, start, groups=NO_GROUPS, shares=True, part=0):
        self.assignment: BitAssignment | None = assignment
        self.start, self.groups, self.part = start, groups, part
        self.shared = SharedCopies() if shares else None
        self.has_saved = False
        self._counts, self._agreed = {}, None

    def seed(self, x: torch.Tensor, purpose: int) -> int | torch.Tensor:
        """Return a new seed from which x is rounded, for a `purpose` (`seeds.purpose`; docs/decisions/0010).

        It is an int64, as (1,) int64 on x's device in a CUDA graph or with tensor parallelism.
        """
        self.has_saved = True
        counts = self._counts
        count = counts[purpose] if purpose in counts else 0
        counts[purpose] = count + 1
        if self.start is None or self.groups.tensor or shards.running.place:
            return self.seed_of(x, purpose, count)
        # This is `mixed`, without a call, because every layer asks for a seed.
        z = self.start + (x.device.index or 0) + purpose + count * STEP & MASK
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        return (z ^ z >> 31) - 2**63

    def seed_of(self, x: torch.Tensor, purpose: int, count: int = 0) -> int | torch.Tensor:
        """Return the seed for a purpose and a count, as `seed` does, but the same in each call."""
        if self.start is None:
            return library.new_seed(x)
        if shards.running.place:
            purpose += seeds.purpose("shard", shards.running.place)
        if self.groups.tensor:
            return self._agreed_number(x.device) ^ mixed(0, purpose, count)
        # The number of the device is constant in a process of tensor parallelism, but not equal in all of them.
        return mixed(self.start + (x.device.index or 0), purpose, count)

    def want_result(self, node, y: torch.Tensor) -> None:
        """Let the layer with this autograd node have its result y in the backward pass, if y is kept (`SharedCopies.note_kept`).

        In a region, nothing is kept.
        """
        if self.shared is not None and not self.is_region:
            self.shared.wanted[node] = y._version, weakref.ref(y)

    def count(self, purpose: int) -> int:
        count = self._counts.get(purpose, 0)
        self._counts[purpose] = count + 1
        return count

    def continue_counting(self, other: Saving) -> None:
        """Count seeds together with `other`, so that no two seeds of both are equal."""
        self._counts = other._counts

    def _agreed_number(self, device) -> torch.Tensor:
        """Return a number on which each tensor-parallel group agrees, (1,) int64."""
        self._agreed = self._agreed or {}
        if device not in self._agreed:
            number = torch.full((1,), self.start - 2**63, dtype=torch.int64, device=device)
            for group in self.groups.tensor:
                first = torch.distributed.get_global_rank(group, 0)
                torch.distributed.broadcast(number, first, group)
            self._agreed[device] = number
        return self._agreed[device]


class RunOfRegion(Saving):
    """The `Saving` of one run of a region. Both runs save the same copies."""

    __slots__ = ()
    is_region = True


class Forward(Saving):
    """A forward pass of a converted model, which runs in this thread.

    Args:
        module: the module whose call is the forward pass.
        outer: the forward pass of another model within which this one runs, or None.
        assignment, start, groups, shares, part: as in `Saving`.

    Attributes:
        module: the innermost module of the model that runs now.
        hook: the hook of the region within which that module was called, or None.
        is_first: whether the forward pass has a backward pass, and is no second run.
        activation: the path of the module whose activation runs now, or None.
    """

    __slots__ = ("activation", "context", "hook", "is_first", "module", "outer")

    def __init__(
        self,
        context: ForwardContext,
        module,
        outer,
        is_first,
        assignment,
        start,
        groups,
        shares=True,
        part=0,
    ):
        super().__init__(assignment, start, groups, shares, part)
        self.context, self.module, self.outer = context, module, outer
        self.hook = None if top_hooks(False) is None else checkpoint_hook()
        self.is_first, self.activation = is_first, None

    @property
    def path(self) -> str:
        attributes = self.module.__dict__
        return attributes[PATH] if PATH in attributes else ""

    def recomputes_alike(self) -> bool:
        """Return whether a recomputation would run the present code within a call of this model again.

        That is so if no region runs, or if the innermost call began inside the region.
        """
        hook = checkpoint_hook()
        return hook is None or self.hook is hook

    def compresses_functions(self) -> bool:
        """Return whether to compress the functions that the running module calls: in training, if it `recomputes_alike`."""
        if not self.module.training:
            return False
        return top_hooks(False) is None or self.recomputes_alike()


class _Running(threading.local):
    """The innermost forward pass that runs in a thread, and the probe of `context.measuring`."""

    forward: Forward | None = None
    measured: tuple = ()


running = _Running()
