"""The reference backend: plain torch for any device, to whose results those of all other backends are equal.

Inputs are dense (`layout.is_dense`). docs/reference/table_schema.md specifies the functions of tables.
"""

from __future__ import annotations

import torch

from fewbit.config import UNIFORM
from fewbit.runtime.backends.reference_batch_norm import batch_norm_backward, can_compute_batch_norm
from fewbit.runtime.backends.reference_bits import pack, philox_words, unpack
from fewbit.runtime.backends.reference_fixed_point import (
    decode_fixed,
    encode_fixed,
    grid_fixed,
    mask_fixed,
)
from fewbit.runtime.backends.reference_quantizer import (
    channel_statistics,
    dequantize,
    quantize,
    squares,
)
from fewbit.runtime.backends.reference_seeds import draw_seeds
from fewbit.runtime.backends.results import QuantizedForward
from fewbit.runtime.format.bit_sharing import share_bits
from fewbit.runtime.format.encoding import Encoding, gray
from fewbit.runtime.format.layout import is_broadcast_scalar, storage_order
from fewbit.runtime.format.tensor_checks import ArgumentChecks

__all__ = [
    "batch_norm_backward",
    "can_compute_batch_norm",
    "can_quantize_result",
    "channel_statistics",
    "decode_fixed",
    "decode_mul",
    "dequantize",
    "draw_seeds",
    "encode",
    "encode_fixed",
    "forward",
    "forward_quantized",
    "grid_fixed",
    "mask_fixed",
    "name",
    "pack",
    "quantize",
    "share_bits",
    "squares",
    "unpack",
]


name = "reference"


def forward(x, function, parameters, encoding, seed, out) -> torch.Tensor | None:
    """Compute f(x) and the codes of x in one pass over memory, if the backend has such a pass. This backend has none.

    Args:
        x: a dense tensor of a floating dtype.
        function: the name of the activation f in `fewbit.functions`.
        parameters: the parameters of f, in the order of `fewbit.functions`.
        encoding: the encoding of the codes.
        seed: (1,) int64 if the encoding draws codes at random, else None.
        out: the tensor to which f(x) is written, with the strides of x; may be x itself.

    Returns:
        The packed codes, int32. None, with nothing done, if there is no such pass for this function or dtype.
    """
    return None


def can_quantize_result(function: str) -> bool:
    """Return whether `forward_quantized` has a pass for the activation `function`."""
    return False


def forward_quantized(
    x,
    function,
    parameters,
    encoding,
    seed,
    out,
    qseed,
    bits,
    group_size,
    kind=UNIFORM,
) -> QuantizedForward | None:
    """Do what `forward` does and quantize f(x), all in one pass over memory, if the backend has such a pass.

    `qseed`, `bits`, `group_size` and `kind` are those of `quantize`, and x has samples outermost.

    Returns:
        A `QuantizedForward`. None, with nothing done, if there is no such pass.
    """
    return None


def encode(x: torch.Tensor, encoding: Encoding, seed: torch.Tensor | None) -> torch.Tensor:
    """Return the packed codes of a dense tensor, int32; `seed` is (1,) int64 if codes are drawn at random."""
    entry = ArgumentChecks("encode", x)
    entry.check_numbers("x", x)
    entry.check_seed(seed, encoding.unbiased)
    flat = storage_order(x.detach())
    codes = _drawn(flat, encoding, seed) if encoding.unbiased else _located(flat, encoding)
    return pack(codes, encoding.bits)


def decode_mul(
    grad: torch.Tensor, packed: torch.Tensor, encoding: Encoding, out: torch.Tensor
) -> None:
    """Write the gradient of the activation's input, lut[code] * grad, to `out`, rounded once to the dtype of `out`.

    `grad` has the dtype and strides of `out`, a dense floating tensor, or repeats one element of storage.
    """
    n = out.numel()
    entry = ArgumentChecks("decode_mul", grad)
    entry.check_numbers("out", out)
    grad = grad.reshape(-1).contiguous() if is_broadcast_scalar(grad) else grad
    entry.check("grad", grad, n, out.dtype)
    entry.check_packed(packed, n, encoding.bits)
    flat = storage_order(grad)
    lut = _constant(encoding.lut64 if grad.dtype == torch.float64 else encoding.lut32, grad.device)
    codes = unpack(packed, encoding.bits, n).to(torch.int64)
    product = lut[codes] * flat.to(lut.dtype)
    storage_order(out).copy_(product.to(grad.dtype))


def _located(flat: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    breaks = encoding.breaks64
    if flat.dtype != torch.float64:
        breaks, flat = encoding.breaks32, flat.to(torch.float32)
    pieces = [encoding.initial]
    for flip in encoding.flips.tolist():
        pieces.append(pieces[-1] ^ flip)
    # bucketize returns the number of breaks below x; for NaN, the number of all breaks.
    piece = torch.bucketize(flat, _constant(breaks, flat.device))
    return torch.tensor(pieces, dtype=torch.uint8, device=flat.device)[piece]


def _drawn(flat: torch.Tensor, encoding: Encoding, seed: torch.Tensor) -> torch.Tensor:
    """Return codes, drawn at random, (n,) uint8, as docs/reference/table_schema.md, "A draw", specifies."""
    x = flat.to(torch.float32)
    points, origins, values, slopes, levels, inverse_gaps = (
        _constant(array, x.device) for array in encoding.draw
    )
    segment = torch.bucketize(x, points)
    i = (segment - 1).clamp(0, len(slopes) - 1)
    inside = values[i] + (x - origins[i]) * slopes[i]
    mean = torch.where(segment == 0, values[0], inside)
    mean = torch.where(segment == len(points), values[-1], mean)
    mean = mean.clamp(levels[0], levels[-1])
    lower = (torch.bucketize(mean, levels, right=True) - 1).clamp(0, len(levels) - 2)
    probability = (mean - levels[lower]) * inverse_gaps[lower]
    level = lower + (uniform(seed, x.numel()) < probability)
    return gray(level).to(torch.uint8)


def uniform(seed: torch.Tensor, n: int) -> torch.Tensor:
    """Return `fewbit.table.philox.uniform(seed, arange(n))`: numbers in [0, 1), float32."""
    index = torch.arange(n, dtype=torch.int64, device=seed.device)
    return (philox_words(seed, index)[0] >> 8).to(torch.float32) * 2.0**-24


def _constant(array, device) -> torch.Tensor:
    return torch.from_numpy(array.copy()).to(device)
