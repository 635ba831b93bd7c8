"""fewbit: train neural networks with a fraction of the activation memory.

Names are imported when they are first used, so designing tables needs no torch.
"""

import gc
import importlib

from fewbit._version import __version__ as __version__

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
    "checkpoint": "fewbit.checkpointing",
    "checkpoint_": "fewbit.checkpointing",
    "uncheckpoint_": "fewbit.checkpointing",
    "chunk_loss_": "fewbit.convert.chunked_loss",
    "unchunk_loss_": "fewbit.convert.chunked_loss",
    "compile": "fewbit.compiler.compiling",
    "compile_blocks_": "fewbit.compiler.compiling",
    "partition_fn": "fewbit.compiler.compiling",
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
    "fits": "fewbit.planning.fits",
    "Fit": "fewbit.planning.fits_result",
    "fit_": "fewbit.planning.fit",
    "FastestFit": "fewbit.planning.fastest_fit",
    "FewbitError": "fewbit.errors",
    "FunctionError": "fewbit.errors",
    "WeightError": "fewbit.errors",
    "SolveError": "fewbit.errors",
    "TableError": "fewbit.errors",
    "InputError": "fewbit.errors",
    "GradientError": "fewbit.errors",
    "BoundWarning": "fewbit.errors",
    "CompileWarning": "fewbit.errors",
    "OutputExistsError": "fewbit.errors",
    "Pointwise": "fewbit.nn",
}
_PACKAGES = {"functional", "nn"}


def _names():
    """Return all public names, with those of activation modules from the registry of functions."""
    return ["__version__", *sorted(_PACKAGES), *sorted([*_HOME, *_activations()])]


def _activations():
    return importlib.import_module("fewbit.functions").modules()


def __getattr__(name):
    if name == "__all__":
        return _names()
    home = _HOME.get(name)
    # The names of modules begin with a capital; looking up any other name must not import the registry.
    if home is None and name[:1].isupper() and name in _activations():
        home = "fewbit.nn"
    if home is None and name not in _PACKAGES:
        raise AttributeError(f"module 'fewbit' has no attribute {name!r}")
    # Imports leave no garbage, and a garbage collection that scans torch's objects takes as long as the import.
    collects = gc.isenabled()
    gc.disable()
    try:
        from fewbit.extras import needed_for

        with needed_for(f"fewbit.{name}"):
            if name in _PACKAGES:
                return importlib.import_module(f"fewbit.{name}")
            value = getattr(importlib.import_module(home), name)
    finally:
        if collects:
            gc.enable()
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *_names()})
