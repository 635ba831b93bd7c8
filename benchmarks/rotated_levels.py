"""Compare the levels of rotated copies, which are those of normal numbers, with the best levels for the data at hand.

    python benchmarks/rotated_levels.py    # about half a minute on one core

A rotated copy multiplies the elements of a group, minus their mean, by random signs and a Hadamard transform, and rounds the
results to the levels that are best for normal numbers (docs/decisions/0016). If the results were not normal, other levels would be
better. For each kind of data, this program computes the distortion with the levels of normal numbers and with levels that Lloyd's
algorithm has fitted to the magnitudes of half of the groups. Both distortions are those of the other half: the mean over groups
of |y|^2 |z|^2 / <y, z>^2 - 1, where y is the rotated group and z its levels. This is the squared error with the scale that makes
the error orthogonal to the group, divided by |y|^2.

Masked groups are those of a ReLU's results: the mean is that of the elements that are not 0, which stay 0. Groups in which one
element has more than an eighth of the sum of squares are rotated twice.

Writes results/rotated_levels.json.
"""

from __future__ import annotations

import harness
import numpy as np

from fewbit.catalog.normal_levels import normal_levels
from fewbit.catalog.quantizers import walsh_hadamard

SIZE, GROUPS = 256, 20_000
BITS = (1, 2, 3, 4)
STEPS = 200  # of Lloyd's algorithm


def silu(x):
    return x / (1 + np.exp(-x))


DATA = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "half-normal": lambda rng, shape: np.abs(rng.normal(size=shape)),
    "ReLU, masked": lambda rng, shape: np.maximum(rng.normal(size=shape), 0),
    "ReLU, not masked": lambda rng, shape: np.maximum(rng.normal(size=shape), 0),
    "SiLU": lambda rng, shape: silu(rng.normal(size=shape)),
    "SwiGLU": lambda rng, shape: silu(rng.normal(size=shape)) * rng.normal(size=shape),
    "Laplace": lambda rng, shape: rng.laplace(size=shape),
    "one in 16 elements": lambda rng, shape: rng.normal(size=shape) * (rng.random(shape) < 1 / 16),
}


def centred(x, is_masked):
    """Return groups minus their means; in a masked group, elements that are 0 stay 0."""
    exists = x != 0 if is_masked else np.ones_like(x, bool)
    means = x.sum(1) / np.maximum(exists.sum(1), 1)
    return np.where(exists, x - means[:, None], 0)


def transformed(x, rng):
    """Return groups times random signs and an orthogonal Hadamard matrix."""
    return walsh_hadamard(x * rng.choice([-1.0, 1.0], size=x.shape))


def rotated(x, rng):
    """Return groups rotated, divided by their root mean square."""
    y = transformed(x, rng)
    has_spike = (x**2).max(1) * 8 > (x**2).sum(1)
    y[has_spike] = transformed(y[has_spike], rng)
    return y / np.sqrt((y**2).mean(1, keepdims=True))


def lloyd(magnitudes, levels):
    """Return the levels at which Lloyd's algorithm ends."""
    magnitudes = np.sort(magnitudes)
    sums = np.concatenate([[0], np.cumsum(magnitudes)])
    for _ in range(STEPS):
        ends = np.searchsorted(magnitudes, (levels[1:] + levels[:-1]) / 2)
        ends = np.concatenate([[0], ends, [len(magnitudes)]])
        levels = np.diff(sums[ends]) / np.diff(ends)
    return levels


def distortion(y, levels):
    """Return the mean distortion of groups y with these levels of magnitudes."""
    breaks = (levels[1:] + levels[:-1]) / 2
    z = levels[np.searchsorted(breaks, np.abs(y))]
    inner = (np.abs(y) * z).sum(1)
    return float(((y**2).sum(1) * (z**2).sum(1) / inner**2 - 1).mean())


def main():
    rows = []
    for name, draw in DATA.items():
        rng = np.random.default_rng(0)
        x = centred(draw(rng, (GROUPS, SIZE)), name == "ReLU, masked")
        y = rotated(x[(x**2).sum(1) > 0], rng)
        fitted, other = y[::2], y[1::2]
        for bits in BITS:
            usual = np.array(normal_levels(bits)[1])
            with_normal = distortion(other, usual)
            with_own = distortion(other, lloyd(np.abs(fitted).ravel(), usual))
            rows.append({"data": name, "bits": bits, "normal": with_normal, "own": with_own})
            gain = with_normal / with_own - 1
            print(
                f"{name:20}{bits} bits: {with_normal:.5f}, own levels {with_own:.5f}, {gain:+.2%}"
            )
    harness.save("rotated_levels", harness.machine("numpy"), rows)


if __name__ == "__main__":
    main()
