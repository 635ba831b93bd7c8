"""docs/reference/cli.md and --help say the same thing, and every example in them runs, as the Python of other pages does.

``python tests/project/test_docs.py`` rewrites the help and output blocks of docs/reference/cli.md.
"""

import os
import re
import shlex
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from fewbit.cli import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "reference" / "cli.md"
COMMANDS = sorted(app.commands)
# A marker, and the fenced block that belongs to it.
MARKER = re.compile(r"<!-- (help|output): *(.*?) *-->\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)


def run(line):
    program, *arguments = shlex.split(line)
    assert program == "fewbit"
    return CliRunner().invoke(
        app, arguments, prog_name="fewbit", env={"COLUMNS": "80", "NO_COLOR": "1"}
    )


def help_text(command):
    result = run(f"fewbit {command} --help")
    assert result.exit_code == 0
    return result.stdout


def block(kind, argument):
    """Return the text that belongs under a marker, without lines that differ from run to run."""
    if kind == "help":
        return help_text(argument)
    result = run(argument)
    assert result.exit_code == 0, result.stderr
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    return "\n".join(line for line in lines if not line.startswith("solver  ")) + "\n"


def sections():
    """{command: its section of the docs}; "" for what comes before the first."""
    parts = re.split(r"^## (.*)\n", DOCS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def own_text(section):
    """A section without the blocks made by the program."""
    return MARKER.sub("", section)


def examples():
    """(command, example) for every example of the help and the docs, in the order of the docs."""
    found = []
    for command, section in sections().items():
        shown = re.findall(r"^    (fewbit .*)$", help_text(command), flags=re.MULTILINE)
        for fenced in re.findall(r"```sh\n(.*?)```", own_text(section), flags=re.DOTALL):
            shown += fenced.splitlines()
        found += [(command, line) for line in shown]
    return found


def options(command):
    """Every option string of a command."""
    # With the application's settings, because click caches the help option of the first context that asks for it.
    settings = app.context_settings
    context = click.Context(app.commands[command], info_name=command, **settings)
    parameters = app.commands[command].get_params(context)
    return {
        name
        for parameter in parameters
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name[0] == "-"
    }


def test_every_command_has_a_section_and_every_section_a_command():
    assert set(sections()) == {"", *COMMANDS}


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_in_the_docs_is_the_help(command):
    blocks = {
        argument: text
        for kind, argument, text in MARKER.findall(sections()[command])
        if kind == "help"
    }
    assert blocks == {command: help_text(command)}, "run python tests/project/test_docs.py"


def outputs():
    return [
        (argument, text)
        for kind, argument, text in MARKER.findall(DOCS.read_text("utf-8"))
        if kind == "output"
    ]


@pytest.mark.parametrize(
    ("line", "text"), outputs(), ids=lambda value: value if "\n" not in value else ""
)
def test_output_in_the_docs_is_the_output(line, text):
    assert text == block("output", line), "run python tests/project/test_docs.py"


@pytest.mark.parametrize("command", COMMANDS)
def test_options_in_the_docs_are_options_of_the_command(command):
    text = sections()[command]
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
    elsewhere = set()
    # An example may run another command; what it mentions has to be an option of that one.
    for line in re.findall(r"^ *(fewbit .*)$", text, flags=re.MULTILINE):
        other = line.split()[1]
        used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", line))
        assert used <= options(other), line
        elsewhere |= used if other != command else set()
    assert mentioned - elsewhere <= options(command)
    assert {name for name in options(command) if name.startswith("--")} <= mentioned


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_an_example_of_the_command(command):
    text = help_text(command)
    assert f"\n  Examples:\n    fewbit {command}" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.slow
def test_every_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEWBIT_CACHE", str(tmp_path / "cache"))
    np.save("activations.npy", np.random.default_rng(1).normal(0.2, 1.5, 4000))
    shown = examples()
    assert {command for command, _ in shown} >= set(COMMANDS)
    for _command, line in dict.fromkeys(shown):
        # Two examples may write the same file; each is shown as if it were the first.
        written = re.search(r"-o (\S+)", line)
        if written and os.path.exists(written[1]):
            os.remove(written[1])
        result = run(line)
        assert result.exit_code == 0, f"{line}\n{result.stderr}"
        assert result.stderr == "", line
        assert written is None or os.path.getsize(written[1]) > 0, line


def python_blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text("utf-8"), flags=re.DOTALL)


def run_blocks(name, names):
    """Runs a page's Python in order, with `names` there from the start; what it left behind."""
    names = {"__name__": "page", **names}
    for number, block in enumerate(python_blocks(name)):
        exec(compile(block, f"{name}, block {number}", "exec"), names)
    return names


def test_python_of_the_guide_runs(capsys):
    """docs/guides/compress.md needs nothing but itself; its blocks end with a model that is torch's again."""
    names = run_blocks("docs/guides/compress.md", {})
    assert "modules converted" in capsys.readouterr().out
    before, after = (sum(entry.values()) for entry in names["controller"].report.saved)
    assert before > 5 * after
    kinds = {type(module).__module__.partition(".")[0] for module in names["model"].modules()}
    assert kinds == {"torch", "page"}
    assert all(parameter.grad is not None for parameter in names["model"].parameters())


def test_python_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    names = run_blocks("README.md", {})
    printed = {line.rstrip() for line in capsys.readouterr().out.splitlines()}
    (shown,) = re.findall(r"^```\n(\d+ modules.*?)^```", readme, flags=re.MULTILINE | re.DOTALL)
    assert {line for line in shown.splitlines() if line != "..."} <= printed
    assert (tmp_path / "gelu.json").stat().st_size > 0
    assert names["table"].lower_bound <= names["table"].error
    assert names["y"].shape == names["x"].shape


@pytest.mark.parametrize(
    ("page", "files", "texts"),
    [
        ("meter", {"saved.png", "saved.json"}, []),
        ("compile", set(), ["saved for backward, in place of"]),
        ("variance_profile", {"profile.json", "profile.png"}, []),
        ("error_bound", set(), ["tensors that layers save"]),
        pytest.param(
            "plan",
            {"plan.csv", "plan.json", "plan.png"},
            ["coarse norms", "20% of that variance"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["meter", "compile", "variance profile", "error bound", "plan"],
)
def test_python_of_a_page_runs(page, files, texts, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run_blocks(f"docs/guides/{page}.md", {})
    shown = " ".join(capsys.readouterr().out.split())
    assert all(text in shown for text in texts)
    assert {path.name for path in tmp_path.iterdir()} == files
    if page == "variance_profile":
        assert names["profile"].contexts == ("0", "1", "3")
    elif page == "error_bound":
        assert names["controller"].bounds.e2 == 0.1 and len(names["controller"].bounds) == 4
    elif page == "plan":
        assert type(names["model"][0]).__module__.startswith("fewbit")
    elif page == "meter":
        assert names["report"].total > 0


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md")))
def test_no_page_has_marks_of_a_merge(page):
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"^(<{7}|={7}|>{7})", text, flags=re.MULTILINE)


def rewrite():
    def fill(match):
        kind, argument, _ = match.groups()
        return f"<!-- {kind}: {argument} -->\n\n```text\n{block(kind, argument)}```\n"

    text = DOCS.read_text(encoding="utf-8")
    DOCS.write_text(MARKER.sub(fill, text), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(rewrite())
