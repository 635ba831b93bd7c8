"""Compiled gradients of random chains of compressed layers against the eager ones.

A case is one chain with parameters and an input of its own. Compiling takes most of the time, so many chains are in one
graph, and each is tried with several sets of parameters and inputs. All copies are drawn with one seed, so gradients agree
to the rounding of the chain's dtype (ROUNDING).

Few chains (one in COARSE) may differ by more, because an operation of torch has other strides in a trace, or because
rounding moves an element to the next code: by a few times as much as two eager runs with different seeds (SPREADS), and by
rounding that norms of few elements amplify (AMPLIFIED). A copy whose elements are permuted differs by much more.
"""

import pytest
import torch
from cases import CASES, CHUNKS, seeds
from chains import Chain
from compilers import draw_alike, inductor_passes

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
# For each part: a backend, whether sizes are symbolic, and the number of draws. Inductor itself takes longest.
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
