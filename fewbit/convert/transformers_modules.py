"""The classes that modules of transformers become.

transformers defines a class of its own for the same few computations in every model. `becomes` recognizes them by the source
of their forward, except for names of variables. A class that a later version changes is therefore left alone. transformers
is not imported unless the process has imported it already.

An adapted class is a subclass of the module's own, made on first use, for assignment to `module.__class__`. The module then
needs a `quantizer`. In eval mode it is torch's own.
"""

from __future__ import annotations

from functools import cache

from torch import Tensor, nn

from fewbit import functional as F
from fewbit.convert.transformers_gated import UNITS
from fewbit.convert.transformers_norms import FORMS, RMSNorm
from fewbit.convert.transformers_source import canonical, source_of
from fewbit.nn.base import Quantized
from fewbit.runtime.interop.module_calls import class_of

__all__ = ["adapted", "becomes", "is_adapted", "misfit_of", "original"]


def becomes(module: nn.Module) -> type[nn.Module] | None:
    """Return the subclass of its own class that a module can be given; None if the module is not recognized.

    transformers' Conv1D, and the root-mean-square norms and gated units of its models are recognized.
    """
    cls = class_of(module)
    return None if _adapter(cls) is None or misfit_of(module) else adapted(cls)


def misfit_of(module: nn.Module) -> str | None:
    """Return why a module of a recognized class is not converted; None if it is, or if the class is not recognized."""
    adapter = _adapter(class_of(module))
    if adapter is None or not issubclass(adapter, RMSNorm):
        return None
    missing = [name for name in adapter.form.attributes if not hasattr(module, name)]
    return f"it has no attribute {missing[0]!r}, which its forward reads" if missing else None


def original(module: nn.Module) -> type[nn.Module] | None:
    """Return the class of transformers that a converted module had; None if it was not converted."""
    return type(module).original if isinstance(module, _Adapted) else None


def is_adapted(cls: type) -> bool:
    """Return whether `adapted` made the class."""
    return issubclass(cls, _Adapted)


class _Adapted:
    """A mixin of the classes that `adapted` makes, which pickle as the module's own class."""

    original: type[nn.Module]

    def __reduce_ex__(self, protocol):
        return _blank, (self.original,), self.__getstate__()


@cache
def adapted(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class that modules of a class of transformers become, if `becomes` recognizes them."""
    doc = f"{cls.__name__} that saves quantized tensors."
    attributes = {"__module__": __name__, "__doc__": doc, "original": cls}
    return type(cls.__name__, (_Adapted, _adapter(cls), cls), attributes)


def _blank(cls: type[nn.Module]) -> nn.Module:
    made = adapted(cls)
    return made.__new__(made)


@cache
def _adapter(cls: type[nn.Module]) -> type[Quantized] | None:
    """Return the mixin with the forward of an adapted class; None if the class is not recognized."""
    if cls.__module__ == "transformers.pytorch_utils" and cls.__name__ == "Conv1D":
        return Conv1D
    if not cls.__module__.startswith("transformers.models."):
        return None
    return _BY_SOURCE.get(source_of(cls))


class Conv1D(Quantized):
    """A linear layer with a transposed weight, which saves what `fewbit.functional.linear` saves."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self._exact(x)
        return F.linear(x, self.weight.t(), self.bias, quantizer=self.quantizer)


_BY_SOURCE = {canonical(form.source): form.mixin() for form in (*FORMS, *UNITS)}
