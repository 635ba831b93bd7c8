"""Making the shipped tables: ``python -m fewbit.catalog.shipping [NAME ...]`` (``make tables``).

Every function at its default parameters, form ``levels`` at 1 to 8 bits under uniform and normal
weight, and form ``intervals`` (the paper's) at 1 to 4 bits under uniform weight.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace

from fewbit import functions
from fewbit.catalog.store import tables_directory
from fewbit.sizes import counted
from fewbit.solver.solve import solve
from fewbit.table import load_file, save_tables


def requests():
    """The keyword arguments of every table shipped for one function."""
    wanted = [("levels", "uniform", 8), ("levels", "normal", 8), ("intervals", "uniform", 4)]
    return [
        {"form": form, "weight": weight, "bits": bits}
        for form, weight, most in wanted
        for bits in range(1, most + 1)
    ]


def make(name, request):
    """One table as it is shipped: without the time it took."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # unbounded derivatives are documented where tables are used
        table = solve(name, **request)
    solver = {key: value for key, value in table.solver.items() if key != "seconds"}
    return replace(table, solver=solver)


def main(names):
    directory = tables_directory()
    for name in names or functions.names():
        name = functions.canonical(name)
        path = directory / f"{name}.json"
        tables = [make(name, request) for request in requests()]
        if path.exists():
            tables = _with_revisions(tables, load_file(path))
        save_tables(path, name, tables, force=True)
        print(f"{path.name}: {counted(len(tables), 'table')}", flush=True)


def _with_revisions(tables, shipped):
    """A table whose numbers changed gets the next revision; one that did not stays as shipped."""
    by_request = {(t.form, t.weight["kind"], t.bits): t for t in shipped}
    result = []
    for table in tables:
        old = by_request.get((table.form, table.weight["kind"], table.bits))
        if old is None:
            result.append(table)
        elif replace(table, revision=old.revision, solver=old.solver) == old:
            result.append(replace(table, revision=old.revision))
        else:
            result.append(replace(table, revision=old.revision + 1))
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
