"""Checks of a table's fields. `checked_*` return the value as a table stores it; all raise TableError with the field and index."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fewbit import schema
from fewbit.errors import TableError
from fewbit.printable import shorten
from fewbit.sizes import counted

FORMS = ("levels", "intervals")
OBJECTIVES = ("mse", "unbiased", "minimax")
TAILS = ("free", "pinned")
SIDES = ("right", "left")
FLOAT32_MAX = float(np.finfo(np.float32).max)
MOST_PIECES = 2**14
"""The most pieces of a table and knots of a stand-in."""
MOST_BINS = 2**16
"""The most bins of a histogram weight."""
MOST_CHARACTERS = 200
"""The most characters of a name; schema/table-1.json repeats these limits."""
MOST_COUNT = 2**53
"""Largest revision and number of grid cells, an integer that float64 represents exactly."""
WEIGHT_FIELDS = ("kind", "mean", "std", "low", "high", "edges", "density", "name")
_SOLVER_NUMBERS = (("grid", int), ("seconds", float))
NARROWEST = 1e-9
"""Smallest width of a domain, relative to its larger end."""


def set_fields(instance, **values) -> None:
    """Set fields of a frozen dataclass during its construction."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)


def wrong(field: str, expected: str, got: Any) -> TableError:
    """Return the TableError for a field with a wrong value."""
    got = got.item() if isinstance(got, np.generic) else got
    return TableError(f"{field}: expected {expected}, got {shorten(got)}")


def checked_field(field: str, value) -> Any:
    """Check a value against the field's schema, and return it in plain Python objects. Whole floats count as integers."""
    value = _plain(field, value)
    problem = schema.find_field_error(value, field, schema.TABLE)
    if problem is not None:
        raise TableError(": ".join(problem))
    return value


def _plain(field: str, value) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {key: _plain(f"{field}.{key}", inside) for key, inside in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(f"{field}[{i}]", inside) for i, inside in enumerate(value)]
    if not isinstance(value, str | bool | int | float | None):
        raise wrong(field, "a value that JSON can hold", value)
    if isinstance(value, int | float) and not _is_finite(value):
        raise wrong(field, "a finite number", value)
    return value


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer beyond the range of float64
        return False


def checked_function(value) -> str:
    """Check the name of a function."""
    _check_printable("function", checked_field("function", value))
    return value


def checked_numbers(
    field: str, value, limit: float = math.inf, most: int = MOST_BINS + 1
) -> np.ndarray:
    """Check up to `most` finite numbers from -limit to limit. Return a read-only float64 array (n,)."""
    try:
        numbers = np.array(value, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise wrong(field, "a list of numbers", value) from None
    if numbers.ndim != 1:
        raise wrong(field, "a list of numbers", value)
    if len(numbers) > most:
        raise wrong(field, f"at most {counted(most, 'number')}", len(numbers))
    bad = np.flatnonzero(~(np.isfinite(numbers) & (np.abs(numbers) <= limit)))
    if bad.size:
        expected = "a finite number" if limit == math.inf else "a number that is finite in float32"
        raise wrong(f"{field}[{bad[0]}]", expected, numbers[bad[0]])
    numbers.setflags(write=False)
    return numbers


def checked_codes(field: str, value, n_levels: int) -> np.ndarray:
    """Check codes in [0, n_levels). Return a read-only int64 array (M,)."""
    codes = np.array(value)
    if codes.ndim != 1 or codes.size == 0 or codes.dtype.kind not in "iuf":
        raise wrong(field, "a list of integers", value)
    bad = np.flatnonzero(~((codes >= 0) & (codes < n_levels) & (codes == np.trunc(codes))))
    if bad.size:
        raise wrong(f"{field}[{bad[0]}]", f"an integer in [0, {n_levels})", codes[bad[0]])
    codes = codes.astype(np.int64)
    codes.setflags(write=False)
    return codes


def checked_sides(field: str, value, length: int, what: str) -> tuple[str, ...]:
    """Check `length` strings "right" or "left", or None for "right" everywhere. The field `what` gives `length`."""
    if value is None:
        return ("right",) * length
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise wrong(field, 'a list of "right" or "left"', value)
    sides = tuple(value)
    for i, side in enumerate(sides):
        if side not in SIDES:
            raise wrong(f"{field}[{i}]", 'one of "right", "left"', side)
    check_length(field, sides, length, what)
    return sides


def checked_interval(field: str, value) -> tuple[float, float]:
    """Return the ends of an interval that is wide enough for plots and quadrature."""
    ends = checked_numbers(field, value, limit=FLOAT32_MAX)
    if len(ends) != 2 or not ends[0] < ends[1]:
        raise wrong(field, "two numbers a < b", value)
    width = ends[1] - ends[0]
    # Plots and quadrature need floats between the ends.
    if width < NARROWEST * np.abs(ends).max() or width < np.finfo(np.float32).tiny:
        raise wrong(field, f"ends that differ by {NARROWEST:g} of the larger one at least", value)
    return tuple(ends.tolist())


def checked_parameters(value) -> dict[str, float]:
    """Check {name: number}, and return a copy with floats."""
    parameters = checked_field("parameters", value)
    for name in parameters:
        if not isinstance(name, str) or not 1 <= len(name) <= MOST_CHARACTERS:
            raise wrong("parameters", f"names of 1 to {MOST_CHARACTERS} characters", name)
        _check_printable("parameters", name)
    return {name: float(number) for name, number in parameters.items()}


def checked_weight(value) -> dict[str, Any]:
    """Check the dict of a weight, and return a copy with plain floats and a fixed order."""
    weight = checked_field("weight", value)
    if weight["kind"] == "callable":
        _check_printable("weight.name", weight["name"])
    if weight["kind"] == "scales" and not weight["low"] < weight["high"]:
        raise wrong("weight.high", f"a number above low, {weight['low']:g}", weight["high"])
    if weight["kind"] == "histogram":
        edges, density = np.array(weight["edges"]), np.array(weight["density"])
        check_ascending("weight.edges", edges)
        check_length("weight.density", density, len(edges) - 1, "edges")
        if not density.max() > 0:
            raise wrong("weight.density", "numbers that are not all 0", weight["density"])
    found = {name: weight[name] for name in WEIGHT_FIELDS if name in weight}
    for name, inside in found.items():
        if isinstance(inside, list):
            found[name] = list(map(float, inside))
        elif not isinstance(inside, str):
            found[name] = float(inside)
    return found


def checked_solver(value) -> dict[str, Any]:
    """Check the dict about the solver's run, and return a copy."""
    solver = checked_field("solver", value)
    for name in ("version", "status"):
        _check_printable(f"solver.{name}", solver.get(name, ""))
    numbers = {name: kind(solver[name]) for name, kind in _SOLVER_NUMBERS if name in solver}
    return solver | numbers


def _check_printable(field: str, value: str) -> None:
    if not value.isprintable():
        raise wrong(field, "printable characters", value)


def checked_knots_error(value) -> float:
    """Return `knots_error`, finite and not negative, as a float."""
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:
        raise wrong("knots.error", "a finite number of at least 0", value)
    return float(value)


def check_length(field: str, value, length: int, what: str) -> None:
    """Check that a field has `length` items, as the field `what` says."""
    if len(value) != length:
        raise wrong(field, f"{counted(length, 'item')} to match {what}", len(value))


def check_ascending(field: str, numbers: np.ndarray, strict: bool = True) -> None:
    """Check that numbers ascend, strictly or not."""
    bad = np.flatnonzero(~(np.diff(numbers) > 0 if strict else np.diff(numbers) >= 0))
    if bad.size:
        order = "more than" if strict else "at least"
        before, here = numbers[bad[0]], numbers[bad[0] + 1]
        raise wrong(f"{field}[{bad[0] + 1}]", f"{order} the previous {before.item()!r}", here)


def check_levels(bits: int, form: str, levels: np.ndarray) -> None:
    """Check the number of levels and, in form "levels", their order."""
    if not 1 <= len(levels) <= 2**bits:
        raise wrong("levels", f"1 to {2**bits} numbers for {counted(bits, 'bit')}", len(levels))
    if form == "levels":
        check_ascending("levels", levels)


def check_pieces(form: str, levels: np.ndarray, breaks: np.ndarray, codes: np.ndarray) -> None:
    """Check breaks and codes, and that neighboring pieces have different levels."""
    check_length("breaks", breaks, len(codes) - 1, "the pieces in codes")
    check_ascending("breaks", breaks)
    if form == "intervals" and codes.tolist() != list(range(len(levels))):
        raise wrong("codes", f"0 ... {len(levels) - 1} in form intervals", codes.tolist())
    same = np.flatnonzero(np.diff(codes) == 0)
    if same.size:
        place = same[0] + 1
        raise wrong(f"codes[{place}]", "another level than the previous piece's", codes[place])


def check_unbiased(
    form: str, levels: np.ndarray, breaks: np.ndarray, codes: np.ndarray, knots
) -> None:
    """Check the form, levels and pieces of an unbiased table."""
    if form != "levels":
        raise wrong("form", '"levels" for objective unbiased', form)
    if len(levels) < 2:
        raise wrong("levels", "at least 2 numbers for objective unbiased", len(levels))
    with np.errstate(over="ignore", divide="ignore"):
        bad = np.flatnonzero(~(1.0 / np.diff(levels) <= FLOAT32_MAX))
    if bad.size:
        place = bad[0] + 1
        raise wrong(f"levels[{place}]", "a gap that float32 can divide by", levels[place])
    _check_lower_pieces(levels, breaks, codes, knots)


def _check_lower_pieces(levels: np.ndarray, breaks: np.ndarray, codes: np.ndarray, knots) -> None:
    """Check, at the middle of every piece, that its code is that of the level below the stand-in."""
    top = np.flatnonzero(codes > len(levels) - 2)
    if top.size:
        raise wrong(f"codes[{top[0]}]", f"a lower level, in [0, {len(levels) - 1})", codes[top[0]])
    # The outer pieces are checked beyond all knots, where the stand-in is constant.
    ends = np.array([*knots.points[[0, -1]], *breaks])
    edges = np.concatenate([[ends.min() - 2.0], breaks, [ends.max() + 2.0]])
    middle = edges[:-1] + 0.5 * np.diff(edges)
    mean = np.clip(knots(middle), levels[0], levels[-1])
    slack = 1e-9 * (levels[-1] - levels[0])
    inside = (mean >= levels[codes] - slack) & (mean <= levels[codes + 1] + slack)
    # A piece that is only a few floats wide is not checked, since its middle is rounded too much.
    bad = np.flatnonzero(~inside & (np.diff(edges) > 1e-9 * (1.0 + np.abs(middle))))
    if bad.size:
        expected = f"the level below the stand-in, {mean[bad[0]]:.6g} at x = {middle[bad[0]]:.6g}"
        raise wrong(f"codes[{bad[0]}]", expected, codes[bad[0]])
