"""The autograd Functions of few-bit activations.

`Activation` calls fused kernels in eager mode, without torch's dispatcher; `Traceable` serves compilers,
`Transformable` callables and the transforms of `torch.func`.
"""

from __future__ import annotations

import torch
from torch.autograd import Function

from fewbit.errors import GradientError
from fewbit.runtime.activations import recomputed
from fewbit.runtime.format import layout
from fewbit.runtime.interop.tensor_kinds import is_abstract, is_plain
from fewbit.runtime.ops import activation_ops, library, traced_copies
from fewbit.runtime.ops.library import NO_FORWARD_MODE, NO_SECOND_DERIVATIVE
from fewbit.runtime.quantizers import computed, copies
from fewbit.runtime.saved import offload
from fewbit.runtime.saved.context import current
from fewbit.runtime.saved.saving_function import Once, graph_anchors
from fewbit.runtime.saved.sharing import place_of


class Activation(Function):
    """Computes f(x) and saves only the codes of x, packed in bit-planes."""

    @staticmethod
    def forward(ctx, x, function, parameters, encoding, inplace):
        seed = library.new_seed(x) if encoding.unbiased else None
        ctx.stride = None if x.is_contiguous() else layout.dense_stride(x)
        ctx.encoding, ctx.from_result = encoding, None
        context = current()
        arguments = x, function, parameters, encoding, seed, inplace
        if context is None:
            y, packed = activation_ops.activation(*arguments)
        else:
            if context.policy is not None:
                observed_as = context.observed_activation(function, parameters)
                if observed_as is not None:
                    ctx.observed_as = observed_as
            y, packed = _in_context(context, *arguments)
            if function in recomputed.FROM_RESULT:
                ctx.from_result = recomputed.FROM_RESULT[function]
                copies.want_result(ctx, context, y)
        if inplace:
            ctx.mark_dirty(x)
        if offload.running.entered:
            offload.mark(packed)
        ctx.save_for_backward(packed)
        return y

    @staticmethod
    def backward(ctx, grad):
        result = None if ctx.from_result is None else copies.result_of(ctx)
        if result is not None:
            with torch.no_grad():
                found = ctx.from_result(grad, result)
            if torch.is_grad_enabled():
                found = Once.apply(found, grad, *graph_anchors(ctx))
            return found, None, None, None, None
        (packed,) = ctx.saved_tensors
        # The first is the case with create_graph=True, the second with is_grads_batched=True.
        if torch.is_grad_enabled() or not is_plain(grad):
            stride = ctx.stride or layout.contiguous_stride(grad.shape)
            anchors = graph_anchors(ctx) if torch.is_grad_enabled() else ()
            grad = _product(grad, packed, ctx.encoding.text, stride, anchors)
        else:
            grad = activation_ops.decode_mul(grad, packed, ctx.encoding, ctx.stride)
        return grad, None, None, None, None


apply_activation = super(Function, Activation).apply
"""`Activation.apply` for plain tensors, without the wrappers for torch.func."""


def _in_context(context, x, function, parameters, encoding, seed, inplace):
    """Return f(x) and the packed codes of x, and record f(x) in the forward pass that runs.

    If f(x) overwrites x, the version of f(x) counts this change in advance, because torch increases x's version only
    when the Function returns.
    """
    arguments = x, function, parameters, encoding, seed, inplace
    saving = context.saving(x)
    copies = saving.shared
    if copies is None:
        return activation_ops.activation(*arguments)
    found = made = None
    if recomputed.is_recomputed(function, encoding, x.dtype):
        found = computed.copies_in(context, copies, x)
    if found is None and context.consumers and not saving.is_region and layout.is_by_sample(x):
        quantizer = context.consumers.get((len(copies.results), x.shape, x.dtype))
        made = quantizer and activation_ops.activation_quantized(*arguments, quantizer)
    y, packed, saved = made or (*activation_ops.activation(*arguments), None)
    place = place_of(y, int(inplace))
    if not saving.is_region:
        copies.record_output(x, y, place, saved is not None)
        if saved is not None:
            copies.put(y, place, quantizer.key, saved)
        if activation_ops.is_masking(function, encoding, x.dtype):
            if x.is_contiguous() or layout.is_dense(x):
                copies.put_mask(y, packed, int(inplace))
    if found is not None:
        found.share(y, place, recomputed.from_codes(y, function, parameters, encoding), packed)
    return y, packed


class Traceable(Function):
    """Computes (f(x), packed codes of x) for any callable f on tensors, with ops that can be traced."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, function, encoding, seed):
        # Multiplying by `one` makes f(x) depend on the codes. Otherwise the compiler's partitioner would save x and make the
        # codes in the backward pass. For fake tensors outside of a compiler, it would only take memory.
        packed, one = traced_copies.encode_kept_op(x, encoding, layout.dense_stride(x), seed)
        y = function(x)
        return y if is_abstract(x) else traced_copies.tie(y, one), packed

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, _, ctx.encoding, _ = inputs
        _, packed, *anchor = output
        ctx.stride = layout.dense_stride(x)
        ctx.save_for_backward(packed, *anchor)
        ctx.mark_non_differentiable(packed)

    @staticmethod
    def backward(ctx, grad, *_):
        packed, *anchor = ctx.saved_tensors
        grad = _product(grad, packed, ctx.encoding, ctx.stride, anchor)
        return grad, None, None, None


class Transformable(Traceable):
    """Computes what `Traceable` does, and refuses second and forward-mode derivatives.

    At every level of transforms, the gradient of x depends on the third result, an empty tensor.
    """

    @staticmethod
    def forward(x, function, encoding, seed):
        return *Traceable.forward(x, function, encoding, seed), x.new_empty(0)

    @staticmethod
    def jvp(ctx, *_):
        raise GradientError(NO_FORWARD_MODE)


def _product(grad, packed, encoding, stride, anchors):
    if torch.compiler.is_compiling():
        return activation_ops.decode_mul_op(grad, packed, encoding, stride)
    return Product.apply(grad, packed, encoding, stride, *anchors)


class Product(Function):
    """Computes `grad` times the table's value for each code, and raises GradientError if the product is differentiated.

    This is a Function, because an op's autograd formula does not work in torch.func.
    """

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
