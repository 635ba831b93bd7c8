"""The methods that `adaptive_bits.py` compares. Some of them exist only for this comparison.

Quantized activations: GELU saves its input quantized, as other layers do at level L3. Its backward pass takes the
derivative at the dequantized input, instead of a value of a table (appendix E of the few-bit paper).

Numbered: levels L2.5 and L3, where the controller is told the numbers of the digits in a batch. It can therefore
remember the gradient magnitude of each digit (ActNN, section 4.3).
"""

from __future__ import annotations

from functools import partial

import torch
from digits_resnet import digits
from torch import Tensor, nn
from torch.nn.functional import gelu

import fewbit
from fewbit.convert.functions import FunctionMode, FunctionQuantizers
from fewbit.runtime.quantizers import copies
from fewbit.runtime.quantizers.quantizer import Quantizer
from fewbit.runtime.saved.single_backward import SavingFunction

BITS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4)
WHOLE = (1, 2, 3, 4)
ACTIVATION_BITS = 3
LEVELS = {"L2": WHOLE, "L2.5": BITS, "L3": BITS}
NUMBERED = {"L2.5, numbered": BITS, "L3, numbered": BITS}
TABLES, QUANTIZED, SHARED = "few-bit activations", "quantized activations", "shared copies"
ACTIVATIONS = dict.fromkeys((TABLES, QUANTIZED, SHARED), WHOLE)
"""The ways to save inputs of activations. Other layers are at level L3 with the same bits."""


def compress(model: nn.Module, method: str, bits: float) -> None:
    """Convert a model in place.

    Args:
        model: The model.
        method: A key of LEVELS or ACTIVATIONS, a key of NUMBERED for a digits network, or "exact" for no conversion.
        bits: The bits, on average if the method divides them.
    """
    if method == "exact":
        return
    layers = {"activation_bits": ACTIVATION_BITS}
    quiet = partial(fewbit.compress_, model, verbose=False)
    if method in ("L2", "L2.5"):
        quiet(fewbit.Level(method, bits), layers=layers | {"attention_bits": bits})
    elif method == "L3":
        quiet(fewbit.AdaptiveBits(bits), layers=layers)
    elif method in NUMBERED:
        level, _ = method.split(", ")
        number_digits(quiet(fewbit.Level(level, bits), layers=layers))
    elif method == TABLES:
        quiet(fewbit.AdaptiveBits(bits), layers={"activation_bits": bits})
    else:
        controller = quiet(fewbit.AdaptiveBits(bits), layers=layers, exclude=is_gelu)
        quantize_activations(controller, shared=method == SHARED)


def of_functions(controller) -> FunctionQuantizers:
    """Return the settings of functions that the model's modules call."""
    return next(c.settings for c in controller.context.contexts if isinstance(c, FunctionMode))


# -- Numbered ------------------------------------------------------------------------------------------------


def number_digits(controller) -> None:
    """Pass the numbers of a batch's digits to the controller before each forward in training.

    A hook recognizes the digits by their pixels.
    """
    numbers = {_pixels(image): number for number, image in enumerate(digits()[0])}

    def tell(model, inputs):
        if model.training:
            controller.number_samples([numbers[_pixels(image)] for image in inputs[0]])

    controller.model.register_forward_pre_hook(tell, prepend=True)


def _pixels(image: Tensor) -> bytes:
    return image.numpy().tobytes()


# -- Activations that keep their input -----------------------------------------------------------------------


class _GELU(SavingFunction):
    @staticmethod
    def forward(ctx, x, quantizer, shared):
        return copies.keep(ctx, gelu(x), x=quantizer.quantize(x, shared))

    @staticmethod
    def backward(ctx, grad):
        x = copies.Kept(ctx).values("x", grad.dtype)
        return torch.ops.aten.gelu_backward(grad, x), None, None


class QuantizedGELU(nn.GELU):
    """A GELU that saves its input quantized.

    Attributes:
        quantizer: The quantizer of the input.
        shared: Whether the GELU may use a copy that another layer, such as the norm before, has of the same tensor.
    """

    quantizer: Quantizer
    shared: bool

    def forward(self, x):
        return _GELU.call(x, self.quantizer, self.shared) if self.training else super().forward(x)


def is_gelu(path: str, module: nn.Module) -> bool:
    return type(module) is nn.GELU


def quantize_activations(controller, shared: bool) -> None:
    """Make the GELUs of a compressed model, which `compress_` has left out, save their inputs quantized."""
    quantizer = of_functions(controller).quantizer
    for path, module in controller.model.named_modules():
        if is_gelu(path, module):
            module.__class__ = QuantizedGELU
            module.quantizer, module.shared = quantizer.copy_for(path), shared
