"""docs/reference/cli.md and --help say the same thing, and every example in them runs, as the Python of other pages does.

The Python of a page is run in order, in one namespace. A comment `<!-- not run: reason -->` above a block says why the
block is not run. A comment `<!-- output -->` above a fenced block says that the page's Python prints its lines. A page that
imports a package which is not installed is skipped.

``python tests/project/test_docs.py`` rewrites the help and output blocks of docs/reference/cli.md.
"""

import ast
import importlib
import importlib.util
import math
import os
import re
import shlex
import sys
import warnings
from pathlib import Path

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner

import fewbit
import fewbit.functional
import fewbit.nn
from fewbit.analysis import progress
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


@pytest.mark.slow
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
    monkeypatch.setattr(
        progress, "INTERVAL", math.inf
    )  # a slow machine would print lines of progress
    np.save("activations.npy", np.random.default_rng(1).normal(0.2, 1.5, 4000))
    shown = examples()
    assert {command for command, _ in shown} >= set(COMMANDS)
    for _command, line in dict.fromkeys(shown):
        # Two examples may write the same file; each is shown as if it were the first.
        written = re.search(r"-o (\S+)", line)
        if written and os.path.exists(written[1]):
            os.remove(written[1])
        result = run(line.replace("--steps 20", "--steps 2"))
        assert result.exit_code == 0, f"{line}\n{result.stderr}"
        assert result.stderr == "", line
        assert written is None or os.path.getsize(written[1]) > 0, line


# The pages of the site, and the README. Every page that has Python is run.
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A fenced block of Python, and the comment above it that says why the block is not run, if there is one.
PYTHON = re.compile(
    r"(?:<!-- not run: *(?P<reason>.+?) *-->\n+)?^```python\n(?P<code>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
# A fenced block, and the comment above it that says that the page's Python prints these lines, and others where
# there are three dots.
OUTPUT = re.compile(r"<!-- output -->\n+^```(?:text)?\n(.*?)^```", re.DOTALL | re.MULTILINE)


def python_blocks(text):
    """The blocks of Python of a page or a section that are run."""
    return [block["code"] for block in PYTHON.finditer(text) if block["reason"] is None]


# Pages whose sections are independent programs: each runs alone, because each needs other packages.
OF_SECTIONS = {"docs/guides/integrations.md"}


def programs():
    """A pytest.param of a name and a text for each page, or section of a page, that has blocks to run."""
    found = []
    for page in PAGES:
        name, text = page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8")
        parts = re.split(r"^## ", text, flags=re.MULTILINE) if name in OF_SECTIONS else [text]
        for part in filter(python_blocks, parts):
            title = part.partition("\n")[0]
            found.append(pytest.param(name, part, id=f"{name}, {title}" if part != text else name))
    return found


def packages(blocks):
    """The packages that blocks of Python import, without those of the standard library."""
    nodes = [node for block in blocks for node in ast.walk(ast.parse(block))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)


# Files that the blocks of a page write, and words that they print, besides the lines of OUTPUT.
WRITTEN = {
    "docs/guides/meter.md": {"saved.png", "saved.json"},
    "docs/guides/plan.md": {"plan.csv", "plan.json", "plan.png"},
    "docs/guides/variance_profile.md": {"profile.json", "profile.png"},
}
PRINTED = {
    "docs/guides/compile.md": ["saved for backward, in place of"],
    "docs/guides/compress.md": ["modules converted"],
    "docs/guides/error_bound.md": ["tensors that layers save"],
    "docs/guides/plan.md": ["coarse norms", "20% of that variance"],
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text"), programs())
def test_python_of_a_page_runs(name, text, tmp_path, monkeypatch, capsys):
    """The blocks run in order, in one namespace and in an empty folder."""
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks(text)
    used = packages(blocks)
    missing = sorted(package for package in used if importlib.util.find_spec(package) is None)
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    torch.manual_seed(0)
    names = {"__name__": "page"}
    with warnings.catch_warnings():
        if used - {"fewbit", "torch", "numpy"}:
            warnings.simplefilter("default")  # warnings of other packages are not fewbit's
        warnings.filterwarnings(
            "ignore", "The .grad attribute of a Tensor"
        )  # torch.compile asks for it
        for number, block in enumerate(blocks):
            exec(compile(block, f"{name}, block {number}", "exec"), names)
    assert {path.name for path in tmp_path.iterdir()} >= WRITTEN.get(name, set())
    shown = capsys.readouterr().out
    assert all(words in shown for words in PRINTED.get(name, []))
    expected = OUTPUT.findall(text)
    if name == "README.md":
        expected += re.findall(r"^```\n(\d+ modules.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
        assert len(expected) > 0
    printed = {line.rstrip() for line in shown.splitlines()}
    for output in expected:
        assert set(output.splitlines()) - {"..."} <= printed


# -- Links and the site ----------------------------------------------------------------------------------------

TEXTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)


def anchors(page):
    """The anchors of a page's headings, as viewers of Markdown in repositories and the site make them."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.*?) *$", text, flags=re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(page):
    text, broken = page.read_text(encoding="utf-8"), []
    assert not re.search(r"^(<{7}|={7}|>{7})", text, flags=re.MULTILINE), "marks of a merge"
    for link in LINK.findall(re.sub(r"`[^`\n]*`", "`code`", FENCED.sub("", text))):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = (page.parent / target) if target else page
        is_found = path.exists() and (not anchor or path.suffix != ".md" or anchor in anchors(path))
        broken += [] if is_found else [link]
    assert not broken


def test_the_files_of_a_change_exist():
    """A name without a folder in the table of CONTRIBUTING is in the folder of the file before it, or in fewbit or the root."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("## Where a change goes")[2].partition("\n## ")[0]
    places, missing = [ROOT / "fewbit", ROOT], []
    for row in table.splitlines():
        folder = ROOT / "fewbit"
        for name in re.findall(r"`([\w/]+(?:/|\.(?:pyi?|cpp|h|toml|md)))`", row):
            found = [place / name for place in (folder, *places) if (place / name).exists()]
            folder = (found[0] if found[0].is_dir() else found[0].parent) if found else folder
            missing += [] if found else [name]
    assert len(table.splitlines()) > 20 and not missing


@pytest.fixture
def hooks(monkeypatch):
    """docs/hooks.py, which the build of the site runs."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("hooks")


def test_the_site_indents_lists_by_four_spaces(hooks):
    page = """\
text
- one
  more
  - inner

    paragraph
  - next

  ```python
  if x:
      y
  ```
- two"""
    shown = """\
text
- one
    more
    - inner

        paragraph

    - next

    ```python
    if x:
        y
    ```

- two"""
    assert [line.rstrip() for line in hooks.indented(page.splitlines())] == shown.splitlines()


@pytest.mark.parametrize(
    ("source", "shown", "link", "expected"),
    [
        ("docs/gpu.md", "gpu.md", "[a](../CONTRIBUTING.md#tests)", "[a](contributing.md#tests)"),
        ("docs/guides/plan.md", "guides/plan.md", "[a](../../README.md)", "[a](../index.md)"),
        ("docs/guides/plan.md", "guides/plan.md", "[a](meter.md#kinds)", "[a](meter.md#kinds)"),
        ("docs/architecture.md", "architecture.md", "[a](decisions)", "[a](decisions/README.md)"),
        ("CHANGELOG.md", "changelog.md", "[a\nb](docs/guides/plan.md)", "[a\nb](guides/plan.md)"),
        ("docs/gpu.md", "gpu.md", "[a](../Makefile), [b](https://x.org)", "a, [b](https://x.org)"),
        ("docs/gpu.md", "gpu.md", "[a](missing.md)", "[a](missing.md)"),
        (
            "docs/gpu.md",
            "gpu.md",
            "[compress.md](guides/compress.md#limits)",
            "[Compressing a model](guides/compress.md#limits)",
        ),
        ("docs/gpu.md", "gpu.md", "![a](images/plan.png)", "![a](images/plan.png)"),
    ],
)
def test_links_of_the_site(hooks, source, shown, link, expected):
    assert hooks.relinked(link, source, shown, None) == expected


def test_links_to_other_files_lead_to_the_source_repository(hooks):
    shown = hooks.relinked("[a](../Makefile)", "docs/gpu.md", "gpu.md", "https://host/fewbit/")
    assert shown == "[a](https://host/fewbit/blob/main/Makefile)"


def test_every_page_is_in_the_navigation_once():
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"[-:] +([\w/-]+\.md)$", settings.partition("\nnav:\n")[2], re.MULTILINE)
    assert len(listed) == len(set(listed))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]}
    # docs/hooks.py makes two pages of files that are outside of docs; decisions/README.md lists the decisions.
    decisions = {page for page in pages if page.startswith("decisions/0")}
    assert set(listed) == pages - decisions | {"contributing.md", "changelog.md"}


def test_every_decision_is_in_the_list_of_decisions():
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"\((\d{4}-.*\.md)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert listed == sorted(page.name for page in folder.glob("0*.md"))


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "decisions").glob("0*.md")), ids=lambda page: page.stem[:4]
)
def test_a_decision_is_short(page):
    """Longer tables belong to benchmarks/results."""
    assert len(page.read_text(encoding="utf-8").split()) <= 400


def reference():
    """The text of the API reference, and the names whose docstrings it shows."""
    pages = sorted((ROOT / "docs" / "reference" / "api").glob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    return text, set(re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE))


def adapters():
    """The public classes of fewbit.integrations, whose frameworks need not be installed."""
    for file in (ROOT / "fewbit" / "integrations").glob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield f"fewbit.integrations.{file.stem}.{node.name}"


def test_every_public_name_is_in_the_reference():
    text, shown = reference()
    # Most modules are in the first cells of tables; fewbit.GELU is fewbit.nn.GELU.
    cells = re.findall(r"^\| (`[^|]*`) \|", text, flags=re.MULTILINE)
    shown |= {f"fewbit.nn.{name}" for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    shown |= {name.replace("fewbit.nn.", "fewbit.") for name in shown}
    names = {f"fewbit.{name}" for name in set(fewbit.__all__) - {"__version__", "functional", "nn"}}
    names |= {f"fewbit.nn.{name}" for name in fewbit.nn.__all__}
    names |= {f"fewbit.functional.{name}" for name in fewbit.functional.__all__}
    assert {*names, *adapters()} - shown == set()


def test_every_name_in_the_reference_exists():
    _, shown = reference()
    for name in shown - {*adapters()}:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


SITE = ROOT / "build" / "docs"


@pytest.mark.skipif(not SITE.exists(), reason="needs the site that `make docs` builds")
def test_the_site_loads_nothing_from_other_servers():
    pages = {page: page.read_text(encoding="utf-8") for page in SITE.rglob("*.html")}
    loaded = re.compile(r"<(?:script|img|link)\b[^>]*(?:src|href)=\"(?:https?:)?//")
    assert [page for page, text in pages.items() if loaded.search(text)] == []
    reference = pages[SITE / "reference" / "api" / "compress" / "index.html"]
    assert 'id="fewbit.compress_"' in reference and "LayerSettings" in reference
    assert "<h1" in pages[SITE / "changelog" / "index.html"]  # made of a file outside of docs


def rewrite():
    def fill(match):
        kind, argument, _ = match.groups()
        return f"<!-- {kind}: {argument} -->\n\n```text\n{block(kind, argument)}```\n"

    text = DOCS.read_text(encoding="utf-8")
    DOCS.write_text(MARKER.sub(fill, text), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(rewrite())
