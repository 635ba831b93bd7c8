"""Scaled dot-product attention, which saves quantized copies of query, key and value alone.

The backward pass differentiates torch's own attention of the dequantized tensors, or computes the gradients in blocks.
"""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from fewbit.config import DEFAULT_BITS, GROUP_SIZE
from fewbit.errors import InputError
from fewbit.functional.attention import score_blocks
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
from fewbit.runtime.quantizers.quantizer import Quantizer, quantizer_of
from fewbit.runtime.saved.saving_function import SavingFunction, is_differentiated, refuse_batches

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

    The gradients are biased (docs/concepts/layers.md#bias). With dropout, the state of torch's random generator is saved
    too, as in `rrelu`, and the backward pass draws the same mask. For nested tensors, torch's own function runs. Other
    arguments are those of torch's function and of `linear`.

    Args:
        query: (N, ..., Hq, L, E), floating.
        key: (N, ..., H, S, E), floating.
        value: (N, ..., H, S, Ev), floating. It is not saved if only `value` needs a gradient.
        attn_mask: boolean or floating, of a shape that broadcasts to (N, ..., Hq, L, S); saved unchanged.

    Returns:
        (N, ..., Hq, L, Ev).

    Raises:
        InputError: `bits` or `group_size` is invalid.
    """
    quantizer = quantizer_of(bits, group_size, quantizer)
    how = How(dropout_p, is_causal, scale, enable_gqa)
    return attention(query, key, value, attn_mask, None, how, quantizer)


class How(NamedTuple):
    """The settings of one call of attention; the first four are torch's.

    Attributes:
        repeats: how many times each head of key and value occurs.
        weighed: whether to return the probabilities too, as torch.nn.functional.multi_head_attention_forward does; the
            other settings must then have their default values.
    """

    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    repeats: int = 1
    weighed: bool = False


def attention(query, key, value, attn_mask, position_bias, how: How, quantizer: Quantizer):
    """Compute attention and save query, key and value quantized; see `scaled_dot_product_attention`.

    `position_bias`, a floating tensor or None, is added to the scores. It is saved apart from the mask, because other layers usually save the
    same two tensors. Returns the result, or (result, probabilities) if `how.weighed`, which raises InputError within torch's `context_parallel`.
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
    return run_outside(_Attention.apply, *inputs, how, quantizer)


def _attention_of_shards(inputs, how: How, quantizer: Quantizer):
    *factors, mask, bias = inputs
    if mask is not None or bias is not None or how.dropout_p > 0 or how.weighed:
        return None
    return shards.attention(lambda *local: attention(*local, None, None, how, quantizer), *factors)


# -- the computation -------------------------------------------------------------------------------


def _attend(query, key, value, mask, bias, how: How, function=None):
    """Run torch's own attention, or `function`, after repeating heads and adding the position bias as transformers does."""
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
    """Return mask plus position bias, with the lowest finite number, not -inf, for masked scores, as in transformers."""
    floor = torch.finfo(key.dtype).min
    if mask is None and is_causal:
        rows, columns = (torch.arange(x.shape[-2], device=key.device) for x in (query, key))
        mask = (rows[:, None] >= columns[None, :])[None, None]
    if mask is None:
        return bias.contiguous()
    both = torch.where(mask, bias, floor) if mask.dtype == torch.bool else bias + mask
    return both.contiguous()


_FEATURES = (-3, -1)
"""The dimensions along which channels differ: heads and the entries of a head's vectors."""


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
        factors = {
            "query": quantizer.quantize(query, features=_FEATURES),
            "key": _quantize_without_mean(quantizer, key, 1),
            "value": None,
        }
        # The gradient of the value does not depend on the value itself.
        if any((*needs[:2], *needs[3:])):
            if how.dropout_p > 0:  # gradients depend on the mean
                own = quantizer.quantize_independent(value, key, query, features=_FEATURES)
            else:
                own = _quantize_without_mean(quantizer, value, 2)
            factors["value"] = own
        y, *weights = results
        y = copies.keep(ctx, y, mask=mask, bias=bias, state=state, **factors)
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
        return *[next(gradients) if is_needed else None for is_needed in ctx.needs], None, None


def _quantize_without_mean(quantizer: Quantizer, x, slot: int):
    """Quantize keys or values minus their mean over the keys, which often is their largest part, unless x is computed again.

    No gradient depends on the mean: it changes all scores of a query, or all gradients of its probabilities, by one number.
    """
    how = {"shared": False, "slot": slot, "features": _FEATURES}
    return computed.again(quantizer, x) or quantizer.quantize(x - x.mean(-2, keepdim=True), **how)


def _gradients(inputs, grads, needs, autocast, how: How, state=None) -> list[Tensor]:
    query = inputs[0]
    if uses_blocks(inputs, grads, how, autocast):
        uncast = nullcontext()
        if torch._C._is_any_autocast_enabled():  # for the backward pass
            uncast = torch.autocast("cpu", enabled=False)
        with bypass(), uncast:
            found = score_blocks.gradients(*inputs[:3], *grads, how.is_causal, how.scale)
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


def uses_blocks(inputs, grads, how: How, autocast: torch.dtype | None = None) -> bool:
    """Return whether `score_blocks.gradients` computes the gradients; `autocast` is the dtype of autocast in the forward pass."""
    *factors, mask, bias = inputs
    is_usual = how == How(is_causal=how.is_causal, scale=how.scale)
    if not is_usual or mask is not None or bias is not None or grads[0] is None:
        return False
    is_cast = autocast is not None and autocast is grads[0].dtype
    return (is_cast or autocast is None) and score_blocks.fits(*factors, grads[0], is_cast)


def _autocast(x) -> torch.dtype | None:
    kind = x.device.type
    # The compiler of torch 2.11 cannot trace is_autocast_available.
    if torch.compiler.is_compiling():
        available = kind != "meta"
    elif not torch._C._is_any_autocast_enabled():
        return None
    else:
        available = torch.amp.is_autocast_available(kind)
    is_enabled = available and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_enabled else None


@contextmanager
def _choosing():
    """Enable gradients, so that torch chooses the same kernel as outside of an autograd Function."""
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


def _fake_gradients(query, key, value, mask, bias, grads, needs, autocast, *how):
    inputs = zip((query, key, value, mask, bias), needs, strict=True)
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) for x, need in inputs if need
    ]


# This is one op, because a compiler cannot trace a call of torch.autograd.grad inside a backward pass.
_gradients_op = define(
    "attention_backward(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, "
    "Tensor?[] grads, bool[] needs, ScalarType? autocast, float dropout_p, bool is_causal, "
    "float? scale, bool enable_gqa, int repeats, bool weighed) -> Tensor[]",
    _attention_backward,
    _fake_gradients,
)
