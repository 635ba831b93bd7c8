"""The fixed-point code of pre-activations in plain torch: any device, and the oracle of the kernels.

`fixed_point` says what a grid is. All is float32, operation for operation as in csrc/common/fixed_point.h.
"""

from __future__ import annotations

import torch

from fewbit.runtime.backends.reference_bits import pack, unpack
from fewbit.runtime.format.buffers import Entry
from fewbit.runtime.format.layout import check_vectors, storage_order

REACH = 3.0
"""Deviations on each side of the mean that have levels."""


def grid_fixed(gamma, beta, bits: int) -> torch.Tensor:
    """(7, channels) float32 of gamma and beta, (channels,) float32 or float64: see `fixed_point.grid_of`."""
    entry = Entry("grid_fixed", gamma)
    entry.check_numbers("gamma", gamma)
    entry.check("beta", beta, gamma.numel(), gamma.dtype)
    levels = 1 << bits
    step = 2 * REACH / levels
    scale = gamma.abs()
    zero = -beta / scale
    is_constant = ~zero.to(torch.float32).isfinite()
    is_inside = zero.abs() <= REACH
    infinity = torch.full_like(zero, torch.inf)
    # (A product: torch divides by a number on the CPU, and multiplies with its reciprocal on CUDA.)
    per_unit = torch.tensor(levels / 6.0, dtype=torch.float32).to(zero)
    first = (levels // 2 + (zero * per_unit).floor()).clamp(1, levels - 1)
    start = torch.where(is_inside, zero - first * step, -REACH)
    constant = torch.where(beta > 0, 0.0, float(levels)).to(zero)
    is_clamped = ~is_inside & ~is_constant
    rows = (
        torch.where(is_constant, -REACH, start),
        torch.where(is_constant, constant, first),
        torch.where(is_clamped, zero + step / 2, -infinity),
        torch.where(is_clamped, zero - step / 2, infinity),
        torch.where(gamma < 0, -1.0, 1.0),
        scale,
        beta,
    )
    return torch.stack([row.to(torch.float32) for row in rows])


def encode_fixed(x, y, grid, bits, inner, normalize=None):
    """The packed codes, (bits * ceil(n / 32),) int32, of a dense x.

    x: the normalized input, or with normalize = (mean, rstd, inner), as in `reference.quantize`, what it is made
    of. y: the norm's result, laid out as x and of its dtype, for its sign. grid: (7, channels) float32, of which
    element e in storage order has column (e div inner) mod channels.
    """
    entry = Entry("encode_fixed", x)
    entry.check_numbers("x", x)
    entry.check("y", y, x.numel(), x.dtype)
    entry.check_grid(grid, bits)
    levels = 1 << bits
    values = storage_order(x.detach()).to(torch.float32)
    if normalize is not None:
        *vectors, every = normalize
        mean, rstd = _placed(values, vectors, every)
        values = (values - mean) * rstd
    start, first, _, _, sign, _, _ = _placed(values, list(grid), inner)
    steps = (sign * values - start) * torch.tensor(levels / 6.0, dtype=torch.float32)
    # By comparisons, in which NaN is 0.
    steps = torch.where(steps > 0, steps, 0.0)
    steps = torch.where(steps < levels, steps, float(levels))
    codes = (steps.ceil() - 1).clamp(min=0).to(torch.int64)
    first = first.to(torch.int64)
    is_positive = ~(storage_order(y.detach()) <= 0)
    codes = torch.where(is_positive, codes.maximum(first), codes.minimum(first - 1))
    return pack(codes.clamp(0, levels - 1).to(torch.uint8), bits)


def decode_fixed(packed, grid, bits, inner, out, slope=None, scale=None) -> None:
    """Restored values into a dense `out`, rounded once to its dtype; grid, inner: as in `encode_fixed`.

    slope: None for the normalized input, times scale = (vector, inner) if given; else y where it is positive and
    y * slope elsewhere, 0 for slope 0.
    """
    entry = Entry("decode_fixed", out)
    entry.check_numbers("out", out)
    entry.check_grid(grid, bits)
    entry.check_packed(packed, out.numel(), bits)
    codes, grid = _codes(packed, grid, bits, inner, out.numel())
    start, first, low, high, sign, factor, shift = grid
    step = 6.0 / (1 << bits)
    values = start + (codes + 0.5) * step
    is_positive = codes >= first
    below = torch.where(values > high, high, values)
    values = torch.where(is_positive, torch.where(values < low, low, values), below)
    if slope is None:
        values = sign * values
        if scale is not None:
            values = values * _placed(values, scale[:1], scale[1])[0]
    else:
        values = factor * values + shift
        # Rounding may not take a value across zero.
        above = torch.where(values < 0, 0.0, values)
        below = torch.where(values > 0, 0.0, values) * slope if slope else torch.zeros_like(values)
        values = torch.where(is_positive, above, below)
    storage_order(out).copy_(values.to(out.dtype))


def mask_fixed(grad, packed, grid, bits, inner, slope, out) -> None:
    """out = grad where y is positive, elsewhere grad * slope, 0 for slope 0; grad laid out as the dense `out`."""
    entry = Entry("mask_fixed", grad)
    entry.check_numbers("grad", grad)
    entry.check("out", out, grad.numel(), grad.dtype)
    entry.check_grid(grid, bits)
    entry.check_packed(packed, grad.numel(), bits)
    flat = storage_order(grad)
    codes, grid = _codes(packed, grid, bits, inner, flat.numel())
    wide = flat.to(torch.float64 if flat.dtype == torch.float64 else torch.float32)
    below = wide * slope if slope else torch.zeros_like(wide)
    storage_order(out).copy_(torch.where(codes >= grid[1], wide, below).to(out.dtype))


def _codes(packed, grid, bits, inner, n):
    """(n,) float32 codes, and the entries of the grid for each."""
    codes = unpack(packed, bits, n).to(torch.float32)
    return codes, _placed(codes, list(grid), inner)


def _placed(flat, vectors, inner):
    n = flat.numel()
    entries = check_vectors(vectors, inner, n)
    index = torch.arange(n, device=flat.device) // inner % max(entries, 1)
    return [each[index] for each in vectors]
