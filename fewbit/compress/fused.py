"""The part of the report that only PreActivationBits has: which layers use a norm's fixed-point copy."""

from __future__ import annotations

from torch import nn

from fewbit.analysis.saved_bytes import STATE, SavedBytes
from fewbit.convert.conversion_report import ConvertedModule
from fewbit.convert.transformers_modules import Conv1D
from fewbit.nn import LeakyReLU, ReLU
from fewbit.nn.preactivation import LINEAR, NORMS
from fewbit.sizes import counted

FOLLOWING = (*LINEAR.values(), Conv1D, ReLU, LeakyReLU)
"""The layers that can restore their input from the tensor that a norm saved."""


def note(model: nn.Module) -> str:
    """Return the report's line with the number of norms that save their input in fixed point."""
    norms = _norms(model)
    if not norms:
        return (
            "no batch or layer norm is converted: unless the model calls F.batch_norm or F.layer_norm, it saves the "
            "same as with FixedBits"
        )
    return f"pre-activations: {counted(len(norms), 'norm')} in fixed point, shared with the layers that follow"


def shared(model: nn.Module, rows, saved: SavedBytes | None = None) -> tuple[ConvertedModule, ...]:
    """Return the rows of the report with `ConvertedModule.shared`, from what a forward pass `saved`, if there was one."""
    norms = _norms(model)
    entries = {}
    for entry in () if saved is None else saved.entries:
        if entry.kind not in STATE:
            entries.setdefault(entry.module, []).append(entry)

    def marked(row):
        if not isinstance(model.get_submodule(row.path), FOLLOWING):
            return row
        found = entries.get(row.path)
        if found is None:  # the module did not run, or had nothing to save
            return row._replace(shared=None if norms else False)
        return row._replace(shared=all(entry.first_saver in norms for entry in found))

    return tuple(marked(row) for row in rows)


def _norms(model) -> set[str]:
    return {
        path
        for path, module in model.named_modules()
        if isinstance(module, tuple(NORMS.values()))
        and module.quantizer.fuse
        and module.copies == 1
    }
