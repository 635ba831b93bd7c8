"""The bytes of a training step, computed from its allocations and releases: the one record of `plan`, `fits` and `fit_`.

The parts of a step with n blocks are, in the order of the forward pass: gap 0 (what runs before the first block), block 0,
gap 1, block 1, ..., block n - 1, gap n, which includes the loss. So gap g is part 2 g, and block j is part 2 j + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

ENTER, LEAVE, LOSS, BEGIN, END = "enter", "leave", "loss", "begin", "end"
UPDATE = "update"
"""The marks of a step: a block's forward pass, the loss, a block's backward pass, and the optimizer's step."""
FORWARD, BACKWARD, STEP = PHASES = "forward", "backward", "step"
TRANSIENT = "transient"
"""The role of storages that no part of the step has claimed."""


class Event(NamedTuple):
    """An allocation or a release.

    Attributes:
        key: an object that stands for the storage. Its attribute `role`, if it has one, says what the storage is for.
        change: the bytes, negative for a release.
    """

    key: object
    change: int


class Mark(NamedTuple):
    """A mark.

    Attributes:
        kind: one of ENTER, LEAVE, LOSS, BEGIN, END and UPDATE.
        block: the number of the block as in `find_blocks`; -1 for LOSS and UPDATE.
        inputs: of ENTER: the keys of the storages of the block's inputs.
    """

    kind: str
    block: int = -1
    inputs: tuple = ()


class Peak(NamedTuple):
    """The moment at which the existing storages have the most bytes.

    Attributes:
        size: the bytes of all storages.
        parts: {role: bytes}. The sum is `size`.
        phase: one of PHASES.
    """

    size: int
    parts: dict[str, int]
    phase: str


@dataclass
class Timeline:
    """A training step, with or without that of the optimizer.

    Attributes:
        existing: {role: bytes} of the storages that exist when the step begins.
        happened: the events and marks in their order.
    """

    existing: Mapping[str, int]
    happened: list[Event | Mark] = field(default_factory=list)

    def peak(self, phase: str | None = None) -> Peak:
        """Return the peak of the step, or of one of its PHASES."""
        parts, now = dict(self.existing), FORWARD
        size = sum(parts.values())
        best = Peak(size, dict(parts), now) if phase in (None, now) else Peak(-1, {}, now)
        for one in self.happened:
            if isinstance(one, Mark):
                now = {LOSS: BACKWARD, UPDATE: STEP}.get(one.kind, now)
            else:
                size += one.change
                role = getattr(one.key, "role", TRANSIENT)
                parts[role] = parts.get(role, 0) + one.change
            if size > best.size and phase in (None, now):
                best = Peak(size, dict(parts), now)
        return best

    def calls(self) -> list[int]:
        """Return the numbers of the blocks in the order of their calls."""
        found = []
        for one in self.happened:
            if isinstance(one, Mark) and one.kind == LOSS:
                break
            if isinstance(one, Mark) and one.kind == ENTER:
                found.append(one.block)
        return found

    def bytes_of(self, order: list[int]) -> PartBytes:
        """Return the bytes of the parts. `order` has the numbers of the blocks in the order of their calls; others belong to the gaps."""
        places = {block: place for place, block in enumerate(order)}
        count = 2 * len(order) + 1
        saved, peak = np.zeros(count), np.zeros(count)
        living: dict[object, list] = {}  # {key: [bytes, part]}
        total, part, is_forward = sum(self.existing.values()), 0, True
        claimed = set()
        for one in self.happened:
            if isinstance(one, Event):
                total += one.change
                entry = living.setdefault(one.key, [0, part])
                entry[0] += one.change
                if entry[0] <= 0:
                    del living[one.key]
            elif one.kind == UPDATE:
                break
            elif one.kind == LOSS:
                for size, owner in living.values():
                    saved[owner] += size
                is_forward, part = False, count - 1
            elif one.block in places:
                place = 2 * places[one.block] + 1
                if is_forward and one.kind == ENTER:
                    part = place
                    for key in one.inputs:
                        if key in living and key not in claimed:
                            claimed.add(key)
                            living[key][1] = place
                elif is_forward and one.kind == LEAVE:
                    part = place + 1
                elif not is_forward and one.kind == BEGIN:
                    part = place
                elif not is_forward and one.kind == END and part == place:
                    part = place - 1
            peak[part] = max(peak[part], total)
        return PartBytes(saved, peak)


class PartBytes(NamedTuple):
    """The bytes of the parts of a step with n blocks, arrays of shape (2 n + 1,).

    Attributes:
        saved: the bytes that a part leaves for the backward pass. The inputs of a block count for the block.
        peak: the most bytes that exist while a part runs, in the forward or the backward pass.
    """

    saved: np.ndarray
    peak: np.ndarray

    @property
    def alone(self) -> np.ndarray:
        """The peaks without what the parts before have saved."""
        return self.peak - np.concatenate([[0.0], np.cumsum(self.saved)[:-1]])
