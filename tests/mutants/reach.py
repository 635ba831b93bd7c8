"""The map from functions to the tests that enter them, and the choice of tests for a mutant."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

from mutants.sample import Mutant

NATIVE = "fewbit/runtime/backends/native.py"
"""The file whose functions call the compiled kernels."""


class Reach:
    """The tests that enter each function, with their times.

    Args:
        tests: {node id: [outcome, seconds of processor time, ["file:qualified name" of functions], is in the fast tier]}.
    """

    def __init__(self, tests: dict[str, list]):
        self.tests = tests
        self.by_key, self.by_file = defaultdict(set), defaultdict(set)
        for name, (outcome, _, keys, _) in tests.items():
            for key in keys if outcome == "passed" else ():
                self.by_key[key].add(name)
                self.by_file[key.split(":")[0]].add(name)

    def tests_of(self, root: Path, mutant: Mutant) -> list[str]:
        """Return the tests of a mutant, those of the fast tier first.

        They are the tests that enter the changed function. If there is no such test, or the changed code is no function's,
        they are those that enter its file; if there is none, those that enter files which import the file.
        """
        return sorted(self._tests_of(root, mutant), key=lambda name: not self.tests[name][3])

    def _tests_of(self, root: Path, mutant: Mutant) -> list[str]:
        if mutant.file.startswith("csrc/"):
            callers = self.by_file[NATIVE]
            own = {name for name in callers if name.startswith("tests/backends/")}
            return self.ordered(own) + self.ordered(callers - own)
        scope = mutant.mutation.scope
        entering = self._entering(mutant.file, scope.removesuffix(".<locals>"))
        if entering and scope.endswith(".<locals>"):
            return self.ordered(entering)
        rest = self.by_file[mutant.file] - entering
        if not entering and not rest:
            rest = set().union(*(self.by_file[file] for file in _importers(root, mutant.file)))
        return self.ordered(entering) + self.ordered(rest)

    def _entering(self, file: str, scope: str) -> set[str]:
        found = set()
        for key, names in self.by_key.items() if scope else ():
            if key == f"{file}:{scope}" or key.startswith(f"{file}:{scope}."):
                found |= names
        return found

    def ordered(self, names: set[str]) -> list[str]:
        """Order tests: those of the fastest files first; within a file the first case of each test, then the second, ..."""
        seconds, cases, rank = Counter(), Counter(), {}
        for name in names:
            seconds[name.split("::")[0]] += self.tests[name][1]
        for name in sorted(names, key=lambda name: (self.tests[name][1], name)):
            test, file = name.split("[")[0], name.split("::")[0]
            rank[name] = seconds[file], file, cases[test], self.tests[name][1], name
            cases[test] += 1
        return sorted(names, key=rank.__getitem__)


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
