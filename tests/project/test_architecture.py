"""The structure that docs/architecture.md describes: who may import whom, and what stays lazy."""

import ast
from pathlib import Path

import pytest
from fresh_process import run

PACKAGE = Path(__file__).parents[2] / "fewbit"

# A module imports only from the layers above its own (or its own). Lazy imports count as well. A folder without an entry
# belongs to the layer of the folder that it is in.
LAYERS = [
    {"_version", "errors", "text", "files", "sizes", "config"},
    {"functions"},
    {"schema"},
    {"render"},
    {"table", "catalog", "solver"},
    {"runtime"},
    {"functional"},
    {"nn"},
    {"models"},
    {"convert", "policies", "analysis", "compress", "planning"},
    {"demo"},
    {"cli"},
]
# The torch half; all else works where torch is not installed.
TORCH = {
    "runtime", "functional", "nn", "models", "convert", "policies", "analysis", "compress", "planning", "demo",
}  # fmt: skip
NO_TORCH_YET = {
    "runtime/format/encoding.py"
}  # what a table is at run time, for those who have no torch
DEPTH = {name: depth for depth, layer in enumerate(LAYERS) for name in layer}
MOST_FILES = 15
"""The largest number of Python files in a folder. functional and nn exceed it until their small files are merged."""
FILES = sorted(PACKAGE.rglob("*.py"))


def layer_of(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path):
    """Names of the modules of this package that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
            if node.module == "fewbit":
                names = [f"fewbit.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith("fewbit."):
                yield name.split(".")[1]


def test_folders_are_small():
    folders = {path.parent for path in FILES} - {PACKAGE / "functional", PACKAGE / "nn"}
    for folder in folders:
        assert len(list(folder.glob("*.py"))) <= MOST_FILES, folder
        assert (folder / "__init__.py").exists(), folder


def test_every_module_has_a_layer():
    named = {layer_of(path) for path in FILES} - {"__init__", "__main__"}
    assert named == set(DEPTH)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_upwards(path):
    if layer_of(path) in {"__init__", "__main__"}:
        return
    for name in imported(path):
        if name in DEPTH:
            assert DEPTH[name] <= DEPTH[layer_of(path)], f"{path.name} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_offline_half_does_not_import_torch(path):
    """Functions may import torch, for users who pass torch callables and for commands that need it."""
    if layer_of(path) in TORCH and str(path.relative_to(PACKAGE)) not in NO_TORCH_YET:
        return
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None), *(alias.name for alias in node.names)]
            assert not any(name and name.split(".")[0] == "torch" for name in names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_exact_code_is_compiled_without_fastmath(path):
    """Every Numba function: cached, lock released, IEEE semantics; no parallel backend of Numba's."""
    for node in ast.walk(ast.parse(path.read_text())):
        for decorator in getattr(node, "decorator_list", []):
            text = ast.unparse(decorator)
            if "njit" in text or "jit(" in text:
                assert text == "njit(cache=True, nogil=True, error_model='numpy')", node.name


def test_import_is_lazy_and_solving_needs_no_torch():
    code = """
import sys
sys.modules["torch"] = None  # an import of torch now fails
import fewbit
heavy = {"numpy", "scipy", "numba", "rich", "matplotlib", "jsonschema"} & set(sys.modules)
assert not heavy, heavy
table = fewbit.solve("gelu", bits=2)
assert len(table.levels) == 4
assert not {"matplotlib", "jsonschema"} & set(sys.modules)
print("done")
"""
    assert run(code) == "done\n"


@pytest.mark.parametrize("name", ["GELU", "functional", "saved_bytes"])
def test_what_needs_torch_says_so(name):
    code = f"""
import sys
sys.modules["torch"] = None
import fewbit
try:
    fewbit.{name}
except ImportError as error:
    print(error)
"""
    assert run(code) == f"fewbit.{name} needs torch: pip install torch\n"


def test_unknown_attribute():
    import fewbit

    with pytest.raises(AttributeError, match="no attribute 'solv'"):
        _ = fewbit.solv
    assert "solve" in dir(fewbit)


def test_no_module_has_the_name_of_a_public_function():
    """Importing such a module, anywhere, would replace the function: `fewbit.verify` was a module after `fewbit verify`."""
    import fewbit

    modules = {path.stem for path in PACKAGE.iterdir()} - {"functional", "nn"}
    assert not modules & set(fewbit.__all__)


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("import fewbit.functions", "torch mpmath matplotlib scipy"),
        ("import numpy, fewbit.functions.callables as c; c.from_callable(numpy.tanh)", "torch matplotlib"),
        ("import fewbit.table", "torch jsonschema matplotlib rich scipy numba click"),
    ],
)  # fmt: skip
def test_the_offline_half_imports_no_library_that_it_does_not_need(code, unwanted):
    found = run(f"import sys; {code}; print(*set({unwanted!r}.split()) & set(sys.modules))")
    assert found == "\n"
