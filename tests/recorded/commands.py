"""Entries "command": exit codes of the command line and the numbers of its JSON."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path

import torch

from recorded import api

FOLDER = "FOLDER"
"""Stands for a temporary folder in arguments."""
NAMES = set("aliases form function kind level model objective policy status tails".split())
"""Fields whose text is a name and is compared; all other text is words."""
NEVER = {"machine", "solver", "version"}
"""Fields that differ between machines, versions or runs; so does all whose name speaks of seconds."""

COMMANDS = [
    "list --json",
    "show gelu --json",
    "show gelu --bits 3 --weight normal --json",
    "show silu --bits 2 --domain -5 5 --json",
    "show gelu",
    "show no-such-function",
    "show gelu --bits 9",
    "solve gelu --bits 2 --json",
    "solve elu --param alpha=2 --bits 2 --domain -5 5 -o FOLDER/elu.json",
    "solve gelu --bits 3 --form intervals --no-refine --json",
    "solve gelu --bits",
    "solve gelu --bits 2 -o FOLDER/elu.txt",
    "show FOLDER/given.json --json",
    "plot gelu --bits 3 -o FOLDER/gelu.svg",
    "plot gelu --bits 3",
    "compare gelu --bits 2 --json",
    "compare silu tanh --bits 1 --bits 2 -o FOLDER/compared.csv",
    "verify FOLDER/given.json --json",
    "verify FOLDER/wrong.json --json",
    "verify FOLDER/none.json --json",
    "verify FOLDER/given.json",
    "memory resnet18 --image-size 64 --json",
    "memory vgg11 --image-size 64 --bits 2 --device-memory 80GB --json",
    "memory roberta-base --sequence-length 16 --bits 2 --json",
    "memory resnet18 --image-size 64 --activation own --batch 2",
    "memory no-such-model",
    "memory",
    "plan recorded.commands:workload --draws 2 --json",
    "plan recorded.commands:workload --policy fixed -o FOLDER/plan.html",
    "plan resnet18 --batch 2 --batches 2 --policy fixed --json",
    "plan recorded.commands:workload --policy none",
    "demo --steps 2 --bits 2 --everything 2 --output FOLDER/demo --json",
    "no-such-command",
    "--version",
]


def entries():
    """Yield (key, function that returns the answers)."""
    for line in COMMANDS:
        yield f"command/{line}", partial(_run, line)


def workload():
    """Return (model, batches, loss) for the command `plan`."""
    from recorded import models

    case = models.made("mlp")
    return case.model, case.batches[:2], case.loss


def _run(line):
    with tempfile.TemporaryDirectory() as folder:
        _write_tables(Path(folder))
        before = set(Path(folder).rglob("*"))
        code, output = api.command(*(word.replace(FOLDER, folder) for word in line.split()))
        made = [path for path in Path(folder).rglob("*") if path not in before and path.is_file()]
        found = {"exit code": code, "files": sorted(str(path.relative_to(folder)) for path in made)}
        for path in made:
            if path.suffix == ".json":
                found[path.name] = without_words(json.loads(path.read_text()))
    if "--json" in line and output:
        found["output"] = without_words(json.loads(output))
    return found | {"next draw": torch.rand(1)}


def _write_tables(folder):
    """Write a file with a table, and one whose table claims another error."""
    document = api.loaded("gelu", 2).document()
    (folder / "given.json").write_text(json.dumps(document))
    wrong = document | {"error": document["error"] / 2, "lower_bound": document["error"] / 4}
    (folder / "wrong.json").write_text(json.dumps(wrong))


def without_words(value, name=""):
    """Return a JSON document without times, versions and words.

    Args:
        value: what `json.loads` returned.
        name: the name of the field that holds the value.
    """
    if isinstance(value, dict):
        if name == "candidate":
            value = api.candidate_of_document(value)
        return {
            field: without_words(part, field)
            for field, part in value.items()
            if field not in NEVER and "seconds" not in field
        }
    if isinstance(value, list):
        return [without_words(part, name) for part in value]
    if isinstance(value, str) and name not in NAMES:
        return "words"
    return value
