"""Copies of the repository, in which mutants are tried, and mutated kernels."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

BUILT_FROM = (
    "setup.py",
    "build_backend.py",
    "pyproject.toml",
    "README.md",
    "csrc",
    "fewbit",
    "tables",
)
KERNELS = "fewbit/_kernels.abi3.so"


class CompileError(Exception):
    """The mutated kernels do not compile. The message is the end of the compiler's output."""


def files_of(root: Path) -> list[str]:
    """Return the files that git tracks or would track, relative to the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return sorted({name for name in listed.split("\0") if name and (root / name).is_file()})


def digest_of(root: Path, files: list[str]) -> str:
    """Return a hash of the contents of files, which stands for a state of the repository."""
    found = hashlib.blake2b(digest_size=8)
    for name in files:
        found.update(f"{name}\0".encode() + (root / name).read_bytes() + b"\0")
    return found.hexdigest()


def copy(root: Path, files: list[str], target: Path) -> None:
    """Copy files and the compiled kernels, with their times, so that compiled Python stays valid."""
    for name in [*files, *([KERNELS] if (root / KERNELS).exists() else [])]:
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, path)


def built_kernels(root: Path, files: list[str], folder: Path) -> Path:
    """Return a folder with the sources of the kernels and their object files, which this function compiles if needed."""
    files = [name for name in files if name.split("/")[0] in BUILT_FROM]
    tree = (
        folder / f"kernels-{digest_of(root, [n for n in files if n.startswith(('csrc', 'setup'))])}"
    )
    if not (tree / KERNELS).exists():
        shutil.rmtree(tree, ignore_errors=True)
        copy(root, files, tree)
        (tree / KERNELS).unlink(missing_ok=True)
        # Optimization changes no result, and takes most of the time of a compilation.
        script = (tree / "setup.py").read_text().replace('"-O3"', '"-O1"')
        (tree / "setup.py").write_text(script)
        build(tree)
    return tree


def mutated_kernels(kernels: Path, file: str, source: str, target: Path) -> bytes:
    """Return the extension module compiled from a mutated source.

    Args:
        kernels: a result of `built_kernels`.
        file: the path of the mutated file.
        source: its text.
        target: a new folder for the compilation, which is deleted at the end.
    """
    try:
        shutil.copytree(kernels, target)
        (target / file).write_text(source)
        build(target)
        return (target / KERNELS).read_bytes()
    finally:
        shutil.rmtree(target, ignore_errors=True)


def build(tree: Path) -> None:
    """Compile what has changed in a tree, for the CPU."""
    environment = {**os.environ, "FEWBIT_KERNELS": "1", "FEWBIT_CUDA": "0"}
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise CompileError((done.stdout + done.stderr)[-500:])
