"""Files with one table (schema fewbit.table/1), or with several tables of one function (fewbit.tables/1)."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fewbit import schema
from fewbit.errors import TableError
from fewbit.files import write_atomic
from fewbit.schema.documents import parse_json, read_text
from fewbit.table.checks import checked_function, wrong
from fewbit.table.table import (
    Table,
    build_table,
    check_against_schema,
    check_schema,
    format_json,
    read_table,
)


def load_file(path: str | os.PathLike) -> list[Table]:
    """Read the tables in a file of either schema.

    Raises:
        TableError: The file cannot be read or is not valid. The message starts with the path.
    """
    return loads(read_text(path, TableError), str(path))


def loads(text: str, where: str = "table") -> list[Table]:
    """Read the tables in JSON text of either schema. Error messages begin with `where`."""
    document = parse_json(text, f"{where}: ", TableError)
    if check_schema(document, f"{where}: ", (schema.TABLE, schema.TABLES)) == schema.TABLE:
        return [read_table(document, f"{where}: ")]
    check_against_schema(document, f"{where}: ", schema.TABLES)
    tables = [
        build_table(table, f"{where}: tables[{i}].") for i, table in enumerate(document["tables"])
    ]
    try:
        _check_same_function(document["function"], tables)
    except TableError as error:
        raise TableError(f"{where}: {error}") from None
    return tables


def dumps_tables(function: str, tables: Sequence[Table]) -> str:
    """Return several tables of one function as JSON text."""
    _check_same_function(checked_function(function), tables)
    listed = ",\n".join("    " + table.dumps().replace("\n", "\n    ") for table in tables)
    head = {"schema": schema.TABLES, "function": function}
    return (
        format_json(head)[: -len("\n}")]
        + ',\n  "tables": ['
        + (f"\n{listed}\n  " if listed else "")
        + "]\n}"
    )


def save_tables(
    path: str | os.PathLike, function: str, tables: Sequence[Table], force: bool = False
) -> None:
    """Write several tables of one function to a file, completely or not at all. Errors are those of `Table.save`."""
    write_atomic(path, dumps_tables(function, tables) + "\n", force=force)


def _check_same_function(function: str, tables: Sequence[Table]) -> None:
    for i, table in enumerate(tables):
        if table.function != function:
            raise wrong(f"tables[{i}].function", f'"{function}"', table.function)
