"""Gated units, which compute act(gate) * up."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as torch_functional

from fewbit import functional as F
from fewbit.errors import InputError
from fewbit.nn.base import Quantized
from fewbit.runtime.interop.bypass import bypass

__all__ = ["GEGLU", "GLU", "ReGLU", "SwiGLU"]


class SwiGLU(Quantized, nn.Module):
    """The product silu(gate) * up, computed by `fewbit.functional.swiglu`."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        if not self.training:
            with bypass():
                return torch_functional.silu(gate) * up
        return F.swiglu(gate, up, quantizer=self.quantizer)


class GEGLU(Quantized, nn.Module):
    """The product gelu(gate, approximate) * up, computed by `fewbit.functional.geglu`."""

    def __init__(self, approximate: str = "none", **kwargs):
        if approximate not in ("none", "tanh"):
            raise InputError(f"approximate: expected none or tanh, got {approximate!r}")
        super().__init__(**kwargs)
        self.approximate = approximate

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        if not self.training:
            with bypass():
                return torch_functional.gelu(gate, approximate=self.approximate) * up
        return F.geglu(gate, up, self.approximate, quantizer=self.quantizer)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}, {super().extra_repr()}"


class ReGLU(Quantized, nn.Module):
    """The product relu(gate) * up, computed by `fewbit.functional.reglu`."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        if not self.training:
            with bypass():
                return torch_functional.relu(gate) * up
        return F.reglu(gate, up, quantizer=self.quantizer)


class GLU(Quantized, nn.GLU):
    """torch.nn.GLU, computed by `fewbit.functional.glu`."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            with bypass():
                return torch_functional.glu(input, self.dim)
        return F.glu(input, self.dim, quantizer=self.quantizer)
