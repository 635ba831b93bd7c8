"""Compute the squared errors of quantizers for saved tensors, and measure them on random normal numbers.

Errors are relative: the squared error of a group of 256 normal numbers, divided by the sum of their squares. *uniform* has equal steps and
random rounding (ActNN, Chen et al., ICML 2021). *rotated* has random signs, a Walsh-Hadamard transform, the nearest of the best levels for
normal numbers, and an unbiased scale (EDEN, Vargaftik et al., ICML 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import numpy as np

from fewbit.catalog.error_table import checked_bits
from fewbit.catalog.normal_levels import normal_levels, value_table
from fewbit.extras import needed_for
from fewbit.render.result import Result
from fewbit.render.view import Column, View

GROUP = 256
_GROUPS = 4096
_SEED = 0
# The least and the greatest of 256 normal numbers lie in [-_REACH, -_START] and [_START, _REACH], except with a
# probability below 1e-15 for each side. The quadrature rule has _POINTS points on each interval.
_START, _REACH, _POINTS = 0.5, 8.5, 64


@dataclass(frozen=True)
class QuantizerRow:
    """The relative squared errors of all quantizers with one number of bits.

    Attributes:
        uniform: The computed error of the uniform quantizer.
        uniform_measured: The measured error.
        rotated: The computed error of the rotated one.
        rotated_measured: The measured error.
        rotated_limit: Its limit for long groups: D / (1 - D), with D the error of the levels.
        bound: 1 / (4**bits - 1), a lower bound for every unbiased code of this size.
    """

    bits: int
    uniform: float
    uniform_measured: float
    rotated: float
    rotated_measured: float
    rotated_limit: float
    bound: float


@dataclass(frozen=True, repr=False)
class QuantizerComparison(Result):
    """A `QuantizerRow` for each number of bits."""

    rows: tuple[QuantizerRow, ...]

    title = "Squared error over squared norm, of groups of 256 normal numbers"

    def records(self) -> list[dict]:
        return [asdict(row) for row in self.rows]

    def view(self) -> View:
        columns = (
            Column("bits", lambda row: str(row.bits)),
            Column("uniform", lambda row: _digits(row.uniform)),
            Column("uniform*", lambda row: _digits(row.uniform_measured), drop=2),
            Column("rotated", lambda row: _digits(row.rotated)),
            Column("rotated*", lambda row: _digits(row.rotated_measured), drop=3),
            Column("limit", lambda row: _digits(row.rotated_limit), drop=1),
            Column("bound", lambda row: _digits(row.bound)),
        )
        notes = (
            "uniform: equal steps from the least to the greatest element, random rounding.",
            "rotated: random rotation, the levels of the tables of 'value', EDEN's scale.",
            "limit: rotated in long groups, D / (1 - D) with D the error of these levels.",
            f"*: measured with NumPy on {_GROUPS} random groups; other errors are computed.",
            "bound: 1 / (4^bits - 1), no unbiased code of so many bits is below it.",
        )
        return View(self.title, columns, self.rows, notes)


def _digits(error: float) -> str:
    return f"{error:.3g}"


def compare_quantizers(
    bits: int | Iterable[int] = range(1, 9),
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> QuantizerComparison:
    """Compute and measure the relative squared errors of quantizers with these numbers of bits, 1 to 8, of normal numbers.

    Raises:
        FewbitError: A number of bits is out of range.
    """
    bits = checked_bits(bits)
    random = np.random.default_rng(_SEED)
    x = random.standard_normal((_GROUPS, GROUP))
    signs = random.choice([-1.0, 1.0], x.shape)
    noise = random.random(x.shape)
    rows = []
    for done, count in enumerate(bits):
        if progress is not None:
            progress(f"measuring {count} bits", done, len(bits))
        rows.append(
            QuantizerRow(
                bits=count,
                uniform=uniform_error(count),
                uniform_measured=_relative(restore_uniform(x, count, noise), x),
                rotated=rotated_error(count),
                rotated_measured=_relative(_restore_rotated(x, count, signs), x),
                rotated_limit=rotated_limit(count),
                bound=1.0 / (4**count - 1),
            )
        )
    return QuantizerComparison(tuple(rows))


def _relative(restored: np.ndarray, x: np.ndarray) -> float:
    return float(np.sum((restored - x) ** 2) / np.sum(x**2))


def rotated_limit(bits: int) -> float:
    """Return D / (1 - D), with D the error of the levels."""
    error = value_table(bits)["error"]
    return error / (1.0 - error)


def rotated_error(bits: int, group: int = GROUP) -> float:
    """Compute the expected error of the nearest level with EDEN's scale, in groups of length `group` = n, up to terms of order 1 / n**2.

    With y uniform on the sphere of radius sqrt(n) and q the nearest levels, the error is A / B**2 - 1, where A is the mean of q**2 and B that of
    y q. An element of y has a density proportional to (1 - y**2 / n)**((n - 3) / 2).
    """
    breaks, levels = normal_levels(bits)
    y, share, piece = _positive_points([*breaks, min(_REACH, np.sqrt(group))])
    weight = share * (1.0 - y * y / group) ** ((group - 3) / 2)
    weight /= weight.sum()
    q = np.array(levels)[piece]

    def mean(values):
        return float(np.sum(weight * values))

    def covariance(f, g):
        with_square = [mean(h * y * y) - mean(h) for h in (f, g)]
        free = mean(f * g) - mean(f) * mean(g)
        return (free - with_square[0] * with_square[1] / (mean(y**4) - 1.0)) / group

    a, b = mean(q * q), mean(y * q)
    spread = 3.0 * covariance(y * q, y * q) / b**2 - 2.0 * covariance(q * q, y * q) / (a * b)
    return a / b**2 * (1.0 + spread) - 1.0


def _positive_points(ends: list[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return points, weights and intervals of a quadrature rule on [0, ends[-1]], smooth between the ends."""
    node, share = np.polynomial.legendre.leggauss(_POINTS)
    edges = np.array([0.0, *ends])
    half = 0.5 * np.diff(edges)
    points = edges[:-1, None] + half[:, None] * (node + 1.0)
    piece = np.repeat(np.arange(len(half)), _POINTS)
    return points.ravel(), (half[:, None] * share).ravel(), piece


def uniform_error(bits: int, group: int = GROUP) -> float:
    """Compute the expected error of 2**bits equal steps from the least to the greatest of n = `group` numbers, with random rounding.

    A number between levels a and b has the variance (v - a)(b - v); the least number l and the greatest u have the joint density
    n (n-1) phi(l) phi(u) (Phi(u) - Phi(l))**(n-2).
    """
    with needed_for("the comparison of quantizers"):
        from scipy.special import ndtr

    node, share = np.polynomial.legendre.leggauss(_POINTS)
    half = 0.5 * (_REACH - _START)
    far = _START + half * (node + 1.0)
    low, high = np.meshgrid(-far, far)
    share = half**2 * np.outer(share, share)
    mass = ndtr(high) - ndtr(low)
    joint = group * (group - 1) * _density(low) * _density(high) * mass ** (group - 2)
    steps = np.linspace(0.0, 1.0, 2**bits)
    levels = low[..., None] + (high - low)[..., None] * steps
    below, above = levels[..., :-1], levels[..., 1:]
    # Let m_k be the integral of v**k phi(v) over a step from a to b. Then the integral of (v - a)(b - v) phi(v) is
    # -m_2 + (a + b) m_1 - a b m_0.
    m0 = np.diff(ndtr(levels))
    m1 = -np.diff(_density(levels))
    m2 = m0 - np.diff(levels * _density(levels))
    variance = np.sum((below + above) * m1 - below * above * m0 - m2, axis=-1) / mass
    return float(np.sum(share * joint * (group - 2) * variance) / group)


def _density(x: np.ndarray) -> np.ndarray:
    return np.exp(-0.5 * x * x) / np.sqrt(2.0 * np.pi)


def restore_uniform(x: np.ndarray, bits: int, noise: np.ndarray) -> np.ndarray:
    """Round every row of x at random, by `noise` in [0, 1), to equal steps between its least and its greatest element."""
    low = x.min(axis=1, keepdims=True)
    step = (x.max(axis=1, keepdims=True) - low) / (2**bits - 1)
    return low + step * np.floor((x - low) / step + noise)


def _restore_rotated(x: np.ndarray, bits: int, signs: np.ndarray) -> np.ndarray:
    """Rotate groups (n, 2**k) by `signs`, take the nearest levels, and rotate back with EDEN's scale."""
    y = walsh_hadamard(signs * x)
    norm = np.mean(y * y, axis=1, keepdims=True)
    breaks, levels = map(np.array, normal_levels(bits))
    nearest = np.copysign(levels[np.searchsorted(breaks, np.abs(y) / np.sqrt(norm))], y)
    scale = norm / np.mean(y * nearest, axis=1, keepdims=True)
    return signs * walsh_hadamard(scale * nearest)


def walsh_hadamard(x: np.ndarray) -> np.ndarray:
    """Return the orthogonal Walsh-Hadamard transform of every row, its own inverse; rows have 2**k elements."""
    rows, length = x.shape
    y, width = x, 1
    while width < length:
        pairs = y.reshape(rows, length // (2 * width), 2, width)
        y = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
        width *= 2
    return y.reshape(rows, length) / np.sqrt(length)
