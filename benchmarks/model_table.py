"""A table of the bytes that models of transformers, diffusers, timm and torch.nn save, and of the errors of their gradients.

    python benchmarks/model_table.py                  # all models, 12 minutes on 2 cores; writes results and page
    python benchmarks/model_table.py Llama "nn.GRU"   # only these models, with what each saves; writes nothing
    python benchmarks/model_table.py Llama --store    # measures Llama again, and writes its row into results and page
    python benchmarks/model_table.py --failed         # measures models again whose stored result is an error or missing
    python benchmarks/model_table.py --page           # writes the page again, from the stored results

`benchmarks/networks/model_zoo.py` has the models: one small instance of each architecture with random weights, and a batch.
For each the script counts the bytes that one forward and its loss save for the backward pass, exactly and after `compress_`
with 4 and 2 bits and otherwise default settings, and with 2 bits and `layers={"everything": True}`. "cosine" is that of the
angle between the gradient of all parameters and that of the exact model, for one draw of the random rounding. With 8 bits,
activations have 8 bits too, so that a wrong gradient shows: its cosine is not close to 1.

"remains" lists the tensors that the model with 2 bits saves in full, by the reason that the meter gives, if they are at
least 5 % of its bytes. It says why a model saves less than another.

A model that fails has a row with the error. The script writes results/models.json and the table between the markers in
docs/results/models.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import statistics
import sys
import warnings
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import harness
import torch
from networks import model_zoo

import fewbit

PAGE = Path(__file__).parent.parent / "docs" / "results" / "models.md"
BEGIN, END = "<!-- models: begin -->\n", "<!-- models: end -->\n"
PACKAGES = "torch", "transformers", "diffusers", "timm"
FEW = 6
"""Models that save less than this factor with 2 bits are listed with the reason."""
LEAST_SHARE = 0.05
EVERYTHING = {"everything": True}
SETTINGS = {
    "8": {"bits": 8, "layers": {"activation_bits": 8}},
    "4": {"bits": 4},
    "2": {"bits": 2},
    "2_everything": {"bits": 2, "layers": EVERYTHING},
}


# -- Measurement ---------------------------------------------------------------------------------------------


def saved_by(step, model):
    """Return what one forward of the model and its loss save for the backward pass."""

    def loss():
        return step.loss(model)

    return fewbit.saved_bytes(loss)


def gradient(step, model):
    """Return the gradient of all parameters, in float64."""
    torch.manual_seed(2)
    model.zero_grad()
    step.loss(model).backward()
    grads = [each.grad.flatten() for each in model.parameters() if each.grad is not None]
    return torch.cat(grads).double()


def remains(saved):
    """Return a list of (share, modules, reason) of what is saved in full, largest share first."""
    groups = defaultdict(lambda: defaultdict(int))
    for entry in saved.left_in_full():
        place = "the loss" if entry.module_type == "function" else entry.module_type
        groups[entry.reason][place] += entry.bytes
    found = [
        (sum(types.values()) / saved.total, sorted(types, key=types.get)[::-1], reason)
        for reason, types in groups.items()
    ]
    return sorted((each for each in found if each[0] >= LEAST_SHARE), reverse=True)


def text_of(found):
    """Return what remains as one line of text."""
    parts = []
    for share, types, reason in found:
        names = ", ".join(types[:2]) + ", ..." * (len(types) > 2)
        parts.append(f"{share:.0%} in {names}: {reason}")
    return "; ".join(parts)


def measure(entry):
    """Return the row of an architecture."""
    torch.manual_seed(0)
    step = entry.build()
    model = step.model.train()
    exact = saved_by(step, model).total
    row = {
        "parameters": sum(each.numel() for each in model.parameters()),
        "exact_bytes": exact,
    }
    wanted = gradient(step, model)
    for name, settings in SETTINGS.items():
        fewbit.compress_(model, verbose=False, **settings)  # undoes the setting before
        saved = saved_by(step, model)
        row[f"bytes_{name}"] = saved.total
        row[f"times_less_{name}"] = exact / saved.total
        found = gradient(step, model)
        row[f"cosine_{name}"] = float(found @ wanted / found.norm() / wanted.norm())
        if name == "2":
            row["remains"] = text_of(remains(saved))
    return row


def row_of(number):
    """Return the row of the architecture with this number, with the error if it fails."""
    entry = model_zoo.ZOO[number]
    about = {"model": entry.name, "library": entry.library}
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return about | measure(entry)
    except Exception as error:
        lines = str(error).splitlines() or [""]
        return about | {"error": f"{type(error).__name__}: {lines[0]}"}


# -- The table -----------------------------------------------------------------------------------------------


def line_of(row):
    """Return the row as a line of a Markdown table."""
    if "error" in row:
        return f"| {row['model']} | failed: {row['error']} | |"
    cells = [
        row["model"],
        *(f"{row[f'times_less_{name}']:.1f}" for name in ("4", "2")),
    ]
    return f"| {' | '.join(cells)} |"


def tables(about, rows):
    """Return the text between the markers of the page."""
    lines = [
        f"{len(rows)} architectures ({', '.join(f'{name} {about[name]}' for name in PACKAGES if name in about)}, "
        f"{about['processor']}):",
        "",
    ]
    for library in dict.fromkeys(row["library"] for row in rows):
        lines += [
            f"### {'torch.nn' if library == 'torch' else library}",
            "",
            "| model | 4 bits | 2 bits |",
            "|---|---|---|",
            *(line_of(row) for row in rows if row["library"] == library),
            "",
        ]
    good = [row for row in rows if "error" not in row]
    few = sorted(
        (row for row in good if row["times_less_2"] < FEW), key=lambda row: row["times_less_2"]
    )
    middle = statistics.median(row["times_less_2"] for row in good)
    lines += [
        f"### Less than {FEW} times less with 2 bits",
        "",
        f"The median of all models is {middle:.1f}. {len(few)} models are below {FEW}:",
        "",
        "| model | 2 bits | 2 bits, everything |",
        "|---|---|---|",
        *(
            f"| {row['model']} | {row['times_less_2']:.1f} | {row['times_less_2_everything']:.1f} |"
            for row in few
        ),
        "",
    ]
    return "\n".join(lines)


def with_tables(page, text):
    """Return the page with `text` between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def show(row):
    """Print a row."""
    if "error" in row:
        print(f"{row['model']:30} {row['error']}", flush=True)
        return
    numbers = ", ".join(f"{name} {row[f'times_less_{name}']:.2f}" for name in SETTINGS)
    cosines = ", ".join(f"{row[f'cosine_{name}']:.5f}" for name in SETTINGS)
    print(f"{row['model']:30} {numbers} | {cosines} | {row['remains']}", flush=True)


def machine():
    """Return the machine and the versions of the packages that are installed."""
    about = harness.machine("torch")
    for name in PACKAGES[1:]:
        try:
            about |= harness.machine(name)
        except importlib.metadata.PackageNotFoundError:
            print(f"{name} is not installed: its models fail", file=sys.stderr)
    return about | {"device": "cpu", "fewbit": fewbit.__version__}


def main():
    names = [entry.name for entry in model_zoo.ZOO]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help="a name in the table")
    parser.add_argument("--page", action="store_true", help="only write the page again")
    parser.add_argument("--store", action="store_true", help="store the results of MODEL")
    parser.add_argument("--failed", action="store_true", help="only models without a result")
    parser.add_argument("--jobs", type=int, default=2, help="the number of processes")
    arguments = parser.parse_args()
    unknown = set(arguments.models) - set(names)
    if unknown:
        parser.error(f"expected names of {', '.join(names)}, got {', '.join(sorted(unknown))}")
    if arguments.models and not arguments.store:
        for name in arguments.models:
            show(row_of(names.index(name)))
        return
    stored = {row["model"]: row for row in harness.stored("models")}
    if not arguments.page:
        kept, again = {}, arguments.models
        if arguments.failed or again:
            kept = {n: row for n, row in stored.items() if "error" not in row and n not in again}
        todo = [number for number, name in enumerate(names) if name not in kept]
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(arguments.jobs, mp_context=context) as pool:
            for row in pool.map(row_of, todo):
                show(row)
                kept[row["model"]] = row
        harness.save("models", machine(), [kept[name] for name in names])
    document = json.loads((harness.RESULTS / "models.json").read_text())
    text = tables(document["machine"], document["rows"])
    PAGE.write_text(with_tables(PAGE.read_text(), text))


if __name__ == "__main__":
    main()
