"""The reasons why a compressed model saves a tensor in full."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fewbit.analysis.recorder import Token, is_fewbit
from fewbit.convert import kinds
from fewbit.runtime.format.groups import LEAST_ELEMENTS
from fewbit.runtime.graph.rules import RULES
from fewbit.runtime.saved.context import contexts_of

_LOSSES = "LogSoftmax", "NllLoss", "NllLoss2D"
_NODES = {node for node, _ in RULES} | {"Pow", "Clamp", "ClampMin", "ClampMax"}
"""The autograd nodes for which `everything` has a rule, without "Backward<number>"."""


class Reasons:
    """Finds out why tensors are saved in full. `modules` is {path: module} of the measured ones.

    With `has_model`, the path "" is a module's.
    """

    def __init__(self, modules: dict[str, nn.Module], has_model: bool):
        self._modules, self._has_model = modules, has_model
        contexts = [context for module in modules.values() for context in contexts_of(module)]
        self._has_fewbit = bool(contexts) or any(map(is_fewbit, modules.values()))
        self._everything = any(context.compressor is not None for context in contexts)

    def of(self, tokens: Sequence[Token], elements: int) -> str:
        """Return the reason for a storage that is neither packed nor a parameter nor a buffer, or ""."""
        if not self._has_fewbit:
            return ""
        if elements < LEAST_ELEMENTS:
            return f"fewer than {LEAST_ELEMENTS:,} elements"
        found = [self._of(token) for token in tokens]
        # If one of several nodes needs the tensor in full, a copy for the others would save nothing.
        others = [reason for reason in found if reason is not None]
        if others:
            return others[0]
        if self._everything:
            return "no copy was made: it would save too little, or the tensor has no gradient"
        name = tokens[0].node.partition("Backward")[0]
        return f'saved by {name}: layers={{"everything": True}} compresses it'

    def _of(self, token: Token) -> str | None:
        name, _, number = token.node.partition("Backward")
        if name == "CompiledFunction":
            return "compiled by torch.compile: use fewbit.compile"
        if not token.node:
            return "an input of torch.utils.checkpoint, or held by no node: use fewbit.checkpoint"
        if token.place.path == "" and not self._has_model:
            if name in _LOSSES:
                return "the loss is outside of the model: call fewbit.functional.cross_entropy"
            return "saved outside of the model: move the code into the model's forward"
        module = self._modules.get(token.place.path)
        if module is not None and not module.training:
            return "the module is in evaluation mode, in which nothing is compressed: call train()"
        if token.has_fewbit_node or token.place.is_fewbit:
            return "the layer's backward pass needs it in full"
        kind = None if module is None else kinds.kind_of(module)
        if kind is not None:
            if kind.family == kinds.RECURRENT and not self._everything:
                return 'one operation over all steps: layers={"everything": True} compresses it on the CPU'
            return "the module is not converted: see include, exclude and overrides"
        if not number.isdigit():
            return f"saved by {name or token.node}, a Function of another library"
        if name not in _NODES:
            return f"the gradient of {name} is not linear in it, or has no rule"
        return None
