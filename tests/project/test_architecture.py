"""The structure that docs/architecture.md describes: who may import whom."""

import ast
import functools
import graphlib
import re
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "fewbit"


def orders():
    """Return the rows of the two tables of docs/architecture.md, {name: row}: those of packages, and of runtime's folders."""
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    found, last = [], ""
    for line in text.splitlines():
        if line.startswith("| `") and last.startswith("|---"):
            found.append({})
        if line.startswith("| `"):
            names = re.findall(r"`(\w+)/?`", line.split("|")[1])
            found[-1] |= dict.fromkeys(names, len(set(found[-1].values())))
        last = line
    return found


PACKAGES, RUNTIME = orders()
# The torch half; all else works where torch is not installed.
TORCH = {
    "runtime", "checkpointing", "functional", "nn", "models", "convert", "policies", "analysis", "compiler", "compress", "planning", "demo", "integrations",
}  # fmt: skip
NO_TORCH_YET = {"runtime/format/encoding.py"}
"""Files of the torch half that programs without torch use: what a table is at run time."""
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def layer_of(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@functools.cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(nodes):
    """Yield the modules of this package that these nodes of a syntax tree import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [member if member in MODULES else node.module for member in members]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "fewbit")


def test_every_folder_is_a_package():
    for folder in {path.parent for path in FILES}:
        assert (folder / "__init__.py").exists(), folder


def test_every_module_has_a_layer():
    named = {layer_of(path) for path in FILES} - {"__init__", "__main__"}
    assert named == set(PACKAGES)
    assert {path.name for path in (PACKAGE / "runtime").iterdir() if path.is_dir()} >= set(RUNTIME)


def place(module):
    """Return the place of a module in the order of imports: the rows of its package and, in runtime, of its folder."""
    _, package, *inner = module.split(".")
    return PACKAGES[package], RUNTIME[inner[0]] if package == "runtime" and inner else -1


@pytest.mark.slow
def test_imports_point_upwards():
    """Lazy imports count as well."""
    for module, path in MODULES.items():
        if module not in ("fewbit", "fewbit.__main__"):
            for name in imported(ast.walk(tree(path))):
                assert name == "fewbit" or place(name) <= place(module), f"{module} imports {name}"


@pytest.mark.slow
def test_no_circle_of_imports():
    """Between modules, as they are loaded; imports inside functions do not count."""
    graph = {}
    for name, path in MODULES.items():
        top = imported(tree(path).body)
        graph[name] = {other for other in top if other != name}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_the_offline_half_does_not_import_torch():
    """Functions may import torch, for users who pass torch callables and for commands that need it."""
    for path in FILES:
        if layer_of(path) not in TORCH or str(path.relative_to(PACKAGE)) in NO_TORCH_YET:
            for node in tree(path).body:
                if isinstance(node, ast.Import | ast.ImportFrom):
                    names = [getattr(node, "module", None), *(alias.name for alias in node.names)]
                    assert not any(name and name.split(".")[0] == "torch" for name in names), path


def test_exact_code_is_compiled_without_fastmath():
    """Every Numba function: cached, lock released, IEEE semantics; no parallel backend of Numba's."""
    for path in FILES:
        for node in ast.walk(tree(path)):
            for decorator in getattr(node, "decorator_list", []):
                text = ast.unparse(decorator)
                if "njit" in text or "jit(" in text:
                    usual = "njit(cache=True, nogil=True, error_model='numpy')"
                    assert text == usual, f"{path}: {node.name}"


def test_no_module_has_the_name_of_a_public_function():
    """Importing such a module, anywhere, would replace the function: `fewbit.verify` was a module after `fewbit verify`."""
    import fewbit

    modules = {path.stem for path in PACKAGE.iterdir()} - {"functional", "nn"}
    assert not modules & set(fewbit.__all__)


def test_no_two_files_have_one_name():
    """Only a file of `nn` has the name of the file of `functional` with the functions that its modules compute."""
    names = Counter(path.name for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    of_functional = {path.name for path in (PACKAGE / "functional").rglob("*.py")}
    names.subtract(
        path.name for path in (PACKAGE / "nn").glob("*.py") if path.name in of_functional
    )
    assert {name for name, count in names.items() if count > 1} == set()


def test_no_two_classes_have_one_name():
    """A name leads to one class. The callbacks of two frameworks are in two modules of `integrations` by the same name."""
    places = {}
    for path in FILES:
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module_of(path))
    several = {name: modules for name, modules in places.items() if len(modules) > 1}
    assert several.keys() <= {"FewbitCallback"}, several
