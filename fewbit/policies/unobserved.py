"""The layers whose saved tensors probes cannot measure, in this process. Policies leave their bits alone."""

from __future__ import annotations

from collections.abc import Container

from torch import nn

from fewbit.runtime.interop.module_calls import is_compiled
from fewbit.runtime.saved.assignment import ALONE, COMPILED, REENTRANT

FORGOTTEN = 8
"""The number of measurements after which a slot or layer without one is forgotten."""
MEASURABLE = (
    "that comes after the first steps of training, with gradients that are finite and not batched (vmap), "
    "outside of compiled autograd"
)
"""The steps that probes measure, for reports."""
REASONS = {
    COMPILED: "inside torch.compile",
    REENTRANT: "in a checkpoint with use_reentrant=True; use use_reentrant=False",
    ALONE: "called by themselves, outside of a forward of the model",
}
"""The reasons in words, for reports."""


class Unobserved:
    """The list of the layers that were reported because a policy cannot measure what they save.

    Compiled layers are reported once, when they are traced. Others are removed after FORGOTTEN measurements without a report.
    """

    def __init__(self):
        self._compiled: set[str] = set()
        self._reports: dict[str, tuple[str, int]] = {}  # layer: (reason, number of the measurement)
        self._measurement = 0

    def add(self, layer: str, reason: str) -> None:
        """Record that probes cannot measure the saved tensors of a layer, for one of the `REASONS`."""
        if reason == COMPILED:
            self._compiled.add(layer)
        else:
            self._reports[layer] = reason, self._measurement

    def new_measurement(self) -> None:
        """Count a measurement, and remove layers whose last report is FORGOTTEN measurements ago."""
        self._measurement += 1
        oldest = self._measurement - FORGOTTEN
        self._reports = {
            layer: (reason, measurement)
            for layer, (reason, measurement) in self._reports.items()
            if measurement > oldest
        }

    def found(self, model: nn.Module | None, seen: Container[str]) -> dict[str, str]:
        """Return {layer: reason in words} of the model's listed layers that are not in `seen`."""
        compiled = self._compiled if model is None else _with_alike(model, self._compiled)
        reasons = dict.fromkeys(compiled, COMPILED) | {
            layer: reason for layer, (reason, _) in self._reports.items()
        }
        return {layer: REASONS[reason] for layer, reason in reasons.items() if layer not in seen}


def _with_alike(model: nn.Module, traced: set[str]) -> set[str]:
    if not traced:
        return traced
    modules, inside = {}, set()
    for path, module in model.named_modules():
        # If torch.compile wrapped a module after the conversion, layers' names do not contain the wrapper.
        path = ".".join(part for part in path.split(".") if part != "_orig_mod")
        modules[path] = module
        if is_compiled(module) or path.rpartition(".")[0] in inside:
            inside.add(path)
    kinds = set()
    for layer in traced:
        path, colon, function = layer.partition(":")
        if path in modules:
            kinds.add((type(modules[path]), colon + function))
    return traced | {
        path + function
        for path in inside
        for cls, function in kinds
        if _is_alike(modules[path], cls)
    }


def _is_alike(module: nn.Module, cls: type) -> bool:
    """Return whether a module is a trained layer of class `cls` with bits that a policy may choose."""
    parameters = list(module.parameters())
    is_trained = any(parameter.requires_grad for parameter in parameters) or not parameters
    has_given_bits = getattr(getattr(module, "quantizer", None), "is_fixed", False)
    return type(module) is cls and module.training and is_trained and not has_given_bits
