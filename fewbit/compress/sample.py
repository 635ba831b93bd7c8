"""Forward passes with the example batch that `compress_` gets as `sample`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.utils._pytree import tree_map

from fewbit.analysis.gradients import shapes_of
from fewbit.analysis.meter import saved_in_call
from fewbit.analysis.saved_bytes import SavedBytes
from fewbit.analysis.unchanged import alone
from fewbit.convert.swap import name_before
from fewbit.errors import FewbitError, InputError
from fewbit.policies.budget import AverageOfBudget, SizeProbe
from fewbit.printable import one_line
from fewbit.runtime.saved.context import measuring


def check_sample(sample) -> None:
    """Raise InputError unless the sample is a tensor, a tuple, a mapping or None."""
    if sample is not None and not isinstance(sample, tuple | Mapping | torch.Tensor):
        raise InputError(
            "sample: expected a tensor, a tuple of positional inputs or a mapping of keyword inputs, "
            f"got {type(sample).__name__}"
        )


def saved_for(model: nn.Module, sample) -> SavedBytes:
    """Return what a forward pass of the sample saves, as `fewbit.saved_bytes` counts."""
    # If the sample is a slice of a larger tensor, `saved_bytes` would count the whole larger tensor.
    sample = tree_map(alone, sample)
    inputs = (sample,) if isinstance(sample, torch.Tensor) else sample
    named = inputs if isinstance(inputs, Mapping) else {}
    inputs = () if named else inputs
    return saved_in_call(model, inputs, named)


def try_sample(model: nn.Module, sample) -> None:
    """Run a forward pass of the sample. Raise InputError if it raises an error."""
    try:
        saved_for(model, sample)
    except (FewbitError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise InputError(
            f"sample: expected inputs of the model's forward, got {shapes_of(sample)}, for which it raises "
            f"{one_line(error)}"
        ) from error


def bytes_by_class(model: nn.Module, saved: SavedBytes) -> dict[str, int]:
    """Return {class name of modules before the conversion: bytes that they save}, without parameters and buffers."""
    sums = {}
    for entry in saved.kept:
        name = name_before(model, entry.module) or entry.module_type
        sums[name] = sums.get(name, 0) + entry.bytes
    return sums


def fit_of(model: nn.Module, sample, budget: int) -> AverageOfBudget:
    """Return how many bits per element of a forward pass of the sample fit `budget` bytes.

    `model` is converted and has a policy. Raises InputError if no bits may change.
    """
    sizes = SizeProbe()
    with measuring(sizes):
        exact = saved_for(model, sample).total
    return sizes.fit(budget, exact)
