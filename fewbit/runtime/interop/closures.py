"""Read the variables that a function encloses."""

from __future__ import annotations

from types import FunctionType


def contents(function: FunctionType) -> list:
    """Return the values of the variables that a function encloses; None for one without a value."""
    return [_content(cell) for cell in function.__closure__ or ()]


def _content(cell):
    try:
        return cell.cell_contents
    except ValueError:
        return None
