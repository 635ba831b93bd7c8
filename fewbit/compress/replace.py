"""The function `replace_activations_`, which converts activation modules and nothing else."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fewbit.config import ACTIVATION_BITS, check_bits, check_verbose
from fewbit.convert import kinds
from fewbit.convert.conversion_report import Report
from fewbit.convert.module_settings import ResolvedSettings
from fewbit.convert.select import Filter, Selection
from fewbit.convert.swap import convert
from fewbit.convert.undo import whole_or_not_at_all
from fewbit.render import terminal


@whole_or_not_at_all
def replace_activations_(
    model: nn.Module,
    bits: int = ACTIVATION_BITS,
    *,
    include: Filter = "*",
    exclude: Filter = (),
    verbose: bool = True,
) -> Report:
    """Make the activation modules of torch.nn and transformers save `bits` bits per element, in place. Return the report.

    Activations whose derivative has only two values, such as ReLU, save 1 bit, which is exact.

    Args:
        model: the model, which changes in place.
        bits: the bits of the code that an activation saves for each element, a whole number from 1 to 8.
        include: the modules to convert, as in `fewbit.compress_`.
        exclude: the modules to leave as they are, in the same form.
        verbose: whether to print the report.

    Raises:
        InputError: `bits` or `verbose` cannot be used, the model is not a module, or a pattern matches no module.
    """
    check_bits(bits)
    check_verbose(verbose)
    settings = ResolvedSettings(activation_bits=bits, families=(kinds.ACTIVATION,))
    report = convert(model, settings, Selection(include, exclude)).report
    if not (report.converted or report.left_alone):
        note = "no activation of torch.nn or transformers was found; fewbit.Pointwise applies one of your own"
        report = replace(report, notes=(note,))
    if verbose:
        terminal.show(report)
    return report
