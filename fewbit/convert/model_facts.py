"""The facts about a converted model from which a policy starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from fewbit.convert import kinds
from fewbit.convert.function_mode import ACTIVATIONS, QUANTIZED, name_of_call
from fewbit.convert.select import Selected
from fewbit.convert.swap import is_converted, name_of_attention
from fewbit.nn.base import Quantized
from fewbit.runtime.activations.recomputed import TWO_VALUED


@dataclass(frozen=True)
class ModelFacts:
    """The names of a model's layers, the bits that a policy must not change, and the average with which it starts.

    Attributes:
        names: all names under which quantized tensors may be saved: of layers, functions that modules call, and attention.
        channels: {name: number of channels}, for layers whose input has channels in dimension 1.
        chosen_activations: the names of few-bit activations whose bits the policy chooses.
        given_activations: {name: bits} of the other few-bit activations.
        average: the average bits per element with which the policy starts.
        budget: the budget in bytes from which `average` was computed, or None.
        elements: {slot's name: number of elements}, for the tensors among which the budget is divided, or None.
    """

    names: tuple[str, ...]
    channels: Mapping[str, int]
    chosen_activations: tuple[str, ...]
    given_activations: Mapping[str, int]
    average: float
    budget: int | None = None
    elements: Mapping[tuple[str, int], int] | None = None


def facts_of(
    model: nn.Module,
    selected: list[Selected],
    average: float,
    budget: int | None = None,
    elements: Mapping[tuple[str, int], int] | None = None,
) -> ModelFacts:
    """Return the facts about a converted model, with arguments as in `ModelFacts`."""
    chosen, given = _activations(selected)
    return ModelFacts(_names(model), _channels(model), chosen, given, average, budget, elements)


def _names(model: nn.Module) -> tuple[str, ...]:
    names = []
    for path, _ in model.named_modules():
        names += [path, name_of_attention(path)]
        names += [name_of_call(path, function) for function in (*QUANTIZED, *ACTIVATIONS)]
    return tuple(names)


def _channels(model: nn.Module) -> dict[str, int]:
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, Quantized):
            for name in ("in_channels", "num_features", "num_channels"):
                count = getattr(module, name, None)
                if isinstance(count, int):
                    found[path] = count
    return found


def _activations(selected: list[Selected]) -> tuple[tuple[str, ...], dict[str, int]]:
    chosen, given = [], {}
    for path, module, attribute, settings in selected:
        if settings is None:
            continue
        bits, held = {}, module if attribute is None else getattr(module, attribute)
        if kinds.is_activation(type(held)):
            if is_converted(held):  # otherwise the user made the activation and gave its bits
                bits = {path: held.bits}
        elif attribute is None and settings.functional and kinds.may_call(module):
            bits = {
                name_of_call(path, function): 1
                if function in TWO_VALUED
                else settings.activation_bits
                for function in ACTIVATIONS
            }
        if settings.chooses_activation_bits:
            chosen += bits
        else:
            given |= bits
    return tuple(chosen), given
