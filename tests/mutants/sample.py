"""The sample of mutants."""

from __future__ import annotations

import random
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from mutants import cpp_code, python_code
from mutants.python_code import Mutation

CSRC = "common", "cpu", "bindings"
"""The folders of csrc/. The CUDA kernels are left out, because their tests compile them for minutes."""
CSRC_SHARE = 0.5
"""C++ mutants are drawn half as often for their lines as those of Python, because each must be compiled."""


class Mutant(NamedTuple):
    """One changed place of one file, whose path is relative to the root of the repository."""

    file: str
    mutation: Mutation

    @property
    def name(self) -> str:
        """The text that identifies the mutant in results."""
        mutation = self.mutation
        change = f"{mutation.kind}: {mutation.before} -> {mutation.after or 'nothing'}"
        return f"{self.file}:{mutation.line}:{mutation.column}: {change}"


def folder_of(file: str) -> str:
    """Return the first two parts of a path, or "fewbit" for a file directly in it."""
    parts = file.split("/")
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def draw(root: Path, number: int, seed: int, only: str = "*") -> list[Mutant]:
    """Draw a sample of mutants.

    Each line has a random number of its own, so that a change of one line leaves the mutants of the others as they are.

    Args:
        root: the root of the repository.
        number: the number of mutants. Fewer are drawn if there are not as many lines that can be changed.
        seed: of the draw.
        only: a glob; files that it does not match have no mutants.

    Returns:
        Mutants, sorted by place, no two of which change the same line.
    """
    ranked = []
    for file in _files(root):
        lines = {}
        for mutant in all_of(root, file) if fnmatchcase(file, only) else ():
            lines.setdefault(mutant.mutation.line, []).append(mutant)
        for mutants in lines.values():
            first = mutants[0].mutation
            draw = random.Random(f"{seed} {file} {first.scope} {first.before}")
            rank = draw.random() / (CSRC_SHARE if file.startswith("csrc") else 1)
            ranked.append((rank, draw.choice(mutants)))
    compiling = (mutant for _, mutant in sorted(ranked) if _compiles(root, mutant))
    return sorted(islice(compiling, number))


def all_of(root: Path, file: str) -> list[Mutant]:
    """Return all mutants of a file."""
    source = (root / file).read_text(encoding="utf-8")
    language = python_code if file.endswith(".py") else cpp_code
    return [Mutant(file, mutation) for mutation in language.mutations(source)]


def found_again(root: Path, names: list[str]) -> tuple[list[Mutant], list[str]]:
    """Find the mutants of an earlier sample, whose lines may have moved.

    Returns:
        (the mutants in the order of their names, the names of mutants that no longer exist).
    """
    known, mutants, gone = {}, [], []
    for name in names:
        file, line, _, change = name.split(":", 3)
        if file not in known:
            known[file] = all_of(root, file) if (root / file).exists() else []
        same = [mutant for mutant in known[file] if mutant.name.split(":", 3)[3] == change]
        if same:
            mutants.append(min(same, key=lambda mutant: abs(mutant.mutation.line - int(line))))
        else:
            gone.append(name)
    return mutants, gone


def _files(root: Path) -> list[str]:
    found = [*(root / "fewbit").rglob("*.py")]
    for folder in CSRC:
        found += (root / "csrc" / folder).glob("*.h")
        found += (root / "csrc" / folder).glob("*.cpp")
    # Without nvcc, nothing compiles the bindings of the CUDA kernels.
    names = sorted(str(path.relative_to(root)) for path in found)
    return [name for name in names if name != "csrc/bindings/cuda.cpp"]


def _compiles(root, mutant) -> bool:
    if mutant.file.endswith(".py"):
        try:
            compile(mutant.mutation.applied((root / mutant.file).read_text("utf-8")), "", "exec")
        except SyntaxError:
            return False
    return True
