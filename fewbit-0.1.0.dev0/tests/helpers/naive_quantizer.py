"""The group quantizer in NumPy, one group at a time, as docs/concepts/quantizer.md defines it: an oracle for the backends.

Rows are (N, D) float32; float64 rows are rounded here, 16-bit rows must be widened before. bfloat16 numbers are uint16.
"""

from fractions import Fraction
from functools import partial

import naive_rotated
import naive_unbiased
import numpy as np

from fewbit.table import philox

NAN16 = 0x7FC0


def streams(shape, widths, group_size):
    """Return (bits, the samples, [(first, end) of each group in the stream]) for each width."""
    samples, features = shape
    for bits in sorted(set(widths)):
        chosen = [i for i in range(samples) if widths[i] == bits]
        n = len(chosen) * features
        step = features if features >= 64 else max(n, 1)  # the length that groups do not cross
        cuts = [
            (first, min(first + group_size, start + step))
            for start in range(0, n, step)
            for first in range(start, start + step, group_size)
        ]
        yield bits, chosen, cuts


def normalized(rows, mean, rstd, inner):
    """Return (x - mean[i]) rstd[i] in float32, element by element. mean may be None."""
    rows = np.asarray(rows, np.float32)
    result = np.empty_like(rows)
    with np.errstate(all="ignore"):
        for e, x in enumerate(rows.reshape(-1)):
            i = e // inner % len(rstd)
            result.flat[e] = (x if mean is None else x - mean[i]) * rstd[i]
    return result


def mapped(values, scale, shift, inner):
    """Return value scale[i] + shift[i] in float32, element by element. scale or shift may be None."""
    result = np.empty_like(values)
    count = len(shift if scale is None else scale)
    with np.errstate(all="ignore"):
        for e, value in enumerate(values.reshape(-1)):
            i = e // inner % count
            product = value if scale is None else value * scale[i]
            result.flat[e] = product if shift is None else product + shift[i]
    return result


def quantize(rows, seed, widths, group_size, fp32_min, kind="uniform"):
    """Return (packed, ranges): uint32 words and (groups, 2 or 3) uint16, with two more rows unless uniform."""
    group = GROUP_OF[kind]
    rows = np.asarray(rows)
    with np.errstate(over="ignore", under="ignore"):
        rows = rows.astype(np.float32)
    packed, ranges, number = [], [], 0
    for bits, chosen, cuts in streams(rows.shape, widths, group_size):
        elements = rows[chosen].reshape(-1)
        codes = np.zeros(len(elements), np.int64)
        for first, end in cuts:
            codes[first:end], row = group(
                elements[first:end], seed, number, bits, group_size, fp32_min
            )
            ranges.append(row)
            number += 1
        packed.append(_planes(codes, bits))
    empty = [np.zeros(0, np.uint32)], [np.zeros((0, 3 if fp32_min else 2), np.uint16)]
    ranges = [np.array(ranges, np.uint16)] if ranges else []
    if kind != "uniform":
        ranges.append(naive_rotated.seed_rows(seed, 3 if fp32_min else 2))
    return np.concatenate(empty[0] + packed), np.concatenate(empty[1] + ranges)


def dequantize(packed, ranges, shape, widths, group_size, kind="uniform"):
    """Return the values, (N, D) float32. Those of a masked copy have no zeros yet."""
    seed = naive_rotated.seed_of(ranges[-2:]) if kind != "uniform" else None
    out, number = np.zeros(shape, np.float32), 0
    for bits, chosen, cuts in streams(shape, widths, group_size):
        n = len(chosen) * shape[1]
        words = bits * -(-n // 32)
        codes, packed = _codes(packed[:words], bits)[:n], packed[words:]
        values = np.zeros(n, np.float32)
        for first, end in cuts:
            limits = _limits(ranges[number])
            if kind != "uniform":
                naive = naive_unbiased if "unbiased" in kind else naive_rotated
                values[first:end] = naive.dequantize_group(
                    codes[first:end], *limits, seed, number, bits
                )
            else:
                values[first:end] = _restored(codes[first:end], *limits, bits)
            number += 1
        out[chosen] = values.reshape(len(chosen), shape[1])
    return out


def _group(x, seed, number, bits, group_size, fp32_min):
    """Return the codes of a group, and its row of the ranges."""
    nothing = np.zeros(len(x), np.int64), [NAN16, NAN16, 0][: 3 if fp32_min else 2]
    if not np.isfinite(x).all():
        return nothing
    top = 2**bits - 1
    minimum = x.min() if fp32_min else _bfloat16(x.min(), up=False)
    with np.errstate(over="ignore"):
        extent = np.float32(x.max() - minimum)
    extent = _bfloat16(extent, up=True)
    if not (np.isfinite(minimum) and np.isfinite(extent)):
        return nothing
    minimum, extent = (
        np.float32(minimum) + np.float32(0),
        np.float32(extent) + np.float32(0),
    )  # makes -0 a +0
    scale = np.float32(0)
    if extent > 0:
        with np.errstate(over="ignore"):
            scale = min(np.float32(top) / extent, np.float32(2.0**111)) * np.float32(65536)
    steps = ((x - minimum) * scale).astype(np.float32)
    # Python rounds half to even, in exact arithmetic.
    fixed = np.array([min(round(Fraction(float(step))), top * 65536) for step in steps], np.int64)
    codes = (fixed + draws(seed, number, len(x), group_size)) >> 16
    return codes, _row(minimum, extent, fp32_min)


def _rotated_group(x, seed, number, bits, group_size, fp32_min, is_masked=False):
    """Return the codes of a group of a rotated or masked copy, and its row of the ranges."""
    codes, *pair = naive_rotated.quantize_group(x, seed, number, bits, fp32_min, is_masked)
    return codes, _row_or_nan(*pair, fp32_min)


def _unbiased_group(x, seed, number, bits, group_size, fp32_min, is_masked=False):
    """Return the codes of a group of an exactly unbiased copy, and its row of the ranges."""
    codes, *pair = naive_unbiased.quantize_group(x, seed, number, bits, fp32_min, is_masked)
    return codes, _row_or_nan(*pair, fp32_min)


GROUP_OF = {
    "uniform": _group,
    "rotated": _rotated_group,
    "masked": partial(_rotated_group, is_masked=True),
    "unbiased": _unbiased_group,
    "masked-unbiased": partial(_unbiased_group, is_masked=True),
}


def _row_or_nan(mean, scale, fp32_min):
    if np.isnan(scale):
        return [NAN16, NAN16, 0][: 3 if fp32_min else 2]
    return _row(mean, scale, fp32_min)


def _row(first, second, fp32_min):
    """Return two float32 numbers as a row of the ranges."""
    upper = [int(number.view(np.uint32)) >> 16 for number in (first, second)]
    return upper + ([int(first.view(np.uint32)) & 0xFFFF] if fp32_min else [])


def _restored(codes, minimum, extent, bits):
    """Return the values of a group of a uniform copy."""
    unit = np.float32(1) / np.float32(2**bits - 1)
    with np.errstate(invalid="ignore"):
        return minimum + extent * (codes.astype(np.float32) * unit)


def draws(seed, number, n, group_size):
    """Return the 16-bit random numbers of the first n elements of a group."""
    padded = -(-group_size // 256) * 256
    e = number * padded + np.arange(n)
    counter = 32 * (e // 256) + e % 32
    words = philox.philox4x32((*philox.split64(counter), 0, 0), philox.seed_key(seed))
    half = e // 32 % 8
    word = np.stack(words)[half // 2, np.arange(n)]
    return (word >> (16 * (half % 2)).astype(np.uint32) & np.uint32(0xFFFF)).astype(np.int64)


def _bfloat16(x, up):
    """Return the nearest bfloat16 that is not below x (up) or not above x, as float32. It is found by walking."""
    x = np.float32(x)
    if not np.isfinite(x):
        return x
    near = int(x.view(np.uint32)) & 0xFFFF0000
    candidates = [np.array(bits, np.uint32).view(np.float32)[()] for bits in (near, near + 0x10000)]
    good = [c for c in candidates if (c >= x if up else c <= x)]
    return min(good, key=lambda c: abs(float(c) - float(x)))


def _limits(row):
    minimum = int(row[0]) << 16 | (int(row[2]) if len(row) == 3 else 0)
    return np.array([minimum, int(row[1]) << 16], np.uint32).view(np.float32)


def _planes(codes, bits):
    blocks = -(-len(codes) // 32)
    padded = np.zeros((blocks, 32), np.int64)
    padded.reshape(-1)[: len(codes)] = codes
    lanes = np.arange(32)
    planes = [((padded >> p & 1) << lanes).sum(1) for p in range(bits)]
    return np.stack(planes, 1).reshape(-1).astype(np.uint32)


def _codes(words, bits):
    planes = words.reshape(-1, bits, 1) >> np.arange(32, dtype=np.uint32) & 1
    return (planes.astype(np.int64) << np.arange(bits)[:, None]).sum(1).reshape(-1)


def grid(x, bits):
    """Return (lower value, step, fraction of a step above the lower value) of each element of one group, in float64."""
    x = np.asarray(x, np.float32)
    minimum = _bfloat16(x.min(), up=False)
    extent = _bfloat16(np.float32(x.max() - minimum), up=True)
    step = float(extent) / (2**bits - 1)
    steps = (x.astype(np.float64) - float(minimum)) / step
    below = np.minimum(np.floor(steps), 2**bits - 2)
    return float(minimum) + below * step, step, steps - below
