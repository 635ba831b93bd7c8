"""Several processes that train one model: what each of them holds in a step, and the choice that all of them take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch.distributed as dist
from torch import nn

from fewbit.errors import FewbitError, InputError
from fewbit.planning.timeline import BEGIN, END, ENTER, LEAVE, LOSS, Event, Mark, Timeline
from fewbit.text import one_line, shorten

DDP, FSDP = KINDS = "ddp", "fsdp"
GRADIENTS = "gradients"
SHARDED = (
    "memory: expected one process, or several with DistributedDataParallel, got {}; with FSDP2, call fewbit.fit_(model, "
    "..., parallel='fsdp') before the trainer shards the model"
)
"""The message of callbacks for a trainer whose processes do not have the whole model."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Processes:
    """The processes of a training.

    Attributes:
        kind: DDP, FSDP, or None for a single process.
    """

    kind: str | None = None
    count: int = 1

    @classmethod
    def of(cls, kind) -> Processes:
        """Return the processes of torch.distributed's default group.

        Raises:
            InputError: `kind` is none of KINDS, or torch.distributed is not initialized.
        """
        if kind is None:
            return cls()
        if kind not in KINDS:
            raise InputError(f"parallel: expected 'ddp', 'fsdp' or None, got {shorten(kind)}")
        if not (dist.is_available() and dist.is_initialized()):
            raise InputError(
                f"parallel: expected torch.distributed to be initialized with {kind!r}, got it uninitialized"
            )
        return cls(kind, dist.get_world_size())

    @property
    def shards(self) -> int:
        """The number of processes that share weights, gradients and the optimizer's state."""
        return self.count if self.kind == FSDP else 1

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


def largest(values: list):
    """Return the largest of numbers, or of the elements of arrays."""
    return np.max(np.stack(values), 0) if isinstance(values[0], np.ndarray) else max(values)


class ShardedWeights:
    """The bytes of weights and gradients of a model if `fully_shard` divides its blocks, and the model as a whole.

    As in torch 2.13, a block's weights are gathered while the block runs, in the backward pass one block ahead, and the others' while the
    model does. A collective's buffer exists until the next of its kind. Gradients of a block are whole until its end.

    Args:
        blocks: the blocks in the order of their calls.
    """

    def __init__(self, model: nn.Module, blocks: list[nn.Module], shards: int):
        self.shards = shards
        known: set[int] = set()
        self.weights, self.gradients = [], []
        for module in (*blocks, model):
            own = [p for p in module.parameters() if id(p) not in known]
            known |= {id(p) for p in own}
            self.weights.append(sum(p.nbytes for p in own))
            self.gradients.append(sum(p.nbytes for p in own if p.requires_grad))

    def timeline(self, whole: Timeline, accumulates: bool) -> Timeline:
        """Return the timeline of one process, from that of the whole model. `accumulates`: whether gradients exist before the step."""
        less = 1 - 1 / self.shards
        existing = dict(whole.existing)
        existing["weights"] += self.weights[-1] - int(less * sum(self.weights))
        for role in ("optimizer", GRADIENTS):
            existing[role] = int(existing.get(role, 0) / self.shards)
        found: list[Event | Mark] = []
        gathered: set[int] = set()
        of_block: dict[object, int] = {}  # gradients that are whole
        of_rest: dict[object, int] = {}
        buffers = {"gather": 0, "reduce": 0}
        is_forward = True

        def during(name, change):
            found.append(Event(name, change))

        def buffer(name, size):
            during(name, size)
            during(name, -buffers[name])
            buffers[name] = size

        def reduced(gradients):
            buffer("reduce", sum(gradients.values()))
            for key, size in gradients.items():
                found.append(Event(key, -int(less * size)))
            gradients.clear()

        def leave(block):
            if block in gathered:
                gathered.remove(block)
                during(("weights", block), -self.weights[block])

        def ahead(block, sign):
            """Gather the weights of the block before, or have done so."""
            size = self.weights[block - 1] if block else 0
            size += self.gradients[block] if accumulates else 0
            during(("ahead", block), sign * size)

        buffer("gather", self.weights[-1])
        for one in whole.happened:
            if isinstance(one, Event):
                found.append(one)
                if getattr(one.key, "role", None) == GRADIENTS and not is_forward:
                    gradients = of_block if gathered else of_rest
                    gradients[one.key] = gradients.get(one.key, 0) + one.change
                continue
            if one.kind == ENTER or (one.kind == BEGIN and one.block not in gathered):
                found.append(one)
                if is_forward:
                    buffer("gather", self.weights[one.block])
                gathered.add(one.block)
                during(("weights", one.block), self.weights[one.block])
                if not is_forward:
                    ahead(one.block, 1)
                continue
            if one.kind == LEAVE:
                leave(one.block)
            elif one.kind == LOSS:
                is_forward = False
                buffer("gather", 0)
            elif one.kind == END and one.block in gathered:
                reduced(of_block)
                leave(one.block)
                ahead(one.block, -1)
            found.append(one)
        reduced(of_rest)
        return Timeline(existing, found)
