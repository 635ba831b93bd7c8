"""The squared norm of each sample's gradient when the sample was last seen (ActNN, section 4.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

import torch

from fewbit.errors import InputError
from fewbit.printable import printable
from fewbit.runtime.interop.cuda_streams import hold_for_stream
from fewbit.runtime.interop.tensor_kinds import is_plain


@dataclass(frozen=True)
class SampleIndices:
    """The rows, (N,) int64, that the samples of one forward pass have in tables of `size` rows."""

    indices: torch.Tensor
    size: int

    def __len__(self) -> int:
        return len(self.indices)

    def to(self, device) -> SampleIndices:
        return SampleIndices(self.indices.to(device, non_blocking=True), self.size)


class SampleNumbering:
    """The rows of samples in the tables. A sample gets the next free row when its number first occurs."""

    def __init__(self):
        self._of: dict[int, int] = {}

    def of(self, numbers) -> SampleIndices:
        """Return the samples' rows. For anything but (N,) integers, raise InputError."""
        try:
            is_tensor = isinstance(numbers, torch.Tensor)
            found = numbers if is_tensor else torch.as_tensor(numbers, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            found = torch.empty((), device="cpu")
        is_whole = not (
            found.is_floating_point() or found.is_complex() or found.dtype == torch.bool
        )
        if found.dim() != 1 or not is_whole:
            raise InputError(
                "expected a whole number for each sample of the next forward, in one dimension, "
                f"got {_described(numbers)}"
            )
        if found.device.type != "cpu":
            raise InputError(f"expected samples' numbers on the CPU, got them on {found.device}")
        found = found.to(torch.int64).tolist()  # large uint64 numbers change, but remain distinct
        places = [self._of.setdefault(each, len(self._of)) for each in found]
        indices = torch.tensor(places, dtype=torch.int64, device="cpu")
        return SampleIndices(indices, len(self._of))

    def state(self) -> torch.Tensor:
        """Return the samples' numbers in the order of their rows, (rows,) int64."""
        return torch.tensor(list(self._of), dtype=torch.int64, device="cpu")

    def load(self, numbers) -> None:
        """Replace all rows by a result of `state`, or raise InputError."""
        is_fit = _is_vector(numbers) and numbers.dtype == torch.int64
        if not is_fit or len(numbers.unique()) < len(numbers):
            raise InputError(
                f"numbers: expected those of a controller's state_dict(), got {_described(numbers)}"
            )
        self._of = {number: place for place, number in enumerate(numbers.tolist())}


class GradientMagnitudes:
    """The squared norms of samples' gradients: a table for each slot, with a row for each sample."""

    def __init__(self):
        self._tables: dict[tuple, torch.Tensor] = {}  # float32; NaN: the sample was not seen
        self._streams = {}  # {slot's name: the CUDA stream that used the slot's table last}

    def __getstate__(self):
        return {"_tables": self._tables, "_streams": {}}

    def __bool__(self) -> bool:
        return bool(self._tables)

    def of(self, name: tuple, numbers: SampleIndices) -> torch.Tensor | None:
        """Return the samples' squared gradient norms, divided by their mean, (N,) float32; None if the slot has none.

        A sample not seen before has 1.
        """
        if name not in self._tables:
            return None
        known = self._table(name, numbers)[numbers.indices]
        return (known / known.nanmean()).nan_to_num(1.0, 1.0, 1.0)

    def note(self, name: tuple, numbers: SampleIndices, grad: torch.Tensor) -> None:
        count = len(numbers)
        if not count or not grad.numel() or not grad.dim() or len(grad) % count:
            return
        dtype = torch.promote_types(grad.dtype, torch.float32)
        rows = grad.detach().reshape(count, -1)
        squares = torch.linalg.vector_norm(rows, dim=1, dtype=dtype).float().square()
        table = self._table(name, numbers)
        before = table[numbers.indices]
        table[numbers.indices] = torch.where(squares.isfinite(), squares, before)

    def _table(self, name, numbers: SampleIndices) -> torch.Tensor:
        device = numbers.indices.device
        table = self._tables.get(name, torch.empty(0, dtype=torch.float32, device=device))
        if device.type == "cuda":
            self._wait_for_last_use(name, table, device)
        missing = numbers.size - len(table)
        if missing > 0:
            room = max(missing, len(table))
            table = torch.cat([table.to(device), table.new_full((room,), torch.nan, device=device)])
        self._tables[name] = table = table.to(device)
        return table

    def _wait_for_last_use(self, name, table, device) -> None:
        current = torch.cuda.current_stream(device)
        before = self._streams.get(name, current)
        if before != current:
            current.wait_stream(before)
            hold_for_stream((table,))
        self._streams[name] = current

    def state(self) -> list[dict]:
        """Return the tables for `load`: for each slot a dict with its name and the squared norms on the CPU."""
        return [
            {"name": name, "input": slot, "squares": table.detach().to("cpu", copy=True)}
            for (name, slot), table in self._tables.items()
        ]

    def load(self, rows) -> None:
        """Replace all tables by a result of `state`, or raise InputError."""
        tables = {}
        for row in rows if isinstance(rows, list | tuple) else (rows,):
            entries = row if isinstance(row, Mapping) else {}
            name, slot, squares = (entries.get(each) for each in ("name", "input", "squares"))
            is_table = _is_vector(squares) and squares.is_floating_point()
            # NaN stands for a sample that was not observed, and is valid.
            is_table = is_table and not (squares < 0).any() and not squares.isinf().any()
            is_named = isinstance(name, str) and type(slot) is int and slot >= 0
            is_new = is_named and (name, slot) not in tables
            if not (is_new and is_table and entries.keys() == {"name", "input", "squares"}):
                raise InputError(
                    "magnitudes: expected rows of name, input and squares of 0 or more, as a controller's state_dict() "
                    f"gave them, got {_described(row)}"
                )
            tables[name, slot] = squares.detach().float().clone()
        self._tables = tables


def _is_vector(value) -> bool:
    return (
        is_plain(value)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and value.dim() == 1
    )


def _described(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, Mapping):
        entries = (f"{name}: {_described(entry)}" for name, entry in islice(value.items(), 4))
        return printable(f"one of {', '.join(entries)}")[:200]
    return type(value).__name__
