"""The methods that `adaptive_bits.py` compares. Some of them exist only for this comparison.

Per tensor: a whole tensor has one minimum and one range, and is rounded at random. ActNN compares itself with BLPA in
this form (section 6.1). A code is stored unpacked in a byte, because only the errors are of interest here.

Quantized activations: GELU saves its input quantized, as other layers do at level L3. Its backward pass takes the
derivative at the dequantized input, instead of a value of a table (appendix E of the few-bit paper).

Numbered: levels L2.5 and L3, where the controller is told the numbers of the digits in a batch. It can therefore
remember the gradient magnitude of each digit (ActNN, section 4.3).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from digits_resnet import digits
from torch import Tensor, nn
from torch.nn.functional import gelu

import fewbit
from fewbit.convert.functions import FunctionMode, FunctionQuantizers
from fewbit.nn.base import Quantized
from fewbit.runtime.quantizers import copies
from fewbit.runtime.quantizers.quantizer import Quantizer
from fewbit.runtime.quantizers.spec import SavedTensors
from fewbit.runtime.saved.single_backward import SavingFunction

BITS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4)
WHOLE = (1, 2, 3, 4)
ACTIVATION_BITS = 3
LEVELS = {"per tensor": WHOLE, "L2": WHOLE, "L2.5": BITS, "L3": BITS}
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
    if method == "per tensor":
        controller = quiet(bits, layers=layers | {"attention_bits": bits})
        use_one_range(controller)
    elif method in ("L2", "L2.5"):
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


# -- Per tensor ----------------------------------------------------------------------------------------------


class OneRangeSpec(NamedTuple):
    """The spec that dequantizes codes with one (minimum, step), in place of `QuantizedTensorSpec`."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    count: int = 2

    def dequantize(self, tensors, dtype=None, affine=None) -> Tensor:
        codes, bounds = tensors
        minimum, step = bounds.unbind()
        values = codes * step + minimum
        scale, shift, _ = affine or (None, None, None)
        if scale is not None:
            values = values * scale
        if shift is not None:
            values = values + shift
        return values.to(dtype or self.dtype)


class OneRange(Quantizer):
    """A quantizer with one minimum and one step for a whole tensor."""

    def quantize_normalized(self, x, mean, rstd, inner):
        return super().quantize_normalized(x, mean, rstd, None)  # as a tensor, like any other

    def quantize_with_activation(self, run, y, encoding=None):
        return None

    def _quantize(
        self, x, dtype, slot=0, normalize=None, activation=None, **settings_of_other_copies
    ) -> SavedTensors:
        assert normalize is None
        generator = torch.Generator().manual_seed(int(self._seed(x, slot, activation)))
        bounds, codes = rounded(x.detach().float(), self.bits, generator)
        return SavedTensors((codes, bounds), OneRangeSpec(tuple(x.shape), codes.stride(), dtype))


def rounded(x: Tensor, bits: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Round x at random, without bias. Return (minimum, step), (2,) float32, and uint8 codes in x's shape and order."""
    least, most = x.aminmax()
    step = (most - least) / (2**bits - 1)
    offset = torch.rand(x.shape, generator=generator)
    codes = ((x - least) / step).nan_to_num(0.0).add(offset).floor().clamp(0, 2**bits - 1)
    return torch.stack((least, step)), codes.to(torch.uint8)


def of_functions(controller) -> FunctionQuantizers:
    """Return the settings of functions that the model's modules call."""
    return next(c.settings for c in controller.context.contexts if isinstance(c, FunctionMode))


def use_one_range(controller) -> None:
    """Make OneRange the class of all quantizers of a model at level L2, those of modules and those of functions."""
    functions = of_functions(controller)
    of_modules = [m.quantizer for m in controller.model.modules() if isinstance(m, Quantized)]
    for quantizer in (*of_modules, functions.quantizer, functions.attention_quantizer):
        quantizer.__class__ = OneRange


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
