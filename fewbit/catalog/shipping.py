"""Make the shipped tables: `python -m fewbit.catalog.shipping [NAME ...]` (`make tables`).

Every activation function has tables of form "levels" with 1 to 8 bits and uniform and normal weight, and of form "intervals" with 1 to 4 bits
and uniform weight. `value`, which is no activation, has those of form "levels" with normal weight.
"""

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
    """Return the keyword arguments of `solve` for every table that is shipped for a function.

    Args:
        name: The canonical name of the function.
    """
    wanted = [("levels", "uniform", 8), ("levels", "normal", 8), ("intervals", "uniform", 4)]
    if name in functions.solver_names():
        wanted = [("levels", "normal", 8)]
    return [
        {"form": form, "weight": weight, "bits": bits}
        for form, weight, most in wanted
        for bits in range(1, most + 1)
    ]


def make(name, request):
    """Solve one table for shipping. The solver's seconds are removed, because they differ from run to run.

    Args:
        name: The name of the function.
        request: Keyword arguments of `solve`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about unbounded derivatives
        table = solve(name, **request)
    solver = {key: value for key, value in table.solver.items() if key != "seconds"}
    table = replace(table, solver=solver)
    return symmetric(table) if name in functions.solver_names() else table


def symmetric(table):
    """Return a table of an odd derivative and a symmetric weight, with levels and breaks that are symmetric about 0 to the last bit.

    The solver's levels deviate from symmetry by about 1e-12, and the error by about the square of that. The lower bound holds for all tables.
    """

    def odd(numbers):
        return 0.5 * (numbers - np.flip(numbers))

    return replace(table, levels=odd(table.levels), breaks=odd(table.breaks))


def main(names):
    """Make the tables of the named functions, or of all functions if `names` is empty, and write one file for each."""
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
    """Return the tables with revisions: that of the shipped table, plus 1 if the table's numbers changed."""
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
