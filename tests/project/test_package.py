"""The package: its requirements, its types, and the files that describe a release.

`python tests/project/test_package.py` rewrites `fewbit/__init__.pyi`.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner

import fewbit
import fewbit.functions
import fewbit.nn
from fewbit import extras
from fewbit.cli import app
from fewbit.errors import FewbitError, MissingPackageError

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fewbit"
STUB = PACKAGE / "__init__.pyi"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]


def name_of(requirement):
    return re.match(r"[\w-]+", requirement)[0].lower()


CORE = {name_of(line) for line in PROJECT["dependencies"]}
EXTRAS = {
    extra: {name_of(line) for line in lines}
    for extra, lines in PROJECT["optional-dependencies"].items()
}


# Requirements


@pytest.mark.parametrize("package", sorted(extras.INSTALLED_BY))
def test_an_extra_installs_the_package_that_a_message_names(package):
    extra = re.fullmatch(r"fewbit\[(\w+)\]", extras.INSTALLED_BY[package])
    if extra is None:
        assert extras.INSTALLED_BY[package] == package
    else:
        assert package in EXTRAS[extra[1]]
        assert extra[1] in PROJECT["optional-dependencies"]["all"][0]


def third_party(path):
    """Yield the names of the packages outside fewbit that a file imports, anywhere in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
        else:
            continue
        for name in names:
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and top != "fewbit":
                yield top


@pytest.mark.processes
def test_every_imported_package_is_a_requirement_or_in_an_extra():
    """Apart from the integrations, which import what their frameworks install."""
    allowed = CORE | set(extras.INSTALLED_BY)
    imports = {path: set(third_party(path)) for path in PACKAGE.rglob("*.py")}
    assert {"numpy", "torch"} <= set().union(*imports.values())
    for path, names in imports.items():
        assert path.parent.name == "integrations" or names <= allowed, path


@pytest.fixture
def hide(monkeypatch):
    """A function that makes later imports of a package fail as if it were not installed."""

    def hidden(package):
        loaded = [name for name in sys.modules if name.partition(".")[0] == package]
        for name in {package, *loaded}:
            monkeypatch.setitem(sys.modules, name, None)

    return hidden


COMMANDS = [
    ("plot gelu --bits 3 -o gelu.png", "fewbit plot", "matplotlib", "plot"),
    ("plan resnet18 -o plan.svg", "fewbit plan -o plan.svg", "matplotlib", "plot"),
    ("demo --steps 1", "fewbit demo", "matplotlib", "plot"),
    ("verify relu.json", "fewbit.verify", "scipy", "numerics"),
    ("compare quantizer --bits 2", "the comparison of quantizers", "scipy", "numerics"),
]


@pytest.mark.fast(len(COMMANDS))
@pytest.mark.parametrize(
    ("line", "feature", "package", "extra"), COMMANDS, ids=[line for line, *_ in COMMANDS]
)
def test_a_command_without_its_package_says_what_to_install(
    line, feature, package, extra, hide, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEWBIT_CACHE", str(tmp_path / "cache"))
    fewbit.load_table("relu", bits=1).save("relu.json")
    hide(package)
    result = CliRunner().invoke(app, line.split(), prog_name="fewbit")
    assert result.exit_code == 2
    last = result.stderr.splitlines()[-1]
    assert last == f"fewbit: error: {feature} needs {package}: pip install 'fewbit[{extra}]'"
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.glob("*.png")) and not list(tmp_path.glob("*.svg"))


def test_an_import_that_a_command_does_not_catch_is_explained_too(hide, monkeypatch):
    hide("scipy")
    monkeypatch.setattr("fewbit.catalog.verification.verify", lambda *_, **__: __import__("scipy"))
    result = CliRunner().invoke(app, ["verify"], prog_name="fewbit")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == (
        "fewbit: error: fewbit verify needs scipy: pip install 'fewbit[numerics]'"
    )


def test_a_missing_package_is_an_import_error_and_an_error_of_fewbit(hide):
    hide("matplotlib")
    with pytest.raises(MissingPackageError) as caught:
        fewbit.load_table("gelu", bits=3).plot()
    assert isinstance(caught.value, FewbitError) and isinstance(caught.value, ImportError)
    assert caught.value.package == "matplotlib"
    assert str(caught.value) == "plotting needs matplotlib: pip install 'fewbit[plot]'"


@pytest.mark.parametrize("module", ["no_such_module", "numpy.no_such_module"])
def test_other_missing_modules_are_not_explained(module):
    """If another version of an installed package lacks a module, an advice to install the package would be wrong."""
    with pytest.raises(ModuleNotFoundError, match=module) as caught:
        with extras.needed_for("a feature"):
            import_module(module)
    assert not isinstance(caught.value, MissingPackageError)


# Types


def stub():
    """Return the text of `fewbit/__init__.pyi`: an import of each public name."""
    homes = {**fewbit._HOME, **dict.fromkeys(fewbit.functions.modules(), "fewbit.nn")}
    homes |= {name: "fewbit" for name in fewbit._PACKAGES}
    homes["__version__"] = "fewbit._version"
    lines = sorted(f"from {home} import {name} as {name}" for name, home in homes.items())
    first = "The public names, for type checkers and editors. `fewbit/__init__.py` imports each name on first use."
    return "\n".join([f'"""{first}"""', "", *lines, ""])


def test_the_stub_has_exactly_the_public_names():
    """If this fails after a change of the public names, run `python tests/project/test_package.py`."""
    found = {}
    for node in ast.parse(STUB.read_text(encoding="utf-8")).body[1:]:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name  # else type checkers treat the name as private
            assert alias.name not in found
            found[alias.name] = node.module
    assert set(found) == set(fewbit.__all__)
    for name, home in found.items():
        if home != "fewbit":
            module = __import__(home, fromlist=[name])
            assert getattr(module, name) is getattr(fewbit, name)


def test_activation_modules_are_those_of_the_registry():
    listed = fewbit.nn.activations.__all__
    assert sorted(listed) == listed
    assert set(listed) == {*fewbit.functions.modules(), "Pointwise"}


SCRIPT = """
import torch
from torch import nn

import fewbit
import fewbit.functional as F

model = nn.Sequential(fewbit.GELU(bits=3), fewbit.nn.Linear(3, 4, bits=2), fewbit.ReLU())
x = torch.ones(2, 3)
fewbit.compress_(model, fewbit.ErrorBound(e2=0.5))
"""
TYPES = {
    'fewbit.compress_(model, fewbit.AdaptiveBits(1.75), layers={"group_size": 64})': "fewbit.compress.controller.Controller",
    "fewbit.compress_(model, bits=2).report": "fewbit.convert.conversion_report.Report",
    "fewbit.restore_": "def (model: torch.nn.modules.module.Module)",
    "fewbit.replace_activations_(model, bits=3)": "fewbit.convert.conversion_report.Report",
    "fewbit.GELU(bits=3)": "fewbit.nn.activations.GELU",
    "fewbit.nn.LayerNorm(3, bits=4)": "fewbit.nn.normalization.LayerNorm",
    "F.gelu(x, bits=2)": "torch._tensor.Tensor",
    'F.conv2d(x, x, padding="same")': "torch._tensor.Tensor",
    'fewbit.solve("gelu", bits=3)': "fewbit.table.table.Table",
    'fewbit.load_table("silu", bits=2, domain=(-3, 3)).error': "float",
    'fewbit.shipped_tables("gelu")': "tuple[fewbit.table.table.Table, ...]",
    "fewbit.saved_bytes(model, x)": "fewbit.analysis.saved_bytes.SavedBytes",
    "fewbit.checkpoint(F.gelu, x, bits=8)": "torch._tensor.Tensor",
    "fewbit.compile(model, bits=2)": "torch.nn.modules.module.Module",
    "fewbit.plan(model, x, lambda model, batch: model(batch).sum())": "fewbit.planning.training_plan.TrainingPlan",
    "fewbit.__version__": "str",
    'fewbit.InputError("text")': "fewbit.errors.InputError",
}
MISTAKES = """
import fewbit
from torch import nn

model = nn.Linear(3, 4)
fewbit.compress_(model, bts=2)
fewbit.compress_("model")
fewbit.GELU(bits="3")
fewbit.solve("gelu", bits=3, domain=4)
fewbit.AdaptiveBits(average="much")
fewbit.compres_(model)
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """The messages of mypy, with the settings of pyproject.toml, for both scripts: {name: [(line, kind, text)]}."""
    pytest.importorskip("mypy")
    folder = tmp_path_factory.mktemp("mypy")
    found = {"right.py": [], "wrong.py": []}
    lines = [f"reveal_type({expression})" for expression in TYPES]
    (folder / "right.py").write_text("\n".join([SCRIPT, *lines]))
    (folder / "wrong.py").write_text(MISTAKES)
    command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml"]
    command += ["--no-error-summary", "--cache-dir", "cache", *found]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, timeout=600
    )
    assert not done.stderr, done.stderr
    for message in done.stdout.splitlines():
        # A message about another file is an error inside fewbit, and fails here.
        name, line, kind, text = re.fullmatch(r"(\w+\.py):(\d+): (\w+): (.*)", message).groups()
        found[name].append((int(line), kind, text))
    return found


@pytest.mark.slow
def test_a_users_script_has_types(checked):
    messages = checked["right.py"]
    assert {kind for _, kind, _ in messages} == {"note"}, messages
    revealed = [re.search('Revealed type is "(.*)"', text)[1] for _, _, text in messages]
    assert dict(zip(TYPES, revealed, strict=True)) == TYPES


@pytest.mark.slow
def test_a_type_checker_finds_a_users_mistakes(checked):
    wrong = {line for line, kind, _ in checked["wrong.py"] if kind == "error"}
    first = MISTAKES.splitlines().index("fewbit.compress_(model, bts=2)") + 1
    assert wrong == set(range(first, first + 6))


# A release


def test_the_changelog_has_a_heading_for_the_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert all(
        re.fullmatch(r"\d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)", heading) for heading in released
    ), headings
    numbers = [tuple(map(int, heading.split()[0].split("."))) for heading in released]
    assert numbers == sorted(numbers, reverse=True) and len(set(numbers)) == len(numbers)
    if re.fullmatch(r"\d+\.\d+\.\d+", fewbit.__version__):  # a release
        assert released[0].split()[0] == fewbit.__version__
    else:  # development of the next one
        assert headings[0] == "Unreleased"
        base = tuple(map(int, re.match(r"(\d+)\.(\d+)\.(\d+)", fewbit.__version__).groups()))
        assert not numbers or numbers[0] < base


def test_the_citation_is_complete():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert citation["title"] == PROJECT["name"] and citation["message"] and citation["authors"]
    assert fewbit.__version__.startswith(citation["version"])
    titles = [reference["title"] for reference in citation["references"]]
    assert len(titles) == len(set(titles)) == 5
    for reference in citation["references"]:
        assert reference["type"] in ("conference-paper", "article")
        assert 2018 < reference["year"] < 2024
        assert all(
            {"family-names", "given-names"} == set(author) for author in reference["authors"]
        )


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_is_valid(path):
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    # YAML 1.1 reads the key `on` as True.
    assert set(workflow) <= {"name", True, "permissions", "concurrency", "env", "jobs"}
    assert workflow["name"] and workflow[True] and workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job["runs-on"] and job["timeout-minutes"] <= 360, name
        assert set(job.get("needs", [])) <= set(workflow["jobs"]), name
        matrix = job.get("strategy", {}).get("matrix", {})
        axes = {*matrix, *(key for row in matrix.get("include", []) for key in row)}
        assert set(re.findall(r"\bmatrix\.(\w+)", str(job))) <= axes, name
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), (name, step)
            if "uses" in step:
                # An action is pinned to a major version, or to the branch of one.
                assert re.fullmatch(r"[\w.-]+/[\w./-]+@(v\d+|release/v\d+)", step["uses"]), step
            for target in re.findall(r"\bmake ([\w-]+)", step.get("run", "")):
                makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
                assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_publishing_needs_the_owners_consent():
    yaml = pytest.importorskip("yaml")
    path = ROOT / ".github" / "workflows" / "wheels.yml"
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    publishing = [
        job
        for job in jobs.values()
        if any("pypi-publish" in step.get("uses", "") for step in job["steps"])
    ]
    (job,) = publishing
    assert "vars.PUBLISH == 'true'" in job["if"] and "refs/tags/v" in job["if"]
    assert job["permissions"] == {"id-token": "write"} and job["environment"] == "pypi"


def test_wheels_are_built_for_every_supported_python():
    listed = {
        line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)
    }
    built = PYPROJECT["tool"]["cibuildwheel"]["build"]
    assert {f"cp{number.replace('.', '')}-*" for number in listed} == set(built)
    assert PROJECT["requires-python"] == f">={min(listed, key=lambda v: int(v[2:]))}"


def test_pre_commit_uses_the_ruff_of_the_tests():
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = {hook["id"]: repo for repo in config["repos"] for hook in repo["hooks"]}
    assert {"ruff-check", "ruff-format", "check-yaml", "check-toml"} <= set(hooks)
    (pinned,) = [line for line in PROJECT["optional-dependencies"]["test"] if "ruff" in line]
    assert pinned == f"ruff=={hooks['ruff-check']['rev'].removeprefix('v')}"
    assert version("ruff") == pinned.partition("==")[2]


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
    for fix in (["check", "--fix", "--select", "I"], ["format"]):
        subprocess.run([sys.executable, "-m", "ruff", *fix, "--quiet", STUB], check=True)
