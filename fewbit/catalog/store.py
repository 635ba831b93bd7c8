"""Find a table: shipped with the package, cached on disk, or solved now."""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from fewbit import functions
from fewbit._version import __version__
from fewbit.errors import FewbitError, FunctionError, SolveError
from fewbit.files import cache_folder, write_atomic
from fewbit.printable import printable
from fewbit.schema.documents import parse_json, read_text
from fewbit.solver.request import (
    check_request,
    checked_domain,
    count_levels,
    domain_of,
)
from fewbit.solver.weight import make_weight
from fewbit.table import Table, load_file

CACHED = "fewbit.cached/1"
"""The schema of a cache file: the arguments of a request, and the table."""
_unusable = set()


def tables_directory():
    """Return the directory of the shipped tables: `fewbit.tables`, or `tables/` in a checkout."""
    installed = Path(__file__).parents[1] / "tables"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "tables"


@cache
def shipped_tables(function: str) -> tuple[Table, ...]:
    """Return all shipped tables of a function, given by its name or alias.

    Raises:
        FunctionError: The name is unknown.
    """
    path = tables_directory() / f"{functions.canonical(function)}.json"
    return tuple(load_file(path)) if path.exists() else ()


def load_table(
    function: str | Callable,
    bits: int | None = None,
    *,
    form: str = "levels",
    weight: object = "uniform",
    domain: Sequence[float] | None = None,
    objective: str = "mse",
    tails: str = "free",
    levels: int | None = None,
    parameters: Mapping[str, float] | None = None,
) -> Table:
    """Return a table for a function: the shipped one if there is one, else a cached one, else a new one.

    Arguments are those of `fewbit.solve`. A new table is cached, unless the function is not built in or the weight is a callable.

    Raises:
        FunctionError: The function cannot be used.
        WeightError: The weight cannot be used.
        SolveError: An argument is out of range, the request cannot be satisfied, or the table must be solved and numba is
            not installed.
    """
    if isinstance(function, str) and function.endswith(".json"):
        raise FunctionError(
            f"expected the name of a function, got {function!r}; fewbit.Table.load reads a file"
        )
    count, all_bits = count_levels(bits, levels)
    check_request(form, objective, tails, parameters)
    domain = checked_domain(domain)
    request = {
        "bits": None if bits is None else all_bits,
        "form": form,
        "domain": None if domain is None else list(domain),
        "objective": objective,
        "tails": tails,
        "levels": None if levels is None else count,
    }
    named = isinstance(function, str) and ":" not in function
    if named:
        found = _find_shipped(function, weight, parameters, request)
        if found is not None:
            return found
    weight = make_weight(weight)

    def solved():
        try:
            from fewbit.solver.solve import solve
        except ModuleNotFoundError as error:
            raise SolveError(
                f"no table of {function!r} is shipped for these arguments, and solving one needs the package "
                f"{error.name}: pip install {error.name}"
            ) from None
        return solve(function, weight=weight, parameters=parameters, **request)

    document = weight.document()
    if not named or document["kind"] == "callable":
        return solved()
    resolved = functions.get(function, parameters)
    expected = {
        "function": resolved.name,
        "parameters": dict(resolved.parameters),
        "bits": all_bits,
        "form": form,
        "objective": objective,
        "weight": document,
        "domain": domain_of(resolved, weight, domain),
        "tails": tails,
    }
    asked = {
        **expected,
        "levels": count,
        "schema": CACHED,
        "version": __version__,
    }
    return _cached(resolved.name, asked, expected, solved)


def _find_shipped(function, weight, parameters, request):
    if request["levels"] is not None:
        return None
    wanted = {"uniform": {"kind": "uniform"}, "normal": {"kind": "normal", "mean": 0.0, "std": 1.0}}
    if not isinstance(weight, str) or weight not in wanted:
        return None
    asked = {name: request[name] for name in ("bits", "form", "objective", "tails")}
    asked["weight"] = wanted[weight]
    resolved = functions.get(function, parameters)
    asked["parameters"] = dict(resolved.parameters)
    asked["domain"] = domain_of(resolved, make_weight(weight), request["domain"])
    return next((table for table in shipped_tables(function) if _has_all(table, asked)), None)


def _has_all(table, values):
    return all(getattr(table, name) == value for name, value in values.items())


def _cached(name, asked, expected, solved):
    """Return the cached table with the arguments `asked` and fields `expected`, else solve and cache it."""
    asked = json.loads(json.dumps(asked))
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    directory = cache_folder("tables")
    if directory is None:
        return solved()
    path = directory / f"{name}-{digest}.json"
    try:
        document = parse_json(read_text(path))
        table = Table.from_document(document["table"])
        if (
            document["asked"] == asked
            and _has_all(table, expected)
            and len(table.levels) <= asked["levels"]
        ):
            return table
    except (FewbitError, LookupError, TypeError):
        pass  # the file is missing, unreadable, damaged, or another kind of document
    table = solved()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may write the same file at the same time, with the same content.
        document = {"schema": CACHED, "asked": asked, "table": table.document()}
        write_atomic(path, json.dumps(document) + "\n", force=True, follow_links=False)
    except (OSError, FewbitError) as error:
        if directory not in _unusable:  # warn once per directory
            _unusable.add(directory)
            reason = printable(str(error))
            # The table exists, so the program continues even if the user turns warnings into errors.
            with contextlib.suppress(UserWarning):
                warnings.warn(f"the table was solved but not cached: {reason}", stacklevel=3)
    return table
