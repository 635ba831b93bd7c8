"""The torch ops of few-bit activations, and their implementations, which eager mode calls without the dispatcher.

    encode(x, encoding, stride, seed) -> packed codes
    decode_mul(grad, packed, encoding, stride) -> lut[code] * grad, with the strides `stride`

An encoding is passed as text, so that an exported program needs nothing but these ops (docs/decisions/0004).
"""

from __future__ import annotations

import torch

from fewbit.runtime import backends
from fewbit.runtime.format import layout
from fewbit.runtime.format.encoding import Encoding, packed_words
from fewbit.runtime.ops.library import define, refuse_second_derivative, run_by_example
from fewbit.runtime.ops.torch_functions import CONTIGUOUS, FORWARD, IN_PLACE, OTHER_STRIDES

MASKING = ("relu",)
"""The functions f whose result is 0 exactly where x <= 0."""

# -- implementations, shared with eager ----------------------------------------------------------------------


def activation(x, function, parameters, encoding, seed, inplace):
    """Return f(x), with the strides of torch's result, and the packed codes of x.

    x is a floating tensor of any strides. If `inplace`, f(x) is written to x, whose elements must not share memory. The
    other arguments are those of `reference.forward`.
    """
    backend, packed = backends.on[x.device], None
    source = x if x.is_contiguous() else layout.dense(x)
    out = source if inplace else _empty_result(x, function)
    if out is not None:
        packed = backend.forward(source, function, parameters, encoding, seed, out)
    if packed is None:
        packed = backend.encode(source, encoding, seed)
        if inplace and function in IN_PLACE:
            return IN_PLACE[function](x, *parameters), packed
        out = FORWARD[function](x, *parameters)
    if inplace and out is not x:
        out = x.copy_(out)
    return out, packed


def _empty_result(x, function):
    if x.is_contiguous() and x.numel() and function not in OTHER_STRIDES:
        # Strides of dimensions of size 1 do not matter here, and this takes less of the host's time.
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    if function in CONTIGUOUS and not x.is_contiguous():
        return None
    stride = layout.pointwise_stride(x)
    return None if stride is None else x.new_empty_strided(x.shape, stride)


def is_masking(function: str, encoding: Encoding, dtype: torch.dtype) -> bool:
    """Return whether f(x) is 0 exactly where the code of x stands for 0, so that the codes are a mask of f(x).

    That is not so for float64, of which the quantizer rounds more results to 0.
    """
    return function in MASKING and dtype != torch.float64 and encoding.is_step_at_zero


def activation_quantized(x, function, parameters, encoding, seed, inplace, quantizer):
    """Compute f(x) and the packed codes of x, and quantize f(x), in one pass over memory; see `activation`.

    x has samples outermost in storage, and `quantizer` is that of the layer that saves f(x).

    Returns:
        (f(x), the packed codes, the SavedTensors of f(x)); None, with nothing done, if the backend has no such pass.
    """
    backend = backends.on[x.device]
    if not backend.can_quantize_result(function):
        return None
    out = x if inplace else _empty_result(x, function)
    if out is None or not (x.is_contiguous() or out.stride() == x.stride()):
        return None

    def run(*settings):
        return backend.forward_quantized(x, function, parameters, encoding, seed, out, *settings)

    are_masks = is_masking(function, encoding, x.dtype)
    made = quantizer.quantize_with_activation(run, out, are_masks)
    return None if made is None else (out, *made)


def encode(x, encoding, seed):
    """Return the packed codes of x, in storage order if x is dense, else in row-major order."""
    return backends.on[x.device].encode(layout.dense(x), encoding, seed)


def decode_mul(grad, packed, encoding, stride):
    """Return the gradient of the activation's input, with the strides of the packed tensor (None for contiguous ones)."""
    if not layout.is_broadcast_scalar(grad):
        grad = grad.contiguous() if stride is None else layout.bring_to(grad, stride)
    if stride is None:
        out = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    else:
        out = torch.empty_strided(grad.shape, stride, dtype=grad.dtype, device=grad.device)
    backends.on[grad.device].decode_mul(grad, packed, encoding, out)
    return out


# -- ops -----------------------------------------------------------------------------------------------------


def _encode(x, encoding, stride, seed=None):
    return backends.on[x.device].encode(
        layout.with_stride(x, stride), Encoding.parse(encoding), seed
    )


def _decode_mul(grad, packed, encoding, stride):
    if layout.is_broadcast_scalar(grad):
        layout.check_stride(grad.shape, stride)
    else:
        grad = layout.with_stride(grad, stride)
    return decode_mul(grad, packed, Encoding.parse(encoding), tuple(stride))


def _fake_codes(x, encoding, stride, seed=None):
    return x.new_empty(packed_words(x.numel(), Encoding.parse(encoding).bits), dtype=torch.int32)


def _fake_product(grad, packed, encoding, stride):
    return torch.empty_strided(grad.shape, stride, dtype=grad.dtype, device=grad.device)


encode_op = define(
    "encode(Tensor x, str encoding, SymInt[] stride, Tensor? seed=None) -> Tensor",
    _encode,
    _fake_codes,
)
decode_mul_op = define(
    "decode_mul(Tensor grad, Tensor packed, str encoding, SymInt[] stride) -> Tensor",
    _decode_mul,
    _fake_product,
)
refuse_second_derivative(decode_mul_op)
for _op in (encode_op, decode_mul_op):
    run_by_example(_op)
