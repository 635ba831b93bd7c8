"""The time of ActNN's greedy algorithm (Prob. 10) in C++ and in NumPy, and its distance from the optimum.

    python benchmarks/allocation.py         # a minute

The algorithm chooses bits for parts of layers, from their sensitivities and sizes, which are random here and differ by
orders of magnitude. A part is a group of samples of a layer's tensor: level L3 has 16 parts per layer, or one for each
sample if there are fewer. Small instances are also solved exactly, by the dynamic program of
tests/policies/test_allocation.py.

Writes results/allocation.json.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import harness
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "policies"))
from test_allocation import optimum, variances_of

from fewbit.policies import allocation

SIZES = {
    "200 layers": (200, 1),
    "200 layers, 16 parts": (200, 16),
    "1024 samples x 200 layers": (200, 1024),
}

INSTANCES = (50, 16), (50, 8), (20, 8), (8, 8), (24, 1)


def instance(layers, parts, seed):
    generator = np.random.default_rng(seed)
    sensitivity = np.exp(
        3 * generator.standard_normal((layers, 1)) + generator.standard_normal((layers, parts))
    )
    elements = np.repeat(2 ** generator.integers(8, 20, (layers, 1)), parts, 1)
    return sensitivity.ravel(), elements.ravel()


def gaps(layers, parts, count=100):
    """Yield, for random instances, the variance with the greedy algorithm's bits divided by the least one, minus 1."""
    for seed in range(count):
        generator = np.random.default_rng(seed)
        sizes = np.repeat(generator.choice((1, 2, 4, 9, 16), layers), parts)
        of_layer = np.repeat(10.0 ** generator.uniform(-3, 3, layers), parts)
        sensitivity = of_layer * 10.0 ** generator.uniform(-1, 1, len(sizes))
        budget = int(generator.uniform(1.1, 4) * sizes.sum())
        variances = variances_of(sensitivity)
        bits = allocation.allocate(variances, sizes, budget)
        best = optimum(variances, sizes, budget)
        yield allocation.variance(variances, bits) / best - 1


def main():
    about = harness.machine("numpy")
    print(json.dumps(about))
    rows = []
    for layers, parts in INSTANCES:
        found = sorted(gaps(layers, parts))
        assert found[0] > -1e-9 and (layers * parts < 100 or found[-1] < 0.01)
        row = {"problem": f"{layers} layers, {parts} parts", "tensors": layers * parts}
        row |= {"median_gap": statistics.median(found), "worst_gap": found[-1]}
        print(
            f"{row['problem']}: {found[-1]:.1e} above the optimum at most, median {row['median_gap']:.1e}"
        )
        rows.append(row)
    for name, (layers, parts) in SIZES.items():
        sensitivity, elements = instance(layers, parts, 0)
        budget, variances = 2 * int(elements.sum()), variances_of(sensitivity)
        arguments = (
            variances,
            elements,
            budget,
            allocation.MIN_BITS,
            allocation.MAX_BITS,
        )
        bits = allocation.allocate(variances, elements, budget)
        assert (bits == allocation.reference(*arguments)).all()
        calls = {
            "C++": lambda: allocation.allocate(variances, elements, budget),  # noqa: B023
            "NumPy": lambda: allocation.reference(*arguments),  # noqa: B023
        }
        for kind, call in calls.items():
            times = harness.seconds(call, 15)
            print(f"{name:28} {kind:6} {harness.spread(times)}")
            rows.append(
                {
                    "problem": name,
                    "tensors": len(elements),
                    "kind": kind,
                    "median_s": statistics.median(times),
                    "least_s": times[0],
                    "most_s": times[-1],
                }
            )
    harness.save("allocation", about, rows)


if __name__ == "__main__":
    main()
