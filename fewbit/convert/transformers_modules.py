"""Adapted classes: subclasses of transformers' module classes that save quantized tensors.

Every model defines its own classes for the same few computations, so `becomes` recognizes them by the source of their forward.
"""

from __future__ import annotations

from functools import cache

from torch import Tensor, nn

from fewbit import functional as F
from fewbit.convert.transformers_gated import UNITS, GatedUnit
from fewbit.convert.transformers_norms import (
    FORMS,
    LigerLayerNorm,
    LigerRMSNorm,
    TransformersRMSNorm,
)
from fewbit.convert.transformers_source import canonical, source_of
from fewbit.nn.base import Quantized
from fewbit.runtime.interop.module_calls import class_of

__all__ = ["adapted", "becomes", "is_adapted", "misfit_of"]


def becomes(module: nn.Module) -> type[nn.Module] | None:
    """Return the adapted class for a Conv1D, root-mean-square norm or gated unit of transformers or Liger, or None."""
    cls = class_of(module)
    return None if _adapter(cls)[0] is None or misfit_of(module) else adapted(cls)


def misfit_of(module: nn.Module) -> str | None:
    """Return why a module of a recognized class cannot be converted, or None."""
    mixin, attributes = _adapter(class_of(module))
    if mixin is LigerRMSNorm:
        return LigerRMSNorm.misfit_of(module)
    if mixin is not TransformersRMSNorm:
        return None
    missing = [name for name in attributes["form"].attributes if not hasattr(module, name)]
    return f"it has no attribute {missing[0]!r}, which its forward reads" if missing else None


def is_adapted(cls: type) -> bool:
    """Return whether `adapted` made the class."""
    return issubclass(cls, _Adapted)


class _Adapted:
    """A mixin of adapted classes. A pickle has the original class, because a class made at run time cannot be imported."""

    original: type[nn.Module]

    def __reduce_ex__(self, protocol):
        return _blank, (self.original,), self.__getstate__()


@cache
def adapted(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the adapted class for a class that `becomes` recognizes."""
    doc = f"{cls.__name__} that saves quantized tensors."
    mixin, attributes = _adapter(cls)
    attributes = {"__module__": __name__, "__doc__": doc, "original": cls, **attributes}
    return type(cls.__name__, (_Adapted, mixin, cls), attributes)


def _blank(cls: type[nn.Module]) -> nn.Module:
    made = adapted(cls)
    return made.__new__(made)


@cache
def _adapter(cls: type[nn.Module]) -> tuple[type[Quantized] | None, dict]:
    """Return the mixin of the adapted class, or None, and the attributes of the class."""
    if cls.__module__ == "transformers.pytorch_utils" and cls.__name__ == "Conv1D":
        return Conv1D, {}
    if not cls.__module__.startswith(("transformers.models.", "liger_kernel.transformers.")):
        return None, {}
    return _BY_SOURCE.get(source_of(cls), (None, {}))


class Conv1D(Quantized):
    """A linear layer with a transposed weight, which saves what `fewbit.functional.linear` saves."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self._exact(x)
        return F.linear(x, self.weight.t(), self.bias, quantizer=self.quantizer)


_BY_SOURCE = {
    **{canonical(form.source): (TransformersRMSNorm, {"form": form}) for form in FORMS},
    **{canonical(unit.source): (GatedUnit, {"unit": unit}) for unit in UNITS},
    **{canonical(norm.SOURCE): (norm, {}) for norm in (LigerRMSNorm, LigerLayerNorm)},
}
