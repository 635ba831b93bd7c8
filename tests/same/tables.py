"""Questions about functions, shipped tables and solved tables."""

from __future__ import annotations

from functools import partial

import numpy as np

import fewbit
from fewbit import functions

X = np.concatenate([np.linspace(-12, 12, 997), [-np.inf, np.inf, np.nan, 0.0, -0.0]])
SOLVED = [
    ("gelu", {"bits": 3}),
    ("silu", {"bits": 4}),
    ("hardswish", {"bits": 2}),
    ("relu", {"bits": 1}),
    ("selu", {"bits": 2, "objective": "minimax"}),
    ("tanh", {"bits": 2, "objective": "unbiased"}),
    ("gelu", {"bits": 2, "objective": "unbiased", "tails": "pinned"}),
    ("mish", {"bits": 2, "tails": "pinned"}),
    ("gelu", {"bits": 3, "form": "intervals"}),
    ("silu", {"bits": 2, "form": "intervals", "tails": "pinned"}),
    ("softplus", {"bits": 2, "domain": (-3, 1)}),
    ("elu", {"bits": 2, "parameters": {"alpha": 2.0}}),
    ("silu", {"bits": 2, "weight": "normal:0.5,2"}),
    ("gelu", {"bits": 2, "weight": ([-1.0, 0.0, 2.0], [1.0, 3.0])}),
    ("gelu", {"levels": 6}),
    ("gelu", {"bits": 3, "refine": False, "grid": 999}),
    ("numpy:arctan", {"bits": 3, "domain": (-8, 8)}),
]


def questions():
    """Yield (key, function that returns the answer)."""
    for name in functions.names():
        yield f"function/{name}", partial(_function, name)
    for name in [*functions.names(), *functions.solver_names()]:
        yield f"table/shipped {name}", partial(_shipped, name)
    for name, request in SOLVED:
        yield f"table/solved {name}, {request}", partial(_solved, name, request)


def _function(name):
    function, x = functions.get(name), X[:997]
    return {"values": function.value(x), "slopes": function.derivative(x), "kinks": function.kinks}


def _shipped(name):
    return {number: _contents(table) for number, table in enumerate(fewbit.shipped_tables(name))}


def _solved(name, request):
    return _contents(fewbit.solve(name, threads=1, **request))


def _contents(table):
    """Return a table's document, and what the table gives for a row of numbers."""
    found = table.document() | {"values": table(X), "codes": table.code(X)}
    return found | ({"drawn": table.sample(X, 3)} if table.objective == "unbiased" else {})
