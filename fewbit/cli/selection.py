"""The tables that the argument NAME|FILE and the options of a command select."""

from __future__ import annotations

from fewbit.cli.options import given, is_file
from fewbit.cli.progress_bar import Progress
from fewbit.errors import FewbitError, FunctionError, TableError


def select_tables(source, request, function, several):
    """Return the tables that the user selects.

    `request` has the options that describe a table, and `function` is `package.module:name` for a file's tables of a
    function that is not built in.

    Raises:
        FewbitError: No table is selected, or more than one although `several` is false.
    """
    if is_file(source):
        tables = _tables_in_file(source, request, function)
    elif function is not None:
        raise FewbitError(f"{source}: expected a FILE with --function, got the name of a function")
    elif request["bits"] is None and request["levels"] is None:
        tables = _shipped_tables(source, request, several)
    else:
        from fewbit.catalog.store import load_table

        with Progress():
            tables = [load_table(source, **given(**request))]
    if len(tables) > 1 and not several:
        raise FewbitError(
            f"{source}: expected one table, got {len(tables)}; choose by --bits, --form and --weight"
        )
    return tables


def _tables_in_file(path, request, function):
    from fewbit.sizes import counted
    from fewbit.table import load_file

    tables = load_file(path)
    chosen = _matching(tables, request)
    if not chosen:
        raise TableError(f"{path}: of its {counted(len(tables), 'table')} none matches the options")
    if function is None:
        return chosen
    return [
        table if table.activation is not None else table.with_activation(function)
        for table in chosen
    ]


def _shipped_tables(name, request, several):
    from fewbit.catalog.store import shipped_tables

    if not several:
        raise FewbitError(f"{name}: expected --bits with the name of a function")
    tables = [] if ":" in name else _matching(shipped_tables(name), request)
    if not tables:
        raise FunctionError(f"{name}: no such table is shipped; with --bits it is solved")
    return tables


def _matching(tables, request):
    request = given(**request)
    if "weight" in request:
        from fewbit.solver.weight import make_weight

        request["weight"] = make_weight(request["weight"]).document()
    return [table for table in tables if all(_has(table, *option) for option in request.items())]


def _has(table, name, value):
    if name == "levels":
        return len(table.levels) == value
    if name == "parameters":
        return all(table.parameters.get(key) == number for key, number in value.items())
    return getattr(table, name) == value
