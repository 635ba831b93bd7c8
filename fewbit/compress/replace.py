"""Turning a model's activation modules, and nothing else, into few-bit ones."""

from __future__ import annotations

from torch import nn

from fewbit.compress.convert import Filter, Settings, convert
from fewbit.convert import kinds
from fewbit.convert.report import Report
from fewbit.convert.undo import whole_or_not_at_all
from fewbit.runtime.activations.tables import check_bits


@whole_or_not_at_all
def replace_activations_(
    model: nn.Module,
    bits: int = 3,
    *,
    include: Filter = "*",
    exclude: Filter = (),
    verbose: bool = True,
) -> Report:
    """Make the activation modules of torch.nn and transformers keep `bits` bits an element, in place.

    What `compress_` does to activations, alone: see there for what stays and for include and exclude. Functions
    whose derivative has two values keep 1 bit, which is exact. Activations that a forward calls as functions are
    not seen. verbose: print the report. Returns the report.

    Raises InputError for bad bits, a model that is not a module, or a glob that no module matches. If the
    conversion does not complete, the model stays unchanged.
    """
    check_bits(bits)
    settings = Settings(activation_bits=bits, families=(kinds.ACTIVATION,))
    report = convert(model, settings, include, exclude).report
    if verbose:
        from rich.console import Console

        Console().print(report)
    return report
