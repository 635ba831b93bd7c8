"""The list of built-in functions and their shipped tables."""

from __future__ import annotations

import json
import math

from fewbit import functions
from fewbit.catalog import store
from fewbit.render.result import Result
from fewbit.render.view import Column, View


class FunctionList(Result):
    """The list of all built-in functions f."""

    def records(self) -> list[dict]:
        """Return a dict for each function. Infinite limits of f' are strings."""
        names = (*functions.names(), *functions.solver_names())
        return [_record(functions.get(name)) for name in names]

    def view(self) -> View:
        columns = (
            Column("function", lambda record: record["function"], "word"),
            Column(
                "domain", lambda record: "[{:g}, {:g}]".format(*record["domain"]), "word", drop=1
            ),
            Column("slopes", lambda record: _slopes(record["slopes"]), "word", drop=2),
            Column("shipped", lambda record: format_ranges(record["shipped_bits"]), "word"),
            Column("parameters, aliases", _parameters_and_aliases, "text", least=24),
        )
        notes = (
            "identity: f(x) = x. Its derivative is 1.",
            "value: f(x) = x^2 / 2. Its derivative is x, so its tables are quantizers of x.",
        )
        return View("", columns, self.records(), notes)


def _slopes(slopes):
    return ", ".join(slope if isinstance(slope, str) else f"{slope:.4g}" for slope in slopes)


def _parameters_and_aliases(record):
    parts = [f"{name}={value:g}" for name, value in record["parameters"].items()]
    parts += [f"alias {', '.join(record['aliases'])}"] if record["aliases"] else []
    return "; ".join(parts)


def format_ranges(numbers):
    """Format ascending integers such as [1, 2, 3, 5] as `1-3,5`, and none as a dash."""
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
    """Return the bits of the shipped tables of form "levels", without validation, to save time."""
    try:
        text = (store.tables_directory() / f"{name}.json").read_text(encoding="utf-8")
        tables = json.loads(text)["tables"]
        return sorted({table["bits"] for table in tables if table["form"] == "levels"})
    except (OSError, ValueError, LookupError, TypeError):
        return []
