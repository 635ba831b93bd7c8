"""The table: a K-level step function q that stands for f' in the backward pass, and its JSON document.

Every field, its meaning and the exact arithmetic are described in docs/table_schema.md.
"""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fewbit import functions, schema
from fewbit.errors import FewbitError, TableError
from fewbit.files import write_atomic
from fewbit.schema import shorten
from fewbit.schema.documents import parse_json, read_text
from fewbit.sizes import counted
from fewbit.table import philox

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
NARROWEST = 1e-9
"""Smallest width of a domain, relative to its larger end."""


# ---------------------------------------------------------------------------------------------------------
# Locating points, and the roundings that every backend shares


def locate(x, breaks, closed: Sequence[str] | None = None) -> np.ndarray:
    """Index of the piece that each x is in: the number of breaks b with x > b (x >= b where closed "left").

    x: any shape; breaks: (M-1,) ascending float64; closed: M-1 of "right" / "left", None for all "right".
    Returns int64 of x's shape in [0, M-1]. NaN is in the last piece.
    """
    limits = np.asarray(breaks, np.float64)
    if closed is not None and "left" in closed:
        # For float64 x, x >= b is the same as x > (the float64 just below b).
        with np.errstate(over="ignore"):  # below the least float64 lies minus infinity
            below = np.nextafter(limits, -np.inf)
        limits = np.where(_is_left(closed), below, limits)
    return np.searchsorted(limits, np.asarray(x, np.float64), side="left")


def round_breaks(breaks, closed: Sequence[str]) -> np.ndarray:
    """Breaks as float32 such that comparing any float32 x with them gives what the float64 breaks give.

    Toward minus infinity where closed is "right" (tested with >), toward plus infinity where "left" (>=).
    """
    breaks = np.asarray(breaks, np.float64)
    nearest = _to_float32(breaks)
    with np.errstate(over="ignore"):  # beyond the largest float32 lies infinity, where it belongs
        below = np.nextafter(nearest, np.float32(-np.inf))
        above = np.nextafter(nearest, np.float32(np.inf))
    down = np.where(nearest > breaks, below, nearest)
    up = np.where(nearest < breaks, above, nearest)
    return np.where(_is_left(closed), up, down)


class Rounded(NamedTuple):
    """The float32 constants of a table that a backend computes with. The last four are None without knots."""

    breaks: np.ndarray
    levels: np.ndarray
    points: np.ndarray | None
    values: np.ndarray | None
    slopes: np.ndarray | None
    inverse_gaps: np.ndarray | None


def _is_left(closed: Sequence[str]) -> np.ndarray:
    return np.array([side == "left" for side in closed], bool)


def _to_float32(x) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(np.float32)


def _interpolate(x, segment, points, values, slopes) -> np.ndarray:
    """values[i] + (x - points[i]) * slopes[i] for i = segment - 1, the end values outside the points."""
    i = np.clip(segment - 1, 0, len(slopes) - 1)
    with np.errstate(invalid="ignore", over="ignore"):  # infinite x, whose result is not used
        inside = values[i] + (x - points[i]) * slopes[i]
    return np.where(segment == 0, values[0], np.where(segment == len(points), values[-1], inside))


# ---------------------------------------------------------------------------------------------------------
# Knots


@dataclass(frozen=True, eq=False)
class Knots:
    """The piecewise-linear stand-in for f' of an unbiased table.

    points, values: (n,) float64, n >= 2, read-only. Points ascend; two equal neighbors are a jump.
    closed: n of "right" / "left": the side that x == points[i] belongs to (it matters at jumps only, where
    both knots have the same); default all "right", the left value.

    Raises TableError, naming the field, if they do not.
    """

    points: np.ndarray
    values: np.ndarray
    closed: tuple[str, ...] | None = None

    def __post_init__(self):
        points = _numbers("points", self.points, limit=FLOAT32_MAX, most=MOST_PIECES)
        values = _numbers("values", self.values, limit=FLOAT32_MAX, most=MOST_PIECES)
        if len(points) < 2:
            raise _wrong("points", "at least 2 numbers", len(points))
        _check_length("values", values, len(points), "points")
        closed = _sides("closed", self.closed, len(points), "points")
        _set(self, points=points, values=values, closed=closed)
        _check_knots(self)

    def __call__(self, x) -> np.ndarray:
        """The stand-in at x (any shape) in float64; beyond the points it keeps its end values."""
        x = np.asarray(x, np.float64)
        return _interpolate(
            x, locate(x, self.points, self.closed), self.points, self.values, self.slopes
        )[()]

    def __eq__(self, other) -> bool:
        return self.document() == other.document() if isinstance(other, Knots) else NotImplemented

    def __hash__(self) -> int:
        return hash((tuple(self.points.tolist()), tuple(self.values.tolist())))

    def __reduce__(self):
        return Knots, (self.points, self.values, self.closed)

    @property
    def slopes(self) -> np.ndarray:
        """(n-1,) float64: the slope of each segment, 0 for the empty segment of a jump."""
        width = np.diff(self.points)
        with np.errstate(over="ignore"):  # an overflow is reported by _check_knots
            return np.divide(np.diff(self.values), width, out=np.zeros_like(width), where=width > 0)

    def document(self) -> dict:
        """The `knots` object of a table document, without its `error`."""
        document = {"points": self.points.tolist(), "values": self.values.tolist()}
        if "left" in self.closed:
            document["closed"] = list(self.closed)
        return document


def _check_knots(knots: Knots) -> None:
    points, closed = knots.points, knots.closed
    _check_ascending("points", points, strict=False)
    for i in np.flatnonzero(np.diff(points) == 0).tolist():
        if closed[i] != closed[i + 1]:
            raise _wrong(
                f"closed[{i + 1}]",
                f'"{closed[i]}" as for the other knot of the jump',
                closed[i + 1],
            )
        if i + 2 < len(points) and points[i] == points[i + 2]:
            raise _wrong(f"points[{i + 2}]", "at most two equal points", points[i + 2])
    steep = np.flatnonzero(~(np.abs(knots.slopes) <= FLOAT32_MAX))
    if steep.size:
        raise _wrong(
            f"points[{steep[0] + 1}]",
            "a segment whose slope is finite in float32",
            points[steep[0] + 1],
        )


def lower_pieces(levels, knots: Knots) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """(breaks, codes, closed) of the lower level of an unbiased table: what it stores under these names.

    levels: (K,) ascending, K >= 2. Breaks are where the stand-in crosses an inner level, or jumps across one.
    """
    levels = np.asarray(levels, np.float64)
    candidates = {
        **dict(zip(knots.points.tolist(), knots.closed, strict=False)),
        **_crossings(levels[1:-1], knots),
    }
    points = np.array(sorted(candidates))
    inside = 0.5 * (points[1:] + points[:-1])
    codes = _lower_level(
        knots(np.concatenate([[points[0] - 1.0], inside, [points[-1] + 1.0]])), levels
    )
    changes = np.flatnonzero(np.diff(codes))
    breaks = points[changes]
    return (
        breaks,
        codes[np.append(changes, len(codes) - 1)],
        tuple(candidates[x] for x in breaks.tolist()),
    )


def _crossings(levels: np.ndarray, knots: Knots) -> dict[float, str]:
    """Where the stand-in passes through a level inside a segment, and the side such a point belongs to."""
    crossings = {}
    for x0, x1, v0, v1, slope in zip(
        knots.points, knots.points[1:], knots.values, knots.values[1:], knots.slopes, strict=False
    ):
        for level in levels[(levels > min(v0, v1)) & (levels < max(v0, v1))] if slope else ():
            # At the level itself the lower level is this one: the point goes with the part above it.
            x = float(np.clip(x0 + (level - v0) / slope, x0, x1))
            if x0 < x < x1:
                crossings[x] = "left" if slope > 0 else "right"
    return crossings


def _lower_level(mean, levels: np.ndarray) -> np.ndarray:
    """Number of the level below each mean; in [0, K-2], so that there is always one above."""
    return np.clip(np.searchsorted(levels, mean, side="right") - 1, 0, len(levels) - 2)


# ---------------------------------------------------------------------------------------------------------
# The table


@dataclass(frozen=True, eq=False, repr=False)
class Table:
    """A validated, immutable few-level approximation q of the derivative f' of an activation function.

    levels: (K,) float64, ascending for form "levels"; for "intervals" in the order of the pieces, any order.
    breaks: (M-1,) float64, ascending: q changes there. codes: (M,) int64: the level of each piece.
    closed: M-1 of "right" (the break belongs to the piece on its left, the default) or "left".
    knots, knots_error: the stand-in for f' and its certified error, for objective "unbiased" only.
    The other fields are as in docs/table_schema.md. Arrays are stored as read-only copies. Two tables are
    equal if their documents are, the solver's seconds aside.

    Raises TableError, naming field and index, if an invariant does not hold.
    """

    function: str
    parameters: dict[str, float]
    bits: int
    form: str
    objective: str
    weight: dict[str, Any]
    domain: tuple[float, float]
    tails: str
    levels: np.ndarray
    breaks: np.ndarray
    codes: np.ndarray
    error: float
    lower_bound: float
    relative_error: float
    solver: dict[str, Any]
    revision: int = 1
    closed: tuple[str, ...] | None = None
    knots: Knots | None = None
    knots_error: float | None = None
    # f itself, for plots of a function that its name cannot bring back; not saved, compared or pickled.
    _function: Any = field(default=None, compare=False)

    def __post_init__(self):
        levels = _numbers("levels", self.levels, limit=FLOAT32_MAX)
        breaks = _numbers("breaks", self.breaks, most=MOST_PIECES - 1)
        _set(
            self,
            function=_text("function", self.function),
            parameters=_parameters("parameters", self.parameters),
            bits=_integer("bits", self.bits, 1, 8),
            form=_choice("form", self.form, FORMS),
            objective=_choice("objective", self.objective, OBJECTIVES),
            weight=_weight("weight", self.weight),
            domain=_interval("domain", self.domain),
            tails=_choice("tails", self.tails, TAILS),
            levels=levels,
            breaks=breaks,
            codes=_codes("codes", self.codes, len(levels)),
            error=_number("error", self.error, minimum=0.0),
            lower_bound=_number("lower_bound", self.lower_bound, minimum=0.0),
            relative_error=_number("relative_error", self.relative_error, minimum=0.0),
            solver=_solver("solver", self.solver),
            revision=_integer("revision", self.revision, 1, MOST_COUNT),
            closed=_sides("closed", self.closed, len(breaks), "breaks"),
        )
        _check_levels(self)
        _check_pieces(self)
        if self.lower_bound > self.error * (1 + 1e-12):
            raise _wrong("lower_bound", f"at most the error {self.error!r}", self.lower_bound)
        _check_knots_presence(self)
        if self.objective == "unbiased":
            _set(self, knots_error=_number("knots.error", self.knots_error, minimum=0.0))
            _check_unbiased(self)

    # -- q ------------------------------------------------------------------------------------------------

    def __call__(self, x) -> np.ndarray:
        """q(x) in float64, for x of any shape; for an unbiased table the mean of its draws.

        NaN gets the value of the last piece; an unbiased table's stand-in keeps its end values outside.
        """
        if self.objective == "unbiased":
            return np.clip(self.knots(x), self.levels[0], self.levels[-1])
        return self.levels[self.code(x)]

    def code(self, x) -> np.ndarray:
        """The level number of each x, int64; for an unbiased table that of the lower of the two levels."""
        if self.objective == "unbiased":
            return _lower_level(self(x), self.levels)
        return self.codes[locate(x, self.breaks, self.closed)]

    def sample(self, x, seed: int) -> np.ndarray:
        """One draw per element of an unbiased table: levels[sample_code(x, seed)], float64 of x's shape."""
        return self.levels[self.sample_code(x, seed)]

    def sample_code(self, x, seed: int) -> np.ndarray:
        """The level numbers of one draw per element, int64 of x's shape.

        x is rounded to float32 first. seed: an integer in [-2**63, 2**64); elements are numbered in C order.
        Raises TableError if the table is not unbiased. The float32 operations are in docs/table_schema.md.
        """
        if self.objective != "unbiased":
            raise _wrong("objective", '"unbiased" to draw from', self.objective)
        constants = self.rounded()
        x32 = _to_float32(x)
        segment = locate(x32, self.knots.points, self.knots.closed)
        mean = _interpolate(x32, segment, constants.points, constants.values, constants.slopes)
        mean = np.clip(mean, constants.levels[0], constants.levels[-1])
        lower = _lower_level(mean, constants.levels)
        probability = (mean - constants.levels[lower]) * constants.inverse_gaps[lower]
        return lower + (philox.uniform(seed, np.arange(x32.size).reshape(x32.shape)) < probability)

    def rounded(self) -> Rounded:
        """The table's constants as every backend rounds them for 16- and 32-bit inputs."""
        breaks, levels = round_breaks(self.breaks, self.closed), _to_float32(self.levels)
        if self.knots is None:
            return Rounded(breaks, levels, None, None, None, None)
        knots = self.knots
        return Rounded(
            breaks=breaks,
            levels=levels,
            points=round_breaks(knots.points, knots.closed),
            values=_to_float32(knots.values),
            slopes=_to_float32(knots.slopes),
            inverse_gaps=_to_float32(1.0 / np.diff(self.levels)),
        )

    # -- facts --------------------------------------------------------------------------------------------

    @property
    def n_pieces(self) -> int:
        """M, the number of pieces."""
        return len(self.codes)

    @property
    def activation(self):
        """The `fewbit.functions.Function` whose derivative q approximates, or None if the function is not known.

        It is the function that the table was solved for or that `with_activation` set, else fewbit's built-in function of
        the table's name. A name in a table is never imported, since the file may be untrusted.
        """
        if self._function is not None:
            return self._function
        try:
            return functions.get(self.function, self.parameters)
        except FewbitError:
            return None

    def with_activation(self, function) -> Table:
        """Return the table with its function set, for a function that is not built into fewbit.

        Args:
            function: a callable, or `package.module:name`, which is imported.

        Raises:
            FunctionError: the function cannot be imported, or its derivative cannot be determined.
        """
        from fewbit.functions.callables import resolve

        return replace(self, _function=resolve(function, domain=self.domain))

    @property
    def exact(self) -> bool:
        """Whether q is f' on the domain (up to a set the weight does not see)."""
        return self.error == 0.0

    @property
    def gap(self) -> float:
        """(error - lower_bound) / error: how far the table can be from the best one; 0 if it is exact."""
        return 0.0 if self.exact else max(0.0, (self.error - self.lower_bound) / self.error)

    # -- documents ----------------------------------------------------------------------------------------

    def document(self) -> dict[str, Any]:
        """The table as a JSON-ready dict of schema fewbit.table/1, its own copy."""
        document = {
            "schema": schema.TABLE,
            "function": self.function,
            "parameters": dict(self.parameters),
            "bits": self.bits,
            "form": self.form,
            "objective": self.objective,
            "weight": _copy_json(self.weight),
            "domain": list(self.domain),
            "tails": self.tails,
            "levels": self.levels.tolist(),
            "breaks": self.breaks.tolist(),
            "codes": self.codes.tolist(),
        }
        if "left" in self.closed:
            document["closed"] = list(self.closed)
        if self.knots is not None:
            document["knots"] = {**self.knots.document(), "error": self.knots_error}
        return document | {
            "error": self.error,
            "lower_bound": self.lower_bound,
            "relative_error": self.relative_error,
            "revision": self.revision,
            "solver": _copy_json(self.solver),
        }

    @classmethod
    def from_document(cls, document: Mapping, where: str = "table") -> Table:
        """The table of a parsed JSON document; `where` starts the message of the TableError it may raise."""
        return _read_table(document, f"{where}: ")

    def dumps(self) -> str:
        """The document as JSON text, a field per line; floats round-trip exactly."""
        return _format_json(self.document())

    def save(self, path: str | os.PathLike, force: bool = False) -> None:
        """Write the document to `path`, completely or not at all; OutputExistsError unless `force`."""
        write_atomic(path, self.dumps() + "\n", force=force)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Table:
        """The table in a fewbit.table/1 file. Raises TableError, one line that starts with the path."""
        document = parse_json(read_text(path, TableError), f"{path}: ", TableError)
        _check_schema(document, f"{path}: ", (schema.TABLE,))
        return _read_table(document, f"{path}: ")

    def __eq__(self, other) -> bool:
        return (
            _comparable(self) == _comparable(other) if isinstance(other, Table) else NotImplemented
        )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # a layer looks its table up at every call
        return hash(
            (self.function, self.bits, tuple(self.levels.tolist()), tuple(self.breaks.tolist()))
        )

    def __reduce__(self):
        # Through the constructor, so that a copy is validated and read-only too.
        return _rebuild, (
            {
                each.name: getattr(self, each.name)
                for each in fields(self)
                if each.name != "_function"
            },
        )

    # -- display ------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        quality = "exact" if self.exact else f"error {self.error:.4g}, gap {100 * self.gap:.2g} %"
        return (
            f"Table({describe_function(self)}, {counted(self.bits, 'bit')}, {self.form}, {self.objective}, "
            f"{describe_weight(self)}: {counted(len(self.levels), 'level')}, "
            f"{counted(self.n_pieces, 'piece')}, {quality})"
        )

    def _repr_html_(self) -> str:
        from fewbit.table.notebook import table_html

        return table_html(self)

    def plot(self, path: str | os.PathLike | None = None, ax=None, force: bool = False):
        """Draw f', q and their difference; see fewbit.table.plot.plot_table."""
        from fewbit.table.plot import plot_table

        return plot_table(self, path=path, ax=ax, force=force)


def _rebuild(arguments: dict) -> Table:
    return Table(**arguments)


def _comparable(table: Table) -> dict:
    document = table.document()
    document["solver"].pop("seconds", None)
    return document


def describe_function(table: Table) -> str:
    """`gelu`, or `leaky_relu(negative_slope=0.01)`."""
    return describe(table.function, table.parameters)


def describe(function: str, parameters: Mapping[str, float]) -> str:
    """A function's name, with its parameters if it has any."""
    inside = ", ".join(f"{name}={value:g}" for name, value in parameters.items())
    return f"{function}({inside})" if inside else function


def describe_weight(table: Table) -> str:
    """`uniform on [-10, 10]`, `normal(0, 1) on [-10, 10]`, ..."""
    weight = table.weight
    text = {"normal": "normal({mean:g}, {std:g})", "callable": "{name}"}.get(
        weight["kind"], "{kind}"
    ).format(**weight)
    return f"{text} on [{table.domain[0]:g}, {table.domain[1]:g}]"


# ---------------------------------------------------------------------------------------------------------
# Files


def load_file(path: str | os.PathLike) -> list[Table]:
    """The tables in a file of schema fewbit.table/1 (a list of one) or fewbit.tables/1.

    Raises TableError, one line that starts with the path.
    """
    return loads(read_text(path, TableError), str(path))


def loads(text: str, where: str = "table") -> list[Table]:
    """The tables in JSON text of either schema; `where` starts the message of the TableError it may raise."""
    document = parse_json(text, f"{where}: ", TableError)
    if _check_schema(document, f"{where}: ", (schema.TABLE, schema.TABLES)) == schema.TABLE:
        return [_read_table(document, f"{where}: ")]
    _check_against_schema(document, f"{where}: ", schema.TABLES)
    tables = [
        _build_table(each, f"{where}: tables[{i}].") for i, each in enumerate(document["tables"])
    ]
    try:
        _check_same_function(document["function"], tables)
    except TableError as error:
        raise TableError(f"{where}: {error}") from None
    return tables


def dumps_tables(function: str, tables: Sequence[Table]) -> str:
    """JSON text of schema fewbit.tables/1. Raises TableError if a table is of another function."""
    _check_same_function(_text("function", function), tables)
    listed = ",\n".join("    " + table.dumps().replace("\n", "\n    ") for table in tables)
    head = {"schema": schema.TABLES, "function": function}
    return (
        _format_json(head)[: -len("\n}")]
        + ',\n  "tables": ['
        + (f"\n{listed}\n  " if listed else "")
        + "]\n}"
    )


def save_tables(
    path: str | os.PathLike, function: str, tables: Sequence[Table], force: bool = False
) -> None:
    """Write several tables of one function; TableError if one is of another, OutputExistsError unless `force`."""
    write_atomic(path, dumps_tables(function, tables) + "\n", force=force)


def _check_same_function(function: str, tables: Sequence[Table]) -> None:
    for i, table in enumerate(tables):
        if table.function != function:
            raise _wrong(f"tables[{i}].function", f'"{function}"', table.function)


def _format_json(document: Mapping) -> str:
    """One field per line, each value compact: arrays of numbers stay on a line and diffs stay small."""
    lines = (
        f"  {json.dumps(key)}: {json.dumps(value, allow_nan=False)}"
        for key, value in document.items()
    )
    return "{\n" + ",\n".join(lines) + "\n}"


def _check_schema(document: Any, prefix: str, known: tuple[str, ...]) -> str:
    if not isinstance(document, Mapping):
        raise TableError(f"{prefix}expected an object with a table, got {shorten(document)}")
    name = document.get("schema")
    if name not in known:
        expected = " or ".join(json.dumps(each) for each in known)
        raise TableError(f"{prefix}schema: expected {expected}, got {shorten(name)}")
    return name


def _check_against_schema(document: Any, prefix: str, name: str) -> None:
    problem = schema.find_error(document, name)
    if problem is not None:
        path, message = problem
        raise TableError(f"{prefix}{path}: {message}" if path else f"{prefix}{message}")


def _read_table(document: Any, prefix: str) -> Table:
    _check_schema(document, prefix, (schema.TABLE,))
    _check_against_schema(document, prefix, schema.TABLE)
    return _build_table(document, prefix)


def _build_table(document: Mapping, prefix: str) -> Table:
    """The table of a document that satisfies its schema."""
    arguments = {key: value for key, value in document.items() if key not in ("schema", "knots")}
    try:
        if "knots" in document:
            knots = dict(document["knots"])
            arguments["knots_error"] = knots.pop("error")
            arguments["knots"] = _build_knots(knots)
        return Table(**arguments)
    except TableError as error:
        raise TableError(f"{prefix}{error}") from None


def _build_knots(document: Mapping) -> Knots:
    try:
        return Knots(**document)
    except TableError as error:
        raise TableError(f"knots.{error}") from None


def _copy_json(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


# ---------------------------------------------------------------------------------------------------------
# Checks of single fields: each takes the field's name and its value, and returns the value as stored


def _set(instance, **values) -> None:
    for name, value in values.items():
        object.__setattr__(instance, name, value)  # the classes are frozen


def _wrong(where: str, expected: str, got: Any) -> TableError:
    got = got.item() if isinstance(got, np.generic) else got
    return TableError(f"{where}: expected {expected}, got {shorten(got)}")


def _text(where: str, value, least: int = 1) -> str:
    """Return `value` if it is a printable string of valid length. Raises TableError otherwise."""
    if not isinstance(value, str) or not least <= len(value) <= MOST_CHARACTERS:
        expected = (
            "a string that is not empty"
            if value == ""
            else f"a string of {least} to {MOST_CHARACTERS} characters"
        )
        raise _wrong(where, expected, value)
    if not value.isprintable():
        raise _wrong(where, "printable characters", value)
    return value


def _choice(where: str, value, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise _wrong(where, "one of " + ", ".join(f'"{each}"' for each in choices), value)
    return value


def _integer(where: str, value, minimum: int, maximum: int) -> int:
    limits = f"of at least {minimum}" if maximum == MOST_COUNT else f"from {minimum} to {maximum}"
    try:
        integer = operator.index(
            int(value) if isinstance(value, float) and value.is_integer() else value
        )
    except TypeError:
        raise _wrong(where, f"an integer {limits}", value) from None
    if isinstance(value, (bool, np.bool_)) or not minimum <= integer <= maximum:
        raise _wrong(where, f"an integer {limits}", value)
    return integer


def _number(where: str, value, minimum: float = -math.inf) -> float:
    expected = (
        "a finite number" if minimum == -math.inf else f"a finite number of at least {minimum:g}"
    )
    try:
        number = math.nan if isinstance(value, (str, bool)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number < minimum:
        raise _wrong(where, expected, value)
    return number


def _numbers(where: str, value, limit: float = math.inf, most: int = MOST_BINS + 1) -> np.ndarray:
    """Return a read-only 1-D float64 copy of at most `most` finite numbers, with absolute values up to `limit`."""
    try:
        numbers = np.array(value, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise _wrong(where, "a list of numbers", value) from None
    if numbers.ndim != 1:
        raise _wrong(where, "a list of numbers", value)
    if len(numbers) > most:
        raise _wrong(where, f"at most {counted(most, 'number')}", len(numbers))
    bad = np.flatnonzero(~(np.isfinite(numbers) & (np.abs(numbers) <= limit)))
    if bad.size:
        expected = "a finite number" if limit == math.inf else "a number that is finite in float32"
        raise _wrong(f"{where}[{bad[0]}]", expected, numbers[bad[0]])
    numbers.setflags(write=False)
    return numbers


def _codes(where: str, value, n_levels: int) -> np.ndarray:
    """A read-only 1-D int64 copy of level numbers."""
    codes = np.array(value)
    if codes.ndim != 1 or codes.size == 0 or codes.dtype.kind not in "iuf":
        raise _wrong(where, "a list of integers", value)
    bad = np.flatnonzero(~((codes >= 0) & (codes < n_levels) & (codes == np.trunc(codes))))
    if bad.size:
        raise _wrong(f"{where}[{bad[0]}]", f"an integer in [0, {n_levels})", codes[bad[0]])
    codes = codes.astype(np.int64)
    codes.setflags(write=False)
    return codes


def _sides(where: str, value, length: int, what: str) -> tuple[str, ...]:
    if value is None:
        return ("right",) * length
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _wrong(where, 'a list of "right" or "left"', value)
    sides = tuple(_choice(f"{where}[{i}]", side, SIDES) for i, side in enumerate(value))
    _check_length(where, sides, length, what)
    return sides


def _interval(where: str, value) -> tuple[float, float]:
    ends = _numbers(where, value, limit=FLOAT32_MAX)
    if len(ends) != 2 or not ends[0] < ends[1]:
        raise _wrong(where, "two numbers a < b", value)
    width = ends[1] - ends[0]
    # Plotting and quadrature need floats between the ends of the interval.
    if width < NARROWEST * np.abs(ends).max() or width < np.finfo(np.float32).tiny:
        raise _wrong(where, f"ends that differ by {NARROWEST:g} of the larger one at least", value)
    return tuple(ends.tolist())


def _parameters(where: str, value) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise _wrong(where, "an object of numbers", value)
    return {
        _text(where, name): _number(f"{where}.{name}", number) for name, number in value.items()
    }


def _weight(where: str, value) -> dict[str, Any]:
    """The weight in document form: its fields in a fixed order, plain floats."""
    kinds = {
        "uniform": (),
        "normal": ("mean", "std"),
        "histogram": ("edges", "density"),
        "callable": ("name",),
    }
    if not isinstance(value, Mapping):
        raise _wrong(where, 'an object with a "kind"', value)
    kind = _choice(f"{where}.kind", value.get("kind"), tuple(kinds))
    if set(value) != {"kind", *kinds[kind]}:
        raise _wrong(where, f"the fields {', '.join(('kind', *kinds[kind]))}", list(value))
    if kind == "normal":
        mean, std = _number(f"{where}.mean", value["mean"]), _number(f"{where}.std", value["std"])
        if not std > 0:
            raise _wrong(f"{where}.std", "more than 0", std)
        return {"kind": kind, "mean": mean, "std": std}
    if kind == "histogram":
        return {"kind": kind, **_histogram(where, value)}
    if kind == "callable":
        return {"kind": kind, "name": _text(f"{where}.name", value["name"])}
    return {"kind": kind}


def _histogram(where: str, value: Mapping) -> dict[str, list[float]]:
    edges, density = (
        _numbers(f"{where}.edges", value["edges"]),
        _numbers(f"{where}.density", value["density"]),
    )
    if len(edges) < 2:
        raise _wrong(f"{where}.edges", "at least 2 numbers", len(edges))
    _check_ascending(f"{where}.edges", edges)
    _check_length(f"{where}.density", density, len(edges) - 1, "edges")
    if density.min() < 0 or not density.max() > 0:
        raise _wrong(f"{where}.density", "numbers of at least 0, not all 0", density.tolist())
    return {"edges": edges.tolist(), "density": density.tolist()}


def _solver(where: str, value) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not isinstance(value.get("version"), str):
        raise _wrong(where, 'an object with a "version" and a "grid"', value)
    solver = dict(value)
    _text(f"{where}.version", value["version"], least=0)
    solver["grid"] = _integer(f"{where}.grid", value.get("grid"), 0, MOST_COUNT)
    if "seconds" in value:
        solver["seconds"] = _number(f"{where}.seconds", value["seconds"], minimum=0.0)
    _text(f"{where}.status", value.get("status", ""), least=0)
    try:
        return _copy_json(solver)
    except (TypeError, ValueError):
        raise _wrong(where, "values that JSON can hold", value) from None


# ---------------------------------------------------------------------------------------------------------
# Checks that relate fields


def _check_length(where: str, value, length: int, what: str) -> None:
    if len(value) != length:
        raise _wrong(where, f"{counted(length, 'item')} to match {what}", len(value))


def _check_ascending(where: str, numbers: np.ndarray, strict: bool = True) -> None:
    bad = np.flatnonzero(~(np.diff(numbers) > 0 if strict else np.diff(numbers) >= 0))
    if bad.size:
        order = "more than" if strict else "at least"
        before, here = numbers[bad[0]], numbers[bad[0] + 1]
        raise _wrong(f"{where}[{bad[0] + 1}]", f"{order} the previous {before.item()!r}", here)


def _check_levels(table: Table) -> None:
    if not 1 <= len(table.levels) <= 2**table.bits:
        raise _wrong(
            "levels",
            f"1 to {2**table.bits} numbers for {counted(table.bits, 'bit')}",
            len(table.levels),
        )
    if table.form == "levels":
        _check_ascending("levels", table.levels)


def _check_pieces(table: Table) -> None:
    _check_length("breaks", table.breaks, len(table.codes) - 1, "the pieces in codes")
    _check_ascending("breaks", table.breaks)
    if table.form == "intervals" and table.codes.tolist() != list(range(len(table.levels))):
        raise _wrong(
            "codes", f"0 ... {len(table.levels) - 1} in form intervals", table.codes.tolist()
        )
    same = np.flatnonzero(np.diff(table.codes) == 0)
    if same.size:
        raise _wrong(
            f"codes[{same[0] + 1}]",
            "another level than the previous piece's",
            table.codes[same[0] + 1],
        )


def _check_knots_presence(table: Table) -> None:
    unbiased = table.objective == "unbiased"
    if unbiased and not isinstance(table.knots, Knots):
        raise _wrong("knots", "knots for objective unbiased", table.knots)
    if not unbiased and table.knots is not None:
        raise _wrong("knots", f"none for objective {table.objective}", table.knots)
    if not unbiased and table.knots_error is not None:
        raise _wrong("knots.error", f"none for objective {table.objective}", table.knots_error)


def _check_unbiased(table: Table) -> None:
    levels = table.levels
    if table.form != "levels":
        raise _wrong("form", '"levels" for objective unbiased', table.form)
    if len(levels) < 2:
        raise _wrong("levels", "at least 2 numbers for objective unbiased", len(levels))
    with np.errstate(over="ignore", divide="ignore"):
        bad = np.flatnonzero(~(1.0 / np.diff(levels) <= FLOAT32_MAX))
    if bad.size:
        raise _wrong(
            f"levels[{bad[0] + 1}]", "a gap that float32 can divide by", levels[bad[0] + 1]
        )
    _check_lower_pieces(table)


def _check_lower_pieces(table: Table) -> None:
    """Each piece's code is the level below the stand-in, seen at the middle of the piece."""
    levels, breaks = table.levels, table.breaks
    top = np.flatnonzero(table.codes > len(levels) - 2)
    if top.size:
        raise _wrong(
            f"codes[{top[0]}]", f"a lower level, in [0, {len(levels) - 1})", table.codes[top[0]]
        )
    # The outer pieces are seen beyond all knots, where the stand-in is constant.
    ends = np.array([*table.knots.points[[0, -1]], *breaks])
    edges = np.concatenate([[ends.min() - 2.0], breaks, [ends.max() + 2.0]])
    middle = edges[:-1] + 0.5 * np.diff(edges)
    mean = np.clip(table.knots(middle), levels[0], levels[-1])
    slack = 1e-9 * (levels[-1] - levels[0])
    inside = (mean >= levels[table.codes] - slack) & (mean <= levels[table.codes + 1] + slack)
    # A piece only a few floats wide has no middle to look at.
    bad = np.flatnonzero(~inside & (np.diff(edges) > 1e-9 * (1.0 + np.abs(middle))))
    if bad.size:
        expected = f"the level below the stand-in, {mean[bad[0]]:.6g} at x = {middle[bad[0]]:.6g}"
        raise _wrong(f"codes[{bad[0]}]", expected, table.codes[bad[0]])
