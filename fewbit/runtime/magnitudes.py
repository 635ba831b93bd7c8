"""How large the gradient of each sample was when it was last seen (ActNN, section 4.2).

Rounding a sample matters as much as its gradient is large, which the forward cannot know; the gradient that the same
sample had an epoch ago is a guess. Whoever numbers the samples of the data gets bits by it.
"""

from __future__ import annotations

import torch

from fewbit.errors import InputError


class Magnitudes:
    """For each variable the squared norm of the gradient of each sample, by the sample's number."""

    def __init__(self):
        self._tables: dict[tuple, torch.Tensor] = {}  # float32; NaN: not seen

    def __bool__(self) -> bool:
        return bool(self._tables)

    def of(self, name: tuple, numbers: torch.Tensor) -> torch.Tensor | None:
        """(N,) float32, relative to the mean; of samples not seen 1. None where none was."""
        table = self._tables.get(name)
        if table is None:
            return None
        table = self._grown(name, table, numbers)
        known = table[numbers.to(table.device, non_blocking=True)]
        return (known / known.nanmean()).nan_to_num(1.0, 1.0, 1.0)

    def note(self, name: tuple, numbers: torch.Tensor, grad: torch.Tensor) -> None:
        """grad: of the result of the layer that kept the variable, samples along dimension 0."""
        count = len(numbers)
        if not grad.dim() or len(grad) % count or not grad.numel():
            return
        squares = torch.linalg.vector_norm(
            grad.detach().reshape(count, -1),
            dim=1,
            dtype=torch.promote_types(grad.dtype, torch.float32),
        ).square()
        table = self._tables.get(name)
        if table is None:
            table = torch.empty(0, dtype=torch.float32, device=grad.device)
        table = self._grown(name, table, numbers)
        table[numbers.to(table.device, non_blocking=True)] = squares.to(table)

    def _grown(self, name, table, numbers):
        missing = int(numbers.max()) + 1 - len(table)
        if missing > 0:
            table = torch.cat([table, table.new_full((max(missing, len(table)),), torch.nan)])
        self._tables[name] = table
        return table

    def state(self) -> list[dict]:
        return [
            {"name": name, "input": slot, "squares": table.cpu()}
            for (name, slot), table in self._tables.items()
        ]

    def load(self, rows) -> None:
        self._tables = {
            (str(row["name"]), int(row["input"])): torch.as_tensor(row["squares"]).float()
            for row in rows
        }


def check_numbers(numbers) -> torch.Tensor:
    """(N,) int64 on the CPU. Raises InputError for anything that is not whole numbers of 0 or more."""
    try:
        found = torch.as_tensor(numbers)
    except (TypeError, ValueError, RuntimeError):
        found = torch.empty(())
    if (
        found.dim() != 1
        or found.is_floating_point()
        or found.is_complex()
        or found.dtype == torch.bool
    ):
        raise InputError(
            "expected a whole number for each sample of the next forward, in one dimension, "
            f"got {_described(numbers)}"
        )
    if found.device.type != "cpu":
        raise InputError(f"expected samples' numbers on the CPU, got them on {found.device}")
    if len(found) and int(found.min()) < 0:
        raise InputError(f"expected samples' numbers of 0 or more, got {int(found.min())}")
    return found.to(torch.int64)


def _described(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return type(value).__name__
