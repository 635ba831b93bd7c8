"""Compare the results of the public API at an earlier commit with those of the working tree, to the bit.

    python tests/same COMMIT              print every difference, one a line; exit 1 if there is any
    python tests/same COMMIT --only GLOB  ask only the questions whose keys match

Both versions of fewbit answer the questions of this tree (`answers.py`), each in a process of its own. A difference is an
answer that changed, or a question that the working tree cannot answer. Questions that COMMIT cannot answer, because it does
not know what they are about, are listed by themselves. The script checks COMMIT out into build/same, and compiles its
kernels if csrc/ differs. pytest does not run the comparison, because it holds on one machine alone: other processors and
versions of torch round differently.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "same"
BUILT_FROM = "csrc", "setup.py", "build_backend.py"
CHECKED_OUT = *BUILT_FROM, "fewbit", "tables", "pyproject.toml", "README.md", "tests/helpers"
SHOWN = 160
"""The number of characters of a value that a difference shows."""


def main(arguments=None) -> int:
    """Run the command line. Return 1 if an answer differs."""
    parser = argparse.ArgumentParser(prog="same", description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("--only", default="*", metavar="GLOB", help="only keys that match")
    options = parser.parse_args(arguments)
    try:
        commit = git("rev-parse", "--verify", f"{options.commit}^{{commit}}").strip()
    except subprocess.CalledProcessError as error:
        sys.exit(f"expected a commit, got {options.commit!r}: {error.stderr.strip()}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    # An exception ends the processes, and deletes the folder.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        before = checked_out(commit, Path(folder))
        runs = [asked(tree, options.only) for tree in (before, ROOT)]
        try:
            found = [run.communicate()[0] for run in runs]
            if any(run.returncode for run in runs):
                sys.exit("a version could not be asked: see above")
        finally:
            for run in runs:
                run.kill()
    differing, unknown = differences(*map(json.loads, found))
    print(*differing, *unknown, sep="\n")
    print(f"{len(differing)} differences; {commit[:12]} cannot answer {len(unknown)} questions")
    return 1 if differing else 0


def git(*arguments: str) -> str:
    """Return the output of a git command."""
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def checked_out(commit: str, folder: Path) -> Path:
    """Return a new folder with the files of a commit and its compiled kernels."""
    tree, archive = folder / "before", folder / "before.tar"
    git("archive", "--output", str(archive), commit, *CHECKED_OUT)
    with tarfile.open(archive) as files:
        files.extractall(tree, filter="data")
    same = not git("diff", "--name-only", commit, "--", *BUILT_FROM)
    built = list((ROOT / "fewbit").glob("_kernels*.so"))
    if same and built:
        shutil.copy2(built[0], tree / "fewbit")
    elif not same:
        print(f"compiling the kernels of {commit[:12]}", flush=True)
        environment = os.environ | {"FEWBIT_KERNELS": "1", "FEWBIT_CUDA": "0"}
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        subprocess.run(command, cwd=tree, env=environment, check=True, stdout=sys.stderr)
    return tree


def asked(tree: Path, only: str) -> subprocess.Popen:
    """Start a process that asks the fewbit of a folder, and prints the answers."""
    script = ROOT / "tests" / "same" / "answers.py"
    # The helpers of an earlier commit serve if those of this tree use what its fewbit does not have.
    helpers = dict.fromkeys(str(root / "tests" / "helpers") for root in (ROOT, tree))
    command = [sys.executable, str(script), only, *helpers]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"}
    return subprocess.Popen(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True)


def differences(before: dict, after: dict) -> tuple[list[str], list[str]]:
    """Compare two mappings {key: {name of a value: value}}, in which {"raised": message} says that there is no answer.

    Returns:
        (a line for each value that differs or is lost, a line for each other question that the earlier version cannot answer).
    """
    differing, unknown = [], []
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key, {"raised": "not asked"}), after.get(key, {"raised": "not asked"})
        if "raised" in new and old == new:
            unknown.append(f"{key}: {new['raised']}")
        elif "raised" in new:
            differing.append(f"{key}: cannot be answered: {new['raised']}")
        elif "raised" in old:
            unknown.append(f"{key}: not known before: {old['raised']}")
        else:
            for name in dict.fromkeys([*old, *new]):
                texts = [json.dumps(found.get(name), sort_keys=True) for found in (old, new)]
                if texts[0] != texts[1]:
                    differing.append(f"{key}: {name}: {_pair(*texts)}")
    return differing, unknown


def _pair(old: str, new: str) -> str:
    """Return two texts, cut around their first difference if they are long."""
    start = max(0, len(os.path.commonprefix([old, new])) - SHOWN // 2)
    if max(len(old), len(new)) <= SHOWN:
        start = 0
    old, new = (text[start : start + SHOWN] for text in (old, new))
    return f"was {'...' * bool(start)}{old}, is {'...' * bool(start)}{new}"


if __name__ == "__main__":
    sys.exit(main())
