"""Compare AC-GC's error bound with grid search over fixed bits: scores, compression, gradients, and the cost of probes.

    python benchmarks/study.py error_bound            # about 90 minutes on one core
    python benchmarks/study.py error_bound --quick    # one seed, few steps, to check that it works
    python benchmarks/study.py error_bound --cost     # only the time that observed steps cost
    python benchmarks/study.py error_bound --plot     # the table and the pictures from stored results

This is the paper's Table 2 on four small tasks (`error_bound_tasks.py`): the ResNet for digits, the demo's
transformer, a text classifier, and a network for super-resolution. An arm is one way to train (`error_bound_arms.py`).
Each task is trained exactly, with 1 to 8 bits for all tensors (the eight runs of a grid search), and with
`fewbit.ErrorBound` at e^2 = 0.5, at e^2 = 0.1, and at e^2 = 0.5 with a codec that leaves out zeros.

Grid search takes the fewest bits whose mean score is not worse than the exact one by more than a tolerance. The
tolerance is 0.1 % of the exact score, as in the paper (section 6), or the standard deviation of the exact score over
seeds if that is larger. Runs with the same seed have the same initial parameters and batches, so scores are compared
in pairs. Compression is the bytes that the exact model saves for the backward pass, loss included, divided by those of
the compressed model. Bytes are means over ten moments of the training, the ends of its tenths.

At these moments the ratio E|g^|^2 / |g|^2 is measured too, for which the error bound sets the limit 1 + e^2. Here g is
the exact gradient of a new batch, and g^ the compressed model's gradient in eight draws of rounding. With seeds other
than the first, the ratio is measured for e^2 = 0.5 only. Runs whose results are stored are not repeated, except for
arms named after --again.

Writes results/error_bound.json (a row for each training run), error_bound_ratios.* (a row for each moment of a run),
error_bound_summary.*, error_bound_cost.*, and docs/images/error_bound_*.png (`error_bound_plots.py`).
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

import harness
import torch
from studies.parts import error_bound_arms as arms
from studies.parts import error_bound_plots
from studies.parts.error_bound_tasks import tasks

import fewbit

SEEDS = 3
POINTS = 10
"""The number of moments of a training at which it is measured: the ends of so many equal parts."""
TENTH_PERCENT = 1e-3
CYCLE, CYCLES = 4, 40
"""When the cost of observed steps is measured: the steps from one to the next, and their number."""


def run(task, name: str, arm: str, seed: int, has_ratios: bool) -> tuple[dict, list[dict]]:
    """Train an arm of a task from one seed. Return the run's row, and if `has_ratios` a row for each moment."""
    model = task.build(seed)
    controller = arms.compress(model, arm)
    ends = {round(task.steps * (i + 1) / POINTS) for i in range(POINTS)}
    others = task.batches(torch.Generator().manual_seed(1000 + seed))
    kept, rows, measuring = [], [], []

    def progress(step):
        if step not in ends:
            return
        start = time.perf_counter()
        batch = next(others)
        kept.append(arms.saved_bytes(model, task.loss, batch))
        if has_ratios:
            found = arms.gradient_ratio(model, task.loss, batch)._asdict()
            where = {"task": name, "arm": arm, "seed": seed, "step": step}
            bound = observed(controller) if arm in arms.BOUNDS else {}
            rows.append(where | found | {"saved_bytes": kept[-1]} | bound)
        measuring.append(time.perf_counter() - start)

    start = time.perf_counter()
    result = task.train(model, seed, progress)
    seconds = time.perf_counter() - start - sum(measuring)
    finite = {key: value if math.isfinite(value) else None for key, value in result.items()}
    row = {
        "task": name,
        "arm": arm,
        "seed": seed,
        "steps": task.steps,
        "score": finite[task.score] and finite[task.score] * task.factor,
        "loss": finite["final"],
        "train_loss": finite["train"],
        "saved_bytes": statistics.fmean(kept),
        "least_bytes": min(kept),
        "most_bytes": max(kept),
        "seconds": seconds,
    }
    return row, rows


def observed(controller) -> dict:
    """Return the ratio by the monitor of an error bound's controller, the average bits and the exact variables."""
    rows = [row for row in controller.bounds if row.bits is not None and row.elements]
    elements = sum(row.elements for row in rows)
    return {
        "monitor": controller.bounds.ratio,
        "bits": sum(row.bits * row.elements for row in rows) / elements if elements else None,
        "exact_variables": sum(row.kept == "exact" for row in controller.bounds),
    }


# -- What it costs -------------------------------------------------------------------------------------------


def cost(task, name: str) -> dict:
    """Measure the processor time that an observed step adds to a training, in one thread.

    The cost falls on the observed step and on the next one, in which the policy uses the measurement. The steps are run
    in cycles of an observed step, the next one and ordinary steps, so that a slow moment of the machine affects all.
    """
    model = task.build(0)
    arms.compress(model, arms.BOUND, interval=CYCLE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    batches = task.batches(torch.Generator().manual_seed(0))

    def step():
        batch = next(batches)
        start = time.process_time()
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
        return time.process_time() - start

    for _ in range(2 * CYCLE - 1):  # the next step is an observed one
        step()
    extra, ordinary = [], []
    for _ in range(CYCLES):
        observed, following, *others = (step() for _ in range(CYCLE))
        usual = statistics.median(others)
        extra.append(observed + following - 2 * usual)
        ordinary += others
    usual = statistics.median(ordinary)
    shares = sorted(each / usual for each in extra)
    first = sum(1 for step in range(1, arms.INTERVAL) if step & (step - 1) == 0)
    observations = first + task.steps // arms.INTERVAL
    return {
        "task": name,
        "ordinary_s": usual,
        "ordinary_least_s": min(ordinary),
        "ordinary_most_s": max(ordinary),
        "extra_steps": statistics.median(shares),
        "extra_steps_least": shares[0],
        "extra_steps_most": shares[-1],
        "share": statistics.median(shares) / arms.INTERVAL,
        "run_share": statistics.median(shares) * observations / task.steps,
        "observations": observations,
        "steps": task.steps,
        "cycles": CYCLES,
    }


# -- Summary -------------------------------------------------------------------------------------------------


def summary(rows, ratios, of):
    """Yield a row for each task and arm: score, change of the score in pairs of seeds, compression, gradient ratio.

    In a row, is_grid says whether grid search takes this arm. is_paper_grid says the same of a grid search from 2 bits
    on, as in the paper.

    Args:
        rows: The rows of the training runs.
        ratios: The rows of the moments.
        of: The tasks by name.
    """
    for name, task in of.items():
        own = [row for row in rows if row["task"] == name]
        exact = {row["seed"]: row for row in own if row["arm"] == arms.EXACT}
        if not exact:
            continue
        records = [r for arm in arms.ARMS if (r := _of_arm(task, name, arm, own, exact))]
        taken = [chosen(task, records, least) for least in (1, 2)]
        for record in records:
            record["is_grid"], record["is_paper_grid"] = (record is each for each in taken)
            points = [r for r in ratios if (r["task"], r["arm"]) == (name, record["arm"])]
            if points:
                record["ratio"] = statistics.fmean(r["ratio"] for r in points)
                record["ratio_most"] = max(r["ratio"] for r in points)
                record["error"] = statistics.fmean(r["error"] for r in points)
        yield from records


def _of_arm(task, name, arm, own, exact):
    found = [row for row in own if row["arm"] == arm and row["seed"] in exact]
    if not found:
        return None
    record = {"task": name, "arm": arm, "seeds": len(found)}
    record["diverged"] = sum(row["score"] is None for row in found)
    found = [row for row in found if row["score"] is not None]
    for value in ("score", "loss"):
        values = [row[value] for row in found]
        changes = [round(row[value] - exact[row["seed"]][value], 9) for row in found]  # no -5e-15
        record[value] = statistics.fmean(values) if values else None
        record[value + "_std"] = statistics.stdev(values) if len(values) > 1 else None
        record[value + "_change"] = statistics.fmean(changes) if values else None
        record[value + "_change_std"] = statistics.stdev(changes) if len(values) > 1 else None
    compressions = [exact[row["seed"]]["saved_bytes"] / row["saved_bytes"] for row in found]
    record["compression"] = statistics.fmean(compressions) if found else None
    return record


def chosen(task, records, least: int = 1):
    """Return the record that grid search takes among arms with `least` bits or more, or None if none is good enough."""
    exact = next(each for each in records if each["arm"] == arms.EXACT)
    allowed = tolerance(exact)
    for arm, bits in arms.FIXED.items():
        for record in records:
            is_kept = record["arm"] == arm and bits >= least and not record["diverged"]
            if is_kept and task.sign * record["score_change"] >= -allowed:
                return record
    return None


def tolerance(exact: dict) -> float:
    return max(TENTH_PERCENT * abs(exact["score"]), exact["score_std"] or 0)


def show(records, of):
    """Print a table like the paper's Table 2, with score and compression of each arm, and then all records."""
    print(
        f"{'':24}{'exact':>18}{'grid search':>34}" + "".join(f"{each:>30}" for each in arms.BOUNDS)
    )
    for name, task in of.items():
        own = {record["arm"]: record for record in records if record["task"] == name}
        if not own:
            continue
        grid = next((each for each in own.values() if each["is_grid"]), None)
        exact = own[arms.EXACT]
        cells = [f"{exact['score']:.4g} ± {exact['score_std'] or 0:.2g} {task.unit}".rjust(18)]
        cells.append((f"{_cell(grid)}, {grid['arm']}" if grid else "none").rjust(34))
        cells += [_cell(own[arm]).rjust(30) if arm in own else "".rjust(30) for arm in arms.BOUNDS]
        print(f"{task.title:24}" + "".join(cells))
    for record in records:
        task = of[record["task"]]
        if record["score"] is None:
            print(f"{record['task']:12} {record['arm']:20} diverged in all runs")
            continue
        print(
            f"{record['task']:12} {record['arm']:20} {record['seeds']} seeds: "
            f"{record['score']:.5g} {task.unit}, change {record['score_change']:+.3g} "
            f"± {record['score_change_std'] or 0:.2g}; loss {record['loss']:.4f} ({record['loss_change']:+.4f}); "
            f"{record['compression']:.2f}x; ratio {record.get('ratio', math.nan):.3f}, "
            f"at most {record.get('ratio_most', math.nan):.3f}; error {record.get('error', math.nan):.3g}"
            + f"; {record['diverged']} diverged" * bool(record["diverged"])
            + " <- grid search" * record["is_grid"]
            + " <- from 2 bits on" * (record["is_paper_grid"] and not record["is_grid"])
        )


def _cell(record) -> str:
    return f"{record['score']:.4g} ({record['score_change']:+.2g}; {record['compression']:.1f}x)"


# -- All of them ---------------------------------------------------------------------------------------------


def work(name, about, rows, ratios, of, seeds, chosen_arms):
    """Run the trainings whose results are not stored, seed after seed, and store their results."""
    done = {(row["task"], row["arm"], row["seed"]) for row in rows}
    todo = [
        (task, arm, seed)
        for seed in seeds
        for task in of
        for arm in chosen_arms
        if (task, arm, seed) not in done
    ]
    for number, (task, arm, seed) in enumerate(todo, 1):
        has_ratios = arm != arms.EXACT and (seed == 0 or arm == arms.BOUND)
        row, points = run(of[task], task, arm, seed, has_ratios)
        rows.append(row)
        ratios += points
        print(f"{number}/{len(todo)}", row, flush=True)
        harness.save(name, about, rows)
        harness.save(name + "_ratios", about, ratios)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cost", action="store_true", help="measure what observing costs, alone")
    parser.add_argument("--plot", action="store_true", help="run nothing")
    parser.add_argument("--arms", nargs="+", default=arms.ARMS, metavar="ARM", help="only these")
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="only these")
    parser.add_argument("--seeds", type=int, nargs="+", default=range(SEEDS), metavar="SEED")
    parser.add_argument(
        "--again", nargs="+", default=(), metavar="ARM", help="forget results of these"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    of = tasks(arguments.quick)
    name = "error_bound" + "_quick" * arguments.quick
    about = harness.machine("torch", "scikit-learn") | {"fewbit": fewbit.__version__, "threads": 1}
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    if arguments.cost:
        found = [cost(task, each) for each, task in of.items()]
        for row in found:
            print(row)
        harness.save(name + "_cost", about, found)
        return
    rows, ratios = (
        [row for row in harness.stored(each) if row["arm"] not in arguments.again]
        for each in (name, name + "_ratios")
    )
    if not arguments.plot:
        wanted = arguments.tasks or of
        for each in wanted:
            arms.check(of[each], arms.fixed(8))
        seeds = (0,) if arguments.quick else arguments.seeds
        only = {each: of[each] for each in wanted}
        work(name, about, rows, ratios, only, seeds, arguments.arms)
    records = list(summary(rows, ratios, of))
    if not arguments.plot:
        harness.save(name + "_summary", about, records)
    show(records, of)
    images = harness.RESULTS if arguments.quick else harness.IMAGES
    shown = {each: of[each] for each in of if any(r["task"] == each for r in records)}
    error_bound_plots.plot(records, ratios, shown, images, name)
