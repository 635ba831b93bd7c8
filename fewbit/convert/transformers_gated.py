"""Gated units act(gate) * up, of linear layers' results gate and up, in models of transformers and of Liger."""

from __future__ import annotations

from collections.abc import Callable
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
        inputs: the names of the layers that compute gate and up, or of the one whose result contains both.
        output: the name of the layer that gets the product.
        dropout: the name of a dropout before it, or None.
        activation: the name of the activation if `act` is None.
        casts: whether the product is converted to the dtype of the last layer's weight, as in T5.
    """

    act: str | None
    source: str
    inputs: tuple[str, ...] = ("gate_proj", "up_proj")
    output: str = "down_proj"
    dropout: str | None = None
    activation: str | None = None
    casts: bool = False


class GatedUnit(Quantized):
    """A mixin for gated units that saves gate and up quantized, as `fewbit.functional.swiglu` does.

    For activations other than SiLU, GELU and ReLU, the original forward runs.
    """

    unit: Unit
    calls_others = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self._exact(x)
        unit = self.unit
        name, function = unit.activation, None
        if name is None:
            name, function = _activation(getattr(self, unit.act))
        if name is None:
            return super().forward(x)
        results = [getattr(self, layer)(x) for layer in unit.inputs]
        gate, up = results if len(results) == 2 else results[0].chunk(2, dim=-1)
        y = gated(gate, up, name, function, quantizer=self.quantizer)
        if unit.dropout is not None:
            y = getattr(self, unit.dropout)(y)
        output = getattr(self, unit.output)
        weight = output.weight if unit.casts else None
        if isinstance(weight, Tensor) and y.dtype != weight.dtype and weight.dtype != torch.int8:
            y = y.to(weight.dtype)
        return output(y)


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


_JOINT = ("gate_up_proj",)
UNITS = (
    Unit(  # llama
        "act_fn",
        """
def forward(self, x):
    y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return y
""",
    ),
    Unit(  # qwen2.5
        "act_fn",
        """
def forward(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
""",
    ),
    Unit(  # llama4
        "activation_fn",
        """
def forward(self, x):
    y = self.activation_fn(self.gate_proj(x)) * self.up_proj(x)
    return self.down_proj(y)
""",
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
        dropout="dropout",
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
        _JOINT,
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
        ("wi_0", "wi_1"),
        "wo",
        "dropout",
        casts=True,
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
        ("wi_0", "wi_1"),
        "wo",
        "dropout",
    ),
    Unit(  # modernbert
        "act",
        """
def forward(self, x):
    gate, up = self.Wi(x).chunk(2, dim=-1)
    return self.Wo(self.drop(self.act(gate) * up))
""",
        ("Wi",),
        "Wo",
        "drop",
    ),
    Unit(  # Liger
        None,
        """
def forward(self, x):
    return self.down_proj(_swiglu_dispatch(self.gate_proj(x), self.up_proj(x)))
""",
        activation="silu",
    ),
    Unit(  # Liger, phi3
        None,
        """
def forward(self, x):
    up = self.gate_up_proj(x)
    gate, up = up.chunk(2, dim=-1)
    return self.down_proj(_swiglu_dispatch(gate, up))
""",
        _JOINT,
        activation="silu",
    ),
    Unit(  # Liger, mixtral
        None,
        """
def forward(self, x):
    return self.w2(_swiglu_dispatch(self.w1(x), self.w3(x)))
""",
        ("w1", "w3"),
        "w2",
        activation="silu",
    ),
    Unit(  # Liger, gemma
        None,
        """
def forward(self, x):
    return self.down_proj(LigerGELUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))
""",
        activation="gelu_tanh",
    ),
)
