"""The trainings in which a callback cannot choose settings for a `memory`."""

from __future__ import annotations

from collections.abc import Iterable

from fewbit.errors import InputError


def refuse(cases: Iterable[tuple[str, object, object]]) -> None:
    """Raise InputError for the first case (expected, got, is_refused) that is refused."""
    for expected, got, is_refused in cases:
        if is_refused:
            raise InputError(f"memory: expected a training with {expected}, got {got}")


def shards(got: str, is_refused: bool) -> tuple[str, object, object]:
    """Return the case of processes of which none has the whole model."""
    hint = "with FSDP2, call fewbit.fit_(model, ..., parallel='fsdp') before the trainer shards the model"
    return "one process, or several with DistributedDataParallel", f"{got}; {hint}", is_refused
