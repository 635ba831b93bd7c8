"""The numbers that a probe measures at the nodes of the autograd graph, and the variances that follow from them.

With own, out and gain of `VarianceProbe`, noise in the incoming gradient of a node causes at all parameters below,
relative to its own square,

    S(node) = sum over its parameters of gain[p]  +  sum over its edges of gain[e] S(node below e)

and rounding the slot adds `sum of own[p] + sum of out[e] S(node below e)`
(docs/decisions/0011-sensitivities-are-measured.md). From a fork to its joins, with the noise P at the parameters
between, the growth G of squares, and c(join), the square of the arriving gradient divided by the sum of the squares of
its parts,

    S(fork) = P(fork) + sum over its joins of G c(join) S(join)

The *relative* variance has the factor 1 / (|g[p]|^2 + LEAST_SHARE m) for each parameter, with the mean m of |g[p]|^2,
because an optimizer such as Adam divides each gradient by its own size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from fewbit.runtime.probes.joins import joins_of
from fewbit.runtime.probes.norms import squared

LEVELS = (1, 2)
"""The numbers of bits at which rounding is measured: level 2 stands for the slot's own bits, but at least 2.

The noise of level 1 does not follow from that of level 2 by the distortion.
"""
LEAST_SHARE = 0.01
"""The part of the mean of |g[p]|^2 below which a gradient counts as zero, as that of a key's bias."""
PARAMETER, NOTHING = -1, -2
"""The entry below an edge that leads to no node."""


@dataclass
class NoiseOfSlot:
    """The changes that noise in a slot makes to the gradients that leave a node through its edges.

    Args:
        scale: 1 / relative_distortion(kind, bits), by which the sum of squared changes is multiplied.
        norms: for each edge the norm of the change, 0-D float32, or None.
        is_own: whether the node is the layer that saved the slot. Its edges to a probed layer do not count, because the
            change is handed to that layer (`Node.handed`).
    """

    name: tuple[str, int]
    level: int
    scale: float
    norms: list[torch.Tensor | None]
    is_own: bool


@dataclass
class Node:
    """A node of the autograd graph.

    Args:
        below: for each edge the number of the node below, or PARAMETER or NOTHING.
        exists: for each input whether it has an edge.
        is_layer: whether the node is a torch.autograd.Function.
        arriving: the norm of the incoming gradient, 0-D float32.
        leaving: for each edge the norm of the gradient that leaves; in a probed layer, with random signs on the
            incoming gradient.
        parts: the same without random signs.
        reaches: {edge: the number of the layer below it}, if only changes of the shape or dtype lie between the two.
        handed: changes of the incoming gradient by noise in the layer above: (slot's name, level, scale, change).
        noise: the changes that noise makes to the gradients on the edges.
        is_probed: whether `VarianceProbe.probe` has measured the node.
    """

    below: list[int]
    exists: list[bool]
    is_layer: bool
    arriving: torch.Tensor | None = None
    leaving: list[torch.Tensor | None] = field(default_factory=list)
    parts: list[torch.Tensor | None] = field(default_factory=list)
    reaches: dict[int, int] = field(default_factory=dict)
    handed: list[tuple] = field(default_factory=list)
    noise: list[NoiseOfSlot] = field(default_factory=list)
    is_probed: bool = False

    def norms(self) -> Iterator[torch.Tensor]:
        norms = [self.arriving, *self.leaving, *self.parts]
        norms += [found for noise in self.noise for found in noise.norms]
        yield from (found for found in norms if found is not None)


def variances(
    nodes: list[Node], names: Iterable[tuple], host: dict, is_relative: bool = False
) -> dict | None:
    """Return {(slot's name, level): variance that rounding adds, times the scale of the noise}; None if a number is not finite.

    Args:
        nodes: the nodes, each after all nodes below it.
        names: the names of the slots.
        host: the result of `AsyncHostCopy.values` for the norms of all nodes.
        is_relative: whether to return relative variances.
    """
    sums = {(name, level): 0.0 for name in names for level in LEVELS}
    factors = _factors(nodes, host, is_relative)
    below = _sums_below(nodes, host, factors)
    for node, own in zip(nodes, factors, strict=True):
        sums_below = [
            factor if n < 0 else below[n] for n, factor in zip(node.below, own, strict=True)
        ]
        following = [node.reaches.get(at, n) for at, n in enumerate(node.below)]
        taken = [n >= 0 and nodes[n].is_probed for n in following]
        for noise in node.noise:
            sums[noise.name, noise.level] += noise.scale * sum(
                squared(host, a) * b
                for a, b, is_taken in zip(noise.norms, sums_below, taken, strict=True)
                if not (noise.is_own and is_taken)
            )
    return sums if all(map(math.isfinite, (*below, *sums.values()))) else None


def _factors(nodes: list[Node], host: dict, is_relative: bool) -> list[list[float]]:
    """Return the factor of the parameter below each edge of each node; 0 if there is none."""
    if not is_relative:
        return [[float(n == PARAMETER) for n in node.below] for node in nodes]
    squares = []
    for node in nodes:
        parts = [*node.parts, *[None] * (len(node.below) - len(node.parts))]
        pairs = zip(node.below, parts, strict=True)
        squares.append([squared(host, part) if n == PARAMETER else None for n, part in pairs])
    found = [square for own in squares for square in own if square is not None]
    least = LEAST_SHARE * sum(found) / max(len(found), 1)
    if not least > 0:
        return _factors(nodes, host, False)
    return [
        [0.0 if square is None else 1.0 / (square + least) for square in own] for own in squares
    ]


def _sums_below(nodes: list[Node], host: dict, factors: list[list[float]]) -> list[float]:
    arriving = [squared(host, node.arriving) for node in nodes]
    # The sum of the squares of the parts that come together at each node.
    parts = [0.0] * len(nodes)
    for node in nodes:
        for n, part in zip(node.below, node.parts, strict=False):
            if n >= 0:
                parts[n] += squared(host, part)
    edges = [
        [
            (n, (factor or 1.0) * squared(host, norm) / own if own > 0 else 0.0)
            for n, norm, factor in zip(node.below, node.leaving, of_edges, strict=False)
        ]
        for node, own, of_edges in zip(nodes, arriving, factors, strict=True)
    ]
    joins = joins_of([[n for n in node.below if n >= 0] for node in nodes])
    ends = frozenset().union(*filter(None, joins))
    # Noise causes `before` at parameters above the next joins, and grows by `growths` on the way to each of these.
    before: list[float] = []
    growths: list[dict[int, float]] = []
    sums: list[float] = []
    for number, own in enumerate(edges):
        inner = [(n, gain) for n, gain in own if n >= 0 and n not in ends]
        at_parameters = sum(gain for n, gain in own if n == PARAMETER)
        before.append(at_parameters + sum(gain * before[n] for n, gain in inner))
        growth: dict[int, float] = {}
        for n, gain in own:
            onward = {n: 1.0} if n in ends else growths[n] if n >= 0 else {}
            for join, factor in onward.items():
                growth[join] = growth.get(join, 0.0) + gain * factor
        growths.append(growth)
        if joins[number] is None:
            total = at_parameters + sum(gain * sums[n] for n, gain in own if n >= 0)
        else:
            total = before[number] + sum(
                factor * sums[join] * (arriving[join] / parts[join] if parts[join] > 0 else 1.0)
                for join, factor in growth.items()
            )
        sums.append(total)
    return sums
