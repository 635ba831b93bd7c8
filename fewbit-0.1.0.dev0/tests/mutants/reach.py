"""The map from functions to the tests that enter them, and the choice of tests for a mutant."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from mutants import python_code, sample
from mutants.sample import Mutant

NATIVE = "fewbit/runtime/backends/native.py"
"""The file whose functions call the compiled kernels."""


class Trial(NamedTuple):
    """How a mutant is tried.

    Attributes:
        names: the tests, in order.
        codes: the keys of mutated functions; none if modules are imported anew.
    """

    names: list[str]
    codes: list[str]


class Reach:
    """The tests that enter each function, with their times.

    Args:
        imported: the keys ("file:line:qualified name") of functions that run while tests are collected.
        tests: {node id: [outcome, seconds of processor time, keys of functions]}.
    """

    def __init__(self, imported: list[str], tests: dict[str, list]):
        self.imported, self.tests = set(imported), tests
        self.by_key, self.by_file = defaultdict(set), defaultdict(set)
        for name, (outcome, _, keys) in tests.items():
            for key in keys if outcome == "passed" else ():
                self.by_key[key].add(name)
                self.by_file[key.split(":")[0]].add(name)

    def usual(self, names: list[str]) -> dict[str, float]:
        """Return the tests' times."""
        return {name: self.tests[name][1] for name in names}

    def trial(self, root: Path, mutant: Mutant) -> Trial:
        """Choose the tests of a mutant: those that enter the changed function, or else those that depend on its module."""
        if mutant.file.startswith("csrc/"):
            callers = self.by_file[NATIVE]
            own = {name for name in callers if name.startswith("tests/backends/")}
            return Trial(self.ordered(own) + self.ordered(callers - own), [])
        keys = self._replaceable(root, mutant)
        if keys:
            return Trial(self.ordered(set().union(*map(self.by_key.__getitem__, keys))), keys)
        entering = self._entering(mutant)
        rest = self.by_file[mutant.file] - entering
        if not entering and not rest:
            rest = set().union(*(self.by_file[file] for file in _importers(root, mutant.file)))
        return Trial(self.ordered(entering) + self.ordered(rest), [])

    def _replaceable(self, root: Path, mutant: Mutant) -> list[str]:
        """Return the key of the mutated function if its code can be replaced after modules are imported, or nothing."""
        source = (root / mutant.file).read_text(encoding="utf-8")
        pairs = sample.changes(root, mutant)
        if len(pairs) != 1 or "njit" in source:
            return []
        before, after = pairs[0]
        whole = compile(source, str(root / mutant.file), "exec", dont_inherit=True)
        counts = Counter(_key(code, mutant.file) for code in _all(whole))
        key = _key(before, mutant.file)
        around = [code for code in _all(whole) if key in {_key(c, mutant.file) for c in _all(code)}]
        keys = [_key(code, mutant.file) for code in around if python_code.is_function(code)]
        if not python_code.is_function(before) or before.co_freevars != after.co_freevars:
            return []
        unclear = any(counts[other] > 1 or other in self.imported for other in keys)
        return [] if unclear else [key]

    def _entering(self, mutant: Mutant) -> set[str]:
        scope = mutant.mutation.scope.removesuffix(".<locals>")
        found = set()
        for key, names in self.by_key.items() if scope else ():
            file, _, name = key.split(":", 2)
            if file == mutant.file and (name == scope or name.startswith(f"{scope}.")):
                found |= names
        return found

    def ordered(self, names: set[str]) -> list[str]:
        """Order tests: those of the fastest files first; within a file the first case of each test, then the second, ..."""
        seconds, cases = Counter(), Counter()
        for name in names:
            seconds[name.split("::")[0]] += self.tests[name][1]
        rank = {}
        for name in sorted(names, key=lambda name: (self.tests[name][1], name)):
            test = name.split("[")[0]
            file = name.split("::")[0]
            rank[name] = seconds[file], file, cases[test], self.tests[name][1], name
            cases[test] += 1
        return sorted(names, key=rank.__getitem__)


def _all(code):
    yield code
    for inner in python_code.inner_codes(code):
        yield from _all(inner)


def _key(code, file: str) -> str:
    return f"{file}:{code.co_firstlineno}:{code.co_qualname}"


def _importers(root: Path, file: str) -> list[str]:
    """Return the files of fewbit that import a file or, if it is an `__init__.py`, a file of its folder."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    found = []
    for path in sorted((root / "fewbit").rglob("*.py")):
        names = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
        if module in names:
            found.append(str(path.relative_to(root)))
    return found
