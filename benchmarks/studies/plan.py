"""Compare what `fewbit.plan` predicts with measurements on the next batches, at the same weights.

    python benchmarks/study.py plan resnet50 roberta-base digits characters

For each model, `fewbit.plan` runs on some batches, and again on the first of these alone. Then a separate loop
measures the mean error of some settings over the next 20 batches, and the bytes that they save. resnet50 and
roberta-base are untrained, of their real size, and have 4 batches of small synthetic inputs. The others are trained
and have 16 batches: "digits" is a ResNet after 5 epochs, and "characters" is the demo's transformer after 200 steps.

The program fails if a prediction of bytes is not exact (for bits that adapt: not within 1 %), or if the predicted
error of an untrained model is off by more than 20 %. Writes a row for each setting to results/plan.json. Rows
of models that are not named are kept. Takes some minutes for each large model on two cores.
"""

from __future__ import annotations

import json
import sys
import time
from copy import deepcopy
from functools import partial

import harness
import torch
from networks import digits_resnet
from studies import variance_profile
from torch.utils._pytree import tree_map

import fewbit
from fewbit.analysis.unchanged import alone
from fewbit.models.workload import workload
from fewbit.planning.candidates import Candidate

NEXT = 20
BATCHES = {"resnet50": 4, "roberta-base": 4, "digits": 16, "characters": 16}
TRAINED = "digits", "characters"
MODELS = tuple(BATCHES)
TOLERANCE, ADAPTED_BYTES = 0.2, 0.01
ADAPTING = 3  # steps before the comparison, on other batches, in which bits adapt
CHECKED = {("fixed", 4), ("fixed", 2), ("shared", 2), ("activations", 3)}


def gradients(model, batch, loss, seed):
    torch.manual_seed(seed)  # both models get the same dropout masks
    model.zero_grad(set_to_none=True)
    loss(model, batch).backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


def squared(tensors):
    return sum(torch.linalg.vector_norm(x, dtype=torch.float64).item() ** 2 for x in tensors)


def trained(name: str):
    """Return (model, batches, loss) for a trained model of benchmarks/variance_profile.py."""
    count = BATCHES[name] + ADAPTING + NEXT
    if name == "characters":
        variance_profile.BATCHES = count
        return variance_profile.transformer()
    model, _, loss = variance_profile.digits()
    generator = torch.Generator().manual_seed(1)
    found = [each for _ in range(2) for each in digits_resnet.batches(generator)]
    return model, found[:count], loss


def converted(candidate: Candidate, model):
    """Return a copy of the model that is converted with the candidate's settings."""
    copy, options = deepcopy(model), candidate.options
    if candidate.method == "replace_activations_":
        fewbit.replace_activations_(copy, candidate.bits.bits, **options, verbose=False)
    else:
        fewbit.compress_(copy, candidate.bits, **options, verbose=False)
    return copy


def following(model, batches, loss, candidates) -> tuple[list[dict], float]:
    """Measure the candidates without `fewbit.plan`.

    Returns:
        A row for each candidate, with its mean squared gradient error over the batches and the bytes that it saves for
        the last batch; and the mean of |g|^2, where g is the exact gradient.
    """
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
    last = tree_map(alone, batches[-1])  # fewbit.saved_bytes counts whole storages
    rows = [
        {
            "next_bytes": fewbit.saved_bytes(partial(loss, copy), last).total,
            "next_error": error,
        }
        for copy, error in zip(copies, errors, strict=True)
    ]
    return rows, squares


def measured(name: str) -> list[dict]:
    """Return a row for each setting in CHECKED, with what `fewbit.plan` predicts and what was measured."""
    count = BATCHES[name]
    if name in TRAINED:
        model, batches, loss = trained(name)
    else:
        model, batches, loss = workload(name, batches=count + ADAPTING + NEXT)
    start = time.perf_counter()
    plan = fewbit.plan(model, batches[:count], loss)
    seconds = time.perf_counter() - start
    print(plan, f"{seconds:.0f} s", sep="\n", end="\n\n", flush=True)
    candidates = [
        row.candidate
        for row in plan.rows
        if (row.policy, row.candidate.bits.initial_bits) in CHECKED
    ]
    of_one = fewbit.plan(model, batches[0], loss, candidates=candidates, chunks=4)
    found, squares = following(model, batches[count:], loss, candidates)
    rows = []
    for candidate, one, after in zip(candidates, of_one.rows, found, strict=True):
        row = next(each for each in plan.rows if each.candidate == candidate)
        rows.append(
            {
                "model": name,
                "policy": row.policy,
                "setting": row.label,
                "exact_bytes": plan.exact_bytes,
                "saved_bytes": row.saved_bytes,
                "next_bytes": after["next_bytes"],
                "error": row.error,
                "error_error": row.error_error,
                "next_error": after["next_error"],
                "deviation": row.error / after["next_error"] - 1,
                "relative_deviation": row.error / after["next_error"] * squares / plan.gradient - 1,
                "error_from_one_batch": one.error,
                "deviation_from_one_batch": one.error / after["next_error"] - 1,
                "sampling": plan.sampling,
                "sampling_error": plan.sampling_error,
                "gradient": plan.gradient,
                "next_gradient": squares,
                "batches": plan.batches,
                "batch_size": plan.batch_size,
                "candidates": len(plan.rows),
                "plan_seconds": seconds,
            }
        )
        print({key: rows[-1][key] for key in SHOWN}, flush=True)
    return rows


SHOWN = (
    "policy",
    "setting",
    "saved_bytes",
    "next_bytes",
    "error",
    "error_error",
    "next_error",
    "deviation",
    "relative_deviation",
    "deviation_from_one_batch",
)


def check(rows) -> None:
    for row in rows:
        which = f"{row['model']}, {row['policy']} at {row['setting']}"
        off = row["saved_bytes"] / row["next_bytes"] - 1
        allowed = ADAPTED_BYTES if row["policy"] == "shared" else 0
        assert abs(off) <= allowed, f"{which}: bytes {row['saved_bytes']}, {row['next_bytes']}"
        is_predicted = abs(row["deviation"]) <= TOLERANCE or row["model"] in TRAINED
        assert is_predicted, f"{which}: error off by {row['deviation']:.1%}"


def main():
    names = sys.argv[1:] or MODELS
    path = harness.RESULTS / "plan.json"
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    about = harness.machine("torch", "transformers") | {
        "threads": torch.get_num_threads(),
        "next_batches": NEXT,
    }
    for name in names:
        rows = measured(name)
        before = [each for each in before if each["model"] != name] + rows
        before.sort(key=lambda row: MODELS.index(row["model"]))
        harness.save("plan", about, before)
        check(rows)
