"""The pre-activation block: a norm, an activation and a linear layer that use one saved tensor."""

from __future__ import annotations

from torch import Tensor, nn

from fewbit.config import DEFAULT_BITS
from fewbit.errors import InputError
from fewbit.nn import activations, convolution, linear, normalization
from fewbit.runtime.interop.module_calls import is_compiled_code, leave_to_interpreter
from fewbit.runtime.quantizers.quantizer import Quantizer
from fewbit.runtime.saved.calls import CallGuard
from fewbit.runtime.saved.context import ForwardContext

__all__ = ["PreActivation"]


def _pairs(module, *names):
    return {getattr(nn, name): getattr(module, name) for name in names}


NORMS = _pairs(normalization, "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LayerNorm")
ACTIVATIONS = {**_pairs(activations, "ReLU", "LeakyReLU"), nn.Identity: nn.Identity}
LINEAR = {
    **_pairs(linear, "Linear"),
    **_pairs(convolution, "Conv1d", "Conv2d", "Conv3d"),
    **_pairs(convolution, "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"),
}
"""{torch's class: fewbit's class}. Other subclasses of torch's classes may compute something else."""


class PreActivation(nn.Module):
    """A block that computes linear(activation(norm(x))) and saves the normalized x once, in fixed point (BLPA, Chakrabarti and Moseley, 2019).

    norm, activation and linear become children with these names. In training the block saves `4 * bits * ceil(n / 32)` bytes for n elements of
    the norm's input, and a reciprocal standard deviation for each channel (batch norm) or row (layer norm). docs/guides/preactivation.md says how
    exact the gradients are. A conversion of the model does not change the block.

    Args:
        norm: a torch.nn.BatchNorm1d to BatchNorm3d or a LayerNorm.
        linear: a torch.nn.Linear, or a plain or transposed convolution.
        activation: a torch.nn.ReLU, LeakyReLU or Identity; None for a ReLU.
        bits: bits per saved element, 1 to 8.

    Raises:
        InputError: a module is of another class, or `bits` is invalid.
    """

    def __init__(
        self,
        norm: nn.Module,
        linear: nn.Module,
        activation: nn.Module | None = None,
        bits: int = DEFAULT_BITS,
    ):
        super().__init__()
        activation = nn.ReLU().train(norm.training) if activation is None else activation
        context = ForwardContext(is_private=True)
        self._private = CallGuard(context)
        quantizer = Quantizer(bits, context=context, fuse=True)
        children = (
            ("norm", norm, NORMS),
            ("activation", activation, ACTIVATIONS),
            ("linear", linear, LINEAR),
        )
        for child in children:
            _check(*child)
        for name, module, classes in children:
            self.add_module(name, module)
            module.__class__ = classes.get(type(module), type(module))
        self.norm.quantizer, self.norm.copies = quantizer, 1
        self.linear.quantizer = quantizer.copy_for("linear")
        if isinstance(self.activation, activations.TwoValued):
            self.activation.bits, self.activation.table = 1, None

    def __call__(self, *args, **kwargs):
        if is_compiled_code() or self._compiled_call_impl is not None:
            return super().__call__(*args, **kwargs)
        return self._private.call(self, super().__call__, args, kwargs)

    def forward(self, input: Tensor) -> Tensor:
        return self.linear(self.activation(self.norm(input)))

    @property
    def bits(self) -> int:
        """The bits per element of the norm's input."""
        return self.norm.quantizer.bits

    def extra_repr(self) -> str:
        return f"bits={self.bits}"


leave_to_interpreter(PreActivation.__call__.__code__)


def _check(name, module, classes) -> None:
    if type(module) not in classes and type(module) not in classes.values():
        known = ", ".join(cls.__name__ for cls in classes)
        raise InputError(f"{name}: expected one of torch.nn's {known}, got {type(module).__name__}")
