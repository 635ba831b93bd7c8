"""The list of built-in functions: parameters, aliases, domains, slopes and shipped tables."""

from __future__ import annotations

import json
import math

from fewbit import functions
from fewbit.catalog import store


class FunctionList:
    """All built-in functions, as records and as a table for the terminal."""

    def records(self):
        """Return a dict for each function, which JSON can represent. Infinite slopes are strings."""
        return [_record(functions.get(name)) for name in functions.names()]

    def __rich_console__(self, console, options):
        from rich.text import Text

        from fewbit.catalog.report import new_grid

        grid = new_grid()
        for column in ("function", "domain", "slopes", "shipped", "parameters, aliases"):
            grid.add_column(column, no_wrap=column != "parameters, aliases")
        for record in self.records():
            low, high = record["domain"]
            slopes = (s if isinstance(s, str) else f"{s:.4g}" for s in record["slopes"])
            more = [f"{name}={value:g}" for name, value in record["parameters"].items()]
            more += [f"alias {', '.join(record['aliases'])}"] if record["aliases"] else []
            cells = (
                record["function"],
                f"[{low:g}, {high:g}]",
                ", ".join(slopes),
                format_ranges(record["shipped_bits"]),
                "; ".join(more),
            )
            grid.add_row(*map(Text, cells))
        yield grid


def format_ranges(numbers):
    """Format ascending integers such as [1, 2, 3, 5] as `1-3,5`, and an empty list as a dash."""
    runs = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs) or "-"


def _record(function):
    names = functions.aliases().items()
    return {
        "function": function.name,
        "parameters": dict(function.parameters),
        "aliases": [alias for alias, name in names if name == function.name],
        "domain": list(function.domain),
        # JSON has no infinity.
        "slopes": [s if math.isfinite(s) else f"{s:g}" for s in function.slopes],
        "kinks": list(function.kinks),
        "shipped_bits": _shipped_bits(function.name),
        "reference": function.reference,
    }


def _shipped_bits(name):
    """Return the bits of the shipped tables of form levels. The files are not validated, so that the list is fast."""
    try:
        text = (store.tables_directory() / f"{name}.json").read_text(encoding="utf-8")
        tables = json.loads(text)["tables"]
        return sorted({table["bits"] for table in tables if table["form"] == "levels"})
    except (OSError, ValueError, LookupError, TypeError):
        return []
