"""The bytes of the parts of a training step, computed from its allocations and releases.

The parts of a step with n blocks are, in the order of the forward pass: gap 0 (what runs before the first block), block 0,
gap 1, block 1, ..., block n - 1, gap n, which includes the loss. So gap g is part 2 g, and block j is part 2 j + 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

ENTER, LEAVE, LOSS, BEGIN, END = "enter", "leave", "loss", "begin", "end"
"""The marks of a step: a block's forward pass begins and ends, the loss is there, a block's backward pass begins and ends."""


class Event(NamedTuple):
    """An allocation or a release.

    Attributes:
        key: an object that stands for the storage.
        change: the bytes, negative for a release.
    """

    key: object
    change: int


class Mark(NamedTuple):
    """A mark.

    Attributes:
        kind: one of ENTER, LEAVE, LOSS, BEGIN and END.
        block: the number of the block, in the order in which `find_blocks` returned the blocks; -1 for LOSS.
        inputs: of ENTER: the keys of the storages of the block's inputs.
    """

    kind: str
    block: int = -1
    inputs: tuple = ()


@dataclass
class Timeline:
    """A training step without the optimizer.

    Attributes:
        existing: the bytes that exist when the step begins.
        happened: the events and marks in their order.
    """

    existing: int
    happened: list[Event | Mark] = field(default_factory=list)

    def calls(self) -> list[int]:
        """Return the numbers of the blocks in the order in which the forward pass calls them, as often as it does."""
        found = []
        for one in self.happened:
            if isinstance(one, Mark) and one.kind == LOSS:
                break
            if isinstance(one, Mark) and one.kind == ENTER:
                found.append(one.block)
        return found

    def bytes_of(self, order: list[int]) -> PartBytes:
        """Return the bytes of the parts of the step.

        Args:
            order: the numbers of the blocks in the order of their calls. Other blocks belong to the gaps.
        """
        places = {block: place for place, block in enumerate(order)}
        count = 2 * len(order) + 1
        saved, peak = np.zeros(count), np.zeros(count)
        living: dict[object, list] = {}  # {key: [bytes, part]}
        total, part, is_forward = self.existing, 0, True
        claimed = set()
        for one in self.happened:
            if isinstance(one, Event):
                total += one.change
                entry = living.setdefault(one.key, [0, part])
                entry[0] += one.change
                if entry[0] <= 0:
                    del living[one.key]
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
