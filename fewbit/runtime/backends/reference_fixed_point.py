"""Fixed-point codes (`fewbit.runtime.ops.fixed_point`) in plain torch, bit for bit those of csrc/common/fixed_point.h."""

from __future__ import annotations

import torch

from fewbit.runtime.backends.reference_bits import entries_of, pack, unpack
from fewbit.runtime.format.layout import storage_order
from fewbit.runtime.format.tensor_checks import ArgumentChecks

REACH = 3.0
"""The codes cover values of x~ up to this many standard deviations from the mean."""


def grid_fixed(gamma, beta, bits: int) -> torch.Tensor:
    """Return the grid, (7, channels) float32, as `fixed_point.grid_of` describes it.

    `gamma` and `beta` are the weight and the bias of the norm, (channels,) float32 or float64.
    """
    entry = ArgumentChecks("grid_fixed", gamma)
    entry.check_numbers("gamma", gamma)
    entry.check("beta", beta, gamma.numel(), gamma.dtype)
    levels = 1 << bits
    step = 2 * REACH / levels
    scale = gamma.abs()
    zero = -beta / scale
    is_constant = ~zero.to(torch.float32).isfinite()
    is_inside = zero.abs() <= REACH
    infinity = torch.full_like(zero, torch.inf)
    # A product, since torch computes `tensor / number` as a division on the CPU but with the reciprocal on CUDA.
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
    """Return the packed codes of x~, (bits * ceil(n / 32),) int32.

    Args:
        x: x~ as a dense tensor, or the norm's input if `normalize` is given.
        y: the norm's result, whose sign is encoded, with the strides and dtype of x.
        grid: the result of `grid_fixed`.
        bits: 1 to 8.
        inner: as in `channels.Normalization`.
        normalize: None if x is x~. Otherwise (mean, rstd, inner), see `quantize`.
    """
    entry = ArgumentChecks("encode_fixed", x)
    entry.check_numbers("x", x)
    entry.check("y", y, x.numel(), x.dtype)
    entry.check_grid(grid, bits)
    levels = 1 << bits
    values = storage_order(x.detach()).to(torch.float32)
    if normalize is not None:
        *vectors, every = normalize
        mean, rstd = entries_of(values, vectors, every)
        values = (values - mean) * rstd
    start, first, _, _, sign, _, _ = entries_of(values, list(grid), inner)
    steps = (sign * values - start) * torch.tensor(levels / 6.0, dtype=torch.float32)
    # The comparison turns NaN into 0.
    steps = torch.where(steps > 0, steps, 0.0)
    steps = torch.where(steps < levels, steps, float(levels))
    codes = (steps.ceil() - 1).clamp(min=0).to(torch.int64)
    first = first.to(torch.int64)
    is_positive = ~(storage_order(y.detach()) <= 0)
    codes = torch.where(is_positive, codes.maximum(first), codes.minimum(first - 1))
    return pack(codes.clamp(0, levels - 1).to(torch.uint8), bits)


def decode_fixed(packed, grid, bits, inner, out, slope=None, scale=None) -> None:
    """Write approximate values of x~, y or an activation of y to `out`, rounded once to the dtype of `out`.

    `packed` is the result of `encode_fixed`, whose arguments `grid`, `bits` and `inner` are. `out` is a dense tensor of
    a floating dtype. Without a slope, values of x~ are written, or with scale = (vector, inner) those of x~ *
    vector[i]. With a slope, values of y are written, multiplied by the slope where y is not positive: 1 for y itself, 0
    for ReLU(y).
    """
    entry = ArgumentChecks("decode_fixed", out)
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
            values = values * entries_of(values, scale[:1], scale[1])[0]
    else:
        values = factor * values + shift
        # Rounding may not take a value across zero.
        above = torch.where(values < 0, 0.0, values)
        below = torch.where(values > 0, 0.0, values) * slope if slope else torch.zeros_like(values)
        values = torch.where(is_positive, above, below)
    storage_order(out).copy_(values.to(out.dtype))


def mask_fixed(grad, packed, grid, bits, inner, slope, out) -> None:
    """Write the gradient of ReLU(y) or LeakyReLU(y) to `out`: `grad`, times `slope` where y is not positive.

    A slope of 0 gives 0, even if grad is not finite. The other arguments are as in `decode_fixed`.
    """
    entry = ArgumentChecks("mask_fixed", grad)
    entry.check_numbers("grad", grad)
    entry.check("out", out, grad.numel(), grad.dtype)
    entry.check_grid(grid, bits)
    entry.check_packed(packed, grad.numel(), bits)
    flat = storage_order(grad)
    codes, grid = _codes(packed, grid, bits, inner, flat.numel())
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    below = flat * slope if slope else torch.zeros_like(flat)
    storage_order(out).copy_(torch.where(codes >= grid[1], flat, below).to(out.dtype))


def _codes(packed, grid, bits, inner, n):
    """Return the codes and the rows of the grid, each expanded to the codes, (n,) float32."""
    codes = unpack(packed, bits, n).to(torch.float32)
    return codes, entries_of(codes, list(grid), inner)
