"""One call that applies a function with a few-bit derivative, whatever mode torch is in."""

from __future__ import annotations

import torch

from fewbit.errors import GradientError, InputError
from fewbit.runtime.activations import autograd
from fewbit.runtime.activations.callable_tables import check_result, name_of
from fewbit.runtime.format import layout
from fewbit.runtime.format.buffers import FLOATING
from fewbit.runtime.format.encoding import Encoding
from fewbit.runtime.interop.bypass import bypass
from fewbit.runtime.interop.tensor_kinds import is_abstract, is_plain
from fewbit.runtime.ops import library
from fewbit.runtime.ops.torch_functions import AUTOCAST_FLOAT32, FORWARD, IN_PLACE, MADE_CONTIGUOUS
from fewbit.runtime.quantizers import preactivation

_creation_meta = torch._C._autograd._get_creation_meta
_ANY_VIEW = torch._C._autograd.CreationMeta.DEFAULT


def apply(x: torch.Tensor, function: str, parameters: tuple, encoding: str, inplace: bool = False):
    """f(x), differentiable once, with `Encoding.parse(encoding)` in place of f'.

    x: floating, any shape and strides. function: a name of `fewbit.functions`; parameters in its order.
    Where no gradient is needed torch's own function runs and nothing is kept; so it does for nested and sparse
    tensors. Raises InputError for a
    dtype that is not float32, float64, float16 or bfloat16, and for an in-place call that torch or the
    packed codes do not allow; GradientError where a second or a forward-mode derivative is asked for.
    """
    if not needs_grad(x) or not _is_strided(x):
        return torchs_own(x, function, parameters, inplace)
    _check_input(x, function)
    plain = is_plain(x)
    if not plain or torch._C._is_any_autocast_enabled():
        x = _autocast(x, function)
    if function in MADE_CONTIGUOUS.get(x.device.type, ()):
        x = x.contiguous()
    if inplace:
        check_inplace(x, function, plain)
    if plain or is_abstract(x):
        y = preactivation.activate(x, function, parameters, encoding, inplace)
        if y is not None:
            return y
    if plain:
        encoded = Encoding.parse(encoding)
        return autograd.Activation.of_plain(x, function, parameters, encoded, inplace)
    y = _traceable(x, _forward(function, parameters), encoding)
    return x.copy_(y) if inplace else y


def _is_strided(x) -> bool:
    return x.layout is torch.strided and not x.is_nested


def takes(x) -> bool:
    """Whether `apply` has a few-bit derivative for x, a tensor or not."""
    return isinstance(x, torch.Tensor) and x.dtype in FLOATING


def torchs_own(x: torch.Tensor, function: str, parameters: tuple, inplace: bool = False):
    """f(x) by torch, with torch's derivative. Takes what `apply` takes."""
    with bypass():
        return (IN_PLACE if inplace else FORWARD)[function](x, *parameters)


def apply_callable(x: torch.Tensor, function, encoding: str):
    """The same for any callable on tensors: its own forward, then the codes of x.

    Raises FunctionError if the callable's result needs a gradient of something other than x, which it would not get.
    """
    if not needs_grad(x) or not _is_strided(x):
        return function(x)
    _check_input(x, name_of(function))
    if not is_plain(x):  # callable_encoding_text has checked the callable
        return _traceable(x, function, encoding)
    with bypass():
        y = function(x.detach())
    check_result(function, y)
    return _traceable(x, lambda _: y, encoding)


def _traceable(x, function, encoding):
    check_transforms(x)
    return autograd.Traceable.apply(x, function, encoding, seed_for(x, encoding))[0]


def _forward(function, parameters):
    return lambda x: FORWARD[function](x, *parameters)


def needs_grad(x) -> bool:
    """Whether a gradient with respect to x may be asked for, at any level of torch.func's transforms.

    torch.jit.trace is to see torch's own function, as torch.export does: ours could not be saved.
    """
    if not torch.is_grad_enabled() or torch.jit.is_tracing():
        return False
    if x.requires_grad or torch.compiler.is_compiling():
        return x.requires_grad
    # A batched tensor does not tell that what it wraps is being differentiated.
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
        if x.requires_grad:
            return True
    return False


def seed_for(x, encoding: str):
    """A fresh seed if the encoding draws its codes. (A look at the text, which a compiler can trace.)"""
    return library.new_seed(x) if '"knots"' in encoding else None


def check_transforms(x) -> None:
    """GradientError if a transform of torch.func around this call differentiates it a second time.

    Codes are integers, so a second derivative would come out as zero without a word.
    """
    if torch.compiler.is_compiling():
        return
    if torch.autograd.forward_ad.unpack_dual(x).tangent is not None:
        raise GradientError(library.NO_FORWARD_MODE)
    if torch._C._functorch.maybe_current_level() is None:
        return
    transforms = torch._C._functorch.TransformType
    kinds = [each.key() for each in torch._C._functorch.get_interpreter_stack() or ()]
    inner = x
    while torch._C._functorch.is_functorch_wrapped_tensor(inner):
        inner = torch._C._functorch.get_unwrapped(inner)
    if kinds.count(transforms.Grad) + inner.requires_grad > 1:
        raise GradientError(library.NO_SECOND_DERIVATIVE)
    if transforms.Jvp in kinds:
        raise GradientError(library.NO_FORWARD_MODE)


def _check_input(x, function: str) -> None:
    if x.dtype not in FLOATING:
        raise InputError(
            f"{function}: expected a float32, float64, float16 or bfloat16 tensor, got {x.dtype}"
        )


def _autocast(x, function: str):
    """x as torch's autocast would pass it to this function."""
    device = x.device.type
    float32 = function in AUTOCAST_FLOAT32.get(device, ()) and torch.is_autocast_enabled(device)
    return x.to(torch.float32) if float32 and x.dtype.itemsize == 2 else x


def check_inplace(x, function: str, plain: bool) -> None:
    """Everything that makes writing to x wrong, found before anything is written."""
    view = plain and x._is_view()
    if x.is_leaf or (view and x._base.is_leaf):
        raise InputError(
            f"{function}: expected an input that is not a leaf which requires grad for inplace=True, "
            "got one, or a view of one; its gradient would be lost"
        )
    if view and _creation_meta(x) != _ANY_VIEW:
        raise InputError(
            f"{function}: expected an input that autograd lets be overwritten for inplace=True, got one "
            "of several views (chunk, split, unbind ...) or a view made without gradients; clone it first"
        )
    if plain and layout.overlaps(x):
        raise InputError(
            f"{function}: expected an input whose elements lie apart for inplace=True, got strides "
            f"{tuple(x.stride())} for shape {tuple(x.shape)}; clone it first"
        )
