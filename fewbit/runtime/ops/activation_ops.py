"""The torch ops of few-bit activations, and their implementations, which eager mode calls without the dispatcher.

    encode(x, encoding, stride, seed) -> packed codes
    encode_kept(x, encoding, stride, seed) -> packed codes, one
    decode_mul(grad, packed, encoding, stride) -> lut[code] * grad, with the strides `stride`
    pack(codes, bits) -> packed, unpack(packed, bits, n) -> codes

An encoding is passed as text (`Encoding.text`), so that an exported program needs nothing but these ops. `lut` holds
the value that the encoding has for each code. `one` is a tensor of value 1: the activation multiplies f(x) by it, so
that a compiler has to run the op in the forward pass. The function f itself is no op. A compiler fuses torch's own
function with its neighbors and may recompute it, which it could not do with an op that returns f(x) and codes at once
(docs/decisions/0004).
"""

from __future__ import annotations

import torch
from torch.library import register_fake

from fewbit.runtime import backends
from fewbit.runtime.format import layout
from fewbit.runtime.format.encoding import Encoding, packed_words
from fewbit.runtime.ops.library import (
    define,
    refuse_second_derivative,
    run_by_example,
    save_results,
)
from fewbit.runtime.ops.torch_functions import CONTIGUOUS, FORWARD, IN_PLACE, OTHER_STRIDES

# -- implementations, shared with eager ----------------------------------------------------------------------


def activation(x, function, parameters, encoding, seed, inplace):
    """Return f(x) and the packed codes of x. x may have any strides; f(x) has the strides of torch's result.

    With `inplace`, f(x) is written to x, no two elements of which may share memory.
    """
    backend, packed = backends.of(x), None
    source = x if x.is_contiguous() else layout.dense(x)
    stride = x.stride() if inplace else _result_stride(x, function)
    if stride is not None:
        out = source if inplace else x.new_empty_strided(x.shape, stride)
        packed = backend.forward(source, function, parameters, encoding, seed, out)
    if packed is None:
        packed = backend.encode(source, encoding, seed)
        if inplace and function in IN_PLACE:
            return IN_PLACE[function](x, *parameters), packed
        out = FORWARD[function](x, *parameters)
    if inplace and out is not x:
        out = x.copy_(out)
    return out, packed


def _result_stride(x, function):
    """Return the strides of torch's function of x, or None if torch has to be asked for them."""
    if function in CONTIGUOUS and not x.is_contiguous():
        return None
    if function in OTHER_STRIDES and not layout.is_regular(x):
        return None
    return layout.result_stride(x)


def activation_quantized(x, function, parameters, encoding, seed, quantizer):
    """Return f(x), the packed codes of x, and the quantizer's SavedTensors of f(x) or None, computed in one pass over memory.

    x must be contiguous. Returns None if the backend has no such pass.
    """
    stride = _result_stride(x, function)
    if stride is None:
        return None
    backend, out = backends.of(x), x.new_empty_strided(x.shape, stride)

    def run(*settings):
        return backend.forward_quantized(x, function, parameters, encoding, seed, out, *settings)

    made = quantizer.quantize_with_activation(run, out)
    return None if made is None else (out, *made)


def encode(x, encoding, seed):
    """Return the packed codes of x, in storage order if x is dense, else in logical order."""
    return backends.of(x).encode(layout.dense(x), encoding, seed)


def decode_mul(grad, packed, encoding, stride):
    """Return lut[code] * grad: the gradient times the value that the encoding has for each code.

    Args:
        grad: the gradient of the activation's result.
        packed: the packed codes.
        encoding: the encoding of the codes.
        stride: the strides of the dense tensor whose codes were packed.
    """
    if grad.is_contiguous() and grad.stride() == stride:
        out = torch.empty_like(grad)
    else:
        if not layout.is_broadcast_scalar(grad):
            grad = layout.bring_to(grad, stride)
        out = torch.empty_strided(grad.shape, stride, dtype=grad.dtype, device=grad.device)
    backends.of(grad).decode_mul(grad, packed, encoding, out)
    return out


# -- ops -----------------------------------------------------------------------------------------------------


def _encode(x, encoding, stride, seed=None):
    return backends.of(x).encode(layout.with_stride(x, stride), Encoding.parse(encoding), seed)


def _decode_mul(grad, packed, encoding, stride):
    if layout.is_broadcast_scalar(grad):
        layout.check_stride(grad.shape, stride)
    else:
        grad = layout.with_stride(grad, stride)
    return decode_mul(grad, packed, Encoding.parse(encoding), tuple(stride))


encode_op = define(
    "encode(Tensor x, str encoding, SymInt[] stride, Tensor? seed=None) -> Tensor", _encode
)
encode_kept_op = define(
    "encode_kept(Tensor x, str encoding, SymInt[] stride, Tensor? seed=None) -> (Tensor, Tensor)",
    lambda x, *how: (_encode(x, *how), x.new_ones(())),
)
decode_mul_op = define(
    "decode_mul(Tensor grad, Tensor packed, str encoding, SymInt[] stride) -> Tensor", _decode_mul
)
pack_op = define(
    "pack(Tensor codes, int bits) -> Tensor",
    lambda codes, bits: backends.of(codes).pack(codes.contiguous().view(-1), bits),
)
unpack_op = define(
    "unpack(Tensor packed, int bits, SymInt n) -> Tensor",
    lambda packed, bits, n: backends.of(packed).unpack(packed, bits, n),
)


@register_fake("fewbit::encode")
def _(x, encoding, stride, seed=None):
    return x.new_empty(packed_words(x.numel(), Encoding.parse(encoding).bits), dtype=torch.int32)


@register_fake("fewbit::encode_kept")
def _(x, encoding, stride, seed=None):
    return encode_op(x, encoding, stride, seed), x.new_empty(())


@register_fake("fewbit::decode_mul")
def _(grad, packed, encoding, stride):
    return torch.empty_strided(grad.shape, stride, dtype=grad.dtype, device=grad.device)


@register_fake("fewbit::pack")
def _(codes, bits):
    return codes.new_empty(packed_words(codes.numel(), bits), dtype=torch.int32)


@register_fake("fewbit::unpack")
def _(packed, bits, n):
    return packed.new_empty(n, dtype=torch.uint8)


save_results(encode_kept_op)
refuse_second_derivative(decode_mul_op)
for _op in (encode_op, encode_kept_op, decode_mul_op):
    run_by_example(_op)
