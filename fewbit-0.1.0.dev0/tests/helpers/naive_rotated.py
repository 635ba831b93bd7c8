"""One group of a rotated or masked copy in NumPy float32, as docs/concepts/quantizer.md defines it: an oracle for the backends.

`naive_quantizer` cuts tensors into groups and calls this module. bfloat16 numbers are uint16.
"""

import math
from fractions import Fraction

import numpy as np

from fewbit.catalog.normal_levels import normal_levels, rotated_levels
from fewbit.table import philox

MOST = 256  # the largest number of elements of a group
GREATEST = np.array(0x7F7F0000, np.uint32).view(np.float32)[()]  # of the bfloat16 numbers
SPREAD = 8  # beyond the sum of squares divided by this, one square calls for a second rotation


def quantize_group(x, seed, number, bits, fp32_min, is_masked=False):
    """Return the codes of a group, (mean, scale) as float32 with the bits that are stored, and (NaN, NaN) if not finite.

    If `is_masked`, elements that are 0 are left out.
    """
    with np.errstate(all="ignore"):
        return _quantize_group(x, seed, number, bits, fp32_min, is_masked)


def remainders(x, fp32_min, is_masked=False):
    """Return the mean of a group; the elements minus the mean, times u; the sum of their squares; and u."""
    counted = [i for i in range(len(x)) if x[i] != 0] if is_masked else list(range(len(x)))
    mean = tree_sum(x) / np.float32(len(counted)) if counted else np.float32(0)
    mean = (mean if fp32_min else nearest_bfloat16(mean)) + np.float32(0)  # makes -0 a +0
    v = np.zeros(len(x), np.float32)
    v[counted] = x[counted] - mean
    energy, u = tree_sum(v * v), np.float32(1)
    if energy < np.float32(2.0**-80):
        u = np.float32(2.0**96)
    elif not energy < np.float32(2.0**100):
        u = np.float32(2.0**-96)
    if u != 1:
        v = v * u
        energy = tree_sum(v * v)
    return mean, v, energy, u


def _quantize_group(x, seed, number, bits, fp32_min, is_masked):
    n, nothing = np.float32(len(x)), np.zeros(len(x), np.int64)
    mean, v, energy, u = remainders(x, fp32_min, is_masked)
    if not (np.isfinite(mean) and np.isfinite(energy)):
        return nothing, np.float32(np.nan), np.float32(np.nan)
    if energy == 0:
        return nothing, mean, np.float32(0)
    greatest = np.abs(v).max()
    twice = greatest * greatest * np.float32(SPREAD) > energy
    y = rotated(v, seed, counter_of(number), twice)
    breaks, levels = np.float32(normal_levels(bits)[0]), np.float32(rotated_levels(bits))
    thresholds = breaks * np.sqrt(energy / n)
    index = (thresholds[None, :] < np.abs(y)[:, None]).sum(1)
    codes = index + 2 ** (bits - 1) * np.signbit(y)
    scale = energy / tree_sum(np.abs(y) * levels[index]) * (np.float32(1) / u)
    scale = stochastic_bfloat16(min(scale, GREATEST), seed, counter_of(number) + 8)
    return codes, mean, -scale if twice else scale


def dequantize_group(codes, mean, scale, seed, number, bits):
    """Return the values of a group, float32."""
    if np.isnan(scale):
        return np.full(len(codes), np.nan, np.float32)
    levels = np.float32(rotated_levels(bits))
    half = 2 ** (bits - 1)
    y = levels[codes % half]
    y = np.where(codes >= half, -y, y)
    twice, scale = np.signbit(scale), np.abs(scale)
    with np.errstate(all="ignore"):
        return mean + rotated_back(y, seed, counter_of(number), twice, scale)


def counter_of(number):
    """Return the first Philox counter of a group."""
    return 2**63 + 16 * number


def tree_sum(values):
    """Return the sum of 256 numbers, of which some are given and the others are 0: i and i + 128, then i and i + 64 ..."""
    numbers = np.zeros(MOST, np.float32)
    numbers[: len(values)] = values
    half = MOST // 2
    while half:
        for_next = numbers[:half] + numbers[half : 2 * half]
        numbers, half = for_next, half // 2
    return numbers[0]


# -- rotation ----------------------------------------------------------------------------------------------


def rotated(v, seed, counter, twice):
    """Return a group after one or two rotations. twice: whether one element has much of the energy."""
    v = _rotated_once(v, signs(seed, counter), signs(seed, counter + 2))
    if not (twice or _is_odd(v)):
        return v
    moved = np.array([v[(i + _places(v)) % len(v)] for i in range(len(v))], np.float32)
    return _rotated_once(moved, signs(seed, counter + 4), signs(seed, counter + 6))


def _is_odd(v):
    return bin(len(v)).count("1") > 1


def _places(v):
    return (len(v) - power_below(len(v))[0]) // 2


def rotated_back(y, seed, counter, twice, scale):
    """Return scale times the group from which the rotations made y."""
    if twice or _is_odd(y):
        moved = _back_once(y, signs(seed, counter + 4), signs(seed, counter + 6), np.float32(1))
        y = np.zeros_like(moved)
        for i in range(len(y)):
            y[(i + _places(y)) % len(y)] = moved[i]
    return _back_once(y, signs(seed, counter), signs(seed, counter + 2), scale)


def _rotated_once(v, first, second):
    m, power, r = len(v), *power_below(len(v))
    v = v.copy()
    v[:power] = hadamard(v[:power] * (first[:power] * r))
    v[power:] = v[power:] * first[power:m]
    if power < m:
        v[m - power :] = hadamard(v[m - power :] * (second[m - power : m] * r))
    return v


def _back_once(y, first, second, scale):
    m, power, r = len(y), *power_below(len(y))
    y = y.copy()
    if power < m:
        y[m - power :] = hadamard(y[m - power :]) * (second[m - power : m] * r)
    y[:power] = hadamard(y[:power]) * (first[:power] * (scale * r))
    y[power:] = y[power:] * (first[power:m] * scale)
    return y


def power_below(m):
    """Return the largest power of two P <= m, and 1 / sqrt(P) in float32."""
    power = 1 << (m.bit_length() - 1)
    return power, np.float32(1 / math.sqrt(power))


def hadamard(values):
    """Return the Walsh-Hadamard transform, whose stages are P/2, P/4, ..., 1."""
    values = values.copy()
    h = len(values) // 2
    while h:
        pairs = values.reshape(-1, 2, h)
        values = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).reshape(-1)
        h //= 2
    return values


def signs(seed, counter):
    """Return the 256 signs, +1 or -1, of the eight words of two Philox counters."""
    words = philox.philox4x32(
        (*philox.split64(np.array([counter, counter + 1], np.uint64)), 0, 0), philox.seed_key(seed)
    )
    words = np.stack(words, 1).reshape(-1)  # the four words of the first counter come first
    bits = words[:, None] >> np.arange(32, dtype=np.uint32) & np.uint32(1)
    return np.where(bits.reshape(-1), np.float32(-1), np.float32(1))


# -- bfloat16 ----------------------------------------------------------------------------------------------


def nearest_bfloat16(x):
    """Return x rounded to the nearest bfloat16, half to even, as float32."""
    if not np.isfinite(x) or x == 0:
        return x
    _, exponent = math.frexp(float(x))
    step = Fraction(2) ** max(exponent - 8, -133)
    nearest = round(Fraction(float(x)) / step) * step  # round rounds half to even
    return np.float32(math.copysign(math.inf, x) if abs(nearest) >= 2**128 else float(nearest))


def stochastic_bfloat16(scale, seed, counter):
    """Return scale rounded at random to one of the two nearest bfloat16 numbers, as float32."""
    word, *_ = philox.philox4x32((*philox.split64(counter), 0, 0), philox.seed_key(seed))
    raised = int(np.float32(scale).view(np.uint32)) + (int(word) & 0xFFFF)
    return np.array(raised & 0xFFFF0000, np.uint32).view(np.float32)[()]


def seed_rows(seed, columns):
    """Return the two last rows of the ranges, which have the four 16-bit words of the seed."""
    words = [seed % 2**64 >> 16 * i & 0xFFFF for i in range(4)]
    return np.array(words + [0] * (2 * columns - 4), np.uint16).reshape(2, columns)


def seed_of(rows):
    """Return the seed, in [0, 2**64), from the two last rows of the ranges."""
    return sum(int(word) << 16 * i for i, word in enumerate(rows.reshape(-1)[:4]))
