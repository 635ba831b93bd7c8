"""Scaled dot-product attention, which saves query, key and value quantized, and neither its output nor the probabilities.

torch saves query, key, value, the output and, for each query, the log-sum-exp of its scores. If torch has no fused
kernel for a call (because of dropout on the CPU, or a mask that needs a gradient), it saves matrices of L x S elements,
for L queries and S keys. fewbit saves quantized copies of query q, key k and value v. The backward pass of fewbit's
function dequantizes q^, k^ and v^ from these copies, runs torch's own attention again on q^, k^ and v^, and
differentiates that run. On the CPU, the gradients of most calls in float32 are computed without a second run
(`blocks.py`).

Before k and v are quantized, their means over the keys are subtracted, except that of v if there is dropout. The means need
not be saved, because no gradient depends on them (`_without_mean`).

q^, k^ and v^ are rounded independently. The mean of each over the random rounding is exact in uniform copies, and
nearly exact in rotated copies (docs/concepts/quantizer.md). The gradients are not linear in q^, k^ and v^, so the mean of a
gradient differs from the exact gradient. This difference is called the bias. Let G be one of the exact gradients, as a
function of the elements x of q, k and v, and G^ the gradient that the backward pass computes. The bias of G^ is, up to
terms of higher order (ActNN, Chen et al., ICML 2021, long version, appendix B.2, derives the same for norms),

    E[G^] - G = 1/2 sum_x Var[x^] d2G / dx2

Var[x^] is the variance that rounding adds to x. In a rotated copy (the default), it is about the same for all elements
of a group: the distortion of the bits (`runtime/format/distortion.py`) times the mean of (x - m)^2 over the group,
where m is the group's mean. The errors of two elements of a group also have a small covariance, because the vector of
errors is orthogonal to the group minus its mean. The formula then has the sum of Cov[x^, z^] d2G / dx dz over all pairs
of elements x and z of the same tensor. In a uniform copy, Var[x^] = f (1 - f) step^2. Here step is the distance between
the two neighboring values to which x can be rounded, and f is the distance from x to the lower value, divided by step.

Let P be the probabilities, P^ the probabilities that are computed from q^ and k^, and g the gradient of the output. The
gradient of v is transpose(P) g, so its bias is transpose(E[P^] - P) g. Let i number the queries, j and m the keys, and
d the features, and let elements be rounded independently. With the scores S and the mean key a_i of query i,

    S_ij = scale sum_d q_id k_jd     a_id = sum_m P_im k_md
    E[P^_ij] - P_ij = P_ij / 2 (w_ij - sum_m P_im w_im)     w_ij = Var[S^_ij - sum_m P_im S^_im]
    w_ij = scale^2 sum_d (Var[q^_id] (k_jd - a_id)^2 + q_id^2 Var[k^_jd - a^_id])

On average, rounding therefore raises the probabilities of the keys to whose scores it adds the most variance.

The size of a bias is its norm divided by the norm of the exact gradient. For normally distributed q, k and v (one head,
16 queries and keys of 16 features, median of 96 random examples) the size at 2, 3 and 4 bits is 6.2, 1.6 and 0.4 % for
query and key, and 3.4, 0.9 and 0.2 % for value. With uniform copies, the size is 24, 5 and 1.1 % for query and key, and
14, 2.8 and 0.6 % for value. The bias is the mean of the error over many backward passes. The error of a single pass is
much larger: for query and key of these random examples, it is 67, 34 and 18 % at 2, 3 and 4 bits, and 1.2 % at 8 bits. With uniform copies, it
is 155, 60, 28 and 1.6 %. All these numbers grow with the size of the scores.
"""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import register_fake

from fewbit.config import DEFAULT_BITS, GROUP_SIZE
from fewbit.errors import InputError
from fewbit.functional.attention import blocks
from fewbit.runtime.format import layout
from fewbit.runtime.interop.autocast import with_torch_casts
from fewbit.runtime.interop.bypass import bypass, run_outside
from fewbit.runtime.interop.original_functions import functional as torch_functional
from fewbit.runtime.interop.random_replay import can_replay, replayed, state_of
from fewbit.runtime.interop.tensor_kinds import PLAIN_CLASSES
from fewbit.runtime.ops.library import define
from fewbit.runtime.parallel import shards
from fewbit.runtime.parallel.context_parallel import exchanging_attention
from fewbit.runtime.quantizers import computed, copies
from fewbit.runtime.quantizers.quantizer import (
    Quantizer,
    is_differentiated,
    quantizer_of,
)
from fewbit.runtime.saved.single_backward import SavingFunction, refuse_batches

__all__ = ["scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | str | None = None,
) -> Tensor:
    """Compute torch.nn.functional.scaled_dot_product_attention and save query, key and value quantized.

    The mean of a gradient over the random rounding differs from the exact gradient; the docstring of
    `fewbit/functional/attention/attention.py` says by how much. If only `value` needs a gradient, `value` is not saved,
    because its gradient does not depend on `value`. With dropout, the state of torch's random generator is saved too
    (5056 bytes on the CPU, 16 on CUDA). The backward pass draws the same dropout mask from this state, without changing
    torch's generator.

    For nested tensors torch's own function runs. With dropout, torch's own function also runs under torch.compile,
    during the capture of a CUDA graph, and on devices other than CPU and CUDA, because the state of the generator
    cannot be read.

    Args:
        query: (N, ..., Hq, L, E), floating.
        key: (N, ..., H, S, E), floating.
        value: (N, ..., H, S, Ev), floating.
        attn_mask: boolean or floating, of a shape that broadcasts to (N, ..., Hq, L, S); saved unchanged.
        dropout_p: as in torch.
        is_causal: as in torch.
        scale: as in torch.
        enable_gqa: as in torch.
        bits: bits per saved element, 1 to 8.
        group_size: the number of elements in a group (docs/concepts/quantizer.md), a multiple of 32.
        quantizer: the kind of quantized copies, "rotated" or "uniform", or None for the usual kind
            (docs/concepts/quantizer.md).
            A Quantizer may be given instead; then `bits` and `group_size` are ignored.

    Returns:
        (N, ..., Hq, L, Ev).

    Raises:
        InputError: `bits` or `group_size` is invalid.
    """
    quantizer = quantizer_of(bits, group_size, quantizer)
    how = How(dropout_p, is_causal, scale, enable_gqa)
    return attention(query, key, value, attn_mask, None, how, quantizer)


class How(NamedTuple):
    """The settings of one call of attention.

    Attributes:
        dropout_p: as in torch.
        is_causal: as in torch.
        scale: as in torch.
        enable_gqa: as in torch.
        repeats: how many times each head of key and value occurs in attention. transformers repeats heads if
            several heads of the query use the same key and value.
        weighed: whether to return the probabilities too, computed as in
            torch.nn.functional.multi_head_attention_forward. If True, scale, is_causal, enable_gqa and repeats must
            have their default values.
    """

    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    repeats: int = 1
    weighed: bool = False


def attention(query, key, value, attn_mask, position_bias, how: How, quantizer: Quantizer):
    """Compute attention and save query, key and value quantized.

    Args:
        query: as in `scaled_dot_product_attention`.
        key: as in `scaled_dot_product_attention`.
        value: as in `scaled_dot_product_attention`.
        attn_mask: as in `scaled_dot_product_attention`.
        position_bias: None, or a floating tensor that is added to the scores, of a shape that broadcasts to
            (N, ..., Hq, L, S). Mask and position bias are saved as two tensors, not as their sum. Other layers usually
            save the same two tensors, which then take memory only once.
        how: the settings of the call.
        quantizer: quantizes the saved tensors.

    Returns:
        The result, or (result, probabilities) if `how.weighed`.

    Raises:
        InputError: `how.weighed`, within torch's `context_parallel`.
    """
    inputs = query, key, value, attn_mask, position_bias
    if type(query) not in PLAIN_CLASSES and shards.runs_on_shards(query):
        y = _attention_of_shards(inputs, how, quantizer)
        return _attend(*inputs, how) if y is None else y
    exchanging = exchanging_attention()
    if exchanging is not None:
        if how.weighed:
            raise InputError(
                "expected attention without weights within context_parallel, got need_weights=True: "
                "a process has the keys of its part of the sequence only; call the layer with need_weights=False"
            )
        return _attend(*inputs, how, exchanging)
    if not is_differentiated(*inputs):
        return _attend(*inputs, how)
    if how.dropout_p > 0 and not can_replay(query):
        return _attend(*inputs, how)
    return run_outside(_Attention.call, *inputs, how, quantizer)


def _attention_of_shards(inputs, how: How, quantizer: Quantizer):
    """Return attention of DTensors, computed from local tensors; None if that is not possible."""
    *factors, mask, bias = inputs
    if mask is not None or bias is not None or how.dropout_p > 0 or how.weighed:
        return None
    return shards.attention(lambda *local: attention(*local, None, None, how, quantizer), *factors)


# -- the computation -------------------------------------------------------------------------------


def _attend(query, key, value, mask, bias, how: How, function=None):
    """Run torch's own attention, after repeating heads and adding the position bias as transformers does.

    Args:
        query: as in `attention`.
        key: as in `attention`.
        value: as in `attention`.
        mask: as in `attention`.
        bias: as in `attention`.
        how: the settings of the call.
        function: a function with the arguments of torch's attention that runs in its place, or None.
    """
    with bypass():
        if how.repeats > 1:
            key, value = _repeated(key, how.repeats), _repeated(value, how.repeats)
        is_causal = how.is_causal
        if bias is not None:
            mask, is_causal = _biased(query, key, mask, bias, is_causal), False
        if how.weighed:
            return _weighed(query, key, value, mask, how.dropout_p)
        function = function or torch_functional.scaled_dot_product_attention
        return function(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=how.dropout_p,
            is_causal=is_causal,
            scale=how.scale,
            enable_gqa=how.enable_gqa,
        )


def _weighed(query, key, value, mask, dropout_p):
    query = query * math.sqrt(1.0 / float(query.shape[-1]))
    scores = (query, key.transpose(-2, -1))
    weights = torch.bmm(*scores) if mask is None else torch.baddbmm(mask, *scores)
    weights = torch_functional.softmax(weights, dim=-1)
    if dropout_p > 0.0:
        weights = torch_functional.dropout(weights, p=dropout_p)
    return torch.bmm(weights, value), weights


def _repeated(x, times: int):
    batch, heads, length, features = x.shape
    x = x[:, :, None].expand(batch, heads, times, length, features)
    return x.reshape(batch, heads * times, length, features)


def _biased(query, key, mask, bias, is_causal: bool):
    """Return the sum of mask and position bias. For masked scores, the sum is the lowest finite number, not -inf.

    transformers computes the sum in the same way.
    """
    floor = torch.finfo(key.dtype).min
    if mask is None and is_causal:
        rows, columns = (torch.arange(x.shape[-2], device=key.device) for x in (query, key))
        mask = (rows[:, None] >= columns[None, :])[None, None]
    if mask is None:
        return bias.contiguous()
    both = torch.where(mask, bias, floor) if mask.dtype == torch.bool else bias + mask
    return both.contiguous()


_FEATURES = (-3, -1)
"""The dimensions of queries, keys and values along which channels differ: heads and the entries of a head's vectors."""


# -- the autograd Function -------------------------------------------------------------------------


class _Attention(SavingFunction):
    @staticmethod
    def forward(ctx, query, key, value, mask, bias, how, quantizer):
        # If the probabilities get no gradient, the backward pass need not differentiate them.
        ctx.set_materialize_grads(False)
        needs = ctx.needs_input_grad[:5]
        state = state_of(query) if how.dropout_p > 0 else None
        if query.is_cuda or needs[3] or needs[4]:
            with _choosing():
                results = with_torch_casts(_attend, query, key, value, mask, bias, how)
        else:
            results = with_torch_casts(_attend, query, key, value, mask, bias, how)
        results = [y.detach() for y in (results if how.weighed else (results,))]
        ctx.how, ctx.needs, ctx.autocast = how, needs, _autocast(query)
        ctx.shape, ctx.dtype, ctx.device = value.shape, value.dtype, value.device
        factors = [
            quantizer.quantize(query, features=_FEATURES),
            computed.again(quantizer, key)
            or quantizer.quantize(_without_mean(key), shared=False, slot=1, features=_FEATURES),
            # The gradient of the value does not depend on the value itself.
            _value_copy(value, (key, query), how, quantizer)
            if any((*needs[:2], *needs[3:]))
            else None,
        ]
        y, *weights = results
        query, key, value = factors
        y = copies.keep(
            ctx, y, mask=mask, bias=bias, state=state, query=query, key=key, value=value
        )
        return (y, *weights) if how.weighed else y

    @staticmethod
    def backward(ctx, *grads):
        # With dropout, all batches of gradients are refused, because torch draws no random numbers inside vmap. Without
        # dropout, only the batches of torch.func.vmap are refused, because autograd differentiates nothing inside it.
        refuse_batches("attention", grads, transforms_only=ctx.how.dropout_p == 0)
        kept = copies.Kept(ctx)
        query, key, value = kept.values("query"), kept.values("key"), kept.values("value")
        mask, bias, state = kept.tensor("mask"), kept.tensor("bias"), kept.tensor("state")
        if value is None:
            value = torch.zeros(ctx.shape, dtype=ctx.dtype, device=ctx.device)
        inputs = query, key, value, mask, bias
        if torch.compiler.is_compiling():
            gradients = _gradients_op(*inputs, list(grads), ctx.needs, ctx.autocast, *ctx.how)
        else:
            gradients = _gradients(inputs, grads, ctx.needs, ctx.autocast, ctx.how, state)
        gradients = iter(gradients)
        return *(next(gradients) if is_needed else None for is_needed in ctx.needs), None, None


def _without_mean(x):
    """Return keys or values minus their mean over the keys.

    No gradient changes if one vector is subtracted from all keys. All scores of a query then change by the same number,
    so no probability changes. The gradients of a query's scores add up to 0, so the gradient of the query does not
    change either. If one vector is subtracted from all values, the gradients of a query's probabilities change by the
    same number, which softmax's backward removes. So the mean need not be saved. Without the mean, which often is the
    largest part of keys and values, rounding adds less variance.
    """
    return x - x.mean(-2, keepdim=True)


def _value_copy(value, others, how: How, quantizer: Quantizer):
    """Quantize the value, minus its mean if there is no dropout.

    With dropout the probabilities of a query do not add up to 1, so the gradients depend on the mean.
    """
    if how.dropout_p > 0:
        return quantizer.quantize_independent(value, *others, features=_FEATURES)
    return computed.again(quantizer, value) or quantizer.quantize(
        _without_mean(value), shared=False, slot=2, features=_FEATURES
    )


def _gradients(inputs, grads, needs, autocast, how: How, state=None) -> list[Tensor]:
    """Return the gradients of those inputs that need one, from blocks or by differentiating torch's own attention.

    Args:
        inputs: query, key, value, mask and position bias.
        grads: the gradients of the results; None for a result without a gradient.
        needs: five booleans, whether each input needs a gradient.
        autocast: autocast's dtype in the forward pass, or None if autocast was off.
        how: the settings of the call.
        state: the state of torch's generator before the forward pass, or None without dropout.
    """
    query = inputs[0]
    if autocast is None and uses_blocks(inputs, grads, how):
        with bypass():
            found = blocks.gradients(*inputs[:3], *grads, how.is_causal, how.scale)
        return [x for x, is_needed in zip(found, needs[:3], strict=True) if is_needed]
    inputs = [
        x if x is None else x.detach().requires_grad_(is_needed)
        for x, is_needed in zip(inputs, needs, strict=True)
    ]
    wanted = [x for x, is_needed in zip(inputs, needs, strict=True) if is_needed]
    cast = nullcontext()
    if torch.amp.is_autocast_available(query.device.type):  # the meta device has no autocast
        cast = torch.autocast(query.device.type, autocast, enabled=autocast is not None)
    replay = nullcontext() if state is None else replayed(query, state)
    with torch.enable_grad(), cast, replay:
        results = _attend(*inputs, how)
    results = results if how.weighed else (results,)
    used = [(y, grad) for y, grad in zip(results, grads, strict=True) if grad is not None]
    if not used:
        return [None] * len(wanted)
    outputs, grads = zip(*used, strict=True)
    return list(torch.autograd.grad(outputs, wanted, grads, materialize_grads=True))


def uses_blocks(inputs, grads, how: How) -> bool:
    """Return whether `blocks.gradients` computes the gradients, for these arguments of `_gradients`."""
    *factors, mask, bias = inputs
    is_usual = how == How(is_causal=how.is_causal, scale=how.scale)
    if not is_usual or mask is not None or bias is not None or grads[0] is None:
        return False
    return blocks.fits(*factors, grads[0])


def _autocast(x) -> torch.dtype | None:
    kind = x.device.type
    # The compiler of torch 2.11 cannot trace is_autocast_available.
    if torch.compiler.is_compiling():
        available = kind != "meta"
    else:
        available = torch.amp.is_autocast_available(kind)
    is_enabled = available and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_enabled else None


@contextmanager
def _choosing():
    """Make torch choose the same kernel as outside of an autograd Function, in which gradients are disabled.

    torch's choice depends on whether the inputs need a gradient: on CUDA always, on other devices if the mask needs
    one. Within the block gradients are enabled. The graph that torch then builds is never differentiated.
    """
    if torch.compiler.is_compiling():
        yield
        return
    # If the hook returned the tensor itself, a node of the graph would hold its own result. Such a cycle is never
    # freed.
    drop = lambda tensor: None  # noqa: E731
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(drop, drop):
        yield


# -- under a compiler ------------------------------------------------------------------------------


def _attention_backward(query, key, value, mask, bias, grads, needs, autocast, *how):
    inputs = query, key, value, mask, bias
    memory, results = {_address(x) for x in (*inputs, *grads) if x is not None}, []
    for gradient in _gradients(inputs, grads, needs, autocast, How(*how)):
        stride = layout.contiguous_stride(gradient.shape)
        result = layout.bring_to(gradient, stride).as_strided(gradient.shape, stride)
        # The results of an op must share no memory with each other or with the op's inputs.
        if _address(result) in memory or result.storage_offset():
            result = result.clone()
        memory.add(_address(result))
        results.append(result)
    return results


def _address(x) -> int:
    return x.untyped_storage().data_ptr()


# This is one op, because a compiler cannot trace a call of torch.autograd.grad inside a backward pass.
_gradients_op = define(
    "attention_backward(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, "
    "Tensor?[] grads, bool[] needs, ScalarType? autocast, float dropout_p, bool is_causal, "
    "float? scale, bool enable_gqa, int repeats, bool weighed) -> Tensor[]",
    _attention_backward,
)


@register_fake("fewbit::attention_backward")
def _(query, key, value, mask, bias, grads, needs, autocast, *how):
    inputs = zip((query, key, value, mask, bias), needs, strict=True)
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) for x, need in inputs if need
    ]
