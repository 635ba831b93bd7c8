"""The sample of mutants: seeded, and stratified by folder."""

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
FEWEST = 4
"""The smallest number of mutants of a folder, if the sample is large enough."""
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

    @property
    def folder(self) -> str:
        """The folder of fewbit/ or csrc/ to which the mutant is counted."""
        return folder_of(self.file)


def folder_of(file: str) -> str:
    """Return the first two parts of a path, or "fewbit" for a file directly in it."""
    parts = file.split("/")
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def draw(root: Path, number: int, seed: int, only: str = "*") -> list[Mutant]:
    """Draw a sample of mutants.

    Args:
        root: the root of the repository.
        number: the number of mutants. Fewer are drawn if there are not as many changed lines.
        seed: of the draw.
        only: a glob; files that it does not match have no mutants.

    Returns:
        Mutants, sorted by place, no two of which change the same line.
    """
    folders, sizes = {}, {}
    for file in _files(root):
        if fnmatchcase(file, only):
            folders.setdefault(folder_of(file), []).append(file)
            lines = sum(bool(line.strip()) for line in (root / file).read_text().splitlines())
            size = lines * (CSRC_SHARE if file.startswith("csrc") else 1)
            sizes[folder_of(file)] = sizes.get(folder_of(file), 0) + size
    drawn = []
    for folder, count in allotted(sizes, number).items():
        # Each folder has its own draw, so that a change in one leaves the mutants of the others as they are.
        drawn += _of_folder(root, folders[folder], count, random.Random(f"{seed} {folder}"))
    return sorted(drawn)


def allotted(sizes: dict[str, float], number: int) -> dict[str, int]:
    """Share a number among folders in proportion to their sizes, with at least FEWEST for each if `number` allows that."""
    fewest = min(FEWEST, number // (2 * len(sizes))) if sizes else 0
    share = {folder: number * size / sum(sizes.values()) for folder, size in sizes.items()}
    counts = {folder: max(fewest, int(exact)) for folder, exact in share.items()}
    while (missing := number - sum(counts.values())) and counts:
        step = 1 if missing > 0 else -1
        free = [folder for folder in counts if step > 0 or counts[folder] > fewest]
        chosen = max(free, key=lambda folder: (step * (share[folder] - counts[folder]), folder))
        counts[chosen] += step
    return counts


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


def _of_folder(root, files, count, draw) -> list[Mutant]:
    lines = {}
    for file in files if count else ():
        for mutant in all_of(root, file):
            lines.setdefault((file, mutant.mutation.line), []).append(mutant)
    places = sorted(lines)
    draw.shuffle(places)
    drawn = (draw.choice(lines[place]) for place in places)
    return [*islice((mutant for mutant in drawn if _compiles(root, mutant)), count)]


def _compiles(root, mutant) -> bool:
    if mutant.file.endswith(".py"):
        try:
            compile(mutant.mutation.applied((root / mutant.file).read_text("utf-8")), "", "exec")
        except SyntaxError:
            return False
    return True
