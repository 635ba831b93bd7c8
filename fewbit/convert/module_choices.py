"""The choice of what each selected module becomes. Nothing changes here: `swap.convert` applies the choices."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from fewbit.convert import kinds
from fewbit.convert.conversion_report import SkippedModule
from fewbit.convert.select import Selected
from fewbit.nn.base import Quantized
from fewbit.nn.preactivation import PreActivation

ORIGINAL = "_fewbit_original"
"""The attribute of a converted module that says what it was (`swap.Original`)."""


class Change(NamedTuple):
    """A module that gets a class of fewbit, or only new settings if `kind` is None.

    Attributes:
        selected: the module, or the activation function that it has as an attribute, and its settings.
        held: the module, or a new one that takes the function's place.
        kind: what the class becomes.
        name: what the report calls it.
    """

    selected: Selected
    held: nn.Module
    kind: kinds.Kind | None
    name: str


class Joining(NamedTuple):
    """A module that its user made from a class of fewbit. It keeps its settings, and shares copies with the converted ones."""

    selected: Selected


Choice = Change | Joining | SkippedModule


def choices_for(model: nn.Module, selected: list[Selected], whole: bool) -> list[Choice]:
    """Choose what becomes of each module. Nothing changes yet."""
    fused = {
        id(child)
        for module in model.modules()
        if isinstance(module, PreActivation)
        for child in module.children()
    }
    found = [_choice(one, whole) for one in selected if id(one.module) not in fused]
    return [choice for choice in found if choice is not None]


def _choice(selected: Selected, whole: bool) -> Choice | None:
    """Choose what becomes of a module, of an activation only unless `whole`. None: the report does not name the module."""
    path, module, attribute, settings = selected
    if attribute is None and kinds.is_fewbit(module):
        return _choice_again(selected, whole)
    held = kinds.FUNCTIONS[getattr(module, attribute)]() if attribute else module
    name = type(module).__name__ if attribute is None else getattr(module, attribute).__name__
    kind = kinds.kind_of(held)
    if kind is None:
        return _left_alone(selected, name, whole)
    if kind.family == kinds.RECURRENT and not (settings is not None and settings.everything):
        return SkippedModule(path, name, kinds.LEFT_ALONE[nn.LSTM]) if whole else None
    if settings is None:
        return SkippedModule(path, name, "excluded")
    if kind.family not in settings.families:
        return None
    reason = kinds.replaced(held)
    if reason is not None:
        return SkippedModule(path, name, reason)
    return Change(selected, held, kind, name if attribute is None else f"{name} (function)")


def _left_alone(selected: Selected, name: str, whole: bool) -> SkippedModule | None:
    path, module, _, settings = selected
    if not (whole or isinstance(module, tuple(kinds.ACTIVATIONS))):
        return None
    everything = (
        settings is not None and settings.make_graph_settings(kinds.is_cell(module)) is not None
    )
    functional = settings is not None and settings.functional
    reason = kinds.why_not(module, everything, functional)
    if not reason:
        return None
    calls_functions = not everything and ("subclass" in reason or "no few-bit" in reason)
    if calls_functions and kinds.may_call(module) and functional:
        reason += "; functions that it calls are compressed"
    return SkippedModule(path, name, reason)


def _choice_again(selected: Selected, whole: bool) -> Choice | None:
    _, module, _, settings = selected
    if isinstance(module, Quantized):
        return Joining(selected) if whole else None
    original = vars(module).get(ORIGINAL)
    if original is None or settings is None or isinstance(module, PreActivation):
        return few_bit_already(selected)
    return Change(selected, module, None, original.cls.__name__)


def few_bit_already(selected: Selected) -> SkippedModule:
    """Return the report's row of a module that its user made from a class of fewbit."""
    path, module = selected[:2]
    what = repr(module)
    if isinstance(module, PreActivation):
        what = f"one tensor of {module.bits} bits an element"
    return SkippedModule(path, type(module).__name__, f"few-bit already: {what}")
