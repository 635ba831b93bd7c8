"""Torch ops on contiguous tensors, which the compiled kernels implement in C++, so that compiled models need no Python.

    quantize_dense(x, seed, bits, group_size, kind) -> packed, ranges
    quantize_by_channels(x, seed, bits, group_size, count) -> packed and ranges of a rotated copy, statistics
    dequantize_dense(packed, ranges, bits, group_size, samples, features, dtype, kind) -> the values, (samples, features)
    dequantize_by_channels(packed, ranges, bits, group_size, samples, features, dtype, statistics) -> the same
    anchor(kept) -> the number 1, () float32 (traced_copies.py); on a GPU always in Python
    pack(codes, bits) -> packed, unpack(packed, bits, n) -> codes
    pack_mask(mask) -> packed, unpack_mask(packed, n, dtype) -> mask

`kind` is one of `KIND_NUMBERS`. A copy "by channels" subtracts each channel's mean and divides by its scale before the rotation;
`statistics`, (count, 2) bfloat16, has both numbers of each of the `count` channels, 1 or more. Sizes are two numbers because a list
of all sizes would cost each call more time. The functions here run where the C++ code does not.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from fewbit.config import KIND_NUMBERS, ROTATED
from fewbit.runtime import backends
from fewbit.runtime.format.encoding import Encoding, mask_text, packed_words
from fewbit.runtime.ops import activation_ops, quantizer_ops
from fewbit.runtime.ops.library import define, run_by_example

_STEP = Encoding.parse(mask_text(1.0))
_KINDS = {number: kind for kind, number in KIND_NUMBERS.items()}


def _define(schema, implementation, fake):
    """Define an op, and "<name>_in_python", which the C++ code may call."""
    name, _, rest = schema.partition("(")
    define(f"{name}_in_python({rest}", _keeps_failure(implementation))
    return define(schema, implementation, fake)


def _keeps_failure(implementation):
    def run(*arguments, **keywords):
        try:
            return implementation(*arguments, **keywords)
        except Exception as error:
            with suppress(ImportError):  # without compiled kernels there is no C++ code
                from fewbit.runtime.backends import native

                native.keep_failure(error)
            raise

    return run


def _quantize(x, seed, bits, group_size, kind):
    x = x.detach().contiguous()
    return quantizer_ops.quantize(x, seed, bits, group_size, kind=_KINDS[kind])


def _quantize_by_channels(x, seed, bits, group_size, count):
    x = x.detach().contiguous()
    return quantizer_ops.quantize_with_channels(x, seed, bits, group_size, ROTATED, count)


def _dequantize(packed, ranges, bits, group_size, samples, features, dtype, kind, statistics=None):
    settings = bits, group_size, (samples, features), (max(features, 1), 1), dtype
    packed, ranges, kind = packed.contiguous(), ranges.contiguous(), _KINDS[kind]
    return quantizer_ops.dequantize(packed, ranges, *settings, kind=kind, channels=statistics)


def _dequantize_by_channels(packed, ranges, bits, group_size, samples, features, dtype, statistics):
    settings = bits, group_size, samples, features, dtype, KIND_NUMBERS[ROTATED]
    return _dequantize(packed, ranges, *settings, statistics.contiguous())


def _anchor(kept):
    return kept.new_ones((), dtype=torch.float32)


def _pack_mask(mask):
    mask = mask.contiguous()
    if mask.dtype is torch.bool:
        return backends.on[mask.device].pack(mask.view(torch.uint8).view(-1), 1)
    return activation_ops.encode(mask, _STEP, None)


def _unpack_mask(packed, n, dtype):
    if dtype is torch.bool:
        return unpack_op(packed, 1, n).view(torch.bool)
    one = torch.ones((), dtype=dtype, device=packed.device)
    return activation_ops.decode_mul(one.expand(n), packed.contiguous(), _STEP, (1,))


def _fake_quantized(x, seed, bits, group_size, kind):
    return quantizer_ops.fake_copy(x, bits, group_size, _KINDS[kind], 0)[:2]


def _fake_quantized_by_channels(x, seed, bits, group_size, count):
    return quantizer_ops.fake_copy(x, bits, group_size, ROTATED, count)


def fake_values(packed, ranges, bits, group_size, samples, features, dtype, *_):
    """Return the fake values of a copy."""
    return packed.new_empty((samples, features), dtype=dtype)


quantize_dense_op = _define(
    "quantize_dense(Tensor x, Tensor seed, int bits, int group_size, int kind) -> (Tensor, Tensor)",
    _quantize,
    _fake_quantized,
)
quantize_by_channels_op = _define(
    "quantize_by_channels(Tensor x, Tensor seed, int bits, int group_size, SymInt count) "
    "-> (Tensor, Tensor, Tensor)",
    _quantize_by_channels,
    _fake_quantized_by_channels,
)
_COPY = "Tensor packed, Tensor ranges, int bits, int group_size, SymInt samples, SymInt features, ScalarType dtype"
dequantize_dense_op = _define(
    f"dequantize_dense({_COPY}, int kind) -> Tensor", _dequantize, fake_values
)
dequantize_by_channels_op = _define(
    f"dequantize_by_channels({_COPY}, Tensor statistics) -> Tensor",
    _dequantize_by_channels,
    fake_values,
)
anchor_op = _define("anchor(Tensor kept) -> Tensor", _anchor, _anchor)
pack_op = _define(
    "pack(Tensor codes, int bits) -> Tensor",
    lambda codes, bits: backends.on[codes.device].pack(codes.contiguous().view(-1), bits),
    lambda codes, bits: codes.new_empty(packed_words(codes.numel(), bits), dtype=torch.int32),
)
unpack_op = _define(
    "unpack(Tensor packed, int bits, SymInt n) -> Tensor",
    lambda packed, bits, n: backends.on[packed.device].unpack(packed.contiguous(), bits, n),
    lambda packed, bits, n: packed.new_empty(n, dtype=torch.uint8),
)
pack_mask_op = _define(
    "pack_mask(Tensor mask) -> Tensor",
    _pack_mask,
    lambda mask: mask.new_empty(packed_words(mask.numel(), 1), dtype=torch.int32),
)
unpack_mask_op = _define(
    "unpack_mask(Tensor packed, SymInt n, *, ScalarType dtype) -> Tensor",
    _unpack_mask,
    lambda packed, n, dtype: packed.new_empty(n, dtype=dtype),
)
run_by_example(anchor_op)
