"""The group quantizer (docs/concepts/quantizer.md) in plain torch, bit for bit that of the compiled kernels."""

from __future__ import annotations

import torch

from fewbit.config import MASKED, ROTATED, UNIFORM, check_rotated_size
from fewbit.runtime.backends import reference_rotated
from fewbit.runtime.backends.reference_bits import entries_of, pack, sixteen_bit_draws, unpack
from fewbit.runtime.format import groups
from fewbit.runtime.format.channels import BLOCK, Normalization, estimated_rows, runs_of
from fewbit.runtime.format.encoding import packed_words
from fewbit.runtime.format.layout import storage_order
from fewbit.runtime.format.tensor_checks import ArgumentChecks, check_bits, seed_on

_MASK32 = 0xFFFFFFFF
_BLOCK = 256  # this many elements get their random numbers from one run of counters


def quantize(
    x,
    seed,
    bits,
    group_size,
    widths=None,
    words=None,
    normalize=None,
    kind=UNIFORM,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a tensor: compute the codes of its elements, and two numbers for each group, the *ranges*.

    Args:
        x: a dense tensor of a floating dtype, with samples outermost in storage.
        seed: an int that fits into int64, or (1,) int64.
        bits: the bits per element of all samples, 1 to 8. Ignored if `widths` is given.
        group_size: at most 256 unless the copy is uniform.
        widths: (N,) uint8, the bits per element of each of N samples, or None.
        words: only if `widths` is given: the number of int32 words to allocate for all codes.
        normalize: None to quantize x itself. (mean, rstd, inner) to quantize (x - mean[i]) * rstd[i], computed in
            float32. A fourth item has the numbers of channels, which only rotated copies have. See `Normalization`.
        kind: one of `fewbit.config.KINDS`.

    Returns:
        The packed codes, int32; and (groups, 2) bfloat16, the minimum and the range of each group in a uniform copy,
        the mean and the scale in all others, which have two more rows with their seed.
    """
    check_rotated_size(kind, group_size)
    entry = ArgumentChecks("quantize", x)
    entry.check_numbers("x", x)
    seed = seed_on(x.device, seed)
    entry.check_seed(seed)
    samples, features = groups.samples_of(x.shape)
    if widths is None:
        check_bits(bits)
    else:
        needed, _ = entry.check_widths(widths, samples, features, group_size)
        if words < needed:
            raise ValueError(
                f"quantize: packed: expected {needed} int32 or more, got {words} int32"
            )
    rows = storage_order(x.detach()).view(samples, features).to(torch.float32)
    if normalize is not None:
        rows = _normalized(entry, rows, kind, *normalize)
    if widths is None:
        packed, ranges = _stream(rows, seed, bits, group_size, kind, 0)
    else:
        packed = torch.zeros(words, dtype=torch.int32, device=x.device)
        most = groups.most_groups(samples, features, group_size)
        ranges = torch.zeros(most, 2, dtype=torch.bfloat16, device=x.device)
        word = group = 0
        for width in range(1, 9):
            stream = rows[widths == width]
            codes, limits = _stream(stream, seed, width, group_size, kind, group)
            packed[word : word + len(codes)] = codes
            ranges[group : group + len(limits)] = limits
            word, group = word + len(codes), group + len(limits)
    if kind != UNIFORM:
        ranges = torch.cat([ranges, seed.view(torch.bfloat16).view(groups.SEED_ROWS, 2)])
    return packed, ranges


def channel_statistics(x, count: int, normalize=None) -> torch.Tensor:
    """Estimate the mean and the scale of each of `count` channels of x, (count, 2) bfloat16.

    docs/concepts/quantizer.md, "Channels", specifies the estimates. `normalize` is None, or (mean, rstd, inner) to
    normalize x first.
    """
    entry = ArgumentChecks("channel_statistics", x)
    entry.check_numbers("x", x)
    rows = storage_order(x.detach()).view(-1, count).to(torch.float32)
    if normalize is not None:
        rows = _normalized(entry, rows, ROTATED, *normalize)
    chosen = estimated_rows(len(rows))
    n = torch.full((), len(chosen), dtype=torch.float32, device=x.device)
    sums, squares = torch.zeros_like(rows[0]), torch.zeros_like(rows[0])
    for run in runs_of(chosen):
        of_run, squares_of_run = torch.zeros_like(sums), torch.zeros_like(sums)
        for row in run:
            of_run = of_run + rows[row]
            squares_of_run = squares_of_run + rows[row] * rows[row]
        sums, squares = sums + of_run, squares + squares_of_run
    means = sums / n
    error = means * 2.0**-8
    variances = (squares / n - means * means).clamp(min=0.0) + error * error
    variances = variances + _averages(variances) / n
    has_scale = (variances >= 1e-30) & (variances <= 1e30)
    scales = torch.where(has_scale, reference_rotated.root(reference_rotated.root(variances)), 1.0)
    means = torch.where(has_scale, means, 0.0)
    return torch.stack([means, scales], 1).to(torch.bfloat16)


def _averages(variances):
    """Return the mean variance of each channel's block, (channels,)."""
    count = len(variances)
    blocks = torch.nn.functional.pad(variances, (0, -count % BLOCK)).view(-1, BLOCK)
    sizes = torch.full((len(blocks),), float(BLOCK), device=variances.device)
    sizes[-1] = count - (len(blocks) - 1) * BLOCK
    while blocks.shape[1] > 1:
        half = blocks.shape[1] // 2
        blocks = blocks[:, :half] + blocks[:, half:]
    return (blocks[:, 0] / sizes).repeat_interleave(BLOCK)[:count]


def squares(x, group_size, normalize=None, kind=UNIFORM):
    """Return `squares` of each sample (docs/concepts/theory/rounding.md), (N,) float32.

    Ranges and means are those that `quantize` stores, but groups never cross samples. A sample with an element that is
    not finite has NaN.
    """
    check_rotated_size(kind, group_size)
    entry = ArgumentChecks("squares", x)
    entry.check_numbers("x", x)
    samples, features = groups.samples_of(x.shape)
    rows = storage_order(x.detach()).view(samples, features).to(torch.float32)
    channels = None
    if normalize is not None:
        rows = _normalized(entry, rows, kind, *normalize)
        channels = Normalization(*normalize).channels
    if not rows.numel():
        return rows.new_zeros(samples)
    per_row = -(-features // group_size)
    cut, exists = _cut_rows(rows, group_size)
    if kind != UNIFORM:
        energies = reference_rotated.energies(cut, exists, kind == MASKED)
        if channels is not None:  # errors are multiplied by the scales of channels
            _, scales = _spread_channels(rows, channels)
            scales, _ = _cut_rows(scales.double().square(), group_size)
            energies = energies * (scales.sum(1) / exists.sum(1)).float()
        return energies.view(samples, per_row).sum(1)
    _, extent = _limits(cut, exists)
    return (exists.sum(1) * (extent * extent)).view(samples, per_row).sum(1)


def dequantize(
    packed,
    ranges,
    bits,
    group_size,
    out,
    widths=None,
    affine=None,
    kind=UNIFORM,
    mask=None,
    channels=None,
) -> None:
    """Write the values that codes stand for to `out`, rounded once to the dtype of `out`.

    `packed`, `ranges`, `bits`, `group_size`, `widths` and `kind` are as in `quantize`. `out` is a dense floating tensor
    with samples outermost in storage.

    With affine = (scale, shift, inner), values * scale[i] + shift[i] are written, computed in float32 before rounding,
    with i as in `Normalization`; scale or shift may be None. Values are multiplied by `mask`, packed codes of 1 bit in
    storage order. With `channels`, (count, 2) bfloat16, each value is multiplied by its channel's scale, then the mean
    is added, before `affine`.

    affine and channels must be None if `widths` is given and samples have fewer than 64 features. `mask` must be None
    if the copy is uniform, or if `affine` is given.
    """
    check_rotated_size(kind, group_size)
    entry = ArgumentChecks("dequantize", out)
    entry.check_numbers("out", out)
    entry.check_copy(packed, ranges, bits, group_size, out.shape, widths, kind)
    samples, features = groups.samples_of(out.shape)
    if widths is not None and features < groups.LEAST_FEATURES:
        if affine is not None:
            raise ValueError("expected no affine map for short samples of several widths")
        if channels is not None:
            raise ValueError("expected no channels for short samples of several widths")
    if mask is not None:
        entry.check_mask(mask, out.numel(), affine, kind)
    seed = None
    if kind != UNIFORM:
        ranges, seed = ranges[: -groups.SEED_ROWS], seed_of(ranges)
    if widths is None:
        rows = _restored(packed, ranges, bits, group_size, samples, features, kind, seed, 0)
    else:
        rows = torch.empty(samples, features, dtype=torch.float32, device=out.device)
        word = group = 0
        for width in range(1, 9):
            chosen = widths == width
            count = int(chosen.sum())
            n_words = packed_words(count * features, width)
            n_groups = groups.group_count(count, features, group_size)
            stream = packed[word : word + n_words], ranges[group : group + n_groups]
            place = group_size, count, features
            rows[chosen] = _restored(*stream, width, *place, kind, seed, group)
            word, group = word + n_words, group + n_groups
    if channels is not None:
        entry.check_channels(channels, out.numel(), kind)
        means, scales = _spread_channels(rows, channels)
        rows = rows * scales + means
    if affine is not None:
        rows = _mapped(rows, *affine)
    if mask is not None:
        rows = rows * unpack(mask, 1, rows.numel()).view(rows.shape)
    storage_order(out).copy_(in_dtype(rows.reshape(-1), out.dtype))


def in_dtype(values, dtype):
    """Convert dequantized values to dtype, clamped to the largest finite float16, because ranges are rounded up."""
    if dtype == torch.float16:
        most = torch.finfo(dtype).max
        values = values.clamp(-most, most)
    return values.to(dtype)


def _normalized(entry, rows, kind, mean, rstd, inner, channels=None):
    if rstd is None and (channels is None or mean is not None):
        raise ValueError("expected rstd, got None")
    if rstd is not None:
        mean, rstd = entries_of(rows, (mean, rstd), inner)
        if mean is not None:
            rows = rows - mean
        rows = rows * rstd
    if channels is not None:
        entry.check_channels(channels, rows.numel(), kind)
        means, scales = _spread_channels(rows, channels)
        rows = (rows - means) * (torch.ones_like(scales) / scales)
    return rows


def _spread_channels(rows, channels):
    numbers = channels.float()
    return entries_of(rows, (numbers[:, 0].contiguous(), numbers[:, 1].contiguous()), 1)


def _mapped(rows, scale, shift, inner):
    scale, shift = entries_of(rows, (scale, shift), inner)
    if scale is not None:
        rows = rows * scale
    return rows if shift is None else rows + shift


def _stream(rows, seed, bits, group_size, kind, first_group):
    """Return the packed codes and ranges of samples, (samples, features) float32, that have the same bits per element.

    The random numbers of a group depend on its number, which starts at `first_group`.
    """
    cut, exists = _cut(rows, group_size)  # (groups, group_size)
    if kind != UNIFORM:
        groups_of = cut, exists, seed, bits, first_group, kind == MASKED
        codes, minimum, extent = reference_rotated.quantize_groups(*groups_of)
    else:
        codes, minimum, extent = _uniform(cut, exists, seed, bits, first_group, group_size)
    packed = pack(codes[exists].to(torch.uint8), bits)
    # The upper 16 bits of each float32, whose lower ones are 0.
    upper = torch.stack([minimum, extent], 1).view(torch.int32) >> 16
    return packed, upper.to(torch.int16).view(torch.bfloat16)


def _uniform(cut, exists, seed, bits, first_group, group_size):
    top = 2**bits - 1
    minimum, extent = _limits(cut, exists)
    # The clamp prevents an overflow for ranges below 1e-31. full_like makes a division of two tensors, because torch
    # computes `number / tensor` as a product with the reciprocal, which rounds twice.
    steps = torch.full_like(extent, top) / extent
    scale = torch.where(extent > 0, steps.clamp(max=2.0**111), 0.0) * 65536.0
    fixed = ((cut - minimum[:, None]) * scale[:, None]).round().clamp(0, top * 65536.0)
    fixed = torch.where(extent.isfinite()[:, None], fixed, 0.0).to(torch.int64)
    group = torch.arange(first_group, first_group + len(cut), device=cut.device)
    return (fixed + draws(seed, group, group_size)) >> 16, minimum, extent


def _limits(cut, exists):
    """Return the minimums and ranges of groups, (groups,) float32 rounded to bfloat16; NaN if not finite."""
    low = torch.where(exists, cut, torch.inf).amin(1) if len(cut) else cut.new_zeros(0)
    high = torch.where(exists, cut, -torch.inf).amax(1) if len(cut) else cut.new_zeros(0)
    # Adding 0 turns -0 into +0, since amin may find either zero.
    minimum = toward(low, -torch.inf) + 0.0
    extent = toward(high - minimum, torch.inf) + 0.0
    finite = (torch.isfinite(cut) | ~exists).all(1) & minimum.isfinite() & extent.isfinite()
    return torch.where(finite, minimum, torch.nan), torch.where(finite, extent, torch.nan)


def seed_of(ranges):
    """Return the seed of a copy, (1,) int64, from the last rows of its ranges."""
    return ranges[-groups.SEED_ROWS :].flatten().clone().view(torch.int64)


def _restored(packed, ranges, bits, group_size, samples, features, kind, seed, first_group):
    codes = unpack(packed, bits, samples * features).view(samples, features)
    cut, exists = _cut(codes.to(torch.float32), group_size)
    minimum, extent = limits_of(ranges)
    if kind != UNIFORM:
        cut = cut.to(torch.int64)
        groups_of = cut, exists, minimum, extent, seed, bits, first_group
        return reference_rotated.restore_groups(*groups_of)[exists].view(samples, features)
    part = cut * torch.tensor(1.0 / (2**bits - 1), dtype=torch.float32, device=cut.device)
    values = minimum[:, None] + extent[:, None] * part
    return values[exists].view(samples, features)


def limits_of(ranges):
    """Return the two numbers of each group, (groups,) float32 each, from ranges."""
    return ranges.float().unbind(1)


def draws(seed, group, group_size):
    """Return the random 16-bit numbers by which the elements of groups are rounded, (groups, group_size) int64."""
    blocks = -(-group_size // _BLOCK)
    run = group[:, None] * blocks + torch.arange(blocks, device=group.device)
    found = sixteen_bit_draws(seed, 32 * run.flatten())
    return found.view(len(group), blocks * _BLOCK)[:, :group_size]


def _cut(rows, group_size):
    """Cut samples, concatenated if they have fewer than 64 features, into groups.

    Returns:
        The elements, (groups, group_size), padded by zeros; and a bool mask of that shape, False for padding.
    """
    features = rows.shape[1]
    if features < groups.LEAST_FEATURES:
        rows = rows.reshape(1, -1)
        if not rows.numel():
            rows = rows.reshape(0, 1)
    return _cut_rows(rows, group_size)


def _cut_rows(rows, group_size):
    length = rows.shape[1]
    per_row = -(-length // group_size)
    cut = torch.nn.functional.pad(rows, (0, per_row * group_size - length))
    exists = torch.arange(per_row * group_size, device=rows.device) < length
    shape = (rows.shape[0] * per_row, group_size)
    return cut.reshape(shape), exists.expand(len(rows), -1).reshape(shape)


def toward(x, limit):
    """Round float32 numbers to bfloat16, toward `limit`, -inf or +inf, as float32."""
    bits = x.view(torch.int32).to(torch.int64) & _MASK32
    cut = bits & 0xFFFF0000
    away = (x < 0) if limit < 0 else (x > 0)  # truncation moves these away from the limit
    moved = torch.where(away & (bits != cut), cut + 0x10000, cut)
    return torch.where(x.isnan(), x, _float(moved))


def _float(bits):
    signed = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    return signed.to(torch.int32).view(torch.float32)
