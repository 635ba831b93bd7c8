"""Compiled gradients of random chains of compressed layers against the eager ones.

A case is one chain with parameters and an input of its own. Compiling takes most of the time, so that many chains are in
one graph, and each is tried with DRAWS sets of parameters and inputs. All copies are drawn with one seed, so that eager and
compiled mode keep the same copies, and gradients agree to the rounding of the chain's dtype (ROUNDING).

Few chains differ by more. In some a torch operation returns other strides in eager mode than in a trace, so that its copy
is drawn in another order; in some of float32 rounding moves an element to the next code. Such a chain must differ by at
most a few times as much as two eager runs with different seeds do (SPREADS), and by rounding that norms of few elements
amplify (AMPLIFIED), and few chains may be such (one in COARSE).
A copy whose elements are permuted differs by as much as the gradient itself.

Of 20 parts, 14 run Inductor's passes without its code generation (`compilers.inductor_passes`), 2 of them with symbolic
sizes, 4 aot_eager, one of them with symbolic sizes, and 2 Inductor itself, which takes longest, with fewer chains.
"""

import pytest
import torch
from cases import CASES, CHUNKS, seeds
from chains import Chain
from compilers import draw_alike, inductor_passes

from fewbit.runtime.format import layout

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning:torch.*",
        "ignore::UserWarning:torch.*",
        "ignore:.*isinstance.*treespec",
        "ignore::FutureWarning:torch.*",
    ),
]
DRAWS = 20
IN_A_GRAPH = 10
ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4}
AMPLIFIED = {torch.float64: 1e-6, torch.float32: 2e-2}
SPREADS = 5.0
COARSE = 10
KINDS = [
    *[(inductor_passes, False, DRAWS)] * 12,
    *[(inductor_passes, True, DRAWS)] * 2,
    *[("aot_eager", False, DRAWS)] * 3,
    ("aot_eager", True, DRAWS),
    *[("inductor", False, 4 * DRAWS)] * 2,
]
assert len(KINDS) == CHUNKS


@pytest.fixture(autouse=True)
def drawn(monkeypatch):
    torch.compiler.reset()
    return draw_alike(monkeypatch)


@pytest.mark.parametrize("part", range(CHUNKS))
def test_compiled_chains(part, drawn):
    backend, dynamic, draws = KINDS[part]
    chains = seeds(part, CASES // draws)
    errors = {}
    for first in range(0, len(chains), IN_A_GRAPH):
        errors |= errors_of(chains[first : first + IN_A_GRAPH], backend, dynamic, draws, drawn)
    coarse = {case: value for case, value in errors.items() if value[0]}
    wrong = {case: value for case, value in coarse.items() if value[0] > value[1]}
    assert not wrong
    assert len({chain for chain, _ in coarse}) <= 1 + len(chains) // COARSE, coarse


def test_ops_that_are_not_told_strides_are_found(monkeypatch, drawn):
    """The test finds the fault in which each op uses its input's strides for those of the trace."""

    def as_it_comes(x, stride, by_sample=False):
        if by_sample:
            return x if layout.is_by_sample(x) else x.contiguous()
        return layout.dense(x)

    monkeypatch.setattr(layout, "with_stride", as_it_comes)
    errors = errors_of(range(20, 140), inductor_passes, False, 1, drawn)
    assert any(error > allowed for error, allowed in errors.values())


def errors_of(numbers, backend, dynamic, draws, drawn):
    """Return {(chain, number of the draw): (error, allowed error)}; the error is 0 if it is within ROUNDING.

    Both are relative to the gradient, or to 1/1000 of the chain's largest. More is allowed if two eager runs with different
    seeds differ.
    """
    torch.compiler.reset()
    chains = []
    for seed in numbers:
        torch.manual_seed(seed)
        chains.append(Chain(seed))

    def run(sources):
        return [chain(x) for chain, x in zip(chains, sources, strict=True)]

    compiled = torch.compile(run, backend=backend, dynamic=dynamic or None)
    errors = {}
    for draw in range(draws):
        torch.manual_seed(draw)
        for chain in chains:
            chain.draw()
        sources = [chain.source() for chain in chains]
        weights = [torch.randn(chain.result, dtype=chain.dtype) for chain in chains]
        ours = gradients(compiled, chains, sources, weights)
        theirs = gradients(run, chains, sources, weights)
        found = [error_of(a, b) for a, b in zip(ours, theirs, strict=True)]
        is_coarse = [
            error > ROUNDING[chain.dtype] for chain, error in zip(chains, found, strict=True)
        ]
        spreads = [0.0] * len(chains)
        if any(is_coarse):
            drawn.seed, before = drawn.seed + 1, drawn.seed
            others = gradients(run, chains, sources, weights)
            drawn.seed = before
            spreads = [error_of(a, b) for a, b in zip(others, theirs, strict=True)]
        for chain, error, spread, coarse in zip(chains, found, spreads, is_coarse, strict=True):
            allowed = AMPLIFIED[chain.dtype] + SPREADS * spread
            errors[repr(chain), draw] = error if coarse else 0.0, allowed
    return errors


def gradients(run, chains, sources, weights):
    """Return the gradients of the input and the parameters of each chain."""
    results = run(sources)
    graded = [
        [tensor for tensor in (x, *chain.parameters()) if tensor.requires_grad]
        for chain, x in zip(chains, sources, strict=True)
    ]
    for leaf in (leaf for of_chain in graded for leaf in of_chain):
        leaf.grad = None
    used = [i for i, y in enumerate(results) if y.requires_grad]
    torch.autograd.backward([results[i] for i in used], [weights[i] for i in used])
    return [[leaf.grad for leaf in of_chain] for of_chain in graded]


def error_of(ours, theirs):
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if not (a is None and b is None)]
    if any(a is None or b is None for a, b in pairs):
        return float("inf")
    largest = max((float(b.norm()) for _, b in pairs), default=0.0)
    errors = [float((a - b).norm()) / max(float(b.norm()), 1e-3 * largest, 1e-30) for a, b in pairs]
    return max(errors, default=0.0)
