"""Measure how the error of a weight's gradient falls with the number of similar tokens (docs/concepts/quantizer.md).

    python benchmarks/study.py similar_tokens         # less than a minute on one core

A batch has N tokens of 256 features. Each token is sqrt(s) c + sqrt(1 - s) d, with one vector c for all tokens and a
vector d of its own. The elements of c and d are drawn from a normal distribution; s is the "shared" part of the
energy. The gradient of the layer's result is one random vector, the same for each token, so the gradient of the weight
is the sum of the tokens, times this vector. Its relative squared error is therefore that of the sum of the tokens,
|sum of errors|^2 / |sum of tokens|^2. If the errors of the tokens are independent, it is D / N for N equal tokens,
where D is the relative squared error of a single token.

The kinds "rotated" and "uniform" are fewbit's copies with 2 bits, which draw new random numbers for each group. In "equal
signs", all groups are rotated with the same signs. Then equal tokens have equal errors.

Writes results/similar_tokens.json: a row for each shared part, kind and number of tokens. "error times N" is the relative
squared error, times N.
"""

from __future__ import annotations

import argparse
import statistics

import harness
import torch
from studies.rotated_bias import copied, simulated

import fewbit

BITS, FEATURES = 2, 256
TOKENS = (1, 8, 64, 512)
SHARED = (1.0, 0.9)
KINDS = ("rotated", "uniform", "equal signs")
DRAWS = 200


def copy_of(tokens, kind, seed):
    """Return a copy of the tokens, (N, FEATURES)."""
    if kind == "equal signs":
        generator = torch.Generator().manual_seed(seed)
        signs = 2.0 * torch.randint(0, 2, (FEATURES,), generator=generator) - 1
        return torch.cat([simulated(token, BITS, signs[None]) for token in tokens])
    return copied(tokens, kind, BITS, FEATURES, seed)


def measured(shared, kind, count, draws):
    """Return the row of the results for a shared part of the energy, a kind of copies and a number of tokens."""
    found = []
    for seed in range(draws):
        generator = torch.Generator().manual_seed(seed)
        common, own = torch.randn(count + 1, FEATURES, generator=generator).tensor_split([1])
        tokens = shared**0.5 * common + (1 - shared) ** 0.5 * own
        error = (copy_of(tokens, kind, seed) - tokens).sum(0)
        found.append((error.square().sum() / tokens.sum(0).square().sum()).item() * count)
    row = {"shared": shared, "kind": kind, "bits": BITS, "tokens": count, "draws": draws}
    deviation = statistics.stdev(found) / draws**0.5
    return row | {"error times N": statistics.fmean(found), "standard error": deviation}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=DRAWS)
    draws = parser.parse_args().draws
    torch.set_num_threads(1)
    about = harness.machine("torch") | {"fewbit": fewbit.__version__}
    print(about)
    rows = []
    for shared in SHARED:
        for kind in KINDS:
            for count in TOKENS:
                rows.append(measured(shared, kind, count, draws))
                row = rows[-1]
                number = f"{row['error times N']:.3f} ± {row['standard error']:.3f}"
                print(f"shared {shared:.0%}, {kind:12} {count:4} tokens: error times N {number}")
    harness.save("similar_tokens", about, rows)
