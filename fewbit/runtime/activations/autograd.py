"""autograd Functions around the implementations of `ops`.

`Activation` is the eager path of named functions: fused kernels, and no dispatcher, whose cost for an op
written in Python is twice that of torch's own activation on a small tensor. `Traceable` is for callables,
and for all functions where the compiler or `torch.func` has to follow.
"""

from __future__ import annotations

from functools import wraps

import torch
from torch.autograd import Function

from fewbit.errors import GradientError
from fewbit.runtime.format import layout
from fewbit.runtime.interop.tensor_kinds import is_plain
from fewbit.runtime.ops import activation_ops, library
from fewbit.runtime.ops.library import NO_FORWARD_MODE, NO_SECOND_DERIVATIVE
from fewbit.runtime.saved import offload
from fewbit.runtime.saved.context import current
from fewbit.runtime.saved.probe import observed


class Activation(Function):
    """f(x) with the packed codes of x kept for the backward pass, and nothing else."""

    @staticmethod
    def forward(ctx, x, function, parameters, encoding, inplace):
        seed = library.new_seed(x) if encoding.unbiased else None
        ctx.stride = layout.dense_stride(x)
        ctx.encoding = encoding
        context = current()
        if context is not None:
            observed_as = context.observed_activation(function, parameters)
            if observed_as is not None:
                ctx.observed_as = observed_as
        if context is None or inplace:
            y, packed = activation_ops.activation(x, function, parameters, encoding, seed, inplace)
        else:
            y, packed = _in_context(context, x, function, parameters, encoding, seed)
        if inplace:
            ctx.mark_dirty(x)
        offload.mark(packed)
        ctx.save_for_backward(packed)
        return y

    @staticmethod
    def backward(ctx, grad):
        (packed,) = ctx.saved_tensors
        # create_graph=True or is_grads_batched=True
        if torch.is_grad_enabled() or not is_plain(grad):
            grad = _product(ctx, grad, packed, ctx.encoding.text)
        else:
            grad = activation_ops.decode_mul(grad, packed, ctx.encoding, ctx.stride)
        return grad, None, None, None, None

    @staticmethod
    def jvp(ctx, *_):
        raise GradientError(NO_FORWARD_MODE)

    @classmethod
    def of_plain(cls, *arguments):
        """`apply` for a plain tensor: Function's own spends a third of its time on torch.func's wrappers."""
        return super(Function, cls).apply(*arguments)


def _in_context(context, x, *arguments):
    """f(x) and packed codes; if a layer will keep f(x), its copy is made in the same pass."""
    quantizer = context.cache.consumer_quantizer(x) if x.is_contiguous() else None
    made = quantizer and activation_ops.activation_quantized(x, *arguments, quantizer)
    if not made:
        y, packed = activation_ops.activation(x, *arguments, False)
        context.cache.record_output(x, y)
        return y, packed
    y, packed, kept = made
    context.cache.record_output(x, y, quantizer, kept)
    return y, packed


class Traceable(Function):
    """(f(x), packed codes of x) for any callable f on tensors, in ops that can be traced."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, function, encoding, seed):
        # The product makes the forward's result depend on the codes; else the compiler's partitioner
        # takes them for a matter of the backward pass, and would keep x to make them there.
        packed, one = activation_ops.encode_kept_op(x, encoding, layout.dense_stride(x), seed)
        return function(x) * one, packed

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, _, ctx.encoding, _ = inputs
        _, packed = output
        ctx.stride = layout.dense_stride(x)
        ctx.save_for_backward(packed)
        ctx.mark_non_differentiable(packed)

    @staticmethod
    def backward(ctx, grad, _):
        (packed,) = ctx.saved_tensors
        return _product(ctx, grad, packed, ctx.encoding), None, None, None


def _product(ctx, grad, packed, encoding):
    """lut[code] * grad, through the op; whoever differentiates it is told."""
    if torch.compiler.is_compiling():
        return activation_ops.decode_mul_op(grad, packed, encoding, ctx.stride)
    anchors = _anchors(ctx) if torch.is_grad_enabled() else ()
    return Product.apply(grad, packed, encoding, ctx.stride, *anchors)


def _anchors(ctx) -> list[torch.Tensor]:
    """What a gradient is to be differentiated by, so that whoever asks for that is told.

    It depends on x by what is kept. x is gone, but what x was made from is there to be asked for a
    derivative; and something must be, as the gradient that came in may be a constant.
    """
    return [torch.empty(0, requires_grad=True), *_leaves(ctx)]


def once_differentiable(backward):
    """A Function's backward whose results refuse to be differentiated, with a GradientError.

    (torch's decorator of that name lets a second derivative pass as zero where the gradient is a constant.)
    """

    @wraps(backward)
    def once(ctx, *grads):
        if torch.compiler.is_compiling():
            return backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return observed(backward, ctx, grads)
        with torch.no_grad():
            results = observed(backward, ctx, grads)
        of = [each for each in (*grads, *_anchors(ctx)) if each is not None]
        if isinstance(results, torch.Tensor):
            return Once.apply(results, *of)
        return tuple(None if each is None else Once.apply(each, *of) for each in results)

    return once


class Once(Function):
    """A gradient, whose derivative by the tensors that it was made from is refused."""

    @staticmethod
    def forward(ctx, result, *of):
        # No view, which nobody could write to.
        return (
            result.clone()
            if result.is_sparse
            else torch.ops.aten._unsafe_view(result, result.shape)
        )

    @staticmethod
    def backward(ctx, *_):
        raise GradientError(NO_SECOND_DERIVATIVE)


def _leaves(node) -> list[torch.Tensor]:
    """The leaves of the graph that the input of an autograd node was computed from."""
    leaves, seen, waiting = [], set(), [node]
    while waiting:
        # (Within torch.func a context is no node; a second derivative is refused in the forward there.)
        for following, _ in getattr(waiting.pop(), "next_functions", ()):
            if following is None or following in seen:
                continue
            seen.add(following)
            if hasattr(following, "variable"):
                leaves.append(following.variable)
            else:
                waiting.append(following)
    return leaves


class Product(Function):
    """lut[code] * grad, whose derivative is refused. (An op's own autograd does not work in torch.func.)"""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad, packed, encoding, stride, *_):
        return activation_ops.decode_mul_op(grad, packed, encoding, stride)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise GradientError(NO_SECOND_DERIVATIVE)
