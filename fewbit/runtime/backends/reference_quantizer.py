"""The group quantizer (docs/quantizer.md) in plain torch, for any device. The kernels have to return the same bits."""

from __future__ import annotations

import torch

from fewbit.runtime.backends.reference_bits import entries_of, pack, philox_words, unpack
from fewbit.runtime.backends.results import QuantizedGroups
from fewbit.runtime.format import groups
from fewbit.runtime.format.buffers import Entry, check_bits
from fewbit.runtime.format.encoding import packed_words
from fewbit.runtime.format.layout import storage_order

_MASK32 = 0xFFFFFFFF
_BLOCK = 256  # the elements whose draws come from 32 counters, 8 draws from each


def quantize(
    x, seed, bits, group_size, fp32_min, widths=None, words=None, normalize=None
) -> QuantizedGroups:
    """Quantize x.

    Args:
        x: a dense tensor with samples outermost.
        seed: (1,) int64.
        bits: the bits per element of all samples, unless `widths` is given.
        group_size: elements of a group.
        fp32_min: whether minimums are float32.
        widths: (N,) uint8, the bits of each sample, or None.
        words: only if `widths` is given: the number of int32 words to allocate for all codes.
        normalize: None to quantize x itself. (mean or None, rstd, inner) to quantize (x - mean[i]) * rstd[i], computed
            in float32. mean and rstd are 1-D contiguous float32 vectors, and element number e in storage order has
            entry i = (e div inner) mod length.

    Returns:
        The codes and ranges of the groups. The spread is two 0-D float32 tensors.
    """
    entry = Entry("quantize", x)
    entry.check_numbers("x", x)
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
        rows = _normalized(rows, *normalize)
    if widths is None:
        packed, ranges = _stream(rows, seed, bits, group_size, fp32_min, 0)
    else:
        packed = torch.zeros(words, dtype=torch.int32, device=x.device)
        most = groups.most_groups(samples, features, group_size)
        ranges = torch.zeros(most, 3 if fp32_min else 2, dtype=torch.bfloat16, device=x.device)
        word = group = 0
        for width in range(1, 9):
            stream = rows[widths == width]
            codes, limits = _stream(stream, seed, width, group_size, fp32_min, group)
            packed[word : word + len(codes)] = codes
            ranges[group : group + len(limits)] = limits
            word, group = word + len(codes), group + len(limits)
    spread = tuple(rows.aminmax()) if rows.numel() else (rows.new_zeros(()),) * 2
    return QuantizedGroups(packed, ranges, spread)


def squares(x, group_size, normalize=None):
    """Return the sum of length * range^2 over the groups of each sample, from exact ranges.

    Args:
        x: as for `quantize`. A sample of fewer than 64 features counts as a group of its own.
        group_size: as for `quantize`.
        normalize: as for `quantize`.

    Returns:
        (N,) float32; NaN for a sample with an element that is not finite.
    """
    Entry("squares", x).check_numbers("x", x)
    samples, features = groups.samples_of(x.shape)
    rows = storage_order(x.detach()).view(samples, features).to(torch.float32)
    if normalize is not None:
        rows = _normalized(rows, *normalize)
    if not rows.numel():
        return rows.new_zeros(samples)
    per_row = -(-features // group_size)
    last = rows[:, -1:].expand(samples, per_row * group_size - features)
    cut = torch.cat([rows, last], 1).view(samples, per_row, group_size)
    length = torch.full((per_row,), float(group_size), device=rows.device)
    length[-1] = features - (per_row - 1) * group_size
    extent = cut.amax(2) - cut.amin(2)
    finite = torch.isfinite(cut).all(2)
    return torch.where(finite, length * (extent * extent), torch.nan).sum(1)


def dequantize(packed, ranges, bits, group_size, out, widths=None, affine=None) -> None:
    """Write the quantized values, rounded once, into `out`.

    Args:
        packed: from `quantize`.
        ranges: from `quantize`.
        bits: as for `quantize`.
        group_size: as for `quantize`.
        out: a dense tensor with samples outermost.
        widths: as for `quantize`.
        affine: (scale or None, shift or None, inner) to write values * scale[i] + shift[i], computed in float32 before
            rounding, with the entries i as in `quantize`; or None. Not possible if samples of fewer than 64 features
            have several widths.
    """
    entry = Entry("dequantize", out)
    entry.check_numbers("out", out)
    entry.check_copy(packed, ranges, bits, group_size, out.shape, widths)
    samples, features = groups.samples_of(out.shape)
    if affine is not None and widths is not None and features < groups.LEAST_FEATURES:
        raise ValueError("expected no affine map for short samples of several widths")
    if widths is None:
        rows = _restored(packed, ranges, bits, group_size, samples, features)
    else:
        rows = torch.empty(samples, features, dtype=torch.float32, device=out.device)
        word = group = 0
        for width in range(1, 9):
            chosen = widths == width
            count = int(chosen.sum())
            n_words = packed_words(count * features, width)
            n_groups = groups.group_count(count, features, group_size)
            stream = packed[word : word + n_words], ranges[group : group + n_groups]
            rows[chosen] = _restored(*stream, width, group_size, count, features)
            word, group = word + n_words, group + n_groups
    if affine is not None:
        rows = _mapped(rows, *affine)
    storage_order(out).copy_(in_dtype(rows.reshape(-1), out.dtype))


def in_dtype(values, dtype):
    """Convert dequantized values to dtype. In float16 they are clamped to 65504, since a rounded range can exceed it."""
    if dtype == torch.float16:
        most = torch.finfo(dtype).max
        values = values.clamp(-most, most)
    return values.to(dtype)


def _normalized(rows, mean, rstd, inner):
    if rstd is None:
        raise ValueError("expected rstd, got None")
    mean, rstd = entries_of(rows, (mean, rstd), inner)
    if mean is not None:
        rows = rows - mean
    return rows * rstd


def _mapped(rows, scale, shift, inner):
    scale, shift = entries_of(rows, (scale, shift), inner)
    if scale is not None:
        rows = rows * scale
    return rows if shift is None else rows + shift


def _stream(rows, seed, bits, group_size, fp32_min, first_group):
    """Return (packed, ranges) of rows that all have one width. Their groups are numbered from first_group on."""
    top = 2**bits - 1
    cut, exists = _cut(rows, group_size)  # (groups, group_size)
    low = torch.where(exists, cut, torch.inf).amin(1) if len(cut) else cut.new_zeros(0)
    high = torch.where(exists, cut, -torch.inf).amax(1) if len(cut) else cut.new_zeros(0)
    # Adding 0 turns -0 into +0, since amin may find either zero.
    minimum = (low if fp32_min else toward(low, -torch.inf)) + 0.0
    extent = toward(high - minimum, torch.inf) + 0.0
    # A group with a non-finite element, or a range beyond bfloat16, is restored as NaN.
    finite = (torch.isfinite(cut) | ~exists).all(1) & minimum.isfinite() & extent.isfinite()
    minimum = torch.where(finite, minimum, torch.nan)
    extent = torch.where(finite, extent, torch.nan)
    # The quotient of a range below 1e-31 could overflow, hence the clamp. torch computes `number / tensor` as a product
    # with the reciprocal, which rounds twice, hence full_like.
    steps = torch.full_like(extent, top) / extent
    scale = torch.where(extent > 0, steps.clamp(max=2.0**111), 0.0) * 65536.0
    fixed = ((cut - minimum[:, None]) * scale[:, None]).round().clamp(0, top * 65536.0)
    fixed = torch.where(finite[:, None], fixed, 0.0).to(torch.int64)
    group = torch.arange(first_group, first_group + len(cut), device=rows.device)
    codes = (fixed + draws(seed, group, group_size)) >> 16
    packed = pack(codes[exists].to(torch.uint8), bits)
    columns = [_upper(minimum), _upper(extent)]
    if fp32_min:
        columns.append(_lower(minimum))
    return packed, torch.stack(columns, 1).view(torch.bfloat16)


def _restored(packed, ranges, bits, group_size, samples, features):
    """Return minimum + range * (code * (1 / (2**bits - 1))), (samples, features) float32."""
    codes = unpack(packed, bits, samples * features).view(samples, features)
    cut, exists = _cut(codes.to(torch.float32), group_size)
    minimum, extent = limits_of(ranges)
    part = cut * torch.tensor(1.0 / (2**bits - 1), dtype=torch.float32, device=cut.device)
    values = minimum[:, None] + extent[:, None] * part
    return values[exists].view(samples, features)


def limits_of(ranges):
    """Return (minimum, range) of each group, float32."""
    bits = ranges.view(torch.int16).to(torch.int64) & 0xFFFF
    minimum = bits[:, 0] << 16
    if ranges.shape[1] == groups.FP32_MIN_COLUMNS:
        minimum = minimum | bits[:, 2]
    return _float(minimum), _float(bits[:, 1] << 16)


def draws(seed, group, group_size):
    """Return the random 16-bit numbers by which the elements of groups are rounded.

    Element i of group g has draw number e = g * (group_size rounded up to 256) + i. One Philox counter yields eight
    draws: draw e is half word (e div 32) mod 8 of counter 32 (e div 256) + e mod 32, lower halves first.

    Args:
        seed: (1,) int64.
        group: (groups,) int64, the numbers of the groups.
        group_size: elements of a group.

    Returns:
        (groups, group_size) int64 in [0, 2**16).
    """
    blocks = -(-group_size // _BLOCK)
    counter = 32 * (group[:, None] * blocks + torch.arange(blocks, device=group.device))
    counter = counter[:, :, None] + torch.arange(32, device=group.device)  # (groups, blocks, 32)
    words = torch.stack(philox_words(seed, counter), -1)  # (groups, blocks, 32, 4)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1).flatten(-2)  # (groups, blocks, 32, 8)
    return halves.transpose(2, 3).reshape(len(group), blocks * _BLOCK)[:, :group_size]


def _cut(rows, group_size):
    """Return rows' elements as (groups, group_size), shorter groups padded with zeros, and a mask of those that exist."""
    samples, features = rows.shape
    if features < groups.LEAST_FEATURES:
        rows = rows.reshape(1, -1)
        if not rows.numel():
            rows = rows.reshape(0, 1)
    length = rows.shape[1]
    per_row = -(-length // group_size)
    cut = torch.nn.functional.pad(rows, (0, per_row * group_size - length))
    exists = torch.arange(per_row * group_size, device=rows.device) < length
    shape = (rows.shape[0] * per_row, group_size)
    return cut.reshape(shape), exists.expand(len(rows), -1).reshape(shape)


def toward(x, limit):
    """Return the next bfloat16 from x toward limit, -inf or +inf, in float32 like x."""
    bits = x.view(torch.int32).to(torch.int64) & _MASK32
    cut = bits & 0xFFFF0000
    away = (x < 0) if limit < 0 else (x > 0)  # truncation moves these away from the limit
    moved = torch.where(away & (bits != cut), cut + 0x10000, cut)
    return torch.where(x.isnan(), x, _float(moved))


def _float(bits):
    signed = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    return signed.to(torch.int32).view(torch.float32)


def _upper(x):
    """Return the upper half of each float32, as int16."""
    return (x.contiguous().view(torch.int32) >> 16).to(torch.int16)


def _lower(x):
    half = x.contiguous().view(torch.int32) & 0xFFFF
    return torch.where(half >= 1 << 15, half - (1 << 16), half).to(torch.int16)
