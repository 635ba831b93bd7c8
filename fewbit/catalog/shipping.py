"""Make the shipped tables: `python -m fewbit.catalog.shipping [NAME ...]` (`make tables`)."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace

import numpy as np

from fewbit import functions
from fewbit.catalog.store import tables_directory
from fewbit.sizes import counted
from fewbit.solver.solve import solve
from fewbit.table import load_file, save_tables


def requests(name):
    """Return the arguments of `solve` for every shipped table of a function."""
    wanted = [("levels", "uniform", 8), ("levels", "normal", 8), ("intervals", "uniform", 4)]
    if name in functions.solver_names():
        wanted = [("levels", "normal", 8)]
    return [
        {"form": form, "weight": weight, "bits": bits}
        for form, weight, most in wanted
        for bits in range(1, most + 1)
    ]


def make(name, request):
    """Solve one table without the seconds, which differ from run to run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about unbounded derivatives
        table = solve(name, **request)
    solver = {key: value for key, value in table.solver.items() if key != "seconds"}
    table = replace(table, solver=solver)
    return symmetric(table) if name in functions.solver_names() else table


def symmetric(table):
    """Return a table of an odd f' and a symmetric weight, made symmetric to the last bit.

    The solver's levels deviate from symmetry by about 1e-12, the error by its square.
    """

    def odd(numbers):
        return 0.5 * (numbers - np.flip(numbers))

    return replace(table, levels=odd(table.levels), breaks=odd(table.breaks))


def main(names):
    """Make and write the tables of the named functions, or of all."""
    directory = tables_directory()
    for name in names or (*functions.names(), *functions.solver_names()):
        name = functions.canonical(name)
        path = directory / f"{name}.json"
        tables = [make(name, request) for request in requests(name)]
        if path.exists():
            tables = _with_revisions(tables, load_file(path))
        save_tables(path, name, tables, force=True)
        print(f"{path.name}: {counted(len(tables), 'table')}", flush=True)


def _with_revisions(tables, shipped):
    by_request = {_described(table): table for table in shipped}
    result = []
    for table in tables:
        old = by_request.get(_described(table))
        if old is None:
            result.append(table)
        elif replace(table, revision=old.revision, solver=old.solver) == old:
            result.append(replace(table, revision=old.revision))
        else:
            result.append(replace(table, revision=old.revision + 1))
    return result


def _described(table):
    return table.form, table.objective, table.weight["kind"], table.bits


if __name__ == "__main__":
    main(sys.argv[1:])
