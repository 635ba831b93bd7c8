"""The class `Table`, a step function q for the derivative f' of an activation function f, and its JSON document."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from fewbit import functions, schema
from fewbit.errors import FewbitError, TableError
from fewbit.files import write_atomic
from fewbit.printable import shorten
from fewbit.schema.documents import parse_json, read_text
from fewbit.sizes import counted
from fewbit.table import philox
from fewbit.table.checks import (
    FLOAT32_MAX,
    MOST_PIECES,
    check_levels,
    check_pieces,
    check_unbiased,
    checked_codes,
    checked_field,
    checked_function,
    checked_interval,
    checked_knots_error,
    checked_numbers,
    checked_parameters,
    checked_sides,
    checked_solver,
    checked_weight,
    set_fields,
    wrong,
)
from fewbit.table.describe import describe_function, describe_weight
from fewbit.table.knots import (
    Knots,
    Rounded,
    interpolate,
    locate,
    lower_level,
    round_breaks,
    to_float32,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

SCALARS = (
    *(("bits", int), ("revision", int), ("form", str), ("objective", str), ("tails", str)),
    *(("error", float), ("lower_bound", float), ("relative_error", float)),
)
"""The fields that the schema checks completely, with their types."""


@dataclass(frozen=True, eq=False, repr=False)
class Table:
    """A step function q with few levels that approximates the derivative f' of an activation function; immutable.

    K is the number of levels, and M the number of pieces; arrays are read-only copies. In an unbiased table, the value at x is drawn at random
    from two neighboring levels, with the stand-in as mean. Tables are equal if their documents are, except for the solver's seconds.

    Attributes:
        function: The name of f.
        parameters: The parameters of f.
        bits: Bits per element, 1 to 8. K is at most 2**bits.
        form: "levels" (pieces may share a level) or "intervals" (every piece has its own).
        objective: "mse", "unbiased" or "minimax".
        weight: The density w(x) by which squared errors count, as a dict.
        domain: The interval [a, b] on which the error is measured.
        tails: "pinned" if q has the limits of f' at infinity outside the domain, else "free".
        levels: float64 (K,), ascending for form "levels", in the order of the pieces for "intervals".
        breaks: float64 (M-1,), ascending: the points at which q changes.
        codes: int64 (M,), the index of every piece's level; if unbiased, of the lower of the two levels.
        error: The integral of (f' - q)**2 w over the domain. For "minimax": the largest |f' - q|. For "unbiased":
            the integral of the expected squared error of a draw, times w.
        lower_bound: A proven lower bound on the error of any table with the same arguments of `fewbit.solve`.
        relative_error: The root of: error / (the integral of f'**2 w). For "minimax": error / (the largest |f'|).
        solver: A dict about the solver's run, as `fewbit.solve` returns it.
        revision: The revision of a shipped table's numbers.
        closed: M-1 strings, by default all "right": a break belongs to the piece before it ("right") or after it ("left").
        knots: The stand-in of an unbiased table, a piecewise linear function that replaces f', else None.
        knots_error: A bound on |f' - stand-in|, or None.

    Raises:
        TableError: An invariant does not hold. The message names the field and the index.
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
    # f itself, if `function` is not the name of a built-in function. This field is not saved, compared or pickled.
    _function: Any = field(default=None, compare=False)

    def __post_init__(self):
        levels = checked_numbers("levels", self.levels, limit=FLOAT32_MAX)
        breaks = checked_numbers("breaks", self.breaks, most=MOST_PIECES - 1)
        set_fields(
            self,
            function=checked_function(self.function),
            parameters=checked_parameters(self.parameters),
            weight=checked_weight(self.weight),
            domain=checked_interval("domain", self.domain),
            levels=levels,
            breaks=breaks,
            codes=checked_codes("codes", self.codes, len(levels)),
            solver=checked_solver(self.solver),
            closed=checked_sides("closed", self.closed, len(breaks), "breaks"),
            **{name: kind(checked_field(name, getattr(self, name))) for name, kind in SCALARS},
        )
        check_levels(self.bits, self.form, levels)
        check_pieces(self.form, levels, breaks, self.codes)
        if self.lower_bound > self.error * (1 + 1e-12):
            raise wrong("lower_bound", f"at most the error {self.error!r}", self.lower_bound)
        _check_knots_presence(self)
        if self.objective == "unbiased":
            set_fields(self, knots_error=checked_knots_error(self.knots_error))
            check_unbiased(self.form, levels, breaks, self.codes, self.knots)

    def __call__(self, x) -> np.ndarray:
        """Return q(x), or the mean of the draws, float64 of x's shape. NaN gets the value of the last piece."""
        if self.objective == "unbiased":
            return np.clip(self.knots(x), self.levels[0], self.levels[-1])
        return self.levels[self.code(x)]

    def code(self, x: ArrayLike) -> np.ndarray:
        """Return the index of the level at every x, or of the lower level of a draw, int64 of x's shape."""
        if self.objective == "unbiased":
            return lower_level(self(x), self.levels)
        return self.codes[locate(x, self.breaks, self.closed)]

    def sample(self, x: ArrayLike, seed: int) -> np.ndarray:
        """Draw a level for every element of x: levels[sample_code(x, seed)], float64 of x's shape.

        Args:
            x: Numbers of any shape.
            seed: An integer in [-2**63, 2**64).

        Raises:
            TableError: The table is not unbiased.
        """
        return self.levels[self.sample_code(x, seed)]

    def sample_code(self, x: ArrayLike, seed: int) -> np.ndarray:
        """Draw the index of a level for every element of x, with the float32 operations of every backend (docs/reference/table_schema.md).

        Args:
            x: Numbers of any shape, rounded to float32 and numbered in C order.
            seed: An integer in [-2**63, 2**64).

        Returns:
            Indices in `levels`, int64 of x's shape.

        Raises:
            TableError: The table is not unbiased.
        """
        if self.objective != "unbiased":
            raise wrong("objective", '"unbiased" to draw from', self.objective)
        constants = self.rounded()
        x32 = to_float32(x)
        segment = locate(x32, self.knots.points, self.knots.closed)
        mean = interpolate(x32, segment, constants.points, constants.values, constants.slopes)
        mean = np.clip(mean, constants.levels[0], constants.levels[-1])
        lower = lower_level(mean, constants.levels)
        probability = (mean - constants.levels[lower]) * constants.inverse_gaps[lower]
        return lower + (philox.uniform(seed, np.arange(x32.size).reshape(x32.shape)) < probability)

    def rounded(self) -> Rounded:
        """Return the table's numbers in float32, as backends use them for 16-bit and 32-bit inputs."""
        breaks, levels = round_breaks(self.breaks, self.closed), to_float32(self.levels)
        if self.knots is None:
            return Rounded(breaks, levels, None, None, None, None)
        knots = self.knots
        return Rounded(
            breaks=breaks,
            levels=levels,
            points=round_breaks(knots.points, knots.closed),
            values=to_float32(knots.values),
            slopes=to_float32(knots.slopes),
            inverse_gaps=to_float32(1.0 / np.diff(self.levels)),
        )

    @property
    def n_pieces(self) -> int:
        """The number of pieces M."""
        return len(self.codes)

    @property
    def activation(self) -> functions.Function | None:
        """The `fewbit.functions.Function` whose derivative q approximates, or None if it is not known.

        It is the function that `with_activation` set or that was solved, else the built-in one of this name. A name in a file
        is never imported.
        """
        if self._function is not None:
            return self._function
        try:
            return functions.get(self.function, self.parameters)
        except FewbitError:
            return None

    def with_activation(self, function: str | Callable) -> Table:
        """Return a copy whose `activation` is a callable, or `package.module:name`, which is imported.

        Raises:
            FunctionError: The function cannot be imported, or its derivative cannot be determined.
        """
        from fewbit.functions.callables import resolve

        return replace(self, _function=resolve(function, domain=self.domain))

    @property
    def exact(self) -> bool:
        """True if q equals f' on the domain, except on a set of weight 0."""
        return self.error == 0.0

    @property
    def gap(self) -> float:
        """The largest share of the error that a better table can avoid: (error - lower_bound) / error; 0 if exact."""
        return 0.0 if self.exact else max(0.0, (self.error - self.lower_bound) / self.error)

    def document(self) -> dict[str, Any]:
        """Return a dict of schema fewbit.table/1 for JSON."""
        document = {
            "schema": schema.TABLE,
            "function": self.function,
            "parameters": dict(self.parameters),
            "bits": self.bits,
            "form": self.form,
            "objective": self.objective,
            "weight": deepcopy(self.weight),
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
            "solver": deepcopy(self.solver),
        }

    @classmethod
    def from_document(cls, document: Mapping, where: str = "table") -> Table:
        """Make a table from a parsed document of schema fewbit.table/1. Error messages begin with `where`.

        Raises:
            TableError: The document is not valid. The message names the field and the index.
        """
        return read_table(document, f"{where}: ")

    def dumps(self) -> str:
        """Return the document as JSON text. Floats round-trip exactly."""
        return format_json(self.document())

    def save(self, path: str | os.PathLike, force: bool = False) -> None:
        """Write the document to a file, completely or not at all. `force` allows to overwrite.

        Raises:
            OutputExistsError: The path exists, and `force` is false.
            FewbitError: The file cannot be written.
        """
        write_atomic(path, self.dumps() + "\n", force=force)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Table:
        """Read the table in a file of schema fewbit.table/1.

        Raises:
            TableError: The file cannot be read or is not valid. The message starts with the path.
        """
        document = parse_json(read_text(path, TableError), f"{path}: ", TableError)
        check_schema(document, f"{path}: ", (schema.TABLE,))
        return read_table(document, f"{path}: ")

    def __eq__(self, other) -> bool:
        return (
            _comparable(self) == _comparable(other) if isinstance(other, Table) else NotImplemented
        )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # cached, because a layer looks its table up at every call
        return hash(
            (self.function, self.bits, tuple(self.levels.tolist()), tuple(self.breaks.tolist()))
        )

    def __reduce__(self):
        # The constructor makes sure that a copy is valid and read-only too.
        names = (item.name for item in fields(self))
        return _rebuild, ({name: getattr(self, name) for name in names if name != "_function"},)

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

    def plot(
        self,
        path: str | os.PathLike | None = None,
        ax: Axes | None = None,
        force: bool = False,
    ) -> Figure:
        """Draw f', q and their difference. Return the matplotlib Figure.

        Args:
            path: A .png or .svg file in which the picture is also saved, or None.
            ax: The matplotlib axes for f' and q, without their difference. None means a new figure.
            force: Whether an existing file may be overwritten.

        Raises:
            OutputExistsError: The file exists, and `force` is false.
            FewbitError: The path has another ending, or matplotlib is not installed.
        """
        from fewbit.table.plot import plot_table

        return plot_table(self, path=path, ax=ax, force=force)


def _rebuild(arguments: dict) -> Table:
    return Table(**arguments)


def _comparable(table: Table) -> dict:
    document = table.document()
    document["solver"].pop("seconds", None)
    return document


def _check_knots_presence(table: Table) -> None:
    drawn = table.objective == "unbiased"
    if drawn and not isinstance(table.knots, Knots):
        raise wrong("knots", f"knots for objective {table.objective}", table.knots)
    if not drawn and table.knots is not None:
        raise wrong("knots", f"none for objective {table.objective}", table.knots)
    if not drawn and table.knots_error is not None:
        raise wrong("knots.error", f"none for objective {table.objective}", table.knots_error)


def format_json(document: Mapping) -> str:
    """Return JSON text with one field per line, so that diffs are small."""
    lines = (
        f"  {json.dumps(key)}: {json.dumps(value, allow_nan=False)}"
        for key, value in document.items()
    )
    return "{\n" + ",\n".join(lines) + "\n}"


def check_schema(document: Any, prefix: str, known: tuple[str, ...]) -> str:
    """Return the name of a document's schema. Raise TableError, beginning with `prefix`, if it is not in `known`."""
    if not isinstance(document, Mapping):
        raise TableError(f"{prefix}expected an object with a table, got {shorten(document)}")
    name = document.get("schema")
    if name not in known:
        expected = " or ".join(json.dumps(name) for name in known)
        raise TableError(f"{prefix}schema: expected {expected}, got {shorten(name)}")
    return name


def check_against_schema(document: Any, prefix: str, name: str) -> None:
    """Raise TableError, beginning with `prefix`, if a document does not satisfy the schema `name`."""
    problem = schema.find_error(document, name)
    if problem is not None:
        path, message = problem
        raise TableError(f"{prefix}{path}: {message}" if path else f"{prefix}{message}")


def read_table(document: Any, prefix: str) -> Table:
    """Make the table of an untrusted document of schema fewbit.table/1."""
    check_schema(document, prefix, (schema.TABLE,))
    check_against_schema(document, prefix, schema.TABLE)
    return build_table(document, prefix)


def build_table(document: Mapping, prefix: str) -> Table:
    """Make the table of a document that satisfies its schema."""
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
