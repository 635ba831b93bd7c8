"""The command line: output, files, errors and start-up time."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from problems import solved

import fewbit
from fewbit import functions
from fewbit.catalog import store
from fewbit.catalog.listing import format_ranges
from fewbit.cli import app
from fewbit.cli.progress_bar import Progress
from fewbit.table import Table, save_tables

ROOT = Path(__file__).parents[2]


def run(*arguments, **kwargs):
    environment = {"COLUMNS": "80", **kwargs.pop("env", {})}
    return CliRunner().invoke(app, [*arguments], prog_name="fewbit", env=environment, **kwargs)


def succeed(*arguments, **kwargs):
    result = run(*arguments, **kwargs)
    assert result.exit_code == 0, result.stderr
    return result


def program(*arguments, **kwargs):
    """Run the command line of the checkout as a process."""
    return subprocess.run(
        [sys.executable, ROOT / "cli.py", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        **kwargs,
    )


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Give every test its own working directory and cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEWBIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def shipped_files(tmp_path_factory):
    """Return a directory of shipped tables with two small files."""
    directory = tmp_path_factory.mktemp("shipped")
    for name in ("relu", "gelu"):
        tables = [solved(name, bits) for bits in (1, 2)]
        tables.append(solved(name, 2, form="intervals"))
        tables.append(solved(name, 2, weight="normal"))
        save_tables(directory / f"{name}.json", name, tables)
    return directory


@pytest.fixture
def shipped(shipped_files, monkeypatch):
    """Replace the directory of shipped tables by the one with two small files."""
    monkeypatch.setattr(store, "tables_directory", lambda: shipped_files)
    store.shipped_tables.cache_clear()
    yield shipped_files
    store.shipped_tables.cache_clear()


def test_the_summary_says_what_the_table_is_worth():
    table = solved("gelu", 3)
    out = succeed("solve", "gelu", "--bits", "3").stdout
    lines = out.splitlines()
    text = {line[:16].strip(): line[16:].strip() for line in lines}
    assert lines[0] == "gelu, 3 bits: 8 levels in 10 pieces"
    assert text["weight"] == "uniform on [-10, 10]"
    assert text["error"].startswith(f"{table.error:.6g} ")
    assert text["lower bound"].startswith(f"{table.lower_bound:.6g} ")
    assert f"gap {100 * table.gap:.3g} %" in text["lower bound"]
    assert text["relative error"].startswith(f"{100 * table.relative_error:.3g} %")
    assert text["status"].startswith("stationary ")
    assert f"grid {table.solver['grid']}" in text["solver"]
    assert text["paper"].split("  ")[0] == "0.0119"
    assert "1.47x lower than Few-bit Backward, Table 3" in text["paper"]
    assert "where x is in" in out


@pytest.mark.slow
def test_the_summary_says_that_levels_are_drawn():
    """On each piece of such a table, one of two levels is drawn. So there may be more levels than pieces."""
    command = "solve value --bits 1 --weight normal --grid 64 --objective unbiased"
    first = succeed(*command.split()).stdout.splitlines()[0]
    assert first == "value, 1 bit: 2 levels drawn in 1 piece"


def test_the_summary_draws_and_lists_the_levels():
    out = succeed("solve", "relu6", "--bits", "1").stdout
    assert re.search("[▔─▁]{10}", out)
    rows = [line.split(maxsplit=2) for line in out.splitlines()[-2:]]
    assert [float(row[1]) for row in rows] == [0.0, 1.0]
    # torch's gradient at both kinks is 0, and the brackets say so.
    assert [row[2].strip() for row in rows] == ["(-inf, 0]  [6, inf)", "(0, 6)"]


@pytest.mark.parametrize(
    "arguments", ["gelu --bits 6 --grid 512", "silu --bits 3 --objective unbiased"]
)
def test_human_output_fits_80_columns_and_is_plain_in_a_pipe(arguments):
    out = succeed("solve", *arguments.split()).stdout
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    # More than 16 levels are not listed.
    assert ("where x is in" in out) == ("--bits 3" in arguments)


@pytest.mark.parametrize(
    ("arguments", "paper"),
    [
        ("gelu --bits 1", "the same digits"),
        ("selu --bits 2", "1.53x lower"),
        ("gelu --bits 3 --no-refine --grid 64 --form intervals", "x higher"),
        ("softplus --bits 3 --param beta=2", None),
    ],
)
def test_the_paper_is_named_only_beside_its_own_problem(arguments, paper):
    out = succeed("solve", *arguments.split()).stdout
    line = next((line for line in out.splitlines() if line.startswith("paper ")), None)
    assert line is None if paper is None else paper in line


REQUESTS = [
    ("swish --bits 2", {"bits": 2}),
    ("gelu --bits 3 --form intervals", {"bits": 3, "form": "intervals"}),
    ("gelu --bits 2 --weight normal:-1,0.5", {"bits": 2, "weight": "normal:-1,0.5"}),
    ("gelu --bits 2 --domain -5 -1e-1", {"bits": 2, "domain": (-5, -0.1)}),
    ("tanh --bits 2 --objective minimax", {"bits": 2, "objective": "minimax"}),
    ("silu --bits 2 --objective unbiased", {"bits": 2, "objective": "unbiased"}),
    ("silu --bits 2 --tails pinned", {"bits": 2, "tails": "pinned"}),
    ("silu --levels 5", {"levels": 5}),
    ("silu --bits 2 --grid 512 --no-refine", {"bits": 2, "grid": 512, "refine": False}),
    ("silu --bits 2 --threads 1", {"bits": 2, "threads": 1}),
    ("elu --bits 2 --param alpha=0.5", {"bits": 2, "parameters": {"alpha": 0.5}}),
    (
        "hardtanh --bits 1 --param min_val=-2 --param max_val=3",
        {"bits": 1, "parameters": {"min_val": -2, "max_val": 3}},
    ),
]


@pytest.mark.parametrize(("arguments", "request_"), REQUESTS)
def test_json_is_one_table_document_and_nothing_else(arguments, request_):
    result = succeed("solve", *arguments.split(), "--json")
    table = Table.from_document(json.loads(result.stdout))
    assert table == fewbit.solve(arguments.split()[0], **request_)
    assert result.stderr == ""


def test_a_function_of_a_module_in_the_current_directory(monkeypatch):
    Path("my_activations.py").write_text(
        "import numpy as np\ndef bent(x):\n    return np.where(x > 1, 2 * x - 1, x)\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    result = succeed("solve", "my_activations:bent", "--bits", "1", "--json")
    table = Table.from_document(json.loads(result.stdout))
    assert table.function == "my_activations:bent"
    assert table.error < 1e-15
    assert table.levels.tolist() == pytest.approx([1, 2], abs=1e-9)


def test_an_unbounded_derivative_is_one_line_on_standard_error():
    result = succeed("solve", "relu_squared", "--bits", "2", "--json")
    assert json.loads(result.stdout)["function"] == "relu_squared"
    assert result.stderr.startswith("fewbit: warning: relu_squared: ")
    assert result.stderr.count("\n") == 1


def test_output_is_the_table_document():
    Path("gelu.json").write_text("mine")
    arguments = "solve", "gelu", "--bits", "2", "-o", "gelu.json", "--force"
    assert succeed(*arguments).stdout.endswith("\nsaved to gelu.json\n")
    assert Table.load("gelu.json") == fewbit.solve("gelu", 2)
    assert os.listdir() == ["gelu.json"]
    printed = succeed(*arguments, "--json").stdout
    assert Table.from_document(json.loads(printed)) == Table.load("gelu.json")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("solve gelu --bits 2", "out.json"),
        ("plot gelu --bits 2", "out.png"),
        ("compare gelu --bits 2", "out.csv"),
    ],
)
def test_an_existing_file_is_refused_before_any_work(command, name, monkeypatch):
    for work in ("solver.solve.solve", "catalog.store.load_table", "catalog.comparison.compare"):
        monkeypatch.setattr(f"fewbit.{work}", lambda *_, **__: pytest.fail("worked before"))
    Path(name).write_text("mine")
    result = run(*command.split(), "-o", name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"fewbit: error: {name} exists; pass --force to overwrite it\n"
    assert Path(name).read_text() == "mine"
    result = run(*command.split(), "-o", f"missing/{name}")
    assert result.exit_code == 2
    assert "existing directory" in result.stderr


def test_a_file_that_comes_meanwhile_is_refused_in_the_same_words(monkeypatch):
    monkeypatch.setattr("fewbit.cli.options.check_writable", lambda *_: None)
    Path("gelu.json").write_text("mine")
    result = run("solve", "gelu", "--bits", "2", "-o", "gelu.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "fewbit: error: gelu.json exists; pass --force to overwrite it\n"


NAME = "expected a function that 'fewbit list' shows, or package.module:name"
NAME_OR_FILE = "expected a function that 'fewbit list' shows, or a JSON file of tables: a path that ends in .json"
ERRORS = [
    ("solve gelo --bits 3", "unknown function 'gelo': did you mean gelu"),
    ("solve math:log --bits 3", "math:log"),
    ("solve gelu", "expected --bits from 1 to 8, or --levels from 2 to 256, got neither"),
    ("solve gelu --bits 3 --domain -1", "'--domain' requires 2 arguments"),
    ("solve gelu --bits 3 --weight broken.npy", "broken.npy: cannot be read as a weight"),
    ("solve elu --bits 3 --param =2", "expected NAME=VALUE with a number, got '=2'"),
    ("solve elu --bits 3 --param alpha=two", "expected NAME=VALUE with a number"),
    ("solve elu --bits 3 --param alpha=1 --param alpha=2", "'alpha' twice"),
    ("solve gelu --bits 3 --bits 4", "expected --bits once, got it 2 times"),
    ("solve", "missing argument 'NAME'"),
    ("solve a/b --bits 2", f"a/b: {NAME}, got a file"),
    ("solve numpy.tan --bits 2", f"numpy.tan: {NAME}"),
    ("solve numpy:tan --bits 2", "choose a domain (--domain) without that point"),
    ("slove gelu", "unknown command 'slove': did you mean solve?"),
    ("frobnicate", "unknown command 'frobnicate': expected "),
    ("--nope", "no such option '--nope'"),
    ("show missing.json", "missing.json: expected a readable file"),
    ("show broken.json", "broken.json: expected JSON"),
    ("show numpy:arctan", "no such table is shipped"),
    ("show one.json --bits 7", "of its 1 table none matches"),
    ("show a.py", f"a.py: {NAME_OR_FILE}"),
    ("plot a.py -o a.png", f"a.py: {NAME_OR_FILE}"),
    ("plot gelu -o gelu.png", "expected --bits"),
    ("plot gelu --bits 2", "missing option '-o' / '--output'"),
    ("plot gelu --bits 2 -o a.png --output b.png", "expected --output once, got it 2 times"),
    ("plot several.json -o x.png", "expected one table, got 2"),
    ("memory resnet18 --batch=1 --batch=2", "expected --batch once, got it 2 times"),
    ("compare quantizer gelu", "expected names of functions, or quantizer alone, got quantizer gelu"),
    ("compare quantiser", "unknown function 'quantiser': did you mean quantizer?"),
    ("compare gelu -o x.txt", "x.txt: expected a file name that ends in .csv or .json"),
    ("compare one.json", f"one.json: {NAME}, got a"),
]  # fmt: skip


@pytest.fixture
def inputs():
    Path("broken.npy").write_bytes(b"not an array")
    Path("broken.json").write_text("{")
    tables = [solved("relu", bits) for bits in (1, 2)]
    tables[0].save("one.json")
    save_tables("several.json", "relu", tables)


@pytest.mark.parametrize(("arguments", "message"), ERRORS)
def test_a_wrong_request_is_one_line_and_exit_code_2(arguments, message, inputs):
    before = sorted(os.listdir())
    result = run(*arguments.split())
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message.lower() in result.stderr.lower()
    assert result.stderr.startswith("fewbit: error: ")
    assert result.stderr.count("\n") == 1
    assert sorted(os.listdir()) == before


def test_a_bug_is_one_line_and_says_how_to_see_it(monkeypatch):
    raised = ZeroDivisionError("two\nlines")

    def broken(*_, **__):
        raise raised

    monkeypatch.setattr("fewbit.solver.solve.solve", broken)
    message = "unexpected ZeroDivisionError: two lines (the traceback: set FEWBIT_TRACEBACK=1)"
    line = f"fewbit: error: {message}\n"
    result = run("solve", "gelu", "--bits", "3")
    assert (result.exit_code, result.stdout, result.stderr) == (70, "", line)
    result = run("solve", "gelu", "--bits", "3", env={"FEWBIT_TRACEBACK": "1"})
    assert result.exit_code == 70 and result.stderr.endswith(line)
    assert "Traceback (most recent call last)" in result.stderr
    assert "in broken" in result.stderr
    raised = MemoryError()
    line = "fewbit: error: not enough memory for this request\n"
    result = run("solve", "gelu", "--bits", "3")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", line)


CODE = {
    "ends the program": ("raise SystemExit(3)", "expected code that does not end the program, got SystemExit: 3"),
    "raises": ("raise ValueError('a\\nb')", "cannot import 'mine': ValueError: a b"),
    "has a wrong syntax": ("def", "cannot import 'mine': SyntaxError"),
    "escapes": ("raise ValueError('\\x1b[2J')", r"ValueError: \x1b[2J"),
    "has a function that ends the program": (
        "def f(*x): raise GeneratorExit", "expected code that does not end the program, got GeneratorExit"
    ),
    "reads": ("input()", "cannot import 'mine': EOFError"),
    "has no text": (
        "class Odd(Exception):\n    def __str__(self): raise TypeError\nraise Odd", "cannot import 'mine': Odd"
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("what", "command"),
    [
        *((what, "solve mine:f --bits 2") for what in CODE),
        ("raises", "plan mine:f"),
        ("ends the program", "verify own.json --function mine:f"),
    ],
)
def test_whatever_a_module_of_the_users_does_is_one_line(what, command, monkeypatch):
    code, message = CODE[what]
    Path("mine.py").write_text(code)
    replace(solved("gelu", 1), function="own:f").save("own.json")
    monkeypatch.syspath_prepend(os.getcwd())
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    result = run(*command.split(), input="")
    assert result.exit_code == 2 and result.stdout == ""
    assert message in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.slow
def test_ctrl_c_in_a_module_of_the_users():
    Path("mine.py").write_text("raise KeyboardInterrupt")
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    result = program("solve", "mine:f", "--bits", "2", env=environment)
    assert (result.returncode, result.stderr) == (130, "fewbit: interrupted\n")


def test_what_a_file_names_is_never_imported_or_called(monkeypatch):
    name = "sys:exit"
    monkeypatch.setattr("fewbit.functions.callables.import_callable", pytest.fail)
    replace(solved("gelu", 2), function=name).save("hostile.json")
    out = succeed("show", "hostile.json").stdout
    assert out.startswith(f"{name}, 2 bits: 4 levels") and "f'   " not in out
    succeed("show", "hostile.json", "--json")
    succeed("plot", "hostile.json", "-o", "hostile.png")
    result = run("verify", "hostile.json")
    assert result.exit_code == 2 and "not checked" in result.stdout
    assert "fewbit has no function" in " ".join(result.stdout.split())


@pytest.mark.slow
def test_the_user_may_name_the_function_of_a_file():
    replace(fewbit.solve("tanh", 2, domain=(-8, 8)), function="own:f").save("own.json")
    assert "holds" in succeed("verify", "own.json", "--function", "numpy:tanh").stdout
    assert "f'   " in succeed("show", "own.json", "--function", "numpy:tanh").stdout
    succeed("plot", "own.json", "-o", "own.svg", "--function", "numpy:tanh")
    result = run("verify", "own.json", "--function", "numpy:arctan")
    assert result.exit_code == 1 and "1 wrong" in result.stdout
    result = run("show", "gelu", "--bits", "2", "--function", "numpy:tanh")
    assert result.exit_code == 2 and "expected a FILE with --function" in result.stderr


CHARACTERS = ["\x1b[2J", "\x1b]8;;http://a\x07", "\u202e", "\x9b1m", "\r", "\n", "\udc80", "\u2066", "\x00"]  # fmt: skip
FIELDS = {
    "function": lambda text: text,
    "parameters": lambda text: {text: 1.0},
    "solver": lambda text: {"version": text, "grid": 1},
    "weight": lambda text: {"kind": "callable", "name": text},
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_file_with_characters_that_a_terminal_acts_on_is_refused(field):
    document = solved("gelu", 1).document()
    for character in CHARACTERS:
        text = json.dumps(document | {field: FIELDS[field](f"a{character}")})
        Path("odd.json").write_text(text)
        result = run("show", "odd.json")
        assert (result.exit_code, result.stdout) == (2, ""), ascii(character)
        assert character not in result.stderr.rstrip("\n")
        assert "expected printable characters" in result.stderr


@pytest.mark.parametrize(
    "command",
    ["solve {}", "show {}.json", "show ./{}", "frobnicate{}", "solve gelu --weight {}", "verify {}",
     "solve gelu --bits {}", "solve gelu --bits 1 -o {}/a.json", "solve elu --param {}=a", "solve {}:f"],
)  # fmt: skip
def test_arguments_are_shown_with_such_characters_escaped(command):
    for character in ("\x1b[2J", "\n", "\udc80"):
        result = run(*command.format(f"a{character}").split(" "))
        assert result.exit_code == 2 and result.stderr.count("\n") == 1
        assert character not in result.stderr.rstrip("\n")


def test_names_of_files_are_shown_escaped():
    name = "a\x1b[2J.json"
    solved("gelu", 1).save(name)
    for command in (["verify", name], ["solve", "gelu", "--bits", "1", "-o", name, "--force"]):
        assert "\x1b" not in succeed(*command).stdout
    save_tables(name, "gelu", [solved("gelu", 1), solved("gelu", 2)], force=True)
    assert r"a\x1b[2J.json" in succeed("show", name).stdout


ODD_FILES = {
    "x" * 300 + ".json": lambda path: None,
    "circle.json": lambda path: path.symlink_to(path),
    "folder.json": lambda path: path.mkdir(),
    "pipe.json": lambda path: os.mkfifo(path),
}
INPUTS = {
    **ODD_FILES,
    "deep.json": lambda path: path.write_text("[" * 200_000),
    "large.json": lambda path: path.write_text(" " * 30_000_000),
    "/dev/zero": lambda path: None,
}
OUTPUTS = {
    **ODD_FILES,
    "missing/a.json": lambda path: None,
    "/dev/null/a.json": lambda path: None,
}


@pytest.mark.parametrize("name", INPUTS, ids=lambda name: name[:12])
def test_any_kind_of_file_is_one_line_and_soon(name):
    INPUTS[name](Path(name))
    before = sorted(os.listdir())
    started = time.perf_counter()
    for command in ("show", "plot -o x.png", "verify"):
        result = run(*command.split(), name)
        assert (result.exit_code, result.stdout) == (2, ""), command
        assert result.stderr.startswith(f"fewbit: error: {name}: expected ")
        assert result.stderr.count("\n") == 1 and sorted(os.listdir()) == before
    assert time.perf_counter() - started < 20


@pytest.mark.parametrize("name", OUTPUTS, ids=lambda name: name[:12])
def test_an_output_that_cannot_be_written_is_refused_before_any_work(name, monkeypatch):
    OUTPUTS[name](Path(name))
    before = sorted(os.listdir())
    monkeypatch.setattr("fewbit.solver.solve.solve", lambda *_, **__: pytest.fail("solved first"))
    result = run("solve", "gelu", "--bits", "2", "-o", name, "--force")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"fewbit: error: {name}: expected a ")
    assert result.stderr.count("\n") == 1 and sorted(os.listdir()) == before


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["0", "\u00b2", "9" * 30, "7"])
def test_any_width_of_the_terminal(columns):
    result = program("show", "gelu", "--bits", "2", env={**os.environ, "COLUMNS": columns})
    assert (result.returncode, result.stderr) == (0, "")
    assert "gelu" in "".join(result.stdout.split())


@pytest.mark.parametrize("count", ["0", "+0", "0_0"])
def test_a_number_of_threads_that_numba_cannot_use_is_one_line(count):
    result = run("show", "gelu", env={"NUMBA_NUM_THREADS": count})
    line = f"fewbit: error: NUMBA_NUM_THREADS: expected 1 or more, got {count}\n"
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", line)
    succeed("show", "gelu", env={"NUMBA_NUM_THREADS": "many"})  # which numba ignores


@pytest.mark.slow
def test_a_matplotlib_that_cannot_be_used_is_one_line():
    environment = {**os.environ, "MPLBACKEND": "nonsense"}
    result = program("plot", "gelu", "--bits", "2", "-o", "a.png", env=environment)
    assert (result.returncode, result.stdout) == (2, "")
    start = "fewbit: error: matplotlib cannot be used: ValueError: Key backend: 'nonsense'"
    assert result.stderr.startswith(start) and result.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="there is no device that is always full"
)
@pytest.mark.parametrize(
    ("arguments", "redirection"),
    [
        ("list", ">/dev/full"),
        ("list", ">&-"),
        ("--version", ">&-"),
        ("show gelu --bits 2 --json", "a closed pipe"),
        ("verify {relu}", "a closed pipe"),
    ],
)
def test_output_that_is_full_or_closed_ends_quietly_with_a_code_of_its_own(arguments, redirection):
    arguments = arguments.format(relu=store.tables_directory() / "relu.json").split()
    reader, writer = os.pipe()
    os.close(reader)
    if redirection == "a closed pipe":
        result = redirected("", *arguments, stdout=writer, stderr=subprocess.PIPE)
    else:
        result = redirected(redirection, *arguments, stderr=subprocess.PIPE)
    assert (result.returncode, result.stderr) == (141, b"")
    os.close(writer)


def redirected(redirection, *arguments, **kwargs):
    """Run the command line of the checkout in a shell that redirects its output."""
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, ROOT / "cli.py"]
    return subprocess.run([*command, *arguments], timeout=120, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", ">&- 2>&-"])
def test_an_error_of_a_process_has_its_code_though_nobody_can_see_it(redirection):
    result = redirected(redirection, "solve", "gelo", "--bits", "3", capture_output=True)
    assert (result.returncode, result.stdout, result.stderr) == (2, b"", b"")


@pytest.mark.slow
def test_a_closed_output_is_nobody_elses():
    """If the descriptor of a closed standard output were not reserved, the next opened file would get it."""
    redirected(">&-", "solve", "relu", "--bits", "1", "-o", "relu.json")
    assert Table.load("relu.json").function == "relu"


@pytest.mark.processes
@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_ctrl_c_is_one_line_exit_code_130_and_no_file():
    command = [sys.executable, ROOT / "cli.py", "solve", "gelu", "--bits", "8", "-o", "gelu.json"]
    process = subprocess.Popen(
        [*command, "--form", "intervals", "--grid", "200000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what it runs in the background with the signal ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    time.sleep(2.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "fewbit: interrupted\n")
    assert os.listdir() == []


def test_ctrl_c_in_python_code_that_c_code_calls_is_not_lost():
    """An exception cannot pass through the C code that called the function, as that of Numba's compiler does."""
    script = """
        import ctypes, signal, time
        from fewbit.cli.interrupts import repeat_lost
        # A shell starts what it runs in the background with the signal ignored, and that is inherited.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        repeat_lost()
        call = ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(signal.SIGINT))
        start = time.monotonic()
        try:
            call()
            time.sleep(20)
        except KeyboardInterrupt:
            print("interrupted at once" if time.monotonic() - start < 10 else "too late")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("interrupted at once\n", "")


@pytest.mark.slow
def test_a_terminal_that_lacks_the_characters_still_gets_the_numbers():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    result = program("solve", "relu", "--bits", "1", env=environment)
    assert result.returncode == 0
    assert "relu, 1 bit: 2 levels in 2 pieces" in result.stdout


def test_list_names_every_function(shipped):
    out = succeed("list").stdout
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert {*functions.names(), *functions.solver_names()} <= set(rows)
    assert max(map(len, out.splitlines())) <= 80
    assert "swish" in rows["silu"]
    assert "negative_slope=0.01" in rows["leaky_relu"] and "0.01, 1 " in rows["leaky_relu"]
    assert " 1-2 " in rows["gelu"]
    assert "[-12, 12]" in rows["gelu_10"]
    assert rows["identity:"].endswith("f(x) = x. Its derivative is 1.")
    text = "f(x) = x^2 / 2. Its derivative is x, so its tables are quantizers of x."
    assert rows["value:"].endswith(text)


def test_list_as_json(shipped):
    known = {record["function"]: record for record in json.loads(succeed("list", "--json").stdout)}
    assert list(known) == [*functions.names(), *functions.solver_names()]
    aliases = {alias: name for name, record in known.items() for alias in record["aliases"]}
    assert aliases == dict(functions.aliases())
    assert known["elu"]["parameters"] == {"alpha": 1.0}
    assert known["relu_squared"]["slopes"] == [0.0, "inf"]
    assert (known["gelu"]["shipped_bits"], known["silu"]["shipped_bits"]) == ([1, 2], [])


@pytest.mark.parametrize(
    ("numbers", "text"), [([], "-"), ([3], "3"), ([1, 2, 3], "1-3"), ([1, 2, 4, 6, 7], "1-2,4,6-7")]
)
def test_ranges(numbers, text):
    assert format_ranges(numbers) == text


def test_show_finds_the_shipped_table_without_solving(shipped, monkeypatch):
    monkeypatch.setattr("fewbit.solver.solve.solve", None)
    Path("gelu").write_text("a file named like a function does not hide it")
    out = succeed("show", "gelu", "--bits", "2", "--weight", "normal", "--json").stdout
    assert Table.from_document(json.loads(out)) == solved("gelu", 2, weight="normal")
    assert "gelu, 2 bits: 4 levels in 4 pieces" in succeed("show", "gelu", "--bits", "2").stdout


def test_show_lists_what_is_shipped(shipped):
    lines = succeed("show", "gelu").stdout.splitlines()
    assert lines[0] == "gelu"
    rows = [" ".join(line.split()[:2]) for line in lines[4:]]
    assert rows == ["1 levels", "2 levels", "2 intervals", "2 levels"]
    assert "normal(0, 1)" in lines[-1]
    document = json.loads(succeed("show", "gelu", "--json").stdout)
    assert (document["schema"], len(document["tables"])) == ("fewbit.tables/1", 4)


def test_show_selects_from_a_file(shipped):
    path = str(shipped / "gelu.json")
    one = succeed("show", path, "--bits", "2", "--form", "intervals", "--json").stdout
    assert Table.from_document(json.loads(one)) == solved("gelu", 2, form="intervals")
    one = succeed("show", path, "--weight", "normal:0,1", "--json").stdout
    assert Table.from_document(json.loads(one)) == solved("gelu", 2, weight="normal")
    two = succeed("show", path, "--bits", "2", "--form", "levels").stdout
    assert len(two.splitlines()) == 6


@pytest.mark.slow
def test_a_table_of_a_function_beyond_float32_is_drawn_without_it():
    """The parameter comes from a file, and matplotlib cannot scale an axis of such numbers."""
    document = fewbit.load_table("gelu", 2).document() | {"function": "elu"}
    for alpha in (1e308, -1e39):
        Path("table.json").write_text(json.dumps(document | {"parameters": {"alpha": alpha}}))
        succeed("plot", "table.json", "-o", "table.png", "--force")
        assert Path("table.png").read_bytes().startswith(b"\x89PNG")


def test_compare_as_json_and_as_files():
    rows = json.loads(succeed("compare", "swish", "mish", "--bits", "2", "--json").stdout)
    assert [(row["function"], row["paper"]) for row in rows] == [("silu", 0.0479), ("mish", None)]
    assert "saved to" in succeed("compare", "relu", "--bits", "1", "-o", "rows.csv").stdout
    assert Path("rows.csv").read_text().startswith("function,bits,paper,")
    succeed("compare", "relu", "--bits", "1", "-o", "rows.json")
    assert json.loads(Path("rows.json").read_text())[0]["levels"] == 0


def test_verify_all_that_is_shipped(shipped, tmp_path, monkeypatch):
    out = succeed("verify").stdout
    rows = [line.split() for line in out.splitlines()[2:]]
    found = [(row[0], row[1], row[-1]) for row in rows]
    assert found == [("gelu.json", "4", "holds"), ("relu.json", "4", "holds")]
    assert float(rows[0][2]) < 1e-9
    monkeypatch.setattr(store, "tables_directory", lambda: tmp_path / "missing")
    assert run("verify").exit_code == 2


def test_verify_exits_with_1_if_a_claim_does_not_hold_and_with_2_if_a_file_cannot_be_read(inputs):
    table = solved("gelu", 2)
    replace(table, error=1.01 * table.error).save("wrong.json")
    result = run("verify", "one.json", "wrong.json")
    assert result.exit_code == 1 and "1 wrong" in result.stdout
    assert "wrong.json, tables[0]: error: claimed 0.0409" in result.stdout
    for files, code in ((["one.json"], 1), (["broken.json", "one.json"], 2)):
        result = run("verify", "wrong.json", *files, "--json")
        assert result.exit_code == code
        # The files that can be read are verified in any case.
        assert [record["holds"] for record in json.loads(result.stdout)] == [False, True]
    assert result.stderr.startswith("fewbit: error: broken.json: ")


def test_version_and_help():
    version = f"fewbit {fewbit.__version__}\n"
    assert succeed("--version").stdout == program("--version").stdout == version
    command = sys.executable, "-m", "fewbit", "--version"
    package = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert package.stdout == version
    assert succeed().stdout == succeed("--help").stdout == succeed("-h").stdout


def test_standalone_mode_leaves_errors_to_the_caller():
    with pytest.raises(fewbit.FunctionError):
        app(["solve", "gelo", "--bits", "3"], standalone_mode=False)


class Terminal(io.StringIO):
    """A standard error that claims to be a terminal, and stores its text."""

    encoding = "utf-8"

    def isatty(self):
        return True


def patched(monkeypatch):
    """Replace standard error by a Terminal. This is not a fixture, since pytest's capture would undo it."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(Progress, "PATIENCE", 0.01)
    return terminal


def wait_for(text, terminal):
    deadline = time.monotonic() + 10
    while text not in terminal.getvalue() and time.monotonic() < deadline:
        time.sleep(0.02)
    return text in terminal.getvalue()


def test_a_bar_appears_on_a_terminal(monkeypatch):
    terminal = patched(monkeypatch)
    with Progress() as progress:
        progress("searching", 3, 7)
        assert wait_for("searching", terminal)
    threads = [thread.name for thread in threading.enumerate()]
    assert not any("_show" in name for name in threads)


def test_compiling_is_said(monkeypatch):
    from numba.core import event

    terminal = patched(monkeypatch)
    with Progress():
        with event.trigger_event("numba:compile"):
            assert wait_for("compiling the solver (first run only)", terminal)


@pytest.mark.parametrize("reason", ["it is quick", "there is no terminal"])
def test_nothing_appears_if(reason, monkeypatch):
    terminal = patched(monkeypatch)
    monkeypatch.setattr(Terminal, "isatty", lambda self: reason == "it is quick")
    monkeypatch.setattr(Progress, "PATIENCE", 5 if reason == "it is quick" else 0.01)
    started = time.monotonic()
    with Progress() as progress:
        progress("searching", 3, 7)
        time.sleep(0.2)
    assert terminal.getvalue() == ""
    assert time.monotonic() - started < 1.2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        ("solve gelu --bits 3 --json", "torch matplotlib jsonschema mpmath scipy.optimize scipy.integrate rich IPython"),
        ("solve --help", "numpy"),
    ],
    ids=["solve", "help"],
)  # fmt: skip
def test_a_command_imports_no_more_than_it_needs(arguments, heavy):
    code = (
        f"import sys; from fewbit.cli import app\napp({arguments.split()}, standalone_mode=False)\n"
        f"print(*set({heavy!r}.split()) & set(sys.modules), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "\n")
