"""Checks of a table's fields: one function for each kind of value, then the checks that relate several fields.

A function `checked_*` returns the value in the form in which a table stores it. All functions raise TableError, with one
line that names the field and the index.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fewbit.errors import TableError
from fewbit.schema import shorten
from fewbit.sizes import counted

FORMS = ("levels", "intervals")
OBJECTIVES = ("mse", "unbiased", "minimax")
TAILS = ("free", "pinned")
SIDES = ("right", "left")
FLOAT32_MAX = float(np.finfo(np.float32).max)
MOST_PIECES = 2**14
"""Largest number of pieces of a table and of knots of a stand-in; the solver makes a few hundred."""
MOST_BINS = 2**16
"""Largest number of bins of a histogram weight."""
MOST_CHARACTERS = 200
"""Largest length of a name. schema/table-1.json repeats this limit and the two above."""
MOST_COUNT = 2**53
"""Largest revision and grid; float64 has all integers up to this one."""
NARROWEST = 1e-9
"""Smallest width of a domain, relative to its larger end."""


def set_fields(instance, **values) -> None:
    """Set fields of a frozen dataclass while it is constructed."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)


def wrong(field: str, expected: str, got: Any) -> TableError:
    """Return the TableError for a field with a wrong value."""
    got = got.item() if isinstance(got, np.generic) else got
    return TableError(f"{field}: expected {expected}, got {shorten(got)}")


def checked_text(field: str, value, least: int = 1) -> str:
    """Return a printable string of valid length."""
    if not isinstance(value, str) or not least <= len(value) <= MOST_CHARACTERS:
        expected = (
            "a string that is not empty"
            if value == ""
            else f"a string of {least} to {MOST_CHARACTERS} characters"
        )
        raise wrong(field, expected, value)
    if not value.isprintable():
        raise wrong(field, "printable characters", value)
    return value


def checked_choice(field: str, value, choices: tuple[str, ...]) -> str:
    """Return a string that is one of the choices."""
    if value not in choices:
        raise wrong(field, "one of " + ", ".join(f'"{choice}"' for choice in choices), value)
    return value


def checked_integer(field: str, value, minimum: int, maximum: int) -> int:
    """Return an integer in a range. A float without fraction counts, since JSON does not tell the two apart."""
    limits = f"of at least {minimum}" if maximum == MOST_COUNT else f"from {minimum} to {maximum}"
    try:
        integer = operator.index(
            int(value) if isinstance(value, float) and value.is_integer() else value
        )
    except TypeError:
        raise wrong(field, f"an integer {limits}", value) from None
    if isinstance(value, (bool, np.bool_)) or not minimum <= integer <= maximum:
        raise wrong(field, f"an integer {limits}", value)
    return integer


def checked_number(field: str, value, minimum: float = -math.inf) -> float:
    """Return a finite float that is not below the minimum."""
    expected = (
        "a finite number" if minimum == -math.inf else f"a finite number of at least {minimum:g}"
    )
    try:
        number = math.nan if isinstance(value, (str, bool)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number < minimum:
        raise wrong(field, expected, value)
    return number


def checked_numbers(
    field: str, value, limit: float = math.inf, most: int = MOST_BINS + 1
) -> np.ndarray:
    """Return a read-only float64 copy (n,) of at most `most` finite numbers, with absolute values up to `limit`."""
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
    """Return a read-only int64 copy (M,) of level numbers."""
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
    """Return `length` strings "right" or "left", all "right" for None. what: the field that has this length."""
    if value is None:
        return ("right",) * length
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise wrong(field, 'a list of "right" or "left"', value)
    sides = tuple(checked_choice(f"{field}[{i}]", side, SIDES) for i, side in enumerate(value))
    check_length(field, sides, length, what)
    return sides


def checked_interval(field: str, value) -> tuple[float, float]:
    """Return the two ends of an interval that is wide enough for plots and quadrature."""
    ends = checked_numbers(field, value, limit=FLOAT32_MAX)
    if len(ends) != 2 or not ends[0] < ends[1]:
        raise wrong(field, "two numbers a < b", value)
    width = ends[1] - ends[0]
    # Plots and quadrature need floats between the ends.
    if width < NARROWEST * np.abs(ends).max() or width < np.finfo(np.float32).tiny:
        raise wrong(field, f"ends that differ by {NARROWEST:g} of the larger one at least", value)
    return tuple(ends.tolist())


def checked_parameters(field: str, value) -> dict[str, float]:
    """Return a function's parameters."""
    if not isinstance(value, Mapping):
        raise wrong(field, "an object of numbers", value)
    return {
        checked_text(field, name): checked_number(f"{field}.{name}", number)
        for name, number in value.items()
    }


def checked_weight(field: str, value) -> dict[str, Any]:
    """Return the weight as in a document: plain floats, and the fields in a fixed order."""
    kinds = {
        "uniform": (),
        "normal": ("mean", "std"),
        "histogram": ("edges", "density"),
        "callable": ("name",),
    }
    if not isinstance(value, Mapping):
        raise wrong(field, 'an object with a "kind"', value)
    kind = checked_choice(f"{field}.kind", value.get("kind"), tuple(kinds))
    if set(value) != {"kind", *kinds[kind]}:
        raise wrong(field, f"the fields {', '.join(('kind', *kinds[kind]))}", list(value))
    if kind == "normal":
        mean, std = (
            checked_number(f"{field}.mean", value["mean"]),
            checked_number(f"{field}.std", value["std"]),
        )
        if not std > 0:
            raise wrong(f"{field}.std", "more than 0", std)
        return {"kind": kind, "mean": mean, "std": std}
    if kind == "histogram":
        return {"kind": kind, **_checked_histogram(field, value)}
    if kind == "callable":
        return {"kind": kind, "name": checked_text(f"{field}.name", value["name"])}
    return {"kind": kind}


def _checked_histogram(field: str, value: Mapping) -> dict[str, list[float]]:
    edges, density = (
        checked_numbers(f"{field}.edges", value["edges"]),
        checked_numbers(f"{field}.density", value["density"]),
    )
    if len(edges) < 2:
        raise wrong(f"{field}.edges", "at least 2 numbers", len(edges))
    check_ascending(f"{field}.edges", edges)
    check_length(f"{field}.density", density, len(edges) - 1, "edges")
    if density.min() < 0 or not density.max() > 0:
        raise wrong(f"{field}.density", "numbers of at least 0, not all 0", density.tolist())
    return {"edges": edges.tolist(), "density": density.tolist()}


def checked_solver(field: str, value) -> dict[str, Any]:
    """Return the solver's record as a copy that JSON can represent."""
    if not isinstance(value, Mapping) or not isinstance(value.get("version"), str):
        raise wrong(field, 'an object with a "version" and a "grid"', value)
    solver = dict(value)
    checked_text(f"{field}.version", value["version"], least=0)
    solver["grid"] = checked_integer(f"{field}.grid", value.get("grid"), 0, MOST_COUNT)
    if "seconds" in value:
        solver["seconds"] = checked_number(f"{field}.seconds", value["seconds"], minimum=0.0)
    checked_text(f"{field}.status", value.get("status", ""), least=0)
    try:
        return copy_json(solver)
    except (TypeError, ValueError):
        raise wrong(field, "values that JSON can hold", value) from None


def copy_json(value: Any) -> Any:
    """Copy a JSON value. Raises TypeError or ValueError for any other value."""
    return json.loads(json.dumps(value, allow_nan=False))


def check_length(field: str, value, length: int, what: str) -> None:
    """Check the length of a field. what: the field that the length must match."""
    if len(value) != length:
        raise wrong(field, f"{counted(length, 'item')} to match {what}", len(value))


def check_ascending(field: str, numbers: np.ndarray, strict: bool = True) -> None:
    """Check that numbers ascend. strict: whether equal neighbors are wrong."""
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
    """Check that breaks and codes describe pieces, and that neighboring pieces have different levels."""
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
    """Check the form, levels and pieces of a table of objective "unbiased"."""
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
    """Check at the middle of every piece that its code is the level below the stand-in."""
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
