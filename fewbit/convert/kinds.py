"""The registry of kinds: the class to which each class of module is converted, or the reason why none exists."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import BuiltinFunctionType, MappingProxyType
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from fewbit import functions
from fewbit import nn as few
from fewbit.convert import transformers_modules
from fewbit.convert.recurrent import StepwiseLSTM
from fewbit.errors import FunctionError
from fewbit.nn.activations import TwoValued
from fewbit.nn.base import Quantized
from fewbit.runtime.interop.module_calls import class_of

ACTIVATION, CONVOLUTION, LAYER, EXACT = "activation", "convolution", "layer", "exact"
RECURRENT = "recurrent"
"""The families of kinds. Activations save codes; convolutions, the only family of level L1, and other layers save quantized inputs.
EXACT saves less than torch, without error. RECURRENT is converted only with `everything`.
"""

OWN_FORWARD = "its forward was replaced on the instance, so its class does not say what it computes"


class Kind(NamedTuple):
    """The class to which a module is converted, `becomes`, a subclass of the module's class.

    `family` is ACTIVATION, CONVOLUTION, LAYER, EXACT or RECURRENT. `attributes` is {name: value} of those that only the new class needs.
    """

    becomes: type[nn.Module]
    family: str = ACTIVATION
    attributes: Mapping[str, object] = MappingProxyType({})

    @property
    def one_bit(self) -> bool:
        """Return whether the kind is an activation whose derivative has two values."""
        return issubclass(self.becomes, TwoValued)


def is_activation(cls: type) -> bool:
    """Return whether the class is one of fewbit's activations."""
    return cls.__module__ == few.GELU.__module__


def _family_of(cls: type[nn.Module]) -> str:
    if is_activation(cls):
        return ACTIVATION
    if not issubclass(cls, Quantized):
        return EXACT
    return CONVOLUTION if issubclass(cls, nn.modules.conv._ConvNd) else LAYER


TORCH = {
    getattr(nn, name): Kind(getattr(few, name), _family_of(getattr(few, name)))
    for name in few.__all__
    if issubclass(getattr(few, name), getattr(nn, name, ()))
}
"""{class of torch.nn: its kind, with the subclass of the same name in `fewbit.nn`}.

A user's subclass of a class of torch.nn has no kind: it may compute something else.
"""
TORCH[nn.LSTM] = Kind(StepwiseLSTM, RECURRENT)
ACTIVATIONS = {cls: kind for cls, kind in TORCH.items() if kind.family == ACTIVATION}
_GELU_TANH = Kind(few.GELU, attributes={"approximate": "tanh"})
# The keys are names of classes in transformers.activations, so that transformers need not be installed.
TRANSFORMERS_ACTIVATIONS = {
    "GELUActivation": Kind(few.GELU, attributes={"approximate": "none"}),
    "NewGELUActivation": _GELU_TANH,
    "GELUTanh": _GELU_TANH,
    "PytorchGELUTanh": _GELU_TANH,
    "AccurateGELUActivation": _GELU_TANH,
    "FastGELUActivation": Kind(few.FastGELU),
    "QuickGELUActivation": Kind(few.QuickGELU),
    "SiLUActivation": Kind(few.SiLU, attributes={"inplace": False}),
    "MishActivation": Kind(few.Mish, attributes={"inplace": False}),
    "LaplaceActivation": Kind(few.Laplace, attributes={"mu": 0.707107, "sigma": 0.282095}),
    "ReLUSquaredActivation": Kind(few.ReLUSquared),
    "SqrtSoftplusActivation": Kind(few.SqrtSoftplus),
    "BloomGelu": _GELU_TANH,
}
FUNCTION_OWNERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Classes whose attribute `activation` may be a plain function, one of FUNCTIONS."""
FUNCTION_ATTRIBUTE = "activation"
FUNCTIONS = {F.relu: nn.ReLU, torch.relu: nn.ReLU, F.gelu: nn.GELU}

_RECURRENT = "one op over all steps, which saves tensors of its own; on a CPU, layers={'everything': True} compresses them"
LEFT_ALONE = {
    nn.Softmin: "no few-bit version",
    nn.Softmax2d: "no few-bit version",
    nn.EmbeddingBag: "no few-bit version",
    nn.LocalResponseNorm: "no few-bit version",
    nn.RNN: _RECURRENT,
    nn.LSTM: _RECURRENT,
    nn.GRU: _RECURRENT,
}


_SAVED_EXACTLY = {
    nn.modules.dropout._DropoutNd: "1-bit mask",
    nn.Embedding: "indices",
    (nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AdaptiveMaxPoolNd): "places of maxima",
    (nn.modules.pooling._AvgPoolNd, nn.modules.pooling._AdaptiveAvgPoolNd, nn.Upsample): "nothing",
}
"""{classes of torch.nn: what their modules save, without error}."""
_SAVES_NO_INPUT = "its frozen weight is quantized, so it saves no input"
# The keys are names of classes in bitsandbytes.nn.
BITSANDBYTES = {
    "Linear4bit": _SAVES_NO_INPUT,
    "LinearFP4": _SAVES_NO_INPUT,
    "LinearNF4": _SAVES_NO_INPUT,
    "Linear8bitLt": "bitsandbytes keeps its input in full until the backward pass, where fewbit.saved_bytes does not see it",
}
_IN_FUNCTIONAL = dict(vars(F))
"""The contents of torch.nn.functional when fewbit was imported."""
_NO_METHODS = type, staticmethod, classmethod

_PART_OF_ATTENTION = nn.modules.linear.NonDynamicallyQuantizableLinear


def kind_of(module: nn.Module) -> Kind | None:
    """Return the kind of a module, which depends on its class and on attributes such as `alpha`, or None."""
    cls = class_of(module)
    if cls.__module__ == "transformers.activations":
        if cls.__name__ == "ClippedGELUActivation" and (module.min, module.max) == (-10, 10):
            return Kind(few.ClippedGELU)
        return TRANSFORMERS_ACTIVATIONS.get(cls.__name__)
    if cls.__module__.startswith(("transformers.", "liger_kernel.")):
        adapted = transformers_modules.becomes(module)
        if adapted is None:
            return TRANSFORMERS_ACTIVATIONS.get(cls.__name__)
        return Kind(adapted, LAYER)
    return None if _misfit_of(module) else TORCH.get(cls)


def _misfit_of(module: nn.Module) -> str | None:
    """Return why an activation's settings, such as `alpha`, have no table, or None."""
    cls = class_of(module)
    # In training the slopes of RReLU are random and need no table.
    if cls not in ACTIVATIONS or cls is nn.RReLU:
        return None
    function = functions.modules()[cls.__name__]
    try:
        names = functions.get(function).parameters
        functions.get(function, {name: float(getattr(module, name)) for name in names})
    except (FunctionError, TypeError, ValueError) as error:
        return str(error)
    return None


def is_cell(module: nn.Module) -> bool:
    """Return whether the module is an RNNCell, GRUCell or LSTMCell."""
    return isinstance(module, nn.RNNCellBase)


def why_not(module: nn.Module, everything: bool = False, functional: bool = False) -> str | None:
    """Return why a module without a kind is not converted; None if no reason need be reported."""
    if not everything:
        return _why_not(module, True, functional)
    reason = _why_not(module, False, functional)
    if reason is None:
        return None
    # On a GPU a recurrent layer is one operation of cuDNN, which stays exact.
    place = "on the CPU, " if isinstance(module, nn.RNNBase) else ""
    return f"{reason}; {place}what its operations save is compressed"


def _why_not(module: nn.Module, is_exact: bool, functional: bool) -> str | None:
    cls = class_of(module)
    if cls in LEFT_ALONE:
        is_recurrent = issubclass(cls, nn.RNNBase) and not is_exact
        return "no few-bit version" if is_recurrent else LEFT_ALONE[cls]
    if cls is _PART_OF_ATTENTION:
        return None
    if cls.__module__.startswith("bitsandbytes.") and cls.__name__ in BITSANDBYTES:
        return BITSANDBYTES[cls.__name__]
    misfit = transformers_modules.misfit_of(module)
    if misfit is not None:
        return misfit
    if cls in TORCH:
        return f"no table for its settings: {_misfit_of(module)}"
    if cls.__module__.startswith("liger_kernel."):
        return "its kernel of Liger saves what it needs in full"
    known = next((base for base in cls.__mro__ if base in TORCH), None)
    if known is not None:
        return f"a subclass of {known.__name__}, which may compute something else"
    code = getattr(getattr(cls, "forward", None), "__code__", None)
    if is_exact and not functional and code is not None and "einsum" in code.co_names:
        return "it calls einsum, which stays exact and saves its inputs in full"
    own = next(module.parameters(recurse=False), None)
    if own is None:
        return None
    if next(module.children(), None) is None:
        return "no few-bit version"
    return "no few-bit version of what it computes with parameters of its own"


def replaced(module: nn.Module) -> str | None:
    """Return which code of a module's forward is monkey-patched, its own or a function's, as a text; or None."""
    cls = class_of(module)
    ours = methods_of_liger(module)
    for name, value in vars(module).items():
        if name == "extra_repr" or name in ours:  # torchao replaces extra_repr on instances
            continue
        if callable(value) and callable(getattr(cls, name, None)):
            return OWN_FORWARD
    for definer in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for name, function in vars(definer).items():
            if name != "forward" and (name.startswith("__") or not name.startswith("_")):
                continue
            code = getattr(function, "__code__", None)
            if code is None and (not callable(function) or isinstance(function, _NO_METHODS)):
                continue
            file = getattr(sys.modules.get(definer.__module__), "__file__", None)
            if code is None or file not in (None, code.co_filename):
                return f"{definer.__name__}.{name} was replaced, so the class does not say what it computes"
            for called in code.co_names:
                if not _is_torchs(called):
                    return f"torch.nn.functional.{called}, which it calls, was replaced"
    return None


def methods_of_liger(module: nn.Module) -> dict[str, object]:
    """Return {name: method} that Liger has set on the instance, and that compute the same as the class's."""
    return {
        name: value
        for name, value in vars(module).items()
        if getattr(getattr(value, "__func__", None), "__module__", "").startswith("liger_kernel.")
    }


def _is_torchs(name: str) -> bool:
    """Return whether torch.nn.functional has torch's own function `name`, or none."""
    function = vars(F).get(name)
    if function is not _IN_FUNCTIONAL.get(name):
        return False
    # The function may have been replaced before fewbit was imported.
    if not callable(function) or isinstance(function, (type, BuiltinFunctionType)):
        return True
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(torch.__path__[0])


def saves_nothing(module: nn.Module) -> bool:
    """Return whether a converted module saves no input, because its weight needs no gradient."""
    kinds = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding, transformers_modules.Conv1D)
    return isinstance(module, kinds) and not module.weight.requires_grad


def saved_exactly(module: nn.Module) -> str:
    """Return what a converted module whose gradients stay exact saves."""
    found = (text for classes, text in _SAVED_EXACTLY.items() if isinstance(module, classes))
    return next(found, "exact")


def is_fewbit(module: nn.Module) -> bool:
    """Return whether the module's class is one of fewbit's layers."""
    return isinstance(module, Quantized) or type(module).__module__.startswith("fewbit.nn.")


def name_of(cls: type) -> str:
    """Return the public name of a class of fewbit, such as "fewbit.nn.Linear", else "fewbit's"."""
    if is_activation(cls):
        return f"fewbit.{cls.__name__}"
    return f"fewbit.nn.{cls.__name__}" if hasattr(few, cls.__name__) else "fewbit's"


def may_call_attention(model: nn.Module) -> bool:
    """Return whether a forward pass may call a function of attention: some module is of no class of torch.nn or fewbit."""
    return not all(_is_torch_or_fewbit(module) for module in model.modules())


def _is_torch_or_fewbit(module: nn.Module) -> bool:
    return is_fewbit(module) or class_of(module).__module__.startswith("torch.nn.")


def may_call(module: nn.Module) -> bool:
    """Return whether a module's forward may call others: all but childless modules of torch.nn and fewbit."""
    if next(module.children(), None) is not None:
        return True
    return not _is_torch_or_fewbit(module)
