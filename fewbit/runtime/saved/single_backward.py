"""Backward passes that can be run but not differentiated: computing a second derivative raises GradientError."""

from __future__ import annotations

from functools import wraps

import torch
from torch.autograd import Function

from fewbit.errors import GradientError
from fewbit.runtime.interop.tensor_kinds import is_batched
from fewbit.runtime.ops.library import NO_SECOND_DERIVATIVE
from fewbit.runtime.probes.restoring import observed


def once_differentiable(backward):
    """Decorate the backward of an autograd Function so that differentiating its results raises GradientError.

    torch's decorator of the same name instead returns a second derivative of zero if the incoming gradient is a
    constant.
    """

    @wraps(backward)
    def once(ctx, *grads):
        if torch.compiler.is_compiling():
            return backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return observed(backward, ctx, grads)
        with torch.no_grad():
            results = observed(backward, ctx, grads)
        inputs = [x for x in (*grads, *graph_anchors(ctx)) if x is not None]
        if isinstance(results, torch.Tensor):
            return Once.apply(results, *inputs)
        return tuple(None if grad is None else Once.apply(grad, *inputs) for grad in results)

    return once


class Once(Function):
    """An autograd Function that returns a gradient unchanged and makes it depend on the tensors it was computed from.

    The Function's own backward, a second derivative, raises GradientError.
    """

    @staticmethod
    def forward(ctx, result, *inputs):
        # A view could not be written to in place.
        return (
            result.clone()
            if result.is_sparse
            else torch.ops.aten._unsafe_view(result, result.shape)
        )

    @staticmethod
    def backward(ctx, *_):
        raise GradientError(NO_SECOND_DERIVATIVE)


def refuse_batches(layer: str, grads, transforms_only: bool) -> None:
    """Raise GradientError if one of the gradients is a batch of gradients, which the layer cannot process.

    Args:
        layer: the layer's name, for the message.
        grads: the incoming gradients.
        transforms_only: whether to look for batches of `torch.func.vmap` alone, see `tensor_kinds.is_batched`.
    """
    if any(is_batched(grad, transforms_only) for grad in grads):
        raise GradientError(
            f"expected one gradient at a time for {layer}, got a batch of gradients inside vmap; "
            "call torch.autograd.grad once for each gradient"
        )


def graph_anchors(ctx) -> list[torch.Tensor]:
    """Return tensors for the gradient to depend on, so that differentiating the gradient raises GradientError.

    The gradient depends on the layer's input x, but x is not saved. The leaves of the graph from which x was computed
    take the place of x. The incoming gradient alone is not enough, because it may be a constant without a graph.
    """
    return [torch.empty(0, requires_grad=True), *_leaves(ctx)]


def _leaves(node) -> list[torch.Tensor]:
    """Return the leaves of the graph that the input of an autograd node was computed from."""
    leaves, seen, waiting = [], set(), [node]
    while waiting:
        # Within torch.func a context is no node; the forward refuses a second derivative there.
        for following, _ in getattr(waiting.pop(), "next_functions", ()):
            if following is None or following in seen:
                continue
            seen.add(following)
            if hasattr(following, "variable"):
                leaves.append(following.variable)
            else:
                waiting.append(following)
    return leaves
