"""fewbit: train neural networks with a fraction of the activation memory.

Names are imported on first use. The offline half (`fewbit.solve`, `fewbit.Table`, the command line) therefore never imports
torch, and works without it.
"""

import gc
import importlib

from fewbit._version import __version__

_HOME = {
    "solve": "fewbit.solver.solve",
    "Table": "fewbit.table",
    "load_table": "fewbit.catalog.store",
    "shipped_tables": "fewbit.catalog.store",
    "error_table": "fewbit.catalog.error_table",
    "compare": "fewbit.catalog.comparison",
    "verify": "fewbit.catalog.verification",
    "saved_bytes": "fewbit.analysis.meter",
    "replace_activations_": "fewbit.compress.replace",
    "compress_": "fewbit.compress.compress",
    "restore_": "fewbit.convert.swap",
    "Controller": "fewbit.compress.controller",
    "BitConfig": "fewbit.config",
    "FixedBits": "fewbit.config",
    "SampleBits": "fewbit.config",
    "AdaptiveBits": "fewbit.config",
    "Budget": "fewbit.config",
    "ErrorBound": "fewbit.config",
    "PreActivationBits": "fewbit.config",
    "Level": "fewbit.config",
    "LayerSettings": "fewbit.config",
    "HostOffload": "fewbit.config",
    "variance_profile": "fewbit.analysis.variance_profile",
    "VarianceProfile": "fewbit.analysis.variance_profile",
    "plan": "fewbit.planning.plan",
    "TrainingPlan": "fewbit.planning.plan",
    "Candidate": "fewbit.planning.candidates",
    "FewbitError": "fewbit.errors",
    "FunctionError": "fewbit.errors",
    "WeightError": "fewbit.errors",
    "SolveError": "fewbit.errors",
    "TableError": "fewbit.errors",
    "InputError": "fewbit.errors",
    "GradientError": "fewbit.errors",
    "BoundWarning": "fewbit.errors",
    "OutputExistsError": "fewbit.errors",
    "CELU": "fewbit.nn",
    "ClippedGELU": "fewbit.nn",
    "ELU": "fewbit.nn",
    "FastGELU": "fewbit.nn",
    "GELU": "fewbit.nn",
    "Hardshrink": "fewbit.nn",
    "Hardsigmoid": "fewbit.nn",
    "Hardswish": "fewbit.nn",
    "Hardtanh": "fewbit.nn",
    "Laplace": "fewbit.nn",
    "LeakyReLU": "fewbit.nn",
    "LogSigmoid": "fewbit.nn",
    "Mish": "fewbit.nn",
    "Pointwise": "fewbit.nn",
    "QuickGELU": "fewbit.nn",
    "RReLU": "fewbit.nn",
    "ReLU": "fewbit.nn",
    "ReLU6": "fewbit.nn",
    "ReLUSquared": "fewbit.nn",
    "SELU": "fewbit.nn",
    "SiLU": "fewbit.nn",
    "Sigmoid": "fewbit.nn",
    "Softplus": "fewbit.nn",
    "Softshrink": "fewbit.nn",
    "Softsign": "fewbit.nn",
    "SqrtSoftplus": "fewbit.nn",
    "Tanh": "fewbit.nn",
    "Tanhshrink": "fewbit.nn",
    "Threshold": "fewbit.nn",
}
_PACKAGES = {"functional", "nn"}

__all__ = ["__version__", *sorted(_PACKAGES), *sorted(_HOME)]


def __getattr__(name):
    if name not in _HOME and name not in _PACKAGES:
        raise AttributeError(f"module 'fewbit' has no attribute {name!r}")
    # Imports leave no garbage, and a collection that scans all of torch's objects takes as long as the import.
    collects = gc.isenabled()
    gc.disable()
    try:
        if name in _PACKAGES:
            return importlib.import_module(f"fewbit.{name}")
        value = getattr(importlib.import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"fewbit.{name} needs torch: pip install torch") from None
    finally:
        if collects:
            gc.enable()
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *_HOME, *_PACKAGES})
