"""The tool of `make mutants`: the changes that it makes, its sample, and its runs."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import cpp_code, python_code, reach, sample, trees

TOOL = Path(python_code.__file__).parent
CHANGED = {
    "a <= b < c": ["comparison: a < b < c", "comparison: a <= b <= c"],
    "a is not None": ["comparison: a is None"],
    "a + b": ["arithmetic: a - b"],
    "'text' + b": [],
    "f'{a + 1}'": [],
    "-a": ["arithmetic: a"],
    "not a": ["not: a"],
    "a and b": ["and or: a or b"],
    "7": ["constant: 8", "constant: 6"],
    "0.5": ["constant: 1.5", "constant: -0.5"],
    "True": ["constant: False"],
    "'text'": [],
    "b if a else c": ["not: not a"],
    "f(a, b, c)": ["swapped arguments: f(b, a, c)"],
    "max(a, b)": [],
    "f(*a, b)": [],
}
STATEMENTS = {
    "return a": ["return value: return None"],
    "return None": [],
    "raise ValueError('at least', 1)": ["deleted statement: pass"],
    "f()": ["deleted statement: pass"],
    "a.b = c": ["deleted statement: pass"],
    "a = b": [],
    "a += 1": ["arithmetic: a -= 1", "constant: 2", "constant: 0", "deleted statement: pass"],
    "if a: pass": ["not: not a"],
    "assert a < b, g(c, 1)": ["comparison: a <= b"],
    "logger.info(a, 1)": [],
    "warnings.warn(g(a, 1))": ["deleted statement: pass"],
}
DEFINITIONS = {
    "def f(a: Literal[1] = 2, *, b=True) -> Literal[3]: ...": ["default: 3", "default: 1", "default: False"],
    "class A:\n    a: Literal[1] = 5": ["constant: 6", "constant: 4"],
    "@cache\ndef f(): ...": ["decorator: "],
    "@overload\ndef f(a=1): ...": [],
    '"""Text."""\n__all__ = ["a", *b(c, 1)]': [],
    "def __repr__(self): return g(1, 2)": [],
    "from a import b\nif TYPE_CHECKING:\n    a = 1": [],
}  # fmt: skip
CPP = {
    "if (a <= b && c) {": ["comparison: if (a < b && c) {", "and or: if (a <= b || c) {"],
    "x = a * b->c;": ["arithmetic: x = a / b->c;"],
    "int* p = &a; vector<int> v;": [],
    "n = 0x1Fu; m = 2.5f;": [
        "constant: n = 32u; m = 2.5f;", "constant: n = 30u; m = 2.5f;",
        "constant: n = 0x1Fu; m = 3.5f;", "constant: n = 0x1Fu; m = 1.5f;",
    ],
    "int32_t a = 0;": ["constant: int32_t a = 1;"],
    '// a < 1\n/* 2\n 3 */ f("a < 4"); #': [],
    "#define A 1\nstatic_assert(sizeof(a) == 4, \"4\");": [],
    "template <int N = 3>\nvoid f() { return true; }": ["constant: void f() { return false; }"],
}  # fmt: skip


def texts(mutations):
    return [f"{mutation.kind}: {mutation.after}" for mutation in mutations]


@pytest.mark.parametrize("source", [*CHANGED, *STATEMENTS, *DEFINITIONS])
def test_mutations_of_python(source):
    """They have as many lines as the source, and compile."""
    expected = (CHANGED | STATEMENTS | DEFINITIONS)[source]
    whole = source
    if source in CHANGED:
        whole = f"x = 'äö', (\n    {source}\n)"
    elif source in STATEMENTS:
        whole = f"def f(a, b, c):\n    {source}"
    found = python_code.mutations(whole)
    assert sorted(texts(found)) == sorted(expected)
    for mutation in found:
        mutant = mutation.applied(whole)
        assert ast.dump(ast.parse(mutant)) != ast.dump(ast.parse(whole))
        assert mutant.count("\n") == whole.count("\n")


@pytest.mark.parametrize("source", CPP)
def test_mutations_of_cpp(source):
    found = cpp_code.mutations(source)
    assert sorted(texts(found)) == sorted(CPP[source])
    for mutation in found:
        lines = mutation.applied(source).split("\n")
        assert " ".join(lines[mutation.line - 1].split()) == mutation.after


SMALL = '''
"""A module."""

LIMIT = 3


def clipped(x, most=LIMIT):
    return min(x, most)


def shifted(x, by=1):
    return sum([x, by])


def twice(x):
    return x * 2


def ignored(x):
    return x + 1


def unused(x):
    return x - 1
'''
TESTS = """
import pytest
from fewbit.folder import small

def test_clipped():
    assert small.clipped(9) == 3

def test_shifted():
    assert small.shifted(5) == 6

@pytest.mark.slow
def test_twice():
    assert small.twice(3) == 6

def test_ignored():
    small.ignored(3)

def test_fails():
    assert small.twice(3) == 7
"""


@pytest.fixture
def project(tmp_path):
    """A project of one module, with tests, and with this tool."""
    (tmp_path / "fewbit" / "folder").mkdir(parents=True)
    (tmp_path / "fewbit" / "folder" / "__init__.py").touch()
    (tmp_path / "fewbit" / "folder" / "small.py").write_text(SMALL)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_small.py").write_text(TESTS)
    return tmp_path


def test_one_seed_draws_one_sample(project):
    drawn = [[mutant.name for mutant in sample.draw(project, 5, seed)] for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 5
    assert len({name.split(":")[1] for name in drawn[0]}) == 5
    assert not sample.draw(project, 5, 3, only="csrc/*")


def test_mutants_are_found_where_lines_have_moved(project):
    names = [mutant.name for mutant in sample.draw(project, 20, 0)]
    path = project / "fewbit" / "folder" / "small.py"
    path.write_text("\n\n" + SMALL.replace("x * 2", "x + x"))
    found, gone = sample.found_again(project, names)
    assert gone == [name for name in names if ":16:" in name]
    lines = [int(name.split(":")[1]) + 2 for name in names if name not in gone]
    assert [mutant.mutation.line for mutant in found] == lines


def test_the_order_of_tests(tmp_path):
    """Fast tests come first, then those of the fastest file, and of each file the first cases."""
    (tmp_path / "fewbit").mkdir()
    (tmp_path / "fewbit" / "a.py").write_text("def f(x):\n    return -x\n")
    key = "fewbit/a.py:f"
    tests = {
        "b.py::test[1]": ["passed", 0.1, [key], True],
        "b.py::test[2]": ["passed", 0.2, [key], True],
        "b.py::other": ["passed", 0.3, [key], True],
        "a.py::slow": ["passed", 9.0, [key], True],
        "a.py::first": ["passed", 0.0, [key], False],
        "a.py::fails": ["failed", 0.0, [key], True],
        "a.py::elsewhere": ["passed", 0.0, ["fewbit/b.py:f"], True],
    }
    found = reach.Reach(tests)
    order = ["b.py::test[1]", "b.py::other", "b.py::test[2]", "a.py::slow", "a.py::first"]
    mutant, *_ = [one for one in sample.all_of(tmp_path, "fewbit/a.py") if one.mutation.line == 2]
    assert found.tests_of(tmp_path, mutant) == order


@pytest.mark.slow
def test_a_run(project):
    """Mutants are killed wherever they are in a module; results are kept and compared."""
    shutil.copytree(TOOL, project / "tests" / "mutants")
    shutil.copy(TOOL.parent / "tiers.py", project / "tests")
    (project / ".gitignore").write_text("build\n__pycache__\n")
    subprocess.run(["git", "init", "--quiet", project], check=True)

    def run(*arguments, code=0):
        command = [sys.executable, "tests/mutants", "--processes", "1", *arguments]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=600)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    output = run("--number", "20", "--tier", "all", "--output", "build/before.json")
    assert "fail in a copy: 1\ntests/test_small.py::test_fails\n" in output
    before = json.loads((project / "build" / "before.json").read_text())["mutants"]
    statuses = {int(name.split(":")[1]): found["status"] for name, found in before.items()}
    expected = {4: "killed", 8: "killed", 11: "killed", 12: "killed", 16: "killed slowly"}
    assert statuses == {**expected, 20: "survived", 24: "survived"}
    assert not list(project.glob("build/*.part"))

    # A run that was interrupted goes on.
    first, *_ = before
    kept = {"mutants": {first: before[first] | {"seconds": 99.0}}}
    files = trees.files_of(project)
    (project / "build" / "again.json.part").write_text(
        json.dumps(kept | {"tree": trees.digest_of(project, files)})
    )
    run("--number", "20", "--tier", "all", "--output", "build/again.json")
    again = json.loads((project / "build" / "again.json").read_text())["mutants"]
    assert again[first]["seconds"] == 99.0
    assert {name: found["status"] for name, found in again.items()} == {
        name: found["status"] for name, found in before.items()
    }

    tests = project / "tests" / "test_small.py"
    tests.write_text(TESTS.replace("assert small.twice(3) == 6", "small.twice(3)"))
    arguments = "--base", "build/before.json", "--tier", "all", "--output", "build/after.json"
    assert run(*arguments, code=1).count("was killed by tests/test_small.py::test_twice") == 1
    assert "exists: expected a new file" in run(*arguments, code=1)
