"""The table, a step function q that replaces the derivative f' of an activation function f, and its JSON document.

The levels are the values of q, the breaks are the points at which q changes, and the pieces are the intervals between breaks. The code of
a piece is the index of its level. docs/reference/table_schema.md describes every field and the exact arithmetic.

This folder may import the files in the root of the package, `fewbit.schema`, `fewbit.functions` and `fewbit.render`, and not torch. It
neither solves tables nor searches for them.
"""

from fewbit.table import philox
from fewbit.table.checks import (
    FLOAT32_MAX,
    FORMS,
    MOST_BINS,
    MOST_CHARACTERS,
    MOST_COUNT,
    MOST_PIECES,
    OBJECTIVES,
    TAILS,
)
from fewbit.table.describe import describe, describe_function, describe_weight
from fewbit.table.files import dumps_tables, load_file, loads, save_tables
from fewbit.table.knots import Knots, locate, lower_pieces, round_breaks
from fewbit.table.table import Table

__all__ = [
    "FLOAT32_MAX",
    "FORMS",
    "MOST_BINS",
    "MOST_CHARACTERS",
    "MOST_COUNT",
    "MOST_PIECES",
    "OBJECTIVES",
    "TAILS",
    "Knots",
    "Table",
    "describe",
    "describe_function",
    "describe_weight",
    "dumps_tables",
    "load_file",
    "loads",
    "locate",
    "lower_pieces",
    "philox",
    "round_breaks",
    "save_tables",
]
