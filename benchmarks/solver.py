"""The discrete solver compared with a plain loop, kmeans1d and ruptures, on the same data in one run.

    python benchmarks/solver.py            # everything, about 4 minutes on 2 cores
    python benchmarks/solver.py --quick    # small sizes, to check that it works

Before a comparison is timed, it checks that both programs find the same optimum. Writes results/solver.json and
docs/images/solver_times.png.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import harness
import kmeans1d
import numpy as np
import ruptures
from matplotlib.figure import Figure
from numba import njit

from fewbit import functions
from fewbit.solver.partition import partition

COUNT = 16
INTERVAL_SIZES = [100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000]
LEVEL_SIZES = [1000, 10_000, 100_000, 1_000_000]
# Above these sizes the other programs take minutes.
PLAIN_LIMIT = 20_000
RUPTURES_LIMIT = 500


@njit
def plain_loop(values, count):
    """Solve by the paper's dynamic program as printed: prefix sums, every j for every i, in one thread."""
    n = len(values)
    first = np.zeros(n + 1)
    second = np.zeros(n + 1)
    for i in range(n):
        first[i + 1] = first[i] + values[i]
        second[i + 1] = second[i] + values[i] * values[i]
    best = np.full((count + 1, n + 1), np.inf)
    where = np.zeros((count + 1, n + 1), dtype=np.int64)
    best[0, 0] = 0.0
    for k in range(1, count + 1):
        for i in range(k, n + 1):
            least = np.inf
            at = 0
            for j in range(k - 1, i):
                s = first[i] - first[j]
                total = best[k - 1, j] + (second[i] - second[j] - s * s / (i - j))
                if total < least:
                    least = total
                    at = j
            best[k, i] = least
            where[k, i] = at
    breaks = np.zeros(count - 1, dtype=np.int64)
    i = n
    for k in range(count, 1, -1):
        i = where[k, i]
        breaks[k - 2] = i
    return best[count, n], breaks


def gelu_slope(n, _rng):
    return functions.get("gelu").derivative(np.linspace(-10, 10, n))


def noisy_steps(n, rng):
    return np.repeat(rng.standard_normal(20), -(-n // 20))[:n] + 0.3 * rng.standard_normal(n)


def normal_values(n, rng):
    return rng.standard_normal(n)


def compare(rows, name, size, data, ours, other, repeats):
    """Check that two programs find the same optimum, time them, and append a row with medians and their ratio."""
    other_name, other_call, other_repeats = other
    mine, (cost, breaks) = ours(), other_call()
    same_breaks = breaks is None or np.array_equal(np.sort(mine.breaks), np.sort(breaks))
    # Prefix sums are less precise than fewbit's solver. Breaks with equal costs may differ.
    relative = abs(mine.cost - cost) / max(cost, 1e-300)
    if relative > 1e-6:
        sys.exit(f"{name} n = {size} on {data}: ours {mine.cost!r}, {other_name} {cost!r}")
    mine_times = harness.seconds(ours, repeats, warm=False)
    other_times = harness.seconds(other_call, other_repeats, warm=False)
    ratio = statistics.median(other_times) / statistics.median(mine_times)
    rows.append(
        {
            "form": name,
            "n": size,
            "K": COUNT,
            "data": data,
            "against": other_name,
            "fewbit_median_s": statistics.median(mine_times),
            "fewbit_min_s": mine_times[0],
            "fewbit_max_s": mine_times[-1],
            "other_median_s": statistics.median(other_times),
            "other_min_s": other_times[0],
            "other_max_s": other_times[-1],
            "ratio": ratio,
            "relative_difference_of_optimum": relative,
            "same_breaks": bool(same_breaks),
        }
    )
    print(
        f"{name:9s} n = {size:>9,} {data:12s} fewbit {harness.spread(mine_times):34s} "
        f"{other_name} {harness.spread(other_times):34s} ratio {ratio:8.1f}"
        f"  optimum differs by {relative:.0e}{'' if same_breaks else ' (tied breaks)'}",
        flush=True,
    )


def alone(rows, name, size, data, ours, repeats):
    times = harness.seconds(ours, repeats)
    rows.append(
        {
            "form": name,
            "n": size,
            "K": COUNT,
            "data": data,
            "against": "",
            "fewbit_median_s": statistics.median(times),
            "fewbit_min_s": times[0],
            "fewbit_max_s": times[-1],
        }
    )
    print(f"{name:9s} n = {size:>9,} {data:12s} fewbit {harness.spread(times)}", flush=True)


def run_ruptures(signal):
    model = ruptures.Dynp(model="l2", min_size=1, jump=1).fit(signal)
    breaks = np.array(model.predict(n_bkps=COUNT - 1)[:-1])
    edges = [0, *breaks, len(signal)]
    parts = [signal[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)]
    return sum(((part - part.mean()) ** 2).sum() for part in parts), breaks


def run_kmeans1d(values):
    found = kmeans1d.cluster(values, COUNT)
    labels, centroids = np.asarray(found.clusters), np.asarray(found.centroids)
    return float(((values - centroids[labels]) ** 2).sum()), None


def plot(rows, about):
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, form in ((left, "intervals"), (right, "levels")):
        lines = {}
        for row in rows:
            if row["form"] != form:
                continue
            lines.setdefault(f"fewbit, {row['data']}", {})[row["n"]] = row["fewbit_median_s"]
            if row["against"]:
                label = f"{row['against']}, {row['data']}"
                lines.setdefault(label, {})[row["n"]] = row["other_median_s"]
        for label, points in lines.items():
            style = "o-" if label.startswith("fewbit") else "s--"
            axes.loglog(list(points), list(points.values()), style, label=label, markersize=4)
        axes.set(xlabel="n", ylabel="seconds (median)", title=f"form {form}, K = {COUNT}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.suptitle(f"{about['processor']}, {about['cores']} cores", fontsize=8)
    harness.IMAGES.mkdir(parents=True, exist_ok=True)
    figure.savefig(harness.IMAGES / "solver_times.png", dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, writes nothing")
    quick = parser.parse_args().quick
    about = harness.machine("numpy", "numba", "kmeans1d", "ruptures")
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    rng = np.random.default_rng(0)
    rows = []
    plain_loop(np.arange(40.0), COUNT)
    for data, make in (("gelu'", gelu_slope), ("noisy steps", noisy_steps)):
        for n in INTERVAL_SIZES:
            if quick and n > 200:
                continue
            signal = make(n, rng)

            def ours(signal=signal):
                return partition(signal, COUNT, form="intervals")

            if n <= RUPTURES_LIMIT:
                other = ("ruptures Dynp", lambda s=signal: run_ruptures(s), 1)
                compare(rows, "intervals", n, data, ours, other, 5)
            if n <= PLAIN_LIMIT:
                other = ("plain loop", lambda s=signal: plain_loop(s, COUNT), 3)
                compare(rows, "intervals", n, data, ours, other, 5)
            else:
                alone(rows, "intervals", n, data, ours, 5)
    for n in LEVEL_SIZES:
        if quick and n > 10_000:
            continue
        values = normal_values(n, rng)
        compare(
            rows,
            "levels",
            n,
            "normal",
            lambda v=values: partition(v, COUNT, form="levels"),
            ("kmeans1d", lambda v=values: run_kmeans1d(v), 3),
            5,
        )
    if not quick:
        harness.save("solver", about, rows)
        plot(rows, about)


if __name__ == "__main__":
    main()
