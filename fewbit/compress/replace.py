"""`replace_activations_`: a model's activation modules, and nothing else, become few-bit ones."""

from __future__ import annotations

from torch import nn

from fewbit.config import check_bits
from fewbit.convert import kinds
from fewbit.convert.report import Report
from fewbit.convert.select import Filter, Selection
from fewbit.convert.settings import ResolvedSettings
from fewbit.convert.swap import convert
from fewbit.convert.undo import whole_or_not_at_all


@whole_or_not_at_all
def replace_activations_(
    model: nn.Module,
    bits: int = 3,
    *,
    include: Filter = "*",
    exclude: Filter = (),
    verbose: bool = True,
) -> Report:
    """Make the activation modules of torch.nn and transformers save `bits` bits per element, in place.

    All other modules stay as they are, and so do functions that a forward calls. Activations whose derivative has two
    values save 1 bit, which is exact.

    Args:
        model: the model, which changes in place.
        bits: a whole number from 1 to 8.
        include: the modules that change, as for `compress_`.
        exclude: the modules that stay, as for `compress_`.
        verbose: print the report.

    Returns:
        The report.

    Raises:
        InputError: `bits` cannot be used, the model is not a module, or a glob matches no module. The model stays unchanged.
    """
    check_bits(bits)
    settings = ResolvedSettings(activation_bits=bits, families=(kinds.ACTIVATION,))
    report = convert(model, settings, Selection(include, exclude)).report
    if verbose:
        from rich.console import Console

        Console().print(report)
    return report
