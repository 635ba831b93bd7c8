"""The table, a step function q that replaces the derivative f' of an activation function f, and its JSON document.

docs/reference/table_schema.md describes every field and the exact arithmetic.
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
from fewbit.table.knots import Knots, locate, lower_pieces, round_breaks
from fewbit.table.table import Table
from fewbit.table.table_files import dumps_tables, load_file, loads, save_tables

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
