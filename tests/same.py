"""Compare the results of the public API at an earlier commit with those of the working tree, to the bit.

    python tests/same.py COMMIT             print every difference, one a line; exit 1 if there is any
    python tests/same.py COMMIT --only GLOB ask only the questions whose keys match

The script checks COMMIT out into build/same, compiles its kernels if csrc/ differs, and asks both versions of fewbit the
questions of *this* tree's `record.py`, at the same time. It keeps the answers of COMMIT in build/same for the next call.
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
from hashlib import blake2b
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "same"
BUILT_FROM = "csrc", "setup.py"


def main(arguments=None) -> int:
    """Run the command line. Return 1 if an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("--only", default="*", metavar="GLOB", help="only keys that match")
    options = parser.parse_args(arguments)
    try:
        commit = git("rev-parse", "--verify", f"{options.commit}^{{commit}}").strip()
    except subprocess.CalledProcessError as error:
        sys.exit(f"expected a commit, got {options.commit!r}: {error.stderr.strip()}")
    before = FOLDER / f"{commit[:12]}-{questions(options.only)}.json"
    FOLDER.mkdir(parents=True, exist_ok=True)
    # An exception ends the processes, and deletes the folder.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        old, new = answers(commit, before, options.only, Path(folder))
    sys.path.insert(0, str(ROOT / "tests"))
    import record

    found = record.differences(old["entries"], new["entries"], new["raised"])
    elsewhere = record.other_machine(old["machine"], new["machine"])
    if elsewhere:
        print(f"another machine, so that numbers may differ by rounding: {elsewhere}")
    for line in found:
        print(line)
    print(f"{len(found)} differences from {commit[:12]}")
    return 1 if found else 0


def answers(commit: str, before: Path, only: str, folder: Path) -> list[dict]:
    """Return the records of a commit and of the working tree, which two processes make at the same time.

    Args:
        commit: the commit.
        before: the file of its record, which is kept.
        only: a glob of keys.
        folder: an empty folder.
    """
    made = {folder / "now.json": ROOT}
    if not before.exists():
        made[folder / "before.json"] = checked_out(commit, folder)
    runs = [asked(tree, path, only) for path, tree in made.items()]
    try:
        if any([run.wait() for run in runs]):
            sys.exit("a version could not answer the questions: see above")
    finally:
        for run in runs:
            run.kill()
    if not before.exists():
        os.replace(folder / "before.json", before)
    return [json.loads(path.read_text()) for path in (before, folder / "now.json")]


def git(*arguments: str) -> str:
    """Return the output of a git command."""
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def questions(only: str) -> str:
    """Return a hash of the questions: an answer is kept for as long as its question stays as it is."""
    found = blake2b(only.encode(), digest_size=6)
    for path in [ROOT / "tests" / "record.py", *sorted((ROOT / "tests" / "recorded").glob("*.py"))]:
        found.update(path.read_bytes())
    return found.hexdigest()


def checked_out(commit: str, folder: Path) -> Path:
    """Return a folder with the files of a commit and its compiled kernels."""
    tree = folder / "before"
    archive = folder / "before.tar"
    git(
        "archive",
        "--output",
        str(archive),
        commit,
        "fewbit",
        "tables",
        "pyproject.toml",
        "README.md",
        *BUILT_FROM,
    )
    with tarfile.open(archive) as files:
        files.extractall(tree, filter="data")
    same = not git("diff", "--name-only", commit, "--", *BUILT_FROM)
    built = list((ROOT / "fewbit").glob("_kernels*.so"))
    if same and built:
        shutil.copy2(built[0], tree / "fewbit")
    elif same:
        print("neither version has compiled kernels", flush=True)
    else:
        print(f"compiling the kernels of {commit[:12]}", flush=True)
        environment = os.environ | {"FEWBIT_KERNELS": "1", "FEWBIT_CUDA": "0"}
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        subprocess.run(command, cwd=tree, env=environment, check=True)
    return tree


def asked(tree: Path, answers: Path, only: str) -> subprocess.Popen:
    """Start a process that asks the fewbit of a folder, and writes the answers into a file when it is done."""
    command = [sys.executable, str(ROOT / "tests" / "record.py"), str(answers), "--only", only]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    return subprocess.Popen(command, cwd=tree, env=environment)


if __name__ == "__main__":
    sys.exit(main())
