"""Layers that keep something of which no observation knows, so that their bits are not chosen: which, and why.

Only of this process, and no part of a state.
"""

from __future__ import annotations

from collections.abc import Container

from torch import nn

from fewbit.analysis.meter import is_compiled
from fewbit.runtime.saved.assignment import ALONE, COMPILED, REENTRANT

FORGOTTEN = 8
"""Observations after which a variable that is not met any more is forgotten."""
WHY = {
    COMPILED: "inside torch.compile",
    REENTRANT: "in a checkpoint with use_reentrant=True; use use_reentrant=False",
    ALONE: "called by themselves, outside of a forward of the model",
}


class Unobserved:
    """What was told. What is compiled is told once, when it is traced; the rest holds for FORGOTTEN observations."""

    def __init__(self):
        self._compiled: set[str] = set()
        self._told: dict[str, tuple[str, int]] = {}  # why, and at which observation
        self._observation = 0

    def tell(self, name: str, why: str) -> None:
        """As of `BitPolicy.unobserved`."""
        if why == COMPILED:
            self._compiled.add(name)
        else:
            self._told[name] = why, self._observation

    def observation_begins(self) -> None:
        """What was not told again since FORGOTTEN of them is forgotten."""
        self._observation += 1
        oldest = self._observation - FORGOTTEN
        self._told = {name: told for name, told in self._told.items() if told[1] > oldest}

    def found(self, model: nn.Module | None, seen: Container[str]) -> dict[str, str]:
        """{name: why, in words} but for those that were seen. model: whose layers they are."""
        compiled = self._compiled if model is None else _alike(model, self._compiled)
        found = dict.fromkeys(compiled, COMPILED) | {
            name: why for name, (why, _) in self._told.items()
        }
        return {name: WHY[why] for name, why in found.items() if name not in seen}


def _alike(model: nn.Module, traced: set[str]) -> set[str]:
    """With the layers of their classes that train in compiled modules: one piece of code serves all that are alike."""
    if not traced:
        return traced
    modules, inside = {}, set()
    for path, module in model.named_modules():
        # A wrapper that came after the conversion is no part of names.
        path = ".".join(part for part in path.split(".") if part != "_orig_mod")
        modules[path] = module
        if is_compiled(module) or path.rpartition(".")[0] in inside:
            inside.add(path)
    kinds = set()
    for name in traced:
        path, colon, what = name.partition(":")
        if path in modules:
            kinds.add((type(modules[path]), colon + what))
    return traced | {
        path + what for path in inside for of, what in kinds if _is_alike(modules[path], of)
    }


def _is_alike(module: nn.Module, cls: type) -> bool:
    """Whether it is a layer of that class that trains, in bits that follow from the bound."""
    parameters = list(module.parameters())
    is_trained = any(each.requires_grad for each in parameters) or not parameters
    has_given_bits = getattr(getattr(module, "quantizer", None), "is_fixed", False)
    return type(module) is cls and module.training and is_trained and not has_given_bits
