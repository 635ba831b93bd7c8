"""Layers that keep something of which no observation knows, so that they keep the most bits: which, and why.

Only of this process, and no part of a state.
"""

from __future__ import annotations

from collections.abc import Container

from torch import nn

from fewbit.compress.meter import is_compiled
from fewbit.runtime.variables import ALONE, COMPILED, REENTRANT

WHY = {
    COMPILED: "inside torch.compile",
    REENTRANT: "in a checkpoint with use_reentrant=True; use use_reentrant=False",
    ALONE: "called by themselves, outside of a forward of the model",
}


class Unobserved:
    """What was told. What is compiled is told once, when it is traced; the rest holds for two observations."""

    def __init__(self):
        self._compiled: set[str] = set()
        self._latest: dict[str, str] = {}
        self._before: dict[str, str] = {}

    def tell(self, name: str, why: str) -> None:
        """As of `Variables.unobserved`."""
        if why == COMPILED:
            self._compiled.add(name)
        else:
            self._latest[name] = why

    def observation_begins(self) -> None:
        """What is not told again until the next one is forgotten."""
        self._before, self._latest = self._latest, {}

    def found(self, model: nn.Module | None, seen: Container[str]) -> dict[str, str]:
        """{name: why, in words} but for those that were seen. model: whose layers they are."""
        compiled = self._compiled if model is None else _alike(model, self._compiled)
        found = dict.fromkeys(compiled, COMPILED) | self._before | self._latest
        return {name: WHY[why] for name, why in found.items() if name not in seen}


def _alike(model, traced: set[str]) -> set[str]:
    """With the layers of compiled modules that run what was traced for another one of their class."""
    blocks = {}
    for path, module in model.named_modules() if traced else ():
        if is_compiled(module):
            parts = [part for part in path.split(".") if part != "_orig_mod"]
            blocks[".".join(parts)] = type(getattr(module, "_orig_mod", module))
    rests = {
        (cls, name.removeprefix(path))
        for path, cls in blocks.items()
        for name in traced
        if not path or name == path or name.startswith((f"{path}.", f"{path}:"))
    }
    return traced | {path + rest for path, cls in blocks.items() for of, rest in rests if of is cls}
