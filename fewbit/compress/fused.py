"""What fuse="preactivation" comes to in a model: norms in fixed point, and the layers that keep nothing beside them."""

from __future__ import annotations

from torch import nn

from fewbit.analysis.saved_bytes import STATE, SavedBytes
from fewbit.convert.report import ConvertedModule
from fewbit.convert.transformers_modules import _Conv1D
from fewbit.nn import LeakyReLU, ReLU
from fewbit.nn.preactivation import LINEAR, NORMS
from fewbit.sizes import counted

FOLLOWING = (*LINEAR.values(), _Conv1D, ReLU, LeakyReLU)
"""Layers that find what a norm has kept."""


def note(model: nn.Module) -> str:
    """What the report says of the norms."""
    count = counted(len(_norms(model)), "norm")
    return f"pre-activations: {count} in fixed point, shared with the layers that follow"


def shared(model: nn.Module, rows, saved: SavedBytes | None = None) -> tuple[ConvertedModule, ...]:
    """The rows with `shared` said of layers that may follow a norm.

    saved: what a forward of the converted model in training has kept; None: only running it would show.
    """
    norms = _norms(model)
    entries = {}
    for entry in () if saved is None else saved.entries:
        if entry.kind not in STATE:
            entries.setdefault(entry.module, []).append(entry)

    def told(row):
        if not isinstance(model.get_submodule(row.path), FOLLOWING):
            return row
        kept = entries.get(row.path)
        if kept is None:  # not run, or it had nothing to keep
            return row._replace(shared=None if norms else False)
        return row._replace(shared=all(each.first_saver in norms for each in kept))

    return tuple(told(row) for row in rows)


def _norms(model) -> set[str]:
    """Paths."""
    return {
        path
        for path, module in model.named_modules()
        if isinstance(module, tuple(NORMS.values()))
        and module.quantizer.fuse
        and module.copies == 1
    }
