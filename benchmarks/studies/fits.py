"""The peak of training steps as `fewbit.fits` computes it, and as torch's profiler measures it on the CPU.

    python benchmarks/study.py fits            # some minutes

Each row is a model of fit.py with a setting. The computed peak comes from fake tensors. The measured peak comes from a real step
in a process of its own: the bytes of parameters, buffers, optimizer state and batch, and the greatest sum of the
allocations and releases that the profiler records in the second step with AdamW. The figures are in results/fits.json.
"""

from __future__ import annotations

import warnings

import fit
import harness
import torch

import fewbit
from fewbit.planning.fake_steps import loss_of_output

MODELS = [name for name in fit.MODELS if name != "moe"]  # whose routing depends on values
SETTINGS = ("exact", "4 bits", "2 bits")


def compared(name, setting):
    """Return the computed and the measured peak of a model with a setting, in MiB."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, batch, loss = fit.MODELS[name]()
    model.train()
    bits = None if setting == "exact" else int(setting.split()[0])
    given = "exact" if bits is None else bits
    (row,) = fewbit.fits(model, batch, loss, settings=[given], progress=False).rows
    if bits is not None:
        fewbit.compress_(model, bits, verbose=False)
    measured = fit.measured_peak(model, batch, loss or loss_of_output, torch.optim.AdamW)
    return {
        "computed_mib": round(row.peak / 2**20, 2),
        "measured_mib": round(measured / 2**20, 2),
        "ratio": round(row.peak / measured, 4),
        "phase": row.phase,
        **{
            f"{part}_mib": round(getattr(row, part) / 2**20, 2)
            for part in ("weights", "gradients", "optimizer", "saved", "transient")
        },
    }


def main():
    about = harness.machine("torch", "transformers", "diffusers")
    tasks = [{"model": model, "setting": setting} for model in MODELS for setting in SETTINGS]
    rows = harness.run_missing("fits", about, compared, tasks, 1)
    order = {(task["model"], task["setting"]): number for number, task in enumerate(tasks)}
    rows.sort(key=lambda row: order[row["model"], row["setting"]])
    harness.save("fits", about, rows)
    for row in rows:
        print(
            f"{row['model']:16}{row['setting']:10}{row['computed_mib']:10.2f}{row['measured_mib']:10.2f}"
            f"{100 * (row['ratio'] - 1):+8.1f} %"
        )
