"""fewbit compared with what its users would choose instead: memory, step time, gradient error and final loss.

    python benchmarks/alternatives.py                    # about an hour on 2 cores
    python benchmarks/alternatives.py --quick            # small batches and a few steps, to check that it works
    python benchmarks/alternatives.py --networks GPT-2 --arms exact "fewbit, 2 bits"
    python benchmarks/alternatives.py --page             # write the tables of docs/results/alternatives.md again

Each arm runs in a process of its own, with one thread and empty caches of the compiler. An arm that fails has a row with
the reason. Rows that are stored are not measured again; delete results/alternatives.json to repeat all.

Bytes are counted from the allocations in torch's profiler, and not by fewbit, so hooks and compiled code are counted
too. "saved" are the bytes that exist at the end of the forward pass and did not exist before it; "peak" are the most
bytes of a forward and a backward pass. Step times are the processor times of a forward and a backward pass. Exact steps
and steps of the arm take turns, and the ratio is the median of the ratios of all turns. The gradient error is the norm of
the error divided by the norm of the exact gradient, for the same batch. Bytes, times and errors are measured after some
steps of exact training.

Training has smaller batches and SEEDS seeds. Runs with the same seed have the same initial parameters and batches. "loss"
is the mean training loss of the last tenth of the steps, and "held_out" the loss on held-out data. Arms with exact
gradients are not trained again, except those of networks with batch norm.

With --device cuda the same code runs on a GPU, in wall times; this has not been tried. No results are stored then,
unless $OUT is set.

Writes results/alternatives.json, a row for each network and arm, and the tables of docs/results/alternatives.md.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import harness
import torch
from rivals import page
from rivals.arms import ALL, arms_of
from rivals.measure import measure_alone
from rivals.tasks import NAMES, prepare

import fewbit


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=NAMES, default=NAMES, metavar="NETWORK")
    parser.add_argument("--arms", nargs="+", choices=ALL, default=list(ALL), metavar="ARM")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--backend", choices=["inductor", "aot_eager"], default="inductor")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--page", action="store_true", help="only write the tables of the page")
    arguments = parser.parse_args()
    name = "alternatives" + "_quick" * arguments.quick
    if arguments.page:
        return page.rewrite(harness.stored(name))
    if arguments.device == "cuda" and "OUT" not in os.environ:
        parser.error("expected the folder for results in $OUT, got a run on a GPU without it")
    torch.set_num_threads(1)
    about = harness.machine("torch", "transformers", "peft") | {"fewbit": fewbit.__version__}
    print(about)
    with tempfile.TemporaryDirectory() as folder:
        for network in arguments.networks:
            harness.in_process(prepare, network, folder, arguments.quick)
        tasks = [
            {"network": network, "arm": arm}
            for network in arguments.networks
            for arm in arms_of(network)
            if arm in arguments.arms
        ]
        settings = arguments.device, arguments.quick, folder, arguments.backend
        rows = harness.run_missing(name, about, measure_alone, tasks, arguments.jobs, *settings)
    rows.sort(key=lambda row: (NAMES.index(row["network"]), list(ALL).index(row["arm"])))
    harness.save(name, about, rows)
    for title, table in page.tables(rows).items():
        print(f"\n{title}\n\n{table}")
    if name == "alternatives" and "OUT" not in os.environ:
        page.rewrite(rows)


if __name__ == "__main__":
    main()
