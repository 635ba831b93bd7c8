"""Entries "table": solved tables, shipped tables and what `verify` finds of them."""

from __future__ import annotations

from functools import partial

import numpy as np

from recorded import api

SOLVED = [
    *((name, bits, {}) for name in ("gelu", "silu", "tanh") for bits in (1, 2, 3, 4)),
    *((name, 2, {}) for name in ("mish", "selu", "softplus", "sigmoid", "hardswish")),
    ("gelu", 8, {"grid": 1024}),
    ("relu", 1, {}),
    ("elu", 2, {"parameters": {"alpha": 2.0}, "domain": (-5.0, 5.0)}),
    ("leaky_relu", 1, {"parameters": {"negative_slope": 0.2}}),
    ("numpy:arctan", 3, {"domain": (-8.0, 8.0)}),
    *(
        (name, 2, {"objective": objective, "tails": tails})
        for name in ("gelu", "tanh")
        for objective in ("mse", "unbiased", "minimax")
        for tails in ("free", "pinned")
        if (objective, tails) != ("mse", "free")
    ),
    ("gelu", 3, {"form": "intervals"}),
    ("silu", 2, {"form": "intervals", "tails": "pinned"}),
    ("gelu", 2, {"form": "intervals", "objective": "minimax"}),
    ("silu", 2, {"weight": "normal"}),
    ("silu", 2, {"weight": "normal:0.5,2"}),
    ("gelu", None, {"levels": 6, "tails": "pinned"}),
    ("gelu", 3, {"refine": False}),
    ("gelu", 2, {"grid": 999}),
    ("gelu", 9, {}),
    ("no such function", 2, {}),
    ("gelu", 2, {"objective": "unbiased", "form": "intervals"}),
]


def entries():
    """Yield (key, function that returns the answers)."""
    for name, bits, options in SOLVED:
        told = "".join(f", {option}={value}" for option, value in options.items())
        yield f"table/solved {name}, {bits} bits{told}", partial(_solved, name, bits, options)
    yield "table/solved for a sample", _fitted
    yield "table/functions", lambda: {"names": " ".join(api.table_functions())}
    for name in api.table_functions():
        yield f"table/shipped {name}", partial(_shipped, name)
        yield f"table/verified {name}", partial(_verified, name)
    yield "table/errors", lambda: dict(enumerate(api.error_table(["gelu", "silu"], (1, 2, 3))))


def _solved(name, bits, options):
    return _contents(api.solved(name, bits, **options))


def _fitted():
    sample = np.random.default_rng(0).normal(size=1000)
    return _contents(api.solved("gelu", 2, weight=sample))


def _shipped(name):
    found = {}
    for index, table in enumerate(api.shipped(name)):
        found |= {f"{index} {field}": value for field, value in _contents(table).items()}
    return found


def _verified(name):
    return dict(enumerate(api.verified(name)))


def _contents(table):
    """Return a table's document, and what the table gives for a row of numbers."""
    x = np.concatenate([np.linspace(-12, 12, 997), [-np.inf, np.inf, np.nan, 0.0, -0.0]])
    found = dict(api.document_of(table)) | {"values": table(x), "codes": table.code(x)}
    if table.objective == "unbiased":
        found["drawn"] = table.sample(x, 3)
    return found
