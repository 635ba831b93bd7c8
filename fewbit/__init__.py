"""fewbit: train neural networks with a fraction of the activation memory.

Names are imported on first use, so that the offline half (``fewbit.solve``, ``fewbit.Table``, the
command line) never imports torch and works where torch is not installed.
"""

import importlib

from fewbit._version import __version__

_HOME = {
    "solve": "fewbit.solver.solve",
    "Table": "fewbit.table",
    "load_table": "fewbit.store",
    "shipped_tables": "fewbit.store",
    "error_table": "fewbit.report",
    "compare": "fewbit.report",
    "verify": "fewbit.verify",
    "FewbitError": "fewbit.errors",
    "FunctionError": "fewbit.errors",
    "WeightError": "fewbit.errors",
    "SolveError": "fewbit.errors",
    "TableError": "fewbit.errors",
    "OutputExistsError": "fewbit.errors",
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module 'fewbit' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *_HOME})
