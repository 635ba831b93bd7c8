"""Apply a function f with a few-bit derivative, in eager mode, in torch.compile and in torch.func's transforms."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from fewbit.config import GROUP_SIZE, MAX_BITS, MIN_BITS
from fewbit.errors import InputError
from fewbit.printable import shorten
from fewbit.runtime.activations import autograd, recomputed, tables
from fewbit.runtime.activations.callable_tables import check_result
from fewbit.runtime.format.encoding import Encoding
from fewbit.runtime.format.groups import LEAST_FEATURES
from fewbit.runtime.format.tensor_checks import FLOATING
from fewbit.runtime.interop.bypass import bypass
from fewbit.runtime.interop.tensor_kinds import check_tensors, is_abstract, is_plain
from fewbit.runtime.ops import library
from fewbit.runtime.ops.torch_functions import AUTOCAST_FLOAT32, FORWARD, IN_PLACE, MADE_CONTIGUOUS
from fewbit.runtime.parallel import shards
from fewbit.runtime.quantizers import computed, fixed_point_copies
from fewbit.runtime.quantizers.quantizer import Quantizer, quantizer_of
from fewbit.runtime.saved.saving_function import may_overwrite, refuse_forward_mode
from fewbit.runtime.saved.sharing import place_of


def apply(x: torch.Tensor, function: str, parameters: tuple, bits, table=None, inplace=False):
    """Return f(x), which can be differentiated once, with a table in place of f'.

    If no gradient is needed, and for nested and sparse tensors, torch's own function runs.

    Args:
        x: a floating tensor of any shape and strides.
        function: the name of f in `fewbit.functions`.
        parameters: the parameters of f, in the order of `fewbit.functions`.
        bits: bits per code of the default table, 1 to 8, or None to run torch's own function.
        table: the table, or None for the default one. In a converted model, the quantizer of the copy of x that is
            saved in place of codes (`recomputed.keeps_copy`).
        inplace: whether to write f(x) to x. If autograd does not allow it, torch's own function runs, and raises its error.

    Raises:
        InputError: the dtype is not float32, float64, float16 or bfloat16.
        FunctionError, SolveError, TableError: there is no such table.
        GradientError: a second derivative or a forward-mode derivative is computed.
    """
    if inplace is not False and inplace is not True:
        _refuse_inplace(inplace, function)
    if bits is None:
        return torchs_own(x, function, parameters, inplace)
    quantizer = None
    if isinstance(table, Quantizer):
        quantizer, table = table, None
    if not is_plain(x):
        return _apply_unusual(x, function, parameters, bits, table, inplace, quantizer)
    # The usual case, for which the host's time counts: this part calls as few Python functions as it can.
    if parameters:
        parameters = tuple(map(float, parameters))
    if type(bits) is not int or table is not None or not MIN_BITS <= bits <= MAX_BITS:
        tables.check_choice(bits, table)
    encoding = tables.encoding_of(function, parameters, bits, table, x.dtype)
    if quantizer is None and table is None and function in recomputed.ANY_SCALE:
        quantizer = quantizer_of(bits, GROUP_SIZE)
    if not x.requires_grad or not torch.is_grad_enabled() or torch._C._is_tracing():
        return torchs_own(x, function, parameters, inplace)
    if forward_ad._current_level >= 0:
        refuse_forward_mode(x)
    if x.dtype not in FLOATING:
        refuse_dtype(x, function)
    if torch._C._is_any_autocast_enabled():
        x = _autocast(x, function)
    if function in MADE_CONTIGUOUS:
        x = _made_contiguous(x, function)
    if inplace and not may_overwrite(x):
        return torchs_own(x, function, parameters, inplace)
    if function in fixed_point_copies.SIGNED:
        y = fixed_point_copies.activate(x, function, parameters, encoding, inplace)
        if y is not None:
            return y
    if quantizer is not None:
        if recomputed.keeps_copy(x, function):
            return recomputed.CopiedActivation.apply(x, function, parameters, inplace, quantizer)
        if function in recomputed.OF_HEADS and x.numel() < LEAST_FEATURES:
            return torchs_own(x, function, parameters, inplace)
    return autograd.apply_activation(x, function, parameters, encoding, inplace)


def _apply_unusual(x, function, parameters, bits, table, inplace, quantizer):
    """Do what `apply` does for tensors of compilers, transforms and subclasses, and those without memory."""
    if torch.compiler.is_compiling():
        # The table depends on the parameters and bits, so symbolic numbers become constants.
        parameters = tuple(map(torch.fx.experimental.symbolic_shapes.guard_scalar, parameters))
        bits = next((number for number in range(1, 9) if number == bits), bits)
    parameters = tuple(map(float, parameters)) if parameters else ()
    dtype = getattr(x, "dtype", None)  # torch.fx traces with other objects in place of tensors
    encoding = tables.encoding_text(function, parameters, bits, table, dtype)
    if quantizer is None and table is None and function in recomputed.ANY_SCALE:
        quantizer = quantizer_of(bits, GROUP_SIZE)
    if torch.is_grad_enabled():
        if not isinstance(x, torch.Tensor):
            raise InputError(f"expected a torch.Tensor, got {shorten(x)}")
        x = shards.has_arrived(x)
        if shards.is_distributed(x):
            y = None
            if shards.runs_on_shards(x) and not inplace:
                y = shards.elementwise(lambda x: apply(x, function, parameters, bits, table), x)
            return torchs_own(x, function, parameters, inplace) if y is None else y
    if not needs_grad(x) or not _is_strided(x):
        return torchs_own(x, function, parameters, inplace)
    if x.dtype not in FLOATING:
        refuse_dtype(x, function)
    x = _autocast(x, function)
    if function in MADE_CONTIGUOUS:
        x = _made_contiguous(x, function)
    if inplace and not may_overwrite(x):
        return torchs_own(x, function, parameters, inplace)
    if is_abstract(x):
        encoded = Encoding.parse(encoding)
        y = fixed_point_copies.activate(x, function, parameters, encoded, inplace)
        if y is not None:
            return y
        if quantizer is not None and recomputed.keeps_copy(x, function):
            return recomputed.CopiedActivation.apply(x, function, parameters, inplace, quantizer)
        is_recomputed = recomputed.is_recomputed(function, encoded, x.dtype)
        found = computed.copies_of(x) if is_recomputed else None
        if found is not None:
            y, codes = autograd.Transformable.apply(
                x, _forward(function, parameters), encoding, None
            )[:2]
            y = x.copy_(y) if inplace else y
            again = recomputed.from_codes(x, function, parameters, encoded)
            found.share(y, place_of(y), again, codes)
            return y
    y = _traceable(x, _forward(function, parameters), encoding)
    return x.copy_(y) if inplace else y


def _is_strided(x) -> bool:
    return x.layout is torch.strided and not x.is_nested


def takes(x) -> bool:
    """Return whether x is a tensor with a dtype that `apply` accepts."""
    return isinstance(x, torch.Tensor) and x.dtype in FLOATING


def torchs_own(x: torch.Tensor, function: str, parameters: tuple, inplace: bool = False):
    """Return f(x), computed and differentiated by torch."""
    with bypass():
        return (IN_PLACE if inplace else FORWARD)[function](x, *parameters)


def apply_callable(x: torch.Tensor, function, encoding: str):
    """Return function(x) for an x that needs a gradient, with an encoding's text in place of the derivative.

    The result can be differentiated once.

    Raises:
        FunctionError: a parameter of the callable needs a gradient, which it would not get.
    """
    if not _is_strided(x):
        return function(x)
    if not is_plain(x):  # callable_encoding_text has checked the callable
        return _traceable(x, function, encoding)
    with bypass():
        y = function(x.detach())
    check_result(function, y)
    return _traceable(x, lambda _: y, encoding)


def _traceable(x, function, encoding):
    compiled = torch.compiler.is_compiling()
    run = autograd.Traceable if compiled else autograd.Transformable
    # A compiler can trace a search in the text, but cannot trace the parsing of the text.
    seed = library.new_seed(x) if '"knots"' in encoding else None
    return run.apply(x, function, encoding, seed)[0]


def _forward(function, parameters):
    return lambda x: FORWARD[function](x, *parameters)


def needs_grad(x) -> bool:
    """Return whether x may get a gradient, at any level of torch.func's transforms, but not under torch.jit.trace.

    Raises:
        InputError: x is not a tensor.
        GradientError: x needs a gradient and is a dual number.
    """
    if not torch.is_grad_enabled() or torch.jit.is_tracing():
        return False
    check_tensors(x)
    if torch.compiler.is_compiling():
        return x.requires_grad
    if x.requires_grad:
        if forward_ad._current_level >= 0:
            refuse_forward_mode(x)
        return True
    # For a batched tensor requires_grad is False, even if the tensor that it wraps is being differentiated.
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
        if x.requires_grad:
            return True
    return False


def refuse_dtype(x, function: str) -> None:
    """Raise InputError, because activations save nothing for a tensor with the dtype of x."""
    raise InputError(
        f"{function}: expected a float32, float64, float16 or bfloat16 tensor, got {x.dtype}"
    )


def _refuse_inplace(inplace, function: str) -> None:
    hint = f"; bits are given by name, as {function}(x, bits=3)" * isinstance(inplace, int)
    raise InputError(f"inplace: expected False or True, got {shorten(inplace)}{hint}")


def _autocast(x, function: str):
    device = x.device.type
    float32 = function in AUTOCAST_FLOAT32.get(device, ()) and torch.is_autocast_enabled(device)
    return x.to(torch.float32) if float32 and x.dtype.itemsize == 2 else x


def _made_contiguous(x, function: str):
    return x.contiguous() if x.device.type in MADE_CONTIGUOUS[function] else x
