"""Root-mean-square norms in models of transformers, and the norms of Liger, which replace them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fewbit import functional as F
from fewbit.functional.layer_norm import RMSNormFunction
from fewbit.nn.base import Quantized
from fewbit.runtime.saved.saving_function import is_differentiated


class Form(NamedTuple):
    """One way in which transformers writes the forward of a root-mean-square norm.

    Attributes:
        source: the source of the forward, by which the class is recognized.
        forward: a function (x, scale, eps) that returns the norm's result and the reciprocal root mean square of each
            row of x, where scale is the weight plus `offset`, added in float32.
        eps: the name of the module's attribute that is added to the mean square.
        weight: the name of the module's attribute that is the weight, or None.
    """

    source: str
    forward: Callable
    eps: str
    weight: str | None = "weight"
    offset: float = 0.0

    @property
    def attributes(self) -> tuple[str, ...]:
        """The names of the attributes that the forward of this form reads."""
        return (self.eps,) if self.weight is None else (self.eps, self.weight)


class TransformersRMSNorm(Quantized):
    """A mixin for root-mean-square norms that saves the normalized x quantized, and 4 bytes for each row.

    The weight's gradient is exact in expectation, x's only if `copies` is 2 (docs/concepts/layers.md#bias).
    """

    form: Form
    copies = 1

    def forward(self, hidden_states: Tensor) -> Tensor:
        form = self.form
        weight = None if form.weight is None else getattr(self, form.weight)
        if not self.training or not is_differentiated(hidden_states, weight):
            return self._exact(hidden_states)
        how = getattr(self, form.eps), form.forward, form.offset, self.copies, self.quantizer
        return RMSNormFunction.apply(hidden_states, hidden_states.shape[-1:], weight, *how)


class LigerRMSNorm(TransformersRMSNorm):
    """A mixin for the root-mean-square norms of Liger, whose form is in attributes of the module.

    The casting mode "llama" computes only the norm in float32, "gemma" also the product with the weight.
    """

    SOURCE = """
def forward(self, x):
    return LigerRMSNormFunction.apply(
        x,
        self.weight,
        self.variance_epsilon,
        self.offset,
        self.casting_mode,
        self.in_place,
        self.row_mode,
    )
"""

    @property
    def form(self) -> Form:
        if self.weight is None:
            return Form("", _unweighted, "variance_epsilon", None)
        forward = _weighted_in_float32 if self.casting_mode == "gemma" else _rounded_then_weighted
        return Form("", forward, "variance_epsilon", offset=self.offset)

    @staticmethod
    def misfit_of(module) -> str | None:
        """Return why a module cannot be converted, or None."""
        mode, offset = module.casting_mode, module.offset
        if mode == "gemma" or (mode == "llama" and offset == 0):
            return None
        return f"no version with casting_mode={mode!r} and offset={offset!r}"


class LigerLayerNorm(Quantized):
    """A mixin for the layer norm of Liger, which saves what `fewbit.functional.layer_norm` saves."""

    SOURCE = """
def forward(self, x):
    return _functional_layer_norm(
        x,
        self.weight,
        self.bias,
        self.variance_epsilon,
        impl=getattr(self, "impl", None),
        mode=getattr(self, "mode", None),
    )
"""
    copies = 1

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not self.training:
            return self._exact(hidden_states)
        options = {"copies": self.copies, "quantizer": self.quantizer}
        shape = self.weight.shape
        return F.layer_norm(
            hidden_states, shape, self.weight, self.bias, self.variance_epsilon, **options
        )


def _normalized(x, eps):
    """Return x divided by its root mean square, and the reciprocal of that, both in float32."""
    x = x.to(torch.float32)
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return x * rstd, rstd


def _rounded_then_weighted(x, scale, eps):
    y, rstd = _normalized(x, eps)
    return scale * y.to(x.dtype), rstd


def _weighted_then_rounded(x, scale, eps):
    y, rstd = _normalized(x, eps)
    return (scale * y).to(x.dtype), rstd


def _weighted_in_float32(x, scale, eps):
    y, rstd = _normalized(x, eps)
    return (y * scale.float()).to(x.dtype), rstd


def _unweighted(x, scale, eps):
    y, rstd = _normalized(x, eps)
    return y.to(x.dtype), rstd


def _of_t5(x, scale, eps):
    rstd = torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)
    y = x * rstd
    return scale * (y.to(scale.dtype) if scale.dtype.itemsize == 2 else y), rstd


_START = """
def forward(self, x):
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + self.variance_epsilon)
"""
_SHORT = """
def _norm(self, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
def forward(self, x):
"""
FORMS = (
    Form(  # llama
        _START + "    return self.weight * x.to(dtype)",
        _rounded_then_weighted,
        "variance_epsilon",
    ),
    Form(  # olmo2
        _START + "    return (self.weight * x).to(dtype)",
        _weighted_then_rounded,
        "variance_epsilon",
    ),
    Form(  # helium
        _START + "    return (self.weight.to(torch.float32) * x).to(dtype)",
        _weighted_in_float32,
        "variance_epsilon",
    ),
    Form(  # gemma
        _SHORT
        + """
    y = self._norm(x.float())
    y = y * (1.0 + self.weight.float())
    return y.type_as(x)
""",
        _weighted_in_float32,
        "eps",
        offset=1.0,
    ),
    Form(  # moshi
        _SHORT
        + """
    y = self._norm(x.float())
    y = y * self.weight.float()
    return y.type_as(x)
""",
        _weighted_in_float32,
        "eps",
    ),
    Form(  # llama4
        _SHORT
        + """
    y = self._norm(x.float()).type_as(x)
    return y * self.weight
""",
        _rounded_then_weighted,
        "eps",
    ),
    Form(  # unweighted
        _SHORT + "    return self._norm(x.float()).type_as(x)",
        _unweighted,
        "eps",
        weight=None,
    ),
    Form(  # t5
        """
def forward(self, x):
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + self.variance_epsilon)
    if self.weight.dtype in [torch.float16, torch.bfloat16]:
        x = x.to(self.weight.dtype)
    return self.weight * x
""",
        _of_t5,
        "variance_epsilon",
    ),
)
