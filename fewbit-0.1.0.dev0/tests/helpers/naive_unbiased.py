"""One group of an exactly unbiased copy in NumPy float32, as docs/concepts/quantizer.md defines it: an oracle for the backends.

`naive_quantizer` cuts tensors into groups and calls this module.
"""

from functools import cache

import naive_rotated
import numpy as np
from naive_rotated import GREATEST, counter_of

from fewbit.catalog.normal_levels import unbiased_levels
from fewbit.table import philox


def quantize_group(x, seed, number, bits, fp32_min, is_masked=False):
    """Return the codes of a group, (mean, scale) as float32 with the bits that are stored, and (NaN, NaN) if not finite.

    If `is_masked`, elements that are 0 are left out.
    """
    with np.errstate(all="ignore"):
        return _quantize_group(x, seed, number, bits, fp32_min, is_masked)


def _quantize_group(x, seed, number, bits, fp32_min, is_masked):
    nothing = np.zeros(len(x), np.int64)
    mean, v, energy, u = naive_rotated.remainders(x, fp32_min, is_masked)
    if not (np.isfinite(mean) and np.isfinite(energy)):
        return nothing, np.float32(np.nan), np.float32(np.nan)
    if energy == 0:
        return nothing, mean, np.float32(0)
    y = naive_rotated.rotated(v, seed, counter_of(number), twice=False)
    levels, before, gap, limit = staircase(bits)
    unit = max(np.sqrt(energy / np.float32(len(x))), np.abs(y).max() * (np.float32(1) / limit))
    scale = bfloat16_above(min(unit * (np.float32(1) / u), GREATEST))
    z = y * (np.float32(1) / (scale * u))
    shared = draws(seed, 2**62 + 64 * number, len(x)) % len(levels)
    own = np.float32(2 * draws(seed, 2**62 + 64 * number + 32, len(x)) + 1) * np.float32(2.0**-17)
    codes = (z[:, None] > before[shared] + own[:, None] * gap[shared]).sum(1)
    return codes, mean, scale


def dequantize_group(codes, mean, scale, seed, number, bits):
    """Return the values of a group, float32."""
    if np.isnan(scale):
        return np.full(len(codes), np.nan, np.float32)
    levels, *_ = staircase(bits)
    y = levels[draws(seed, 2**62 + 64 * number, len(codes)) % len(levels), codes]
    with np.errstate(all="ignore"):
        return mean + naive_rotated.rotated_back(y, seed, counter_of(number), False, scale)


@cache
def staircase(bits):
    """Return the code as its definition has it, all in float32.

    The states of the staircase are walked one by one, in exact order of the slopes. Returns the levels (H, K); the mean of
    the state before each transition, and the distance to the mean after it, (H, K-1); and the mean of the last state.
    """
    levels = np.float32(unbiased_levels(bits))
    rows, columns = levels.shape
    exact = levels.astype(np.float64)
    transitions = sorted(
        (exact[h, c] + exact[h, c + 1], h, c) for h in range(rows) for c in range(columns - 1)
    )
    state = np.zeros(rows, np.int64)
    before, gap = (np.zeros((rows, columns - 1), np.float32) for _ in range(2))
    mean = exact[:, 0].mean()
    for _, h, c in transitions:
        assert state[h] == c
        state[h] += 1
        after = exact[np.arange(rows), state].mean()
        before[h, c], gap[h, c], mean = mean, after - mean, after
    return levels, before, gap, np.float32(mean)


def draws(seed, counter, n):
    """Return the 16-bit random numbers of the first n elements of a group, whose 32 counters begin with this one."""
    e = np.arange(n)
    words = philox.philox4x32((*philox.split64(counter + e % 32), 0, 0), philox.seed_key(seed))
    half = e // 32
    word = np.stack(words)[half // 2, e]
    return (word >> (16 * (half % 2)).astype(np.uint32) & np.uint32(0xFFFF)).astype(np.int64)


def bfloat16_above(x):
    """Return the least bfloat16 that is not below a positive number, as float32."""
    bits = int(np.float32(x).view(np.uint32))
    raised = bits if bits % 2**16 == 0 else (bits >> 16 << 16) + 2**16
    return np.array(raised, np.uint32).view(np.float32)[()]
