"""Questions about the command line: the output and the files of every example of its page."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from click.testing import CliRunner

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "cli.md"
SLOW = re.compile("demo --all|--seeds|--output short|resnet50|densenet121|policy fixed|plan.html")
UNSTEADY = re.compile(r"^solver .*|[\d.]+ (?:s|ms|seconds)\b", re.MULTILINE)
"""Parts of the output that differ from run to run."""


def questions():
    """Yield (key, function that returns the answer)."""
    lines = dict.fromkeys(re.findall(r"^ *(fewbit .*)$", PAGE.read_text("utf-8"), re.MULTILINE))
    for line in lines:
        if not SLOW.search(line):
            yield f"command/{line}", partial(_run, line, lines)


def _run(line, lines):
    from fewbit.cli import app

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        np.save("activations.npy", np.random.default_rng(1).normal(0.2, 1.5, 4000))
        runner = CliRunner()
        for other in lines:  # which write the files that the line names
            made = re.search(r"-o (\S+\.json)", other)
            if made and made[1] in line.split() and other != line:
                runner.invoke(app, shlex.split(other)[1:], prog_name="fewbit")
        before = set(os.listdir())
        result = runner.invoke(app, shlex.split(line)[1:], prog_name="fewbit")
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        files = [path for path in Path().rglob("*") if path.is_file() and path.name not in before]
        found = {"exit code": result.exit_code, "files": sorted(map(str, files))}
        found |= {
            path.name: _contents(path.read_text("utf-8"))
            for path in files
            if path.suffix == ".json"
        }
        return found | {"output": _contents(result.stdout), "errors": _contents(result.stderr)}


def _contents(text):
    """Return the document of a text in JSON, or the text."""
    try:
        return json.loads(text)
    except ValueError:
        return UNSTEADY.sub("...", text)
