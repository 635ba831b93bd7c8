"""Scaled dot-product attention with queries, keys and values kept quantised, and nothing else.

torch keeps query, key, value, the output and the log-sum-exp of each row, or, where no fused kernel
serves (dropout on the CPU, a mask that needs a gradient), matrices of L x S elements. Here output
and log-sum-exp are not kept: the backward pass computes torch's own attention again from the
restored q^, k^, v^, whose softmax then fits them, and differentiates that.

So it is not linear in what is kept. The draws are independent and exact in expectation, so that for
every gradient G, a function of the elements x of q, k and v,

    E[G^] - G = 1/2 sum_x Var[x^] d2G / dx2

to the first order that does not vanish (ActNN, long version, appendix B.2, has the like for norms).
Var[x^] is what rounding adds: f (1 - f) step^2 for an element that lies the fraction f of a step
above a level. For the value's gradient, P^T g with the probabilities P and g the gradient of the
output, this is (E[P^] - P)^T g, where with the scores S = scale q k^T and rows i

    E[P^_ij] - P_ij = P_ij / 2 (w_ij - sum_m P_im w_im)     w_ij = Var[S^_ij - sum_m P_im S^_im]
    w_ij = scale^2 sum_d (Var[q^_id] (k_jd - a_id)^2 + q_id^2 Var[k^_jd - a^_id])

with a_i = sum_m P_im k_m: scores that rounding leaves less certain get more weight.

For normal q, k and v (one head, 16 queries and keys of 16 features, median of 96 draws of those) it
is 25, 5 and 1.1 % of the gradients of query and key at 2, 3 and 4 bits, and 15, 3.0 and 0.6 % of
the value's. A single backward pass is off by much more, which averages out: 160, 62 and 28 % for
query and key, 1.7 % at 8 bits. All grow with the size of the scores.
"""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.library import register_fake

from fewbit.runtime import layout, ops
from fewbit.runtime.autograd import once_differentiable
from fewbit.runtime.casts import as_torch_casts
from fewbit.runtime.exact import exactly
from fewbit.runtime.groups import GROUP_SIZE
from fewbit.runtime.quantiser import DEFAULT_BITS, Quantiser, is_differentiated, quantiser_of
from fewbit.runtime.replay import can_replay, replayed, state_of
from fewbit.runtime.torchs import functional as torch_functional

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
    quantiser: Quantiser | None = None,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention; kept: query, key and value, quantised.

    query: (N, ..., Hq, L, E), key: (N, ..., H, S, E), value: (N, ..., H, S, Ev), floating.
    attn_mask: boolean or floating, a shape that broadcasts to (N, ..., Hq, L, S), kept as it is.
    Returns (N, ..., Hq, L, Ev). quantiser: in place of bits and group_size.

    Output and log-sum-exp are computed again: see the module, also for the gradients' bias. With
    dropout the state of torch's generator is kept too (5056 bytes on the CPU, 16 on CUDA), from
    which the same mask is drawn again; what torch draws next is not changed by that. Where only
    value needs a gradient it is not kept: its gradient does not depend on it.

    With dropout torch's own function runs under torch.compile and in the capture of a CUDA graph,
    where the state of a generator cannot be read, and on devices other than CPU and CUDA; for
    nested tensors always. Raises InputError for bits or group_size that there are not.
    """
    quantiser = quantiser or quantiser_of(bits, group_size)
    how = How(dropout_p, is_causal, scale, enable_gqa)
    return attention(query, key, value, attn_mask, None, how, quantiser)


class How(NamedTuple):
    """What attention computes.

    repeats: how often each head of key and value is repeated, as transformers does before the call.
    weighed: also yields the probabilities, as torch.nn.functional.multi_head_attention_forward
    computes them; scale, is_causal, enable_gqa and repeats are not used then.
    """

    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    repeats: int = 1
    weighed: bool = False


def attention(query, key, value, attn_mask, position_bias, how: How, quantiser: Quantiser):
    """Attention, or (attention, probabilities) if how.weighed; kept: query, key, value, quantised.

    position_bias: None, or a floating tensor to add to the scores. It is kept apart from the mask,
    as both are usually those of other layers too.
    """
    inputs = query, key, value, attn_mask, position_bias
    if not is_differentiated(*inputs):
        return _attend(*inputs, how)
    if how.dropout_p > 0 and not can_replay(query):
        return _attend(*inputs, how)
    return _Attention.apply(*inputs, how, quantiser)


# -- what is computed ------------------------------------------------------------------------------


def _attend(query, key, value, mask, bias, how: How):
    """As torch and transformers compute it."""
    with exactly():
        return _torchs_own(query, key, value, mask, bias, how)


def _torchs_own(query, key, value, mask, bias, how: How):
    if how.repeats > 1:
        key, value = _repeated(key, how.repeats), _repeated(value, how.repeats)
    is_causal = how.is_causal
    if bias is not None:
        mask, is_causal = _biased(query, key, mask, bias, is_causal), False
    if how.weighed:
        return _weighed(query, key, value, mask, how.dropout_p)
    return torch_functional.scaled_dot_product_attention(
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
    """The mask that adds bias; the floor, not -inf, where masked, as transformers has it."""
    floor = torch.finfo(key.dtype).min
    if mask is None and is_causal:
        rows, columns = (torch.arange(x.shape[-2], device=key.device) for x in (query, key))
        mask = (rows[:, None] >= columns[None, :])[None, None]
    if mask is None:
        return bias.contiguous()
    both = torch.where(mask, bias, floor) if mask.dtype == torch.bool else bias + mask
    return both.contiguous()


# -- what is kept ----------------------------------------------------------------------------------


class _Attention(Function):
    @staticmethod
    def forward(ctx, query, key, value, mask, bias, how, quantiser):
        # Probabilities that nobody differentiates cost no backward pass of their own.
        ctx.set_materialize_grads(False)
        needs = ctx.needs_input_grad[:5]
        state = state_of(query) if how.dropout_p > 0 else None
        with as_torch_casts(), _choosing(query, needs):
            results = _attend(query, key, value, mask, bias, how)
        results = tuple(y.detach() for y in (results if how.weighed else (results,)))
        ctx.how, ctx.needs, ctx.autocast = how, needs, _autocast(query)
        ctx.shape, ctx.dtype, ctx.device = value.shape, value.dtype, value.device
        kept, ctx.kept = [], []
        factors = query, key, value
        for i, is_needed in enumerate(_factors(needs)):
            if is_needed:
                keep = quantiser.keep_beside(*factors[i::-1])
                results = (keep.mark(results[0]), *results[1:])
                kept += keep.tensors
            ctx.kept.append((keep.recipe, len(keep.tensors)) if is_needed else None)
        ctx.save_for_backward(mask, bias, state, *kept)
        return results if how.weighed else results[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        mask, bias, state, *kept = ctx.saved_tensors
        factors = []
        for each in ctx.kept:
            if each is None:
                factors.append(torch.zeros(ctx.shape, dtype=ctx.dtype, device=ctx.device))
            else:
                recipe, count = each
                factors.append(recipe.restore(kept[:count]))
                kept = kept[count:]
        inputs = *factors, mask, bias
        if torch.compiler.is_compiling():
            gradients = _gradients_op(*inputs, list(grads), ctx.needs, ctx.autocast, *ctx.how)
        else:
            gradients = _gradients(inputs, grads, ctx.needs, ctx.autocast, ctx.how, state)
        gradients = iter(gradients)
        return *(next(gradients) if is_needed else None for is_needed in ctx.needs), None, None


def _factors(needs) -> tuple[bool, bool, bool]:
    """Which of query, key and value the gradients depend on: the value's own not on the value."""
    return True, True, any((*needs[:2], *needs[3:]))


def _gradients(inputs, grads, needs, autocast, how: How, state=None) -> list[Tensor]:
    """The gradients of those inputs that need one, by torch's own attention of them.

    autocast: the dtype in which the forward pass had torch cast, None without.
    """
    query = inputs[0]
    inputs = [
        x if x is None else x.detach().requires_grad_(is_needed)
        for x, is_needed in zip(inputs, needs, strict=True)
    ]
    wanted = [x for x, is_needed in zip(inputs, needs, strict=True) if is_needed]
    cast = nullcontext()
    if torch.amp.is_autocast_available(query.device.type):  # on the meta device it is not
        cast = torch.autocast(query.device.type, autocast, enabled=autocast is not None)
    drawn_again = nullcontext() if state is None else replayed(query, state)
    with torch.enable_grad(), cast, drawn_again:
        results = _attend(*inputs, how)
    results = results if how.weighed else (results,)
    used = [(y, grad) for y, grad in zip(results, grads, strict=True) if grad is not None]
    if not used:
        return [None] * len(wanted)
    outputs, grads = zip(*used, strict=True)
    return list(torch.autograd.grad(outputs, wanted, grads, materialize_grads=True))


def _autocast(x) -> torch.dtype | None:
    kind = x.device.type
    is_enabled = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_enabled else None


@contextmanager
def _choosing(x, needs):
    """Where torch chooses a kernel by whether there will be a gradient, it sees that there will be.

    On CUDA it does; anywhere for a mask that needs a gradient. Nothing of the graph is kept.
    """
    if torch.compiler.is_compiling() or not (x.is_cuda or any(needs[3:])):
        yield
        return
    # A hook that returned the tensor itself would make a node hold its own result, a cycle that nothing ever frees.
    drop = lambda tensor: None  # noqa: E731
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(drop, drop):
        yield


# -- under a compiler ------------------------------------------------------------------------------


def _attention_backward(query, key, value, mask, bias, grads, needs, autocast, *how):
    inputs = query, key, value, mask, bias
    taken, results = {_place(x) for x in (*inputs, *grads) if x is not None}, []
    for gradient in _gradients(inputs, grads, needs, autocast, How(*how)):
        stride = layout.contiguous_stride(gradient.shape)
        result = layout.bring_to(gradient, stride).as_strided(gradient.shape, stride)
        if _place(result) in taken or result.storage_offset():
            result = (
                result.clone()
            )  # an op's results share no memory, with each other or what it was given
        taken.add(_place(result))
        results.append(result)
    return results


def _place(x) -> int:
    return x.untyped_storage().data_ptr()


# As one op: a compiler follows no call of autograd inside a backward pass.
_gradients_op = ops.define(
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
