"""Finding a table: shipped with the package, solved before and cached on disk, or solved now."""

from __future__ import annotations

import hashlib
import json
import operator
import os
import warnings
from functools import cache
from pathlib import Path

from fewbit import functions
from fewbit._version import __version__
from fewbit.errors import FewbitError, OutputExistsError, TableError
from fewbit.table import Table, load_file


def tables_directory():
    """Where the shipped tables lie: the package ``fewbit.tables``, or ``tables/`` of a checkout."""
    installed = Path(__file__).parent / "tables"
    return installed if installed.is_dir() else Path(__file__).parent.parent / "tables"


def cache_directory():
    """``$FEWBIT_CACHE``, or the user's cache folder; it may not exist yet."""
    if os.environ.get("FEWBIT_CACHE"):
        return Path(os.environ["FEWBIT_CACHE"])
    from platformdirs import user_cache_path

    return user_cache_path("fewbit") / "tables"


@cache
def shipped_tables(function):
    """All shipped tables of a named function (an alias will do), as a tuple; empty if there are none.

    Raises FunctionError for an unknown name.
    """
    path = tables_directory() / f"{functions.canonical(function)}.json"
    return tuple(load_file(path)) if path.exists() else ()


def load_table(
    function,
    bits=None,
    *,
    form="levels",
    weight="uniform",
    domain=None,
    objective="mse",
    tails="free",
    levels=None,
    parameters=None,
):
    """The table for a function: a shipped one if there is one, else a cached one, else solved now.

    Arguments as for :func:`fewbit.solve`. A table of a named function that is not shipped (other
    parameters, domain, objective ...) is solved on first use and kept in :func:`cache_directory`.
    """
    bits = None if bits is None else operator.index(bits)
    levels = None if levels is None else operator.index(levels)
    request = {
        "bits": bits,
        "form": form,
        "domain": None if domain is None else [float(end) for end in domain],
        "objective": objective,
        "tails": tails,
        "levels": levels,
    }
    named = isinstance(function, str) and ":" not in function
    if named:
        found = _find_shipped(function, weight, parameters, request)
        if found is not None:
            return found
    from fewbit.solver.solve import solve
    from fewbit.solver.weight import make_weight

    weight = make_weight(weight)

    def solved():
        return solve(function, weight=weight, parameters=parameters, **request)

    document = weight.document()
    if not named or document["kind"] == "callable":
        return solved()
    resolved = functions.get(function, parameters)
    key = {
        "function": resolved.name,
        "parameters": dict(resolved.parameters),
        "weight": document,
        "version": __version__,
        **request,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    wanted = (resolved.name, dict(resolved.parameters), document, form, objective, tails)
    return _cached(cache_directory() / f"{resolved.name}-{digest}.json", solved, wanted)


def _find_shipped(function, weight, parameters, request):
    if request["domain"] is not None or request["levels"] is not None:
        return None
    wanted = {"uniform": {"kind": "uniform"}, "normal": {"kind": "normal", "mean": 0.0, "std": 1.0}}
    if not isinstance(weight, str) or weight not in wanted:
        return None
    asked = dict(functions.get(function, parameters).parameters)
    for table in shipped_tables(function):
        if (
            table.bits == request["bits"]
            and table.form == request["form"]
            and table.objective == request["objective"]
            and table.tails == request["tails"]
            and table.weight == wanted[weight]
            and table.parameters == asked
        ):
            return table
    return None


def _cached(path, solved, wanted):
    damaged = path.exists()
    if damaged:
        try:
            t = Table.load(path)
            if (t.function, t.parameters, t.weight, t.form, t.objective, t.tails) == wanted:
                return t
        except TableError:
            pass
    table = solved()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        table.save(path, force=damaged)
    except OutputExistsError:
        pass  # another process solved the same table at the same time
    except (OSError, FewbitError) as error:
        warnings.warn(f"the table was solved but not cached: {error}", stacklevel=3)
    return table
