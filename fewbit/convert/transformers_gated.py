"""Gated units act(gate) * up, of linear layers' results gate and up, in models of transformers and of Liger."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fewbit.functional.products import gated
from fewbit.nn.base import Quantized


class Unit(NamedTuple):
    """One way in which transformers writes the forward of a gated unit.

    Attributes:
        act: the name of the attribute that is the activation; None if the unit always has the same one.
        source: the source of the forward, by which the class is recognized.
        forward: a function (module, x, product) that returns the result, where product(gate, up) returns act(gate) * up.
        activation: the name of the activation if `act` is None.
    """

    act: str | None
    source: str
    forward: Callable
    activation: str | None = None

    def mixin(self) -> type[GatedUnit]:
        """Return the mixin for classes whose forward is written in this way."""
        return type("GatedUnit", (GatedUnit,), {"__module__": __name__, "unit": self})


class GatedUnit(Quantized):
    """A mixin for gated units that saves gate and up quantized, as `fewbit.functional.swiglu` does.

    For activations other than SiLU, GELU and ReLU, the original forward runs.
    """

    unit: Unit
    calls_others = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self._exact(x)
        name, function = self.unit.activation, None
        if name is None:
            name, function = _activation(getattr(self, self.unit.act))
        if name is None:
            return super().forward(x)
        product = partial(gated, activation=name, function=function, quantizer=self.quantizer)
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
    """Return `activation` and `function` of `fewbit.functional.products.gated` for a module."""
    if isinstance(act, nn.Module) and _has_hooks(act):
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


def _has_hooks(module) -> bool:
    """Return whether the module has hooks other than those of `fewbit.saved_bytes`, which only watch."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return not all(getattr(hook, "only_watches", False) for hook in hooks)


def _simple(self, x, product):
    return self.down_proj(product(self.gate_proj(x), self.up_proj(x)))


def _with_dropout(self, x, product):
    return self.down_proj(self.dropout(product(self.gate_proj(x), self.up_proj(x))))


def _joint(self, x, product):
    gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
    return self.down_proj(product(gate, up))


def _mixtral(self, x, product):
    return self.w2(product(self.w1(x), self.w3(x)))


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


UNITS = (
    Unit(  # llama
        "act_fn",
        """
def forward(self, x):
    y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return y
""",
        _simple,
    ),
    Unit(  # qwen2.5
        "act_fn",
        """
def forward(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
""",
        _simple,
    ),
    Unit(  # llama4
        "activation_fn",
        """
def forward(self, x):
    y = self.activation_fn(self.gate_proj(x)) * self.up_proj(x)
    return self.down_proj(y)
""",
        _simple,
    ),
    Unit(  # t5gemma
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
    Unit(  # phi3
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
    Unit(  # t5
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
    Unit(  # longt5
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
    Unit(  # modernbert
        "act",
        """
def forward(self, x):
    gate, up = self.Wi(x).chunk(2, dim=-1)
    return self.Wo(self.drop(self.act(gate) * up))
""",
        _modernbert,
    ),
    Unit(  # Liger
        None,
        """
def forward(self, x):
    return self.down_proj(_swiglu_dispatch(self.gate_proj(x), self.up_proj(x)))
""",
        _simple,
        "silu",
    ),
    Unit(  # Liger, phi3
        None,
        """
def forward(self, x):
    up = self.gate_up_proj(x)
    gate, up = up.chunk(2, dim=-1)
    return self.down_proj(_swiglu_dispatch(gate, up))
""",
        _joint,
        "silu",
    ),
    Unit(  # Liger, mixtral
        None,
        """
def forward(self, x):
    return self.w2(_swiglu_dispatch(self.w1(x), self.w3(x)))
""",
        _mixtral,
        "silu",
    ),
    Unit(  # Liger, gemma
        None,
        """
def forward(self, x):
    return self.down_proj(LigerGELUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))
""",
        _simple,
        "gelu_tanh",
    ),
)
