"""Measure the mean error of rotated copies, also of groups whose rotation does not look normal (docs/concepts/quantizer.md).

    python benchmarks/study.py rotated_bias           # about two minutes on one core

Every group is quantized and dequantized 100000 times, each time with other signs. v is the group minus its mean, and e
is the error of a copy. Some elements of each group are `watched`: the large elements, or all if none is
large.

- gain is the mean of <e, v> / <v, v>, with the inner products over the watched elements. A gain of 0.1 means that these
  elements are restored 10 % too large in the mean. gain_error is the standard error of the gain.
- bias is the norm of the mean error, divided by the norm of v, minus the part that comes from sampling.
- noise is the mean of |e|^2, divided by |v|^2.
- predicted is the gain that `predicted_gain` computes from the levels, to first order in the elements' parts of the
  energy. Only groups with a single watched element have it, and only if this element has less than an eighth of the
  energy.

There are three arms:

- quantizer: fewbit's rotated copies, which rotate a group twice if one element has more than an eighth of the energy.
- once: a simulation that rotates every group once, by one transform of the whole group. Its scale is not rounded.
- fixed signs: the same simulation with one set of signs for all draws. All draws are equal, so all of the error is
  bias.

Writes results/rotated_bias.json.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import NamedTuple

import harness
import torch

import fewbit
from fewbit.catalog.normal_levels import normal_levels, rotated_levels
from fewbit.runtime.ops import quantizer_ops

BITS = (1, 2, 3, 4)
DRAWS, CHUNK = 100_000, 10_000
PAD = (
    64  # elements before a group of fewer than 64, so that the group is the last one of its sample
)
ARMS = ("quantizer", "once", "fixed signs")


class Group(NamedTuple):
    """A group, and the elements whose gain is measured.

    Attributes:
        name: the name in the results.
        x: (n,) float32, the group. n is a power of two.
        watched: the indices of the elements.
    """

    name: str
    x: torch.Tensor
    watched: list[int]


def groups() -> list[Group]:
    """Return the groups that are measured."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(256, generator=generator)
    normal -= normal.mean()
    unit = torch.eye(256)

    def with_share(share):
        x = normal.clone()
        x[7] = 0
        x[7] = (share / (1 - share) * x @ x).sqrt()
        return x

    outliers = normal.clone()
    outliers[[7, 100]] = 10 * normal.std() * torch.tensor([1.0, -1.0])
    everything = list(range(256))
    return [
        Group("one-hot", unit[7].clone(), [7]),
        Group("two-sparse", unit[7] - unit[100], [7, 100]),
        Group("half of the energy in one", with_share(0.5), [7]),
        Group("two outliers of 10 deviations", outliers, [7, 100]),
        Group("an eighth of the energy in one", with_share(0.122), [7]),
        Group("a thirty-second of the energy in one", with_share(1 / 32), [7]),
        Group("normal", normal, everything),
        Group("constant", torch.full((256,), 0.7), everything),
        Group("4 normal numbers", normal[:4].clone(), [int(normal[:4].abs().argmax())]),
        Group("8 normal numbers", normal[:8].clone(), [int(normal[:8].abs().argmax())]),
    ]


# -- the arms ----------------------------------------------------------------------------------------------


def of_quantizer(x, bits, draws, seed):
    """Return rotated copies by fewbit's quantizer, (draws, n)."""
    n = len(x)
    pad = PAD if n < PAD else 0
    group_size = PAD if pad else 256
    rows = torch.cat((torch.zeros(pad), x)).expand(draws, -1).contiguous()
    return copied(rows, "rotated", bits, group_size, seed)[:, pad:]


def copied(rows, kind, bits, group_size, seed):
    """Return a copy of a kind, in the shape of the contiguous tensor `rows`."""
    seed = torch.tensor([seed])
    saved = quantizer_ops.quantize(rows, seed, bits, group_size, kind=kind)
    place = bits, group_size, rows.shape, rows.stride(), rows.dtype
    return quantizer_ops.dequantize(*saved, *place, kind=kind)


def hadamard(n):
    """Return the orthogonal Hadamard matrix of n rows, a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < n:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / math.sqrt(n)


def simulated(x, bits, signs):
    """Return copies that are rotated once, with the given signs: (draws, n)."""
    n = len(x)
    v, matrix = x - x.mean(), hadamard(n)
    y = (signs * v) @ matrix
    breaks, levels = torch.tensor(normal_levels(bits)[0]), torch.tensor(rotated_levels(bits))
    index = torch.bucketize(y.abs() / (v @ v / n).sqrt(), breaks)
    chosen = levels[index].float().copysign(y)
    scale = (v @ v) / (y * chosen).sum(1, keepdim=True).clamp(min=1e-30)
    return x.mean() + (scale * chosen @ matrix) * signs


def copies(arm, group, bits, draws, seed):
    """Return copies of a group by an arm, (draws, n)."""
    if arm == "quantizer":
        return of_quantizer(group.x, bits, draws, seed)
    signs = torch.randint(
        0, 2, (draws, len(group.x)), generator=torch.Generator().manual_seed(seed)
    )
    return simulated(group.x, bits, 2.0 * signs - 1)


def predicted_gain(v, index, bits):
    """Return the gain of element `index` of a group that is rotated once, if all parts s_j of the energy are small.

    In units of the root mean square, a rotated number is y = sum_j a_j t_j, with a_j^2 = s_j and random signs t_j. Let Q be
    the function that rounds y to a level, z a normal number, He_n the Hermite polynomials, and c_n = E[Q(z) He_n(z)].
    Element i is restored as E[Q(y) t_i] / E[Q(y) y] instead of a_i. With S = sum_j s_j^2,
    E[He_1(y) t_i] = a_i, E[He_3(y) t_i] = -2 a_i s_i, E[He_5(y) t_i] = -10 a_i S and E[He_4(y)] = -2 S, up to terms of
    higher order. Terms in S are of first order, like those in s_i. If Q is expanded in Hermite polynomials, this gives
    E[Q(y) t_i] = a_i (c_1 - s_i c_3 / 3 - S c_5 / 12). Because z He_4(z) = He_5(z) + 4 He_3(z), the expansion of
    z Q(z) gives E[Q(y) y] = c_1 - S (c_5 + 4 c_3) / 12. So the gain is k (s_i - S) with k = -c_3 / (3 c_1).
    """
    shares = v.square() / v.square().sum()
    z = torch.linspace(0, 10, 2_000_001, dtype=torch.float64)
    density = (-(z**2) / 2).exp()  # not normalized
    breaks = torch.tensor(normal_levels(bits)[0], dtype=torch.float64)
    chosen = torch.tensor(rotated_levels(bits), dtype=torch.float64)[torch.bucketize(z, breaks)]
    first, third = (density * chosen * z).sum(), (density * chosen * (z**3 - 3 * z)).sum()
    return float(-third / (3 * first) * (shares[index] - shares.square().sum()))


# -- the measurement ---------------------------------------------------------------------------------------


def measured(arm, group, bits, draws):
    """Return the row of the results for a group, an arm and a number of bits."""
    v = (group.x - group.x.mean()).double()
    watched = v[group.watched]
    energy, energy_of_watched = float(v @ v), float(watched @ watched)
    total, squares, gains = torch.zeros_like(v), torch.zeros_like(v), []
    draws = 1 if arm == "fixed signs" else draws
    for seed in range(math.ceil(draws / CHUNK)):
        count = min(CHUNK, draws - seed * CHUNK)
        errors = copies(arm, group, bits, count, seed).double() - group.x
        total += errors.sum(0)
        squares += errors.square().sum(0)
        gains.append(errors[:, group.watched] @ watched)
    row = {"group": group.name, "arm": arm, "bits": bits, "draws": draws}
    if energy < 1e-9:
        return row | {"greatest_error": float(squares.max() / draws) ** 0.5}
    gains = torch.cat(gains) / energy_of_watched
    mean = total / draws
    sampling = float((squares / draws - mean.square()).sum()) / max(draws - 1, 1)
    bias = math.sqrt(max(float(mean @ mean) - sampling, 0.0) / energy)
    found = {
        "share": energy_of_watched / energy,
        "gain": float(gains.mean()),
        "gain_error": float(gains.std() / math.sqrt(draws)) if draws > 1 else 0.0,
        "bias": bias,
        "noise": float(squares.sum()) / draws / energy,
    }
    if arm in ("quantizer", "once") and len(group.watched) == 1 and found["share"] < 1 / 8:
        found["predicted"] = predicted_gain(v, group.watched[0], bits)
    return row | found


def report(rows):
    """Print gains with their standard errors, and biases: a line for each group and each arm."""
    print(
        f"{'group':32} {'arm':12}", *(f"{f'{bits} bits: gain +- error, bias':>31}" for bits in BITS)
    )
    for start in range(0, len(rows), len(BITS)):
        own = rows[start : start + len(BITS)]
        if "greatest_error" in own[0]:
            cells = (f"{'greatest error ' + str(row['greatest_error']):>31}" for row in own)
        else:
            cells = (
                f"{row['gain']:+11.5f} +- {row['gain_error']:.5f}, {row['bias']:7.4f}"
                for row in own
            )
        print(f"{own[0]['group']:32} {own[0]['arm']:12}", *cells)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=DRAWS)
    draws = parser.parse_args().draws
    torch.set_num_threads(1)
    start = time.process_time()
    rows = [
        measured(arm, group, bits, draws) for group in groups() for arm in ARMS for bits in BITS
    ]
    about = harness.machine("torch") | {"fewbit": fewbit.__version__}
    harness.save("rotated_bias", about, rows)
    report(rows)
    print(f"{time.process_time() - start:.0f} s of processor time")
