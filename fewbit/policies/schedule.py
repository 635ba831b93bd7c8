"""The schedule of a policy's measurements. Modules that the training loop calls one by one take turns."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fewbit.policies.records import Record

PATIENCE = 16
"""The number of steps for which a measurement waits for its backward pass, or for the module whose turn is next."""


class Turn(NamedTuple):
    """A module that the training loop calls: its path, and the steps of its latest call and measurement."""

    path: str
    latest: int
    measured: int

    @property
    def key(self) -> str:
        """The path."""
        return self.path


@dataclass(frozen=True)
class Schedule(Record):
    """The number of steps so far, and the modules that wait for a measurement.

    Args:
        step: the number of forward passes in training so far.
        is_due: whether a measurement takes place when the training loop calls the module that is next in turn.
        turns: a `Turn` for each module that the training loop calls.
    """

    step: int = 0
    is_due: bool = False
    turns: dict[str, Turn] = field(default_factory=dict)

    def after_step(self, path: str, interval: int) -> Schedule:
        """Return the schedule after a forward pass of the module at `path` has begun.

        Measurements are due in steps 1, 2, 4, 8 ... up to `interval`, and then once in each interval.
        """
        step = self.step + 1
        is_early = step < interval and step & (step - 1) == 0
        is_due = self.is_due or is_early or step % interval == 0
        measured = self.turns[path].measured if path in self.turns else 0
        turn = Turn(path, step, measured)
        return Schedule(step, is_due, {**self.turns, path: turn})

    def is_turn_of(self, path: str) -> bool:
        """Return whether a measurement is due, and that of the module at `path` is oldest among those called recently."""
        own = self.turns[path].measured
        return self.is_due and all(
            turn.measured >= own
            for turn in self.turns.values()
            if turn.latest + PATIENCE >= self.step
        )

    def measured(self, path: str) -> Schedule:
        """Return the schedule after a measurement of the module at `path` has begun."""
        turn = Turn(path, self.step, self.step)
        return replace(self, is_due=False, turns={**self.turns, path: turn})
