"""The function mode of a converted model, which replaces the functions in `FunctionMode.TABLE` (docs/decisions/0009)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, partial
from inspect import signature

import torch
from torch.nn import functional as torch_functional

from fewbit import functional as F
from fewbit.errors import FunctionError
from fewbit.functional.operations import contractions, elementwise, vector_norm
from fewbit.functional.products import is_in_memory, is_quantized_product
from fewbit.runtime.activations.apply import takes
from fewbit.runtime.activations.recomputed import TWO_VALUED
from fewbit.runtime.format.groups import LEAST_ELEMENTS
from fewbit.runtime.interop.bypass import ReplacingMode, current_mode
from fewbit.runtime.interop.module_calls import is_compiled_code, leave_to_interpreter
from fewbit.runtime.interop.tensor_kinds import PLAIN_CLASSES
from fewbit.runtime.quantizers.quantizer import Quantizer
from fewbit.runtime.saved.sharing import SharedCopies

_ACTIVATIONS = (
    "celu elu gelu hardsigmoid hardswish leaky_relu logsigmoid mish selu silu softplus softsign tanhshrink "
    "relu relu6 rrelu sigmoid tanh"
)
ACTIVATIONS = tuple(_ACTIVATIONS.split())
"""Names of functions that save few-bit codes."""
_QUANTIZED = (
    "linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d batch_norm layer_norm rms_norm "
    "group_norm instance_norm prelu glu softmax log_softmax cross_entropy scaled_dot_product_attention matmul mul"
)
_OTHER_QUANTIZED = {
    contractions.einsum: (torch.einsum,),
    contractions.baddbmm: (torch.baddbmm, torch.Tensor.baddbmm),
    contractions.addcmul: (torch.addcmul, torch.Tensor.addcmul),
    contractions.grouped_mm: (
        torch_functional.grouped_mm,
        getattr(torch, "_grouped_mm", None),
    ),
    elementwise.erf: (torch.erf, torch.Tensor.erf),
    elementwise.exp: (torch.exp, torch.Tensor.exp),
    elementwise.square: (torch.square, torch.Tensor.square),
    elementwise.pow: (torch.pow, torch.Tensor.pow, torch.Tensor.__pow__),
    vector_norm.vector_norm: (torch.linalg.vector_norm,),
    vector_norm.norm: (torch.norm, torch.Tensor.norm),
    vector_norm.normalize: (torch_functional.normalize,),
}
"""{a function that `fewbit.functional` does not export, and that saves quantized tensors: those that it replaces}."""
QUANTIZED = (*_QUANTIZED.split(), *(function.__name__ for function in _OTHER_QUANTIZED))
"""Names of functions that save quantized inputs."""
_EXACT = (
    "embedding dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout max_pool1d max_pool2d max_pool3d "
    "avg_pool1d avg_pool2d avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d adaptive_avg_pool1d "
    "adaptive_avg_pool2d adaptive_avg_pool3d interpolate pad"
)


def _torch_softmax(input, dim, dtype=None, *, quantizer):
    """Compute torch.softmax, whose third argument is `dtype`, not `_stacklevel`."""
    return F.softmax(input, dim, dtype=dtype, quantizer=quantizer)


def _torch_log_softmax(input, dim, dtype=None, *, quantizer):
    return F.log_softmax(input, dim, dtype=dtype, quantizer=quantizer)


def _clamp_max(input, max):
    return elementwise.clamp(input, None, max)


# Saved tensors and their seeds are named after the function that saves them.
_torch_softmax.__name__, _torch_log_softmax.__name__ = "softmax", "log_softmax"

_OTHER_NAMES = {
    "dropout": (torch.dropout,),
    "relu": (torch.relu, torch.Tensor.relu),
    "sigmoid": (torch.sigmoid, torch.Tensor.sigmoid),
    "tanh": (torch.tanh, torch.Tensor.tanh),
    "matmul": (torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.bmm, torch.Tensor.__matmul__),
    "mul": (torch.mul, torch.Tensor.mul, torch.Tensor.__mul__),
}  # fmt: skip
_OTHER_EXACT = {
    elementwise.clamp: (
        torch.clamp,
        torch.clip,
        torch.clamp_min,
        torch.Tensor.clamp,
        torch.Tensor.clip,
        torch.Tensor.clamp_min,
    ),
    _clamp_max: (torch.clamp_max, torch.Tensor.clamp_max),
    elementwise.gather: (torch.gather, torch.Tensor.gather),
    elementwise.maximum: (torch.maximum, torch.Tensor.maximum),
    elementwise.minimum: (torch.minimum, torch.Tensor.minimum),
}
_OPERATIONS = {*_OTHER_QUANTIZED, *_OTHER_EXACT}
"""The functions of `fewbit.functional.operations`. torch's own run if no argument is large: almost nothing would be saved."""
_SUMMANDS = {
    contractions.baddbmm: ("batch1", "batch2"),
    contractions.addcmul: ("tensor1", "tensor2"),
}
"""{a product to which its first argument is added: the names of the factors}."""
_PRODUCTS = F.mul, F.matmul, contractions.einsum, contractions.grouped_mm, *_SUMMANDS
_NORMS = frozenset("batch_norm layer_norm rms_norm group_norm instance_norm".split())
_ATTENTION = (
    F.scaled_dot_product_attention,
    F.matmul,
    F.softmax,
    _torch_softmax,
    contractions.einsum,
    contractions.baddbmm,
    elementwise.square,
    elementwise.pow,
    vector_norm.normalize,
)
"""Functions of attention, and squares, often those of a loss. Their tensors get the bits of q, k and v, except in products with parameters."""
_NAMES_OF_ATTENTION = {function.__name__ for function in _ATTENTION}


def _table() -> dict:
    """Return {torch's function: (fewbit's function, its family)}."""
    families = {
        "activation": ACTIVATIONS,
        "quantized": _QUANTIZED.split(),
        "exact": _EXACT.split(),
    }
    table = {
        torch.softmax: (_torch_softmax, "quantized"),
        torch.Tensor.softmax: (_torch_softmax, "quantized"),
        torch.log_softmax: (_torch_log_softmax, "quantized"),
        torch.Tensor.log_softmax: (_torch_log_softmax, "quantized"),
    }
    for family, names in families.items():
        for name in names:
            entry = getattr(F, name), "one bit" if name in TWO_VALUED else family
            theirs = {getattr(torch_functional, name, None), *_OTHER_NAMES.get(name, ())} - {None}
            table |= dict.fromkeys(theirs, entry)
    for family, functions in {"quantized": _OTHER_QUANTIZED, "exact": _OTHER_EXACT}.items():
        for ours, theirs in functions.items():
            table |= dict.fromkeys({*theirs} - {None}, (ours, family))
    return table


_NAMES = {"mat2": "other", "train": "training", "x": "input"}
"""{name of an argument in some functions of torch: its name in fewbit's function}."""
_EXPOSING = {
    torch.Tensor.data.__get__,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
}
"""Attributes and methods by which a tensor's memory can be written without a change of its version."""

_SINGULAR = "log log2 log10 log1p logit reciprocal xlogy".split()
_KEEPING = {
    torch_functional.binary_cross_entropy,
    torch_functional.gaussian_nll_loss,
    torch_functional.kl_div,
    torch.Tensor.__rtruediv__,
    *(getattr(of, name) for of in (torch, torch.Tensor) for name in _SINGULAR),
    *(getattr(torch.Tensor, f"{name}_") for name in _SINGULAR),
    *(getattr(torch.special, name) for name in ("log1p", "logit", "xlogy", "xlog1py")),
}
"""Functions of probabilities whose gradients grow without limit near 0 or 1."""


@dataclass(frozen=True)
class FunctionQuantizers:
    """The settings for functions that modules call, such as F.linear.

    Attributes:
        quantizer: quantizes what functions save, except for functions of attention and norms.
        activation_bits: bits of the code that an activation saves for each element.
        attention_quantizer: quantizes what functions of attention save.
        norm_quantizer: quantizes what norms save.
        activation_quantizer: quantizes the inputs of activations; None if they save codes.
        own: {(path of a module, name of a function): the quantizer of the function there}, filled by first calls.
    """

    quantizer: Quantizer
    activation_bits: int
    attention_quantizer: Quantizer
    norm_quantizer: Quantizer
    activation_quantizer: Quantizer | None = None
    own: dict[tuple[str, str], Quantizer] = field(default_factory=dict, compare=False)

    @property
    def has_attention(self) -> bool:
        """Return whether a function of attention has been called so far."""
        return any(name in _NAMES_OF_ATTENTION for _, name in self.own)

    def call(self, ours, family, theirs, args, kwargs, path: str):
        """Call fewbit's function with these settings, or torch's if fewbit's does not support the arguments.

        `family` is "activation", "one bit", "quantized" or "exact". `theirs` takes no arguments. `path` is that of the running module.
        """
        if ours in _OPERATIONS and not _has_large(args):
            return theirs()
        if family == "exact":
            return ours(*args, **kwargs)
        if family == "quantized":
            name = ours.__name__
            is_attention = ours in _ATTENTION
            if ours in _PRODUCTS:
                factors = _factors(ours, args, kwargs)
                if factors is None:
                    return theirs()
                if any(map(is_in_memory, factors)) and is_attention:
                    # A product with a parameter is a linear layer.
                    name, is_attention = F.linear.__name__, False
                    if ours is F.matmul and factors[1].dim() == 2:
                        ours, args = F.linear, (factors[0], factors[1].t())
            usual = self.attention_quantizer if is_attention else self.quantizer
            quantizer = self._own(path, name, self.norm_quantizer if name in _NORMS else usual)
            return ours(*args, **kwargs, quantizer=quantizer)
        x = args[0] if args else kwargs.get("input")
        if not takes(x):
            return theirs()
        saves = {"bits": self.activation_bits} if family == "activation" else {}
        if self.activation_quantizer is not None:
            saves["table"] = self._own(path, ours.__name__, self.activation_quantizer)
        context, run = self.quantizer.context, ours
        if context is not None and context.policy is not None:
            name = name_of_call(path, ours.__name__)
            run = partial(context.run_activation, name, ours)
            if "bits" in saves:
                saves["bits"] = context.activation_bits(name, self.activation_bits, x)
        try:
            return run(*args, **kwargs, **saves)
        except FunctionError:  # torch accepts these parameters and fewbit does not
            return theirs()

    def _own(self, path: str, function: str, quantizer: Quantizer) -> Quantizer:
        """Return the quantizer that all calls of a function in the module at `path` share."""
        if quantizer.context is None:
            return quantizer
        call = path, function
        if call not in self.own:
            self.own[call] = quantizer.copy_for(name_of_call(*call))
        return self.own[call]


def name_of_call(path: str, function: str) -> str:
    """Return "<path>:<function>", which stands in reports for a function that the module at `path` calls."""
    return f"{path}:{function}"


class FunctionMode(ReplacingMode):
    """The mode in which fewbit's functions run in place of torch's functions in `TABLE`, if gradients are enabled."""

    TABLE = _table()

    def __init__(self, settings: FunctionQuantizers):
        self.settings = settings

    def __enter__(self):
        torch._C._push_on_torch_function_stack(self)

    def __exit__(self, *error):
        torch._C._pop_torch_function_stack()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function not in self.TABLE:  # most calls end here
            if function in _EXPOSING and not is_compiled_code():
                self._expose(args)
            elif function in _KEEPING and not is_compiled_code():
                self._keep((*args, *kwargs.values()))
            return function(*args, **kwargs)
        own = current_mode()
        if own is True or not torch.is_grad_enabled() or is_compiled_code():
            return function(*args, **kwargs)
        context, path = self.settings.quantizer.context, ""
        if context is not None:
            forward = context.innermost_forward()
            if forward is None or not forward.compresses_functions():
                return function(*args, **kwargs)
            path = forward.path
        ours, family = self.TABLE[function]
        # torch also takes the names of NumPy, such as axis for dim. The first argument of einsum is a text.
        moved, given, theirs = args, kwargs, partial(function, *args, **kwargs)
        if kwargs:
            if kwargs.get("out", self) is None:  # which is no argument: torch.norm passes it on
                kwargs = {name: value for name, value in kwargs.items() if name != "out"}
            names = _names(ours, tuple(kwargs))
            if names is None:
                return theirs()
            given = dict(zip(names, kwargs.values(), strict=True))
            moved, given = _tensors_first(ours, args, given)
        if moved and type(moved[0]) not in PLAIN_CLASSES:
            if not isinstance(moved[0], torch.Tensor | str):
                return theirs()
        return (own or self.settings).call(ours, family, theirs, moved, given, path)

    def _expose(self, args) -> None:
        """Stop layers from sharing a copy of the tensor args[0], whose memory may now change unnoticed."""
        copies = self._copies(args[0]) if args else None
        if copies is not None:
            copies.stop_sharing(args[0])

    def _keep(self, values) -> None:
        """Let layers use their results that are among the values, or from which values were computed, in the backward pass."""
        if not torch.is_grad_enabled():
            return
        for x in values:
            if isinstance(x, torch.Tensor) and x.requires_grad:
                copies = self._copies(x)
                if copies is not None and copies.wanted and not copies.note_kept(x):
                    copies.keep_source(x)

    def _copies(self, x) -> SharedCopies | None:
        """Return the copies that layers share if x is a tensor in a forward pass of the model, or None."""
        context = self.settings.quantizer.context
        forward = None if context is None else context.innermost_forward()
        if forward is None or not isinstance(x, torch.Tensor):
            return None
        return context.saving(x).shared


leave_to_interpreter(FunctionMode.__torch_function__.__code__)


def _has_large(args) -> bool:
    # The first argument of einsum is a text.
    tensors = contractions.operands_of(args[1:]) if args and isinstance(args[0], str) else args
    return any(isinstance(x, torch.Tensor) and x.numel() >= LEAST_ELEMENTS for x in tensors)


def _tensors_first(ours, args, kwargs) -> tuple[tuple, dict]:
    """Return the arguments of a call, with tensors that were passed by name at their positions."""
    for name in _positional(ours)[len(args) :]:
        if name not in kwargs or not isinstance(kwargs[name], torch.Tensor):
            break
        args = *args, kwargs.pop(name)
    return args, kwargs


@cache
def _names(ours, given: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the function's names for these names of torch's arguments; None if it lacks one of them."""
    names = tuple(_NAMES.get(name, name) for name in given)
    return names if set(names) <= set(signature(ours).parameters) - {"out"} else None


@cache
def _positional(ours) -> tuple[str, ...]:
    parameters = signature(ours).parameters.values()
    return tuple(one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD)


def _factors(ours, args, kwargs) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return both factors of a product, or None if torch's function has to run: one needs no gradient, or both are (views of) parameters."""
    if ours is contractions.einsum:
        factors = contractions.operands_of(args[1:])
    elif ours in _SUMMANDS:
        factors = *args[1:], *(kwargs[name] for name in _SUMMANDS[ours] if name in kwargs)
    else:
        has_others = kwargs and ours is not contractions.grouped_mm
        factors = () if has_others else args
    if len(factors) != 2 or not all(isinstance(factor, torch.Tensor) for factor in factors):
        return None
    takes = contractions.takes_einsum if ours is contractions.einsum else is_quantized_product
    return tuple(factors) if takes(*factors) else None
