"""What modules of transformers become.

transformers has a class of its own for the same few computations in every model. `becomes` knows
them by what their forward computes: its source, but for the names of variables, is one of those
written here. So a class that a later version changes is left alone. transformers is not imported
unless it is already.

Each adapted class is a subclass of the module's own, made when first asked for, for assignment to
`module.__class__`; the module then needs `quantiser`. It is torch's own in eval mode.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from fewbit.functional import sums
from fewbit.functional.gated import gated
from fewbit.functional.linear import linear
from fewbit.nn.quantised import Quantised
from fewbit.runtime.autograd import once_differentiable
from fewbit.runtime.calling import class_of
from fewbit.runtime.normalised import input_gradient, keep_copies, offer, restore_copies
from fewbit.runtime.quantiser import is_differentiated

__all__ = ["adapted", "becomes", "is_adapted", "original"]


def becomes(module: nn.Module) -> type[nn.Module] | None:
    """The class, a subclass of its own, that the module can be given; None if it is not known.

    Known are transformers' Conv1D, root-mean-square norms and gated units of its models.
    """
    adapter = _adapter(class_of(module))
    return None if adapter is None else adapted(class_of(module))


def original(module: nn.Module) -> type[nn.Module] | None:
    """The class of transformers that a converted module had; None if it is not one of `becomes`."""
    return type(module).original if isinstance(module, _Adapted) else None


def is_adapted(cls: type) -> bool:
    """Return whether a class is one that `becomes` returns."""
    return issubclass(cls, _Adapted)


# -- classes ---------------------------------------------------------------------------------------


class _Adapted(Quantised):
    """Before the module's own class in a class made by `adapted`; pickles as that class."""

    original: type[nn.Module]

    def __reduce_ex__(self, protocol):
        return _blank, (self.original,), self.__getstate__()


@cache
def adapted(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class that modules of that class of transformers become, see `becomes`."""
    names = {"__module__": __name__, "__doc__": f"{cls.__name__} that keeps quantised tensors."}
    return type(cls.__name__, (_adapter(cls), cls), {**names, "original": cls})


def _blank(cls: type[nn.Module]) -> nn.Module:
    made = adapted(cls)
    return made.__new__(made)


@cache
def _adapter(cls: type[nn.Module]) -> type[_Adapted] | None:
    if cls.__module__ == "transformers.pytorch_utils" and cls.__name__ == "Conv1D":
        return _Conv1D
    if not cls.__module__.startswith("transformers.models."):
        return None
    return _BY_SOURCE.get(_source(cls))


class _Conv1D(_Adapted):
    """A linear layer with a transposed weight, kept as `fewbit.functional.linear` keeps it."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self._exact(x)
        return linear(x, self.weight.t(), self.bias, quantiser=self.quantiser)


# -- root-mean-square norms ------------------------------------------------------------------------


class _Form(NamedTuple):
    """One way to compute the norm: forward(x, weight, eps) -> (y, 1 / root mean square).

    offset: what is added to the weight.
    """

    source: str
    forward: Callable
    offset: float = 0.0


class _Norm(_Adapted):
    """Keeps normalised x quantised, and a float32 number a row where x needs a gradient.

    The gradient of the weight is exact in expectation, that of x is as
    `fewbit.functional.normalization` says; `copies` as in `fewbit.functional.rms_norm`.
    """

    form: _Form
    copies = 1

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = getattr(self, "weight", None)
        if not self.training or not is_differentiated(hidden_states, weight):
            return self._exact(hidden_states)
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        return _RMSNorm.apply(hidden_states, weight, eps, self.form, self.copies, self.quantiser)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, eps, form, copies, quantiser):
        y, rstd = form.forward(x, weight, eps)
        needs_x = ctx.needs_input_grad[0]
        ctx.dtype, ctx.offset = x.dtype, form.offset
        inner = x.shape[-1] if x.is_contiguous() else None
        keep, kept = keep_copies(ctx, x, None, rstd, inner, copies, quantiser)
        offer(quantiser, y, keep, _scale(weight, form.offset), None)
        ctx.save_for_backward(*((weight, rstd) if needs_x else (None, None)), *kept)
        ctx.weight_dtype = None if weight is None else weight.dtype
        return keep.mark(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight, rstd, *kept = ctx.saved_tensors
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        first, second = restore_copies(ctx, kept)
        grad, grad_x, grad_weight = grad.to(first.dtype), None, None
        if needs_x:
            g = grad if weight is None else grad * _scale(weight, ctx.offset).to(first.dtype)
            grad_x = input_gradient(g, first, second, rstd, -1, centred=False).to(ctx.dtype)
        if needs_weight:
            grad_weight = sums.over_rows(grad * first).to(ctx.weight_dtype)
        return grad_x, grad_weight, None, None, None, None


def _scale(weight, offset):
    return weight if weight is None or not offset else offset + weight.float()


def _normalised(x, eps):
    """(x over its root mean square, 1 / that), in float32."""
    x = x.to(torch.float32)
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return x * rstd, rstd


def _rounded_then_weighted(x, weight, eps):
    y, rstd = _normalised(x, eps)
    return weight * y.to(x.dtype), rstd


def _weighted_then_rounded(x, weight, eps):
    y, rstd = _normalised(x, eps)
    return (weight * y).to(x.dtype), rstd


def _weighted_in_float32(x, weight, eps, offset=None):
    y, rstd = _normalised(x, eps)
    weight = weight.float() if offset is None else offset + weight.float()
    return (y * weight).to(x.dtype), rstd


def _unweighted(x, weight, eps):
    y, rstd = _normalised(x, eps)
    return y.to(x.dtype), rstd


def _of_t5(x, weight, eps):
    rstd = torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)
    y = x * rstd
    return weight * (y.to(weight.dtype) if weight.dtype.itemsize == 2 else y), rstd


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
FORMS = {
    "llama": _Form(
        _START + "    return self.weight * x.to(dtype)",
        _rounded_then_weighted,
    ),
    "olmo2": _Form(
        _START + "    return (self.weight * x).to(dtype)",
        _weighted_then_rounded,
    ),
    "helium": _Form(
        _START + "    return (self.weight.to(torch.float32) * x).to(dtype)",
        _weighted_in_float32,
    ),
    "gemma": _Form(
        _SHORT
        + """
    y = self._norm(x.float())
    y = y * (1.0 + self.weight.float())
    return y.type_as(x)
""",
        partial(_weighted_in_float32, offset=1.0),
        offset=1.0,
    ),
    "moshi": _Form(
        _SHORT
        + """
    y = self._norm(x.float())
    y = y * self.weight.float()
    return y.type_as(x)
""",
        _weighted_in_float32,
    ),
    "llama4": _Form(
        _SHORT
        + """
    y = self._norm(x.float()).type_as(x)
    return y * self.weight
""",
        _rounded_then_weighted,
    ),
    "unweighted": _Form(
        _SHORT + "    return self._norm(x.float()).type_as(x)",
        _unweighted,
    ),
    "t5": _Form(
        """
def forward(self, x):
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + self.variance_epsilon)
    if self.weight.dtype in [torch.float16, torch.bfloat16]:
        x = x.to(self.weight.dtype)
    return self.weight * x
""",
        _of_t5,
    ),
}


# -- gated units -----------------------------------------------------------------------------------


class _Unit(NamedTuple):
    """One way to write a gated unit: forward(module, x, product).

    act: the attribute that holds the activation. product(gate, up) -> act(gate) up.
    """

    act: str
    source: str
    forward: Callable


class _Gated(_Adapted):
    """Keeps gate and up as `fewbit.functional.swiglu` and its kin do; linear layers are their own.

    With an activation other than SiLU, GELU and ReLU it is the original.
    """

    unit: _Unit

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self._exact(x)
        name, function = _activation(getattr(self, self.unit.act))
        if name is None:
            return super().forward(x)
        product = partial(gated, activation=name, function=function, quantiser=self.quantiser)
        return self.unit.forward(self, x, product)


_NAMES = {
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
}


def _activation(act) -> tuple[str | None, Callable | None]:
    """The activation's name for `gated`, or None, and what computes it where torch's differs."""
    if isinstance(act, nn.Module) and _is_listened_to(act):
        return None, None
    if isinstance(act, nn.SiLU):
        return "silu", None
    if isinstance(act, nn.GELU):
        return ("gelu" if act.approximate == "none" else "gelu_tanh"), None
    if isinstance(act, nn.ReLU):
        return "relu", None
    cls = type(act)
    name = _NAMES.get(cls.__name__) if cls.__module__ == "transformers.activations" else None
    function = getattr(act, "act", None)
    if name == "silu" or getattr(function, "func", function) is nn.functional.gelu:
        return name, None
    return name, act


def _is_listened_to(module) -> bool:
    """Whether it has hooks other than the meter's."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return not all(getattr(hook, "only_watches", False) for hook in hooks)


def _simple(self, x, product):
    return self.down_proj(product(self.gate_proj(x), self.up_proj(x)))


def _with_dropout(self, x, product):
    return self.down_proj(self.dropout(product(self.gate_proj(x), self.up_proj(x))))


def _joint(self, x, product):
    gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
    return self.down_proj(product(gate, up))


def _t5(self, x, product):
    x = self.dropout(product(self.wi_0(x), self.wi_1(x)))
    weight = self.wo.weight
    if isinstance(weight, Tensor) and x.dtype != weight.dtype and weight.dtype != torch.int8:
        x = x.to(weight.dtype)
    return self.wo(x)


def _long_t5(self, x, product):
    return self.wo(self.dropout(product(self.wi_0(x), self.wi_1(x))))


def _modernbert(self, x, product):
    gate, up = self.Wi(x).chunk(2, dim=-1)
    return self.Wo(self.drop(product(gate, up)))


UNITS = {
    "llama": _Unit(
        "act_fn",
        """
def forward(self, x):
    y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return y
""",
        _simple,
    ),
    "qwen2.5": _Unit(
        "act_fn",
        """
def forward(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
""",
        _simple,
    ),
    "llama4": _Unit(
        "activation_fn",
        """
def forward(self, x):
    y = self.activation_fn(self.gate_proj(x)) * self.up_proj(x)
    return self.down_proj(y)
""",
        _simple,
    ),
    "t5gemma": _Unit(
        "act_fn",
        """
def forward(self, x):
    y = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
    y = self.dropout(y)
    z = self.down_proj(y)
    return z
""",
        _with_dropout,
    ),
    "phi3": _Unit(
        "activation_fn",
        """
def forward(self, x):
    up = self.gate_up_proj(x)
    gate, up = up.chunk(2, dim=-1)
    up = up * self.activation_fn(gate)
    return self.down_proj(up)
""",
        _joint,
    ),
    "t5": _Unit(
        "act",
        """
def forward(self, x):
    gate = self.act(self.wi_0(x))
    up = self.wi_1(x)
    x = gate * up
    x = self.dropout(x)
    if (
        isinstance(self.wo.weight, torch.Tensor)
        and x.dtype != self.wo.weight.dtype
        and self.wo.weight.dtype != torch.int8
    ):
        x = x.to(self.wo.weight.dtype)
    x = self.wo(x)
    return x
""",
        _t5,
    ),
    "longt5": _Unit(
        "act",
        """
def forward(self, x):
    gate = self.act(self.wi_0(x))
    up = self.wi_1(x)
    x = gate * up
    x = self.dropout(x)
    x = self.wo(x)
    return x
""",
        _long_t5,
    ),
    "modernbert": _Unit(
        "act",
        """
def forward(self, x):
    gate, up = self.Wi(x).chunk(2, dim=-1)
    return self.Wo(self.drop(self.act(gate) * up))
""",
        _modernbert,
    ),
}


# -- recognising -----------------------------------------------------------------------------------


def _source(cls: type[nn.Module]) -> str | None:
    """The canonical source of what the class computes; None if Python does not have it."""
    try:
        methods = [cls.forward, *([cls._norm] if hasattr(cls, "_norm") else [])]
        sources = [textwrap.dedent(inspect.getsource(method)) for method in methods]
    except (OSError, TypeError, AttributeError):
        return None
    return _canonical("\n".join(reversed(sources)))


def _canonical(source: str) -> str:
    """Functions without docstrings and annotations, variables renamed in order of appearance."""
    functions = []
    for function in ast.parse(source).body:
        names = {}
        arguments = function.args.posonlyargs + function.args.args
        for argument in arguments:
            argument.annotation = None
            names[argument.arg] = f"v{len(names)}"
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.setdefault(node.id, f"v{len(names)}")
        for node in (*arguments, *ast.walk(function)):
            if isinstance(node, ast.Name):
                node.id = names.get(node.id, node.id)
            elif isinstance(node, ast.arg):
                node.arg = names.get(node.arg, node.arg)
        function.returns = None
        if ast.get_docstring(function) is not None:
            function.body = function.body[1:]
        functions.append(ast.unparse(function))
    return "\n".join(functions)


_BY_SOURCE = {
    _canonical(each.source): type(kind.__name__, (kind,), {"__module__": __name__, field: each})
    for kind, field, table in ((_Norm, "form", FORMS), (_Gated, "unit", UNITS))
    for each in table.values()
}
