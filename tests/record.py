"""Record the results of the public API, and compare those of a later version with the record to the bit.

    python tests/record.py FILE.json             write a record
    python tests/record.py --compare FILE.json   ask again; print every difference, one a line; exit 1 if there is any

A record maps keys such as "model/mlp/2 bits" to answers: bytes, gradients, losses, states, tables and the numbers that
commands print. Tensors are hashed with dtype and shape. Words and times are left out. Keys name
questions and not places in fewbit, so that a record outlives renaming. `recorded/api.py` has all calls of fewbit. The fewbit
that answers is the one that Python imports; `same.py` asks those of two commits, and compares them.

The script is a test that compares with an earlier version instead of an oracle, which is why it is in `tests/` and not in
`benchmarks/`, whose scripts measure and keep results. pytest does not collect it, because a record holds on one machine
alone: other processors and versions of torch round differently.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
import warnings
from fnmatch import fnmatchcase
from pathlib import Path

PACKAGES = ("torch", "numpy", "scipy", "numba", "transformers", "imagecodecs", "mpmath")
ABSENT = "nothing"
SHOWN = 160
"""The number of characters of a value that a difference shows."""


def main(arguments=None) -> int:
    """Run the command line and return its exit code."""
    options = _parsed(arguments)
    if not options.compare and options.file.exists() and not options.force:
        sys.exit(f"{options.file} exists: expected a new file, or --force")
    before = json.loads(options.file.read_text()) if options.compare else None
    sys.path.insert(0, str(Path(__file__).parent / "helpers"))
    with tempfile.TemporaryDirectory() as tables:
        _prepare(tables)
        started = time.process_time()
        entries, raised = answers(options.only, options.shuffle)
    seconds = time.process_time() - started
    count = sum(map(len, entries.values()))
    print(f"{len(entries)} entries, {count} values, {seconds:.0f} s of one processor")
    if before is None:
        for key, message in raised.items():
            if not key.startswith("refused/"):
                print(f"recorded as an answer: {key}: {message}")
        found = {"commit": _commit(), "machine": machine(), "entries": entries, "raised": raised}
        write(options.file, found)
        return 0
    print(f"compared with the record of commit {before['commit']}")
    elsewhere = other_machine(before["machine"], machine())
    if elsewhere:
        print(f"another machine, so that numbers may differ by rounding: {elsewhere}")
    asked = {
        key: value for key, value in before["entries"].items() if fnmatchcase(key, options.only)
    }
    found = differences(asked, entries, raised)
    for line in found:
        print(line)
    print(f"{len(found)} differences")
    return 1 if found else 0


def _parsed(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE.json")
    parser.add_argument("--compare", action="store_true", help="compare with the record in FILE")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    parser.add_argument("--only", default="*", metavar="GLOB", help="only keys that match")
    parser.add_argument(
        "--shuffle", type=int, metavar="SEED", help="ask in an order drawn from SEED"
    )
    return parser.parse_args(arguments)


def _prepare(tables: str) -> None:
    """Make answers independent of threads, the contents of new memory, cached tables and the terminal.

    Args:
        tables: an empty folder for the tables that will be solved.
    """
    os.environ |= {"COLUMNS": "80", "FEWBIT_CACHE": tables}
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }  # read when NumPy is imported
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # also fills new memory
    warnings.simplefilter("ignore")


def answers(only: str = "*", shuffle: int | None = None) -> tuple[dict, dict]:
    """Compute all answers.

    Args:
        only: a glob; keys that it does not match are left out.
        shuffle: the seed of the order, None for the order of the modules.

    Returns:
        {key: {name of a value: value}}, with keys in the order of the modules, and {key: message} of entries that raised.
    """
    from recorded import commands, functionals, layers, measurements, tables, trainings

    subjects = tables, functionals, layers, trainings, measurements, commands
    asked = [entry for subject in subjects for entry in subject.entries()]
    asked = [entry for entry in asked if fnmatchcase(entry[0], only)]
    keys = [key for key, _ in asked]
    twice = {key for key in keys if keys.count(key) > 1} if len(set(keys)) < len(keys) else ()
    if twice:
        raise ValueError(f"expected each key once, got {sorted(twice)} more often")
    if shuffle is not None:
        random.Random(shuffle).shuffle(asked)
    found, raised = {}, {}
    for key, ask in asked:
        found[key], message = answer(ask)
        if message:
            raised[key] = message
    return {key: found[key] for key in keys}, raised


def answer(ask) -> tuple[dict, str]:
    """Compute the answer of one entry. If an exception is raised, the answer is {"raised": its kind}.

    Args:
        ask: a function without arguments, as `entries` of the modules in `recorded` yield.

    Returns:
        ({name of a value: leaf}, the message of the exception or "").
    """
    import torch
    from recorded import api
    from recorded.leaves import leaf

    torch.manual_seed(0)
    try:
        return {str(name): leaf(value) for name, value in ask().items()}, ""
    except Exception as error:
        kind = next(base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins")
        if isinstance(error, api.Refusal):
            kind = "an error of fewbit"
        return {"raised": kind}, " ".join(f"{type(error).__name__}: {error}".split())[:SHOWN]


def differences(before: dict, after: dict, raised: dict) -> list[str]:
    """Compare two mappings of answers.

    Args:
        before, after: {key: {name of a value: leaf}}.
        raised: {key: message} of entries that raised now.

    Returns:
        A line for each value that differs, and one for an entry that is missing, new or raises now.
    """
    lines = []
    for key in dict.fromkeys([*before, *after]):
        if key not in before or key not in after:
            lines.append(f"{key}: {'not asked any more' if key in before else 'new'}")
            continue
        old, new = before[key], after[key]
        if "raised" in new and "raised" not in old:
            lines.append(f"{key}: was {len(old)} values, now raises {raised[key]}")
            continue
        for name in dict.fromkeys([*old, *new]):
            texts = [_text(values, name) for values in (old, new)]
            if texts[0] != texts[1]:
                lines.append(f"{key}: {name}: {_pair(*texts)}")
    return lines


def _text(values: dict, name: str) -> str:
    return json.dumps(values[name], sort_keys=True) if name in values else ABSENT


def _pair(old: str, new: str) -> str:
    """Return two texts, cut around their first difference if they are long."""
    same = len(os.path.commonprefix([old, new]))
    start = max(0, same - SHOWN // 2) if max(len(old), len(new)) > SHOWN else 0
    old, new = (
        ("..." if start else "") + text[start : start + SHOWN] + "..." * (len(text) > start + SHOWN)
        for text in (old, new)
    )
    return f"was {old}, is {new}"


def machine() -> dict[str, str]:
    """Return the processor, its flags, the kernels and the versions that numbers depend on."""
    import torch
    from recorded import api

    lines = {}
    if Path("/proc/cpuinfo").exists():
        pairs = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
        lines = {name.strip(): value.strip() for name, _, value in pairs if value}
    flags = lines.get("flags", lines.get("Features", ""))
    found = {
        "processor": lines.get("model name", platform.machine()),
        "flags": flags,
        "architecture": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "instructions of torch": torch.backends.cpu.get_cpu_capability(),
        "kernels of fewbit": api.kernels(),
        "threads": str(torch.get_num_threads()),
    }
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ABSENT
    return found


def other_machine(before: dict, now: dict) -> str:
    """Return what differs between two machines, in one line, or ""."""
    found = []
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name, ABSENT), now.get(name, ABSENT)
        if old != new and name == "flags":
            old, new = set(old.split()), set(new.split())
            found.append(f"flags gone {sorted(old - new)}, flags new {sorted(new - old)}")
        elif old != new:
            found.append(f"{name} was {old}, is {new}")
    return "; ".join(found)


def _commit() -> str:
    """Return the last commit that changed what is recorded, with "and changes" if files differ from it."""
    recorded = "--", "fewbit", "csrc", "tables"
    commit = _git("log", "-1", "--format=%H", *recorded)
    changes = _git("status", "--porcelain", *recorded)
    return (commit or ABSENT) + (" and changes" if changes else "")


def _git(*arguments: str) -> str:
    root = Path(importlib.util.find_spec("fewbit").origin).parents[1]
    try:
        return subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def write(path: Path, record: dict) -> None:
    """Write a record in one piece: a reader finds the old file or the whole new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(record, file, indent=1)
            file.write("\n")
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


if __name__ == "__main__":
    sys.exit(main())
