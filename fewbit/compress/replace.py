"""Turning a model's activation modules into few-bit ones, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from fewbit import nn as few
from fewbit.errors import InputError
from fewbit.runtime.tables import check_choice


class Kind(NamedTuple):
    """What a module's class becomes. `attributes`: what the new class needs and the old one lacks."""

    becomes: type[nn.Module]
    exact: bool = False  # its derivative has two values, so that 1 bit says all
    attributes: Callable[[nn.Module], dict] = lambda module: {}


_NONE = {"approximate": "none"}
_TANH = {"approximate": "tanh"}

# By class, exactly: a subclass may compute something else. Each becomes a subclass of itself.
TORCH = {
    nn.ReLU: Kind(few.ReLU, exact=True),
    nn.ReLU6: Kind(few.ReLU6, exact=True),
    nn.LeakyReLU: Kind(few.LeakyReLU, exact=True),
    nn.RReLU: Kind(few.RReLU, exact=True),
    nn.Threshold: Kind(few.Threshold, exact=True),
    nn.Hardtanh: Kind(few.Hardtanh, exact=True),
    nn.Hardsigmoid: Kind(few.Hardsigmoid, exact=True),
    nn.Hardshrink: Kind(few.Hardshrink, exact=True),
    nn.Softshrink: Kind(few.Softshrink, exact=True),
    nn.ELU: Kind(few.ELU),
    nn.CELU: Kind(few.CELU),
    nn.SELU: Kind(few.SELU),
    nn.GELU: Kind(few.GELU),
    nn.SiLU: Kind(few.SiLU),
    nn.Mish: Kind(few.Mish),
    nn.Hardswish: Kind(few.Hardswish),
    nn.Sigmoid: Kind(few.Sigmoid),
    nn.LogSigmoid: Kind(few.LogSigmoid),
    nn.Tanh: Kind(few.Tanh),
    nn.Tanhshrink: Kind(few.Tanhshrink),
    nn.Softsign: Kind(few.Softsign),
    nn.Softplus: Kind(few.Softplus),
}
# By class name in transformers.activations, so that transformers need not be installed.
TRANSFORMERS = {
    "GELUActivation": Kind(few.GELU, attributes=lambda module: _NONE),
    "NewGELUActivation": Kind(few.GELU, attributes=lambda module: _TANH),
    "GELUTanh": Kind(few.GELU, attributes=lambda module: _TANH),
    "PytorchGELUTanh": Kind(few.GELU, attributes=lambda module: _TANH),
    "AccurateGELUActivation": Kind(few.GELU, attributes=lambda module: _TANH),
    "FastGELUActivation": Kind(few.FastGELU),
    "QuickGELUActivation": Kind(few.QuickGELU),
    "SiLUActivation": Kind(few.SiLU, attributes=lambda module: {"inplace": False}),
    "MishActivation": Kind(few.Mish, attributes=lambda module: {"inplace": False}),
    "LaplaceActivation": Kind(
        few.Laplace, attributes=lambda module: {"mu": 0.707107, "sigma": 0.282095}
    ),
    "ReLUSquaredActivation": Kind(few.ReLUSquared),
    "SqrtSoftplusActivation": Kind(few.SqrtSoftplus),
}
# Modules that hold their activation as a plain function.
FUNCTION_ATTRIBUTES = {
    nn.TransformerEncoderLayer: "activation",
    nn.TransformerDecoderLayer: "activation",
}
FUNCTIONS = {F.relu: nn.ReLU, torch.relu: nn.ReLU, F.gelu: nn.GELU}

LEFT_ALONE = {
    nn.PReLU: "its slope is learned, which takes the input itself",
    nn.GLU: "not pointwise",
    nn.Softmax: "not pointwise",
    nn.LogSoftmax: "not pointwise",
    nn.Softmin: "not pointwise",
}
OWN_FORWARD = "its forward was replaced on the instance, so its class does not say what it computes"


class Replacement(NamedTuple):
    """One module: its dotted path ("" for the model itself), its old and new class, its bits."""

    path: str
    before: str
    after: str
    bits: int


class Skipped(NamedTuple):
    """An activation module that was left as it is, and why."""

    path: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Report:
    """What `replace_activations_` did. Printed as a table."""

    replaced: tuple[Replacement, ...]
    skipped: tuple[Skipped, ...]

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=100, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip()

    def __rich_console__(self, console, options):
        from rich.table import Table

        if self.replaced:
            table = Table(
                "module", "was", "is", "bits", box=None, header_style="bold", pad_edge=False
            )
            for row in self.replaced:
                table.add_row(row.path or "(the model)", row.before, row.after, str(row.bits))
            yield table
            yield f"{len(self.replaced)} activation module{'s' * (len(self.replaced) != 1)} replaced"
        else:
            yield "no activation module replaced; a function that a forward calls (F.gelu) is not seen"
        for row in self.skipped:
            yield f"left alone: {row.path or '(the model)'} ({row.kind}): {row.reason}"


def replace_activations_(
    model: nn.Module,
    bits: int = 3,
    *,
    include: str | Iterable[str] = "*",
    exclude: str | Iterable[str] = (),
    verbose: bool = True,
) -> Report:
    """Make the activation modules of torch.nn and transformers keep `bits` bits an element, in place.

    The module objects stay, their class changes: parameters, `state_dict` keys, hooks, shared modules and
    forward values (but for rounding, see `fewbit.functional`) are as before. Functions whose derivative has
    two values keep 1 bit, which is exact. Activations that a forward calls as functions are not seen.

    bits: 1 to 8. include, exclude: globs over dotted module paths ("encoder.*.act", "" is the model
    itself; each path of a shared module counts); exclude wins. verbose: print the report. Returns the report.

    Raises InputError, with nothing changed, for bad bits, a model that is not a module, or a glob that no
    activation matches.
    """
    check_choice(bits, None)
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a torch.nn.Module, got {type(model).__name__}")
    found = _activations(model)
    include, exclude = _globs(include), _globs(exclude)
    for glob in (*include, *exclude):
        if glob != "*" and not any(_matches(paths, (glob,)) for paths, _, _ in found):
            raise InputError(f"expected a glob that matches an activation module, got {glob!r}")
    replaced, skipped = [], []
    for paths, module, attribute in found:
        path = paths[0]
        name = type(module).__name__ if attribute is None else getattr(module, attribute).__name__
        if not _matches(paths, include) or _matches(paths, exclude):
            skipped.append(Skipped(path, name, "excluded"))
        elif type(module) in LEFT_ALONE:
            skipped.append(Skipped(path, name, LEFT_ALONE[type(module)]))
        elif type(module).__module__ == few.GELU.__module__:
            skipped.append(Skipped(path, name, f"few-bit already: {module!r}"))
        elif attribute is None and "forward" in vars(module):
            skipped.append(Skipped(path, name, OWN_FORWARD))
        else:
            replaced.append(_replace(path, module, attribute, bits))
    report = Report(tuple(replaced), tuple(skipped))
    if verbose:
        from rich.console import Console

        Console().print(report)
    return report


def _activations(model: nn.Module) -> list[tuple[list[str], nn.Module, str | None]]:
    """(paths, module, None) for activation modules, (paths, owner, attribute) for plain functions.

    A module that is shared has several paths.
    """
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        known = _kind(module) is not None or type(module) in LEFT_ALONE
        if known or type(module).__module__ == few.GELU.__module__:
            found.setdefault((id(module), None), ([], module, None))[0].append(path)
        attribute = FUNCTION_ATTRIBUTES.get(type(module))
        if attribute is not None and getattr(module, attribute, None) in FUNCTIONS:
            of_owner = found.setdefault((id(module), attribute), ([], module, attribute))
            of_owner[0].append(f"{path}.{attribute}".lstrip("."))
    return list(found.values())


def _kind(module: nn.Module) -> Kind | None:
    cls = type(module)
    if cls.__module__ == "transformers.activations":
        if cls.__name__ == "ClippedGELUActivation" and (module.min, module.max) == (-10, 10):
            return Kind(few.ClippedGELU)
        return TRANSFORMERS.get(cls.__name__)
    return TORCH.get(cls)


def _replace(path, module, attribute, bits) -> Replacement:
    if attribute is not None:
        before = getattr(module, attribute)
        # A function attribute is no submodule: it has to go before a module of its name can come.
        delattr(module, attribute)
        setattr(module, attribute, FUNCTIONS[before]())
        return _replace(path, getattr(module, attribute), None, bits)._replace(
            before=f"{before.__name__} (function)"
        )
    kind, before = _kind(module), type(module).__name__
    bits = 1 if kind.exact else bits
    for name, value in kind.attributes(module).items():
        setattr(module, name, value)
    module.__class__ = kind.becomes
    module.bits, module.table = bits, None
    return Replacement(path, before, f"fewbit.{kind.becomes.__name__}", bits)


def _globs(globs: str | Iterable[str]) -> tuple[str, ...]:
    globs = (globs,) if isinstance(globs, str) else globs
    if not isinstance(globs, Iterable) or not all(isinstance(glob, str) for glob in globs):
        raise InputError(f"expected a glob or a list of globs, got {globs!r}")
    return tuple(globs)


def _matches(paths: list[str], globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(path, glob) for path in paths for glob in globs)
