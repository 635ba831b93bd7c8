"""What `fewbit.plan` says beforehand, and what the next batches say from the same weights.

python benchmarks/plan.py resnet50 roberta-base: the plan on 4 batches, and on the first of them alone; then, by a loop of its own
over the next 20 batches, the mean error of each of some settings and the bytes that they keep. Fails if a prediction of
bytes is not exact (at fixed bits; of bits that adapt: within 1 %), or one of an error, from 4 batches, is off by more than 20 %.
results/plan_<model>.json and .csv: a row for each setting, with what was predicted and what came; docs/images/plan.png: the
plan for RoBERTa-base. Minutes a model on two cores.
"""

from __future__ import annotations

import sys
import time
from copy import deepcopy
from functools import partial

import harness
import torch

import fewbit
from fewbit.compress.candidates import Candidate, default_candidates
from fewbit.models.workload import workload

BATCHES, NEXT = 4, 20
MODELS = "resnet50", "roberta-base"
TOLERANCE, ADAPTED_BYTES = 0.2, 0.01
CHECKED = {("fixed", 4), ("fixed", 2), ("shared", 2), ("activations", 3), ("activations", 2)}


def gradients(model, batch, loss, seed):
    torch.manual_seed(seed)  # dropout is alike in both models
    model.zero_grad(set_to_none=True)
    loss(model, batch).backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


def squared(tensors):
    return sum(each.double().square().sum().item() for each in tensors)


def converted(candidate: Candidate, model):
    """A copy, converted by hand."""
    copy, options = deepcopy(model), candidate.options
    if candidate.activations_only:
        fewbit.replace_activations_(copy, **options, verbose=False)
    else:
        fewbit.compress_(copy, **options, verbose=False)
    return copy


def following(model, batches, loss, candidates) -> tuple[list[dict], float]:
    """For each candidate: its mean squared error over the batches' mean |g|^2; bytes of the last. And that mean."""
    copies = [converted(each, model) for each in candidates]
    before, batches = (
        batches[:3],
        batches[3:],
    )  # for bits that adapt: the first steps, which tell nothing
    for copy, each in zip(copies, candidates, strict=True):
        for number, batch in enumerate(before if each.policy == "shared" else ()):
            gradients(copy, batch, loss, number)
    squares, errors = 0.0, [0.0] * len(copies)
    for number, batch in enumerate(batches):
        exact = gradients(model, batch, loss, 100 + number)
        squares += squared(exact) / len(batches)
        for i, copy in enumerate(copies):
            found = gradients(copy, batch, loss, 100 + number)
            error = squared(x - y for x, y in zip(found, exact, strict=True))
            errors[i] += error / len(batches)
            copy.zero_grad(set_to_none=True)
    rows = [
        {
            "next_bytes": fewbit.saved_bytes(partial(loss, copy), batches[-1]).total,
            "next_error": error / squares,
        }
        for copy, error in zip(copies, errors, strict=True)
    ]
    return rows, squares


def measured(name: str) -> None:
    work = workload(name, batches=BATCHES + 3 + NEXT)
    model, batches, loss = work
    start = time.perf_counter()
    plan = fewbit.plan(model, batches[:BATCHES], loss)
    seconds = time.perf_counter() - start
    print(plan, f"{seconds:.0f} s", sep="\n", end="\n\n", flush=True)
    plan.save(harness.RESULTS / f"plan_{name}_plan.json", force=True)
    if name == MODELS[-1]:
        plan.plot(harness.IMAGES / "plan.png", force=True)
    candidates = [
        each for each in default_candidates(model) if (each.policy, each.options["bits"]) in CHECKED
    ]
    of_one = fewbit.plan(model, batches[0], loss, candidates=candidates, chunks=4)
    found, squares = following(model, batches[BATCHES:], loss, candidates)
    rows = []
    for candidate, one, after in zip(candidates, of_one.rows, found, strict=True):
        row = next(each for each in plan.rows if each.candidate == candidate)
        rows.append(
            {
                "policy": row.policy,
                "setting": row.label,
                "saved_bytes": row.saved_bytes,
                "error": row.error,
                "error_error": row.error_error,
                "error_from_one_batch": one.error,
                **after,
                "deviation": row.error / after["next_error"] - 1,
                "deviation_from_one_batch": one.error / after["next_error"] - 1,
            }
        )
        print(rows[-1], flush=True)
    about = harness.machine("torch", "transformers") | {
        "model": name,
        "batches": BATCHES,
        "batch_size": plan.batch_size,
        "next_batches": NEXT,
        "plan_seconds": seconds,
        "threads": torch.get_num_threads(),
        "candidates": len(plan.rows),
        "exact_bytes": plan.exact_bytes,
        "gradient": plan.gradient,
        "next_gradient": squares,
        "sampling": plan.sampling,
        "sampling_error": plan.sampling_error,
    }
    harness.save(f"plan_{name}", about, rows)
    for row in rows:
        which = f"{name}, {row['policy']} at {row['setting']}"
        off = row["saved_bytes"] / row["next_bytes"] - 1
        allowed = ADAPTED_BYTES if row["policy"] == "shared" else 0
        assert abs(off) <= allowed, f"{which}: bytes {row['saved_bytes']}, {row['next_bytes']}"
        assert abs(row["deviation"]) <= TOLERANCE, f"{which}: error off by {row['deviation']:.1%}"


if __name__ == "__main__":
    for model_name in sys.argv[1:] or MODELS:
        measured(model_name)
