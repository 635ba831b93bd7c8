"""Functions that a forward calls, rather than modules: few-bit versions in their place while a model trains."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch.nn import functional as torch_functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from fewbit import functional as F
from fewbit.errors import FunctionError
from fewbit.runtime.activations.apply import takes
from fewbit.runtime.interop.bypass import said
from fewbit.runtime.interop.module_calls import is_compiled_code, leave_to_interpreter
from fewbit.runtime.quantizers.quantizer import Quantizer

_ACTIVATIONS = (
    "celu elu gelu hardsigmoid hardswish leaky_relu logsigmoid mish selu silu softplus softsign tanhshrink "
    "relu relu6 rrelu"
)
ACTIVATIONS = (*_ACTIVATIONS.split(), "sigmoid", "tanh")
"""Names of functions that keep few-bit codes."""
_ONE_BIT = ("relu", "relu6", "leaky_relu", "rrelu", "hardsigmoid")
_QUANTIZED = (
    "linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d batch_norm "
    "layer_norm rms_norm group_norm instance_norm prelu softmax log_softmax scaled_dot_product_attention"
)
QUANTIZED = (*_QUANTIZED.split(), "matmul", "mul")
"""Names of functions that keep quantized inputs."""
_EXACT = (
    "embedding dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout "
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d adaptive_avg_pool1d "
    "adaptive_avg_pool2d adaptive_avg_pool3d interpolate pad"
)


def _softmax(ours):
    """torch.softmax and Tensor.softmax take dtype where torch.nn.functional's takes something else."""

    def softmax(input, dim, dtype=None, **kwargs):
        return ours(input, dim, dtype=dtype, **kwargs)

    softmax.__name__ = ours.__name__
    return softmax


def _torch_dropout(input, p, train):
    """torch.dropout names its last argument otherwise than torch.nn.functional's."""
    return F.dropout(input, p, train)


_torch_softmax, _torch_log_softmax = _softmax(F.softmax), _softmax(F.log_softmax)
_ELSEWHERE = {  # other names of the same functions
    "relu": (torch.relu, torch.Tensor.relu),
    "sigmoid": (torch.sigmoid, torch.Tensor.sigmoid),
    "tanh": (torch.tanh, torch.Tensor.tanh),
    "matmul": (torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.bmm, torch.Tensor.__matmul__),
    "mul": (torch.mul, torch.Tensor.mul, torch.Tensor.__mul__),
}  # fmt: skip


_OF_ATTENTION = (F.scaled_dot_product_attention, F.matmul, F.softmax, _torch_softmax)


def _table() -> dict:
    """{torch's function: (ours, "activation", "one bit", "quantized" or "exact")}."""
    table = {}
    families = {
        "activation": ACTIVATIONS,
        "quantized": QUANTIZED,
        "exact": _EXACT.split(),
    }
    for family, names in families.items():
        for name in names:
            each = "one bit" if name in _ONE_BIT else family
            theirs = {getattr(torch_functional, name, None), *_ELSEWHERE.get(name, ())} - {None}
            table.update({function: (getattr(F, name), each) for function in theirs})
    table[torch.dropout] = _torch_dropout, "exact"
    for function in (torch.softmax, torch.Tensor.softmax):
        table[function] = _torch_softmax, "quantized"
    for function in (torch.log_softmax, torch.Tensor.log_softmax):
        table[function] = _torch_log_softmax, "quantized"
    return table


_EXPOSING = {
    torch.Tensor.data.__get__,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
}
"""Attributes and methods that give access to a tensor's memory without changing its version on a write."""


@dataclass(frozen=True)
class FunctionSettings:
    """What functions keep that modules call."""

    quantizer: Quantizer
    activation_bits: int
    attention_quantizer: Quantizer
    own: dict[str, Quantizer] = field(
        default_factory=dict, compare=False
    )  # by name, of those that have called

    def call(self, ours, family, function, args, kwargs):
        if family == "quantized":
            if ours in (F.mul, F.matmul) and not _both_are_made(args, kwargs):
                return function(*args, **kwargs)
            quantizer = self.attention_quantizer if ours in _OF_ATTENTION else self.quantizer
            if quantizer.session is not None:
                quantizer = self._named(quantizer, ours)
            return ours(*args, **kwargs, quantizer=quantizer)
        if family == "exact":
            return ours(*args, **kwargs)
        if not takes(args[0] if args else kwargs.get("input")):
            return function(*args, **kwargs)
        bits = {"bits": self.activation_bits} if family == "activation" else {}
        session, named = self.quantizer.session, nullcontext()
        if session is not None and session.policy is not None:
            name = name_of_call(session.path(), ours.__name__)
            named = session.activation(name)
            if bits:
                x = args[0] if args else kwargs["input"]
                bits["bits"] = session.activation_bits(name, self.activation_bits, x)
        try:
            with named:
                return ours(*args, **kwargs, **bits)
        except FunctionError:  # of parameters that torch alone takes
            return function(*args, **kwargs)

    def _named(self, quantizer: Quantizer, ours) -> Quantizer:
        """For all calls of that function by the module that runs."""
        name = name_of_call(quantizer.session.path(), ours.__name__)
        own = self.own.get(name)
        if own is None:
            own = self.own[name] = quantizer.named(name)
        return own


def name_of_call(path: str, function: str) -> str:
    """The name of what a function keeps that the module at that path calls."""
    return f"{path}:{function}"


def bits_of_call(function: str, bits: int) -> int:
    """Of the codes that an activation keeps which a module calls. bits: of those whose derivative has more than two values."""
    return 1 if function in _ONE_BIT else bits


class Calls(TorchFunctionMode):
    """Within it torch's functions of the table run as fewbit's, on tensors that need a gradient."""

    TABLE = _table()

    def __init__(self, settings: FunctionSettings):
        self.settings = settings

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_compiled_code():
            return function(*args, **kwargs)
        found = self.TABLE.get(function)
        if found is None and function in _EXPOSING:
            self._expose(args)
        own = said()
        if found is None or own is True or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        session = self.settings.quantizer.session
        if session is not None and not session.compresses_functions():
            return function(*args, **kwargs)
        ours, family = found
        if not all(isinstance(each, torch.Tensor) for each in args[:1]) or "out" in kwargs:
            return function(*args, **kwargs)
        return (own or self.settings).call(ours, family, function, args, kwargs)

    def _expose(self, args) -> None:
        session = self.settings.quantizer.session
        if session is not None and args and isinstance(args[0], torch.Tensor):
            session.expose(args[0])

    def depth_outside(self) -> int:
        """Return how often a forward that begins in this thread may find the mode entered: if it is, it was left behind."""
        return 0

    def depth(self) -> int:
        """Return how often this mode is entered in this thread."""
        return sum(each is self for each in _get_current_function_mode_stack())

    def cut(self, depth: int) -> None:
        """Exit this mode until it is entered only `depth` times. Other modes on torch's stack stay entered."""
        above = []
        try:
            while self.depth() > depth:
                mode = torch._C._get_function_stack_at(torch._C._len_torch_function_stack() - 1)
                if mode is not self:
                    above.append(mode)
                torch._C._pop_torch_function_stack()
        finally:
            for mode in reversed(above):
                torch._C._push_on_torch_function_stack(mode)


leave_to_interpreter(Calls.__torch_function__.__code__)


def _both_are_made(args, kwargs) -> bool:
    """Whether both factors come from layers: then torch would keep both."""
    return (
        len(args) == 2
        and not kwargs
        and all(
            isinstance(each, torch.Tensor) and each.requires_grad and not each.is_leaf
            for each in args
        )
    )
