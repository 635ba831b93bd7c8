"""The base of the autograd Functions of layers: when they run, and which derivatives they refuse.

They have no second derivatives, no forward mode, and some take no batches of gradients.
"""

from __future__ import annotations

from functools import wraps

import torch
from torch.autograd import Function, forward_ad

from fewbit.errors import GradientError
from fewbit.runtime.format import layout
from fewbit.runtime.interop.tensor_kinds import (
    PLAIN_CLASSES,
    check_tensors,
    is_batched,
    overrides_functions,
    transforms_active,
)
from fewbit.runtime.ops.library import NO_FORWARD_MODE, NO_SECOND_DERIVATIVE
from fewbit.runtime.parallel.shards import is_distributed
from fewbit.runtime.probes.restoring import observed

_creation_meta = torch._C._autograd._get_creation_meta
_ANY_VIEW = torch._C._autograd.CreationMeta.DEFAULT


def is_differentiated(*tensors) -> bool:
    """Return whether fewbit's layer has to run for these inputs and parameters, which may be None.

    torch's own layer runs instead if no gradient is needed, if an input is complex, nested, not strided, a DTensor or
    of a class that overrides torch's functions, or if torch.func or torch.jit.trace transforms the call.

    Raises:
        InputError: gradients are enabled, and an argument is neither a tensor nor None.
        GradientError: fewbit's layer would have to run, and an argument is a dual number.
    """
    if not torch.is_grad_enabled():
        return False
    needs_gradient, are_ordinary = False, True
    for x in tensors:
        if x is None:
            continue
        if type(x) not in PLAIN_CLASSES:
            check_tensors(x)
            are_ordinary = are_ordinary and not (overrides_functions(x) or is_distributed(x))
        needs_gradient = needs_gradient or x.requires_grad
        if x.layout is not torch.strided or x.dtype.is_complex or x.is_nested:
            are_ordinary = False
    if not (needs_gradient and are_ordinary):
        return False
    if torch.compiler.is_dynamo_compiling():
        return True
    if transforms_active() or torch._C._is_tracing():
        return torch.compiler.is_compiling()
    if forward_ad._current_level >= 0:
        refuse_forward_mode(*tensors)
    return True


def may_overwrite(x: torch.Tensor) -> bool:
    """Return whether autograd lets a layer write its result to x. If not, torch's own function runs, and raises its error."""
    if torch.compiler.is_compiling():
        return True
    if x.is_leaf or layout.overlaps(x):
        return False
    return not x._is_view() or (not x._base.is_leaf and _creation_meta(x) == _ANY_VIEW)


class SavingFunction(Function):
    """The base of the autograd Functions of layers. Differentiating the results of their backward raises GradientError.

    torch's `once_differentiable` gives a wrong second derivative, zero, if the incoming gradient is a constant.

    Attributes:
        gradient_errors: a static method (context, what was kept, gradient of the result, gradients of the inputs,
            squared errors of rows) that returns the errors of the gradients (`probes/gradient_errors.py`). None if the
            layer has no formula; `ErrorBound` then measures them with noise.
        observed: the name of the quantized tensor on whose error the formulas depend.
    """

    gradient_errors = None
    observed = "x"

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.apply = super(
            Function, cls
        ).apply  # without torch's wrappers for torch.func, which cost the host's time
        if "backward" in vars(cls):
            cls.backward = staticmethod(_once(cls.backward))


def _once(backward):
    @wraps(backward)
    def once(ctx, *grads):
        if torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling():
            return _differentiable_once(backward, ctx, grads)
        if getattr(ctx, "is_observed", False):
            return observed(backward, ctx, grads)
        return backward(ctx, *grads)

    return once


def _differentiable_once(backward, ctx, grads):
    """Run a layer's backward whose results may be differentiated, which raises GradientError."""
    with torch.no_grad():
        is_observed = getattr(ctx, "is_observed", False)
        results = observed(backward, ctx, grads) if is_observed else backward(ctx, *grads)
    inputs = [x for x in (*grads, *graph_anchors(ctx)) if x is not None]
    if isinstance(results, torch.Tensor):
        return Once.apply(results, *inputs)
    return tuple(None if grad is None else Once.apply(grad, *inputs) for grad in results)


class Once(Function):
    """An autograd Function that returns a gradient unchanged, and raises GradientError if the gradient is differentiated."""

    @staticmethod
    def forward(ctx, result, *inputs):
        # An ordinary view may not be written to in place.
        return (
            result.clone()
            if result.is_sparse
            else torch.ops.aten._unsafe_view(result, result.shape)
        )

    @staticmethod
    def backward(ctx, *_):
        raise GradientError(NO_SECOND_DERIVATIVE)


def refuse_batches(layer: str, grads, transforms_only: bool) -> None:
    """Raise GradientError if a gradient is a batch (`tensor_kinds.is_batched`); `layer` is for the message."""
    for grad in grads:
        if is_batched(grad, transforms_only):
            raise GradientError(
                f"expected one gradient at a time for {layer}, got a batch of gradients inside vmap; "
                "call torch.autograd.grad once for each gradient"
            )


def refuse_forward_mode(*tensors) -> None:
    """Raise GradientError if one of the tensors, which may be None, is a dual number of `torch.autograd.forward_ad`.

    A method `jvp` could raise the error instead, but Dynamo traces no Function that has one.
    """
    for x in tensors:
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise GradientError(NO_FORWARD_MODE)


def graph_anchors(ctx) -> list[torch.Tensor]:
    """Return tensors on which `Once` makes a gradient depend: leaves of the input's graph, as the input is not saved.

    The incoming gradient may be a constant.
    """
    return [torch.empty(0, requires_grad=True), *_leaves(ctx)]


def _leaves(node) -> list[torch.Tensor]:
    leaves, seen, waiting = [], set(), [node]
    while waiting:
        for following, _ in waiting.pop().next_functions:
            if following is None or following in seen:
                continue
            seen.add(following)
            if hasattr(following, "variable"):
                leaves.append(following.variable)
            else:
                waiting.append(following)
    return leaves
