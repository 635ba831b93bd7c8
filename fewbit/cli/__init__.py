"""The command line. No mathematics: every command calls the library and shows what comes back.

Only click is imported here; each command imports what it needs, so that ``fewbit solve`` starts
quickly and ``fewbit --help`` at once.
"""

from __future__ import annotations

import difflib
import gc
import json
import math
import os
import re
import sys
import threading
import traceback
import warnings
from pathlib import Path

import click

from fewbit._version import __version__
from fewbit.cli.streams import OutputLost, secure
from fewbit.errors import FewbitError, FunctionError, OutputExistsError, TableError
from fewbit.files import check_writable
from fewbit.text import one_line, printable

FAILED, BAD_INPUT, BUG, INTERRUPTED, OUTPUT_LOST = 1, 2, 70, 130, 141
TRACEBACK = "FEWBIT_TRACEBACK"
"""The environment variable that makes fewbit print the traceback of an unexpected error."""


# ---------------------------------------------------------------------------------------------------------
# The app: what goes wrong is one line on standard error, without a traceback


class App(click.Group):
    """The group of all commands. An error becomes one line on standard error, and one of the exit codes in docs/cli.md."""

    def main(self, *args, standalone_mode=True, **kwargs):
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **kwargs)
        try:
            code = super().main(*args, standalone_mode=False, **kwargs)
        except BaseException as error:
            code = _explained(error)
        sys.exit(code if isinstance(code, int) else 0)

    def resolve_command(self, ctx, args):
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            close = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            hint = f"did you mean {close[0]}?" if close else f"expected {', '.join(self.commands)}"
            ctx.fail(f"unknown command {args[0]!r}: {hint}")

    def invoke(self, ctx):
        threads = os.environ.get("NUMBA_NUM_THREADS", "1")
        try:
            impossible = int(threads) < 1
        except ValueError:  # numba ignores what is no integer
            impossible = False
        if impossible:  # importing numba would raise
            raise FewbitError(f"NUMBA_NUM_THREADS: expected 1 or more, got {threads}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warnings.simplefilter("always", UserWarning)
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except KeyboardInterrupt:
            _complain("interrupted")
            ctx.exit(INTERRUPTED)
        except EOFError as error:  # click would treat EOFError as an interrupt
            raise FewbitError(f"standard input has ended: {one_line(error)}") from error


def _explained(error):
    """Print the error that ended a command on one line. Return the exit code."""
    if isinstance(error, OutputLost):
        return OUTPUT_LOST
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, click.ClickException):
        _complain("error", _usage_message(error))
    elif isinstance(error, OutputExistsError):
        _complain("error", f"{error.path} exists; pass --force to overwrite it")
    elif isinstance(error, FewbitError):
        _complain("error", error)
    elif isinstance(error, MemoryError):
        _complain("error", "not enough memory for this request")
    elif not isinstance(
        error, Exception
    ):  # SystemExit or the like, from a user's code, not a command
        _complain("error", f"expected code that does not end the program, got {one_line(error)}")
    else:
        if os.environ.get(TRACEBACK):
            traceback.print_exception(error)
        _complain("error", f"unexpected {one_line(error)} (the traceback: set {TRACEBACK}=1)")
        return BUG
    return BAD_INPUT


def main():
    """Run the ``fewbit`` command."""
    # Importing numba makes a great many objects and no garbage. Looking for some, again and again
    # and once more at exit, would take a third of the time of a small solve.
    gc.set_threshold(100_000, 50, 50)
    secure()
    if not re.fullmatch("[1-9][0-9]{0,3}", os.environ.get("COLUMNS", "80")):
        del os.environ["COLUMNS"]  # not a valid width
    code = 0
    try:
        app(prog_name="fewbit")
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:  # before or after the command
        code = INTERRUPTED
    try:
        sys.stdout.flush()
    except OutputLost:
        code = OUTPUT_LOST
    gc.freeze()
    sys.exit(code)


def _usage_message(error):
    message = error.format_message()
    message = message[:1].lower() + message[1:]
    command = getattr(error, "ctx", None)
    hint = f" (try '{command.command_path} --help')" if command is not None else ""
    return f"{message.rstrip('.')}{hint}"


def _complain(kind, message=None):
    text = kind if message is None else f"{kind}: {message}"
    click.echo(f"fewbit: {printable(' '.join(text.split()))}", err=True)


def _show_warning(message, category, filename, lineno, file=None, line=None):
    _complain("warning", message)


def _console():
    from rich.console import Console

    return Console(highlight=False, emoji=False, markup=False)


def _print_json(value):
    click.echo(json.dumps(value, indent=2, allow_nan=False))


# ---------------------------------------------------------------------------------------------------------
# Progress


class Progress:
    """A bar on standard error once something has lasted a second; nothing unless that is a terminal.

    An instance is the ``progress`` callable of the library: ``progress(stage, done, total)``.
    """

    PATIENCE = 1.0

    def __init__(self):
        self._state = ("solving", 0, 0)
        self._compilations = _Compilations()
        self._thread = None
        self._finished = threading.Event()

    def __call__(self, stage, done, total):
        self._state = (stage, done, total)

    def __enter__(self):
        if sys.stderr.isatty():
            self._compilations.listen()
            self._thread = threading.Thread(target=self._show, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_):
        self._finished.set()
        if self._thread is not None:
            self._thread.join()

    def _show(self):
        if self._finished.wait(self.PATIENCE):
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        console = Console(stderr=True, highlight=False, emoji=False, markup=False)
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=None)
            while not self._finished.wait(0.1):
                self._compilations.listen()
                stage, done, total = self._state
                if self._compilations.running:
                    stage, done, total = "compiling the solver (first run only)", 0, 0
                bar.update(task, description=stage, completed=done, total=total or None)


class _Compilations:
    """Counts numba's compilations in progress: the first time they take seconds, without other news."""

    def __init__(self):
        self.running = 0
        self._listening = False

    def listen(self):
        """From as soon as numba is imported, which it may be only after the progress has begun."""
        event = sys.modules.get("numba.core.event")
        if self._listening or not hasattr(event, "register"):
            return
        self._listening = True
        compilations = self

        class Listener(event.Listener):
            def on_start(self, _event):
                compilations.running += 1

            def on_end(self, _event):
                # Its start may have gone unheard.
                compilations.running = max(0, compilations.running - 1)

        event.register("numba:compile", Listener())


# ---------------------------------------------------------------------------------------------------------
# Options that commands share


def _parse_parameters(_ctx, _option, pairs):
    parameters = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        try:
            number = float(value)
        except ValueError:
            equals = ""
        if not (name and equals):
            raise click.BadParameter(f"expected NAME=VALUE with a number, got {pair!r}")
        if name in parameters:
            raise click.BadParameter(f"expected every name once, got {name!r} twice")
        parameters[name] = number
    return parameters or None


def _problem(command):
    """The options that say which table is meant; those that describe a solve are in ``solve``."""
    for option in reversed(_PROBLEM):
        command = option(command)
    return command


_PROBLEM = (
    click.option("--bits", type=int, metavar="B", help="Bits per element, 1 to 8; 2^B levels."),
    click.option(
        "--form",
        type=click.Choice(["levels", "intervals"]),
        help="Pieces may share a level (default), or each has its own, as in the paper.",
    ),
    click.option(
        "--weight",
        metavar="W",
        help="What the error is weighted with: uniform (default), normal, normal:MEAN,STD, or a "
        ".npy or .npz file of pre-activations or of a histogram.",
    ),
    click.option(
        "--domain",
        type=float,
        nargs=2,
        metavar="A B",
        help="Where the error counts, as --domain -5 5.",
    ),
    click.option(
        "--objective",
        type=click.Choice(["mse", "unbiased", "minimax"]),
        help="Least squared error (default), least variance of an unbiased draw, or least maximum.",
    ),
    click.option(
        "--tails",
        type=click.Choice(["free", "pinned"]),
        help="pinned: the outermost pieces take the function's asymptotic slopes.",
    ),
    click.option("--levels", type=int, metavar="K", help="The number of levels, instead of 2^B."),
    click.option(
        "--param",
        "parameters",
        multiple=True,
        metavar="NAME=VALUE",
        callback=_parse_parameters,
        help="A parameter of the function, by torch's name; may be repeated.",
    ),
)
_function = click.option(
    "--function",
    metavar="MODULE:NAME",
    help="The function of a FILE's tables, if it is none of fewbit's: package.module:name, which is "
    "imported. A name in the FILE is never imported.",
)
_several_bits = click.option(
    "--bits",
    type=int,
    multiple=True,
    metavar="B",
    help="1 to 8; may be repeated.  [default: 1 to 4]",
)
_force = click.option("--force", is_flag=True, help="Overwrite an existing output file.")
_json = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON on standard output, and nothing else."
)


def _output(required=False, what="the table document"):
    return click.option(
        "-o", "--output", metavar="FILE", required=required, help=f"Write {what} to FILE."
    )


def _check_output(path, force):
    """Refuse before the work is done, not after it."""
    if path is not None:
        check_writable(path, force)


def _given(**options):
    """The options that were given; the library has the defaults of the others."""
    return {name: value for name, value in options.items() if value is not None}


# ---------------------------------------------------------------------------------------------------------
# Commands


@click.group(
    cls=App,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)
@click.version_option(__version__, prog_name="fewbit", message="%(prog)s %(version)s")
@click.pass_context
def app(ctx):
    """The best few-bit tables for the derivatives of activation functions.

    A table is a step function q of few levels that stands for f' in the backward pass: a layer
    keeps a level's number per element, a few bits, instead of its input.

    \b
    Examples:
      fewbit solve gelu --bits 3
      fewbit compare
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@app.command()
@click.argument("name")
@_problem
@click.option(
    "--grid", type=int, metavar="N", help="Cells of the discrete problem; more narrow the gap."
)
@click.option("--no-refine", is_flag=True, help="Keep the levels of the discrete problem.")
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="Use at most N threads.")
@_output()
@_force
@_json
def solve(name, no_refine, threads, output, force, as_json, **problem):
    """Solve for the best table of NAME and show it.

    NAME is a function that 'fewbit list' shows, one of its aliases, or package.module:f, any
    Python function of NumPy arrays or torch tensors.

    \b
    Examples:
      fewbit solve gelu --bits 3
      fewbit solve elu --param alpha=2 --bits 2 --domain -5 5 -o elu.json
      fewbit solve numpy:arctan --bits 3 --json
    """
    if output is not None and Path(output).suffix.lower() != ".json":
        raise FewbitError(f"{output}: expected a file name that ends in .json")
    _check_output(output, force)
    from fewbit.solver.solve import solve

    with Progress() as progress:
        table = solve(
            name, refine=not no_refine, threads=threads, progress=progress, **_given(**problem)
        )
    if output is not None:
        table.save(output, force=force)
    _show_table(table, as_json)
    if output is not None and not as_json:
        click.echo(f"\nsaved to {printable(output)}")


@app.command("list")
@_json
def list_(as_json):
    """List the functions that fewbit knows.

    With their parameters and defaults, aliases, domain, the slopes they tend to on the left and
    right, and the bits of the tables shipped with this package (form levels).

    \b
    Examples:
      fewbit list
      fewbit list --json
    """
    from fewbit import functions

    known = [_describe(functions.get(name)) for name in functions.names()]
    if as_json:
        _print_json(known)
        return
    from fewbit.render.view import Column, View

    columns = (
        Column("function", lambda row: row["function"], "word"),
        Column("domain", lambda row: "[{:g}, {:g}]".format(*row["domain"]), "word", drop=1),
        Column("slopes", lambda row: _slopes(row["slopes"]), "word", drop=2),
        Column("shipped", lambda row: _ranges(row["shipped_bits"]), "word"),
        Column("parameters, aliases", _parameters_and_aliases, "text", least=24),
    )
    _console().print(View("", columns, known))


def _slopes(slopes):
    return ", ".join(slope if isinstance(slope, str) else f"{slope:.4g}" for slope in slopes)


def _parameters_and_aliases(row):
    parts = [f"{name}={value:g}" for name, value in row["parameters"].items()]
    return "; ".join([*parts, *([f"alias {', '.join(row['aliases'])}"] if row["aliases"] else [])])


def _describe(function):
    from fewbit import functions

    return {
        "function": function.name,
        "parameters": dict(function.parameters),
        "aliases": [alias for alias, name in functions.aliases().items() if name == function.name],
        "domain": list(function.domain),
        # JSON has no infinity.
        "slopes": [
            slope if abs(slope) < float("inf") else f"{slope:g}" for slope in function.slopes
        ],
        "kinks": list(function.kinks),
        "shipped_bits": _shipped_bits(function.name),
        "reference": function.reference,
    }


def _shipped_bits(name):
    """Read, not validated: a list of all functions is to come at once."""
    from fewbit.catalog.store import tables_directory

    try:
        text = (tables_directory() / f"{name}.json").read_text(encoding="utf-8")
        tables = json.loads(text)["tables"]
        return sorted({table["bits"] for table in tables if table["form"] == "levels"})
    except (OSError, ValueError, LookupError, TypeError):
        return []


def _ranges(numbers):
    """[1, 2, 3, 5] as 1-3,5; a dash for none."""
    runs = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs) or "-"


@app.command()
@click.argument("source", metavar="NAME|FILE")
@_problem
@_function
@_json
def show(source, function, as_json, **problem):
    """Show a table: shipped, solved before, or in a file.

    Of a function's NAME without --bits, all shipped tables; with --bits, the table, solved and
    cached if it is not shipped. Of a FILE with several tables, those that the options select. A
    FILE is a path that ends in .json or has a slash.

    \b
    Examples:
      fewbit show gelu
      fewbit show gelu --bits 3 --weight normal
      fewbit show elu.json
    """
    tables = _load(source, problem, function, several=True)
    if len(tables) == 1:
        _show_table(tables[0], as_json)
    elif as_json:
        from fewbit.table import dumps_tables

        click.echo(dumps_tables(tables[0].function, tables))
    else:
        from fewbit.catalog.table_report import tables_report

        _console().print(tables_report(printable(source), tables))


@app.command()
@click.argument("source", metavar="NAME|FILE")
@_problem
@_function
@_output(required=True, what="the picture, PNG or SVG by its ending,")
@_force
def plot(source, function, output, force, **problem):
    """Draw a table: f', q, and the error below.

    NAME|FILE and the options are those of 'fewbit show'; they have to leave one table.

    \b
    Examples:
      fewbit plot gelu --bits 3 -o gelu.png
      fewbit plot elu.json -o elu.svg
    """
    if Path(output).suffix.lower() not in (".png", ".svg"):
        raise FewbitError(f"{output}: expected a file name that ends in .png or .svg")
    _check_output(output, force)
    (table,) = _load(source, problem, function, several=False)
    table.plot(path=output, force=force)
    click.echo(f"saved to {printable(output)}")


@app.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@_several_bits
@_output(what="the rows, CSV or JSON by its ending,")
@_force
@_json
def compare(names, bits, output, force, as_json):
    """Solve now, in both forms, and set the errors beside the paper's.

    The paper is Few-bit Backward (ICML 2023), its figures are those of Table 3. Without a NAME:
    its functions, and Mish.

    \b
    Examples:
      fewbit compare
      fewbit compare gelu silu --bits 3 --bits 4 -o compared.csv
    """
    if output is not None and Path(output).suffix.lower() not in (".csv", ".json"):
        raise FewbitError(f"{output}: expected a file name that ends in .csv or .json")
    _check_output(output, force)
    from fewbit.catalog.comparison import compare

    with Progress() as progress:
        comparison = compare(names or None, bits or (1, 2, 3, 4), progress=progress)
    if output is not None:
        comparison.save(output, force=force)
    if as_json:
        _print_json(comparison.records())
        return
    _console().print(comparison)
    if output is not None:
        click.echo(f"\nsaved to {printable(output)}")


@app.command()
@click.argument("files", nargs=-1, metavar="[FILE]...")
@_function
@_json
def verify(files, function, as_json):
    """Check what tables claim, by other means than made them.

    For each FILE (default: all shipped tables): its schema; each table's error, recomputed by
    adaptive quadrature; that the lower bound is not above it; that no table is worse than one of
    fewer bits. The error of a function that is none of fewbit's is recomputed if you name it
    with --function.

    The bound itself is not proved again; solving the table anew does that.

    Exit code 0 if everything holds, 1 if a claim does not, 2 if a FILE or its function cannot be
    read.

    \b
    Examples:
      fewbit verify
      fewbit verify elu.json --json
    """
    from fewbit.catalog.verification import verify

    paths = [Path(name) for name in files] or _shipped_files()
    results, unreadable = [], False
    with Progress() as progress:
        for done, path in enumerate(paths):
            progress(f"verifying {path.name}", done, len(paths))
            try:
                results.append((path, verify(path, function=function)))
            except TableError as error:
                _complain("error", error)
                unreadable = True
    findings = [finding for _, found in results for finding in found]
    if as_json:
        _print_json([_finding_record(finding) for finding in findings])
    elif results:
        view, problems = _verification(results)
        _console().print(view)
        for line in ["", *problems] if problems else []:
            click.echo(line)
    if unreadable:
        click.get_current_context().exit(BAD_INPUT)
    if any(finding.problems for finding in findings):
        click.get_current_context().exit(FAILED)
    if any(finding.unchecked for finding in findings):
        click.get_current_context().exit(BAD_INPUT)


def _shipped_files():
    from fewbit.catalog.store import tables_directory

    paths = sorted(tables_directory().glob("*.json"))
    if not paths:
        raise TableError("expected shipped tables to verify, found none")
    return paths


def _finding_record(finding):
    return {
        "file": finding.path,
        "index": finding.index,
        "function": finding.table.function,
        "bits": finding.table.bits,
        "form": finding.table.form,
        "error": finding.table.error,
        "recomputed": _finite(finding.recomputed),
        "holds": None if finding.unchecked else not finding.problems,
        "problems": list(finding.problems),
        "unchecked": finding.unchecked,
    }


def _finite(number):
    """Return the number, or None if it is not finite, since JSON has no infinities and no NaN."""
    return number if number is not None and math.isfinite(number) else None


def _verification(results):
    """Return a view with a line for each file, and a list with a line for each problem."""
    from fewbit.render.view import Column, View

    rows, problems = [], []
    for path, findings in results:
        wrong = [(finding, problem) for finding in findings for problem in finding.problems]
        unchecked = [(finding, finding.unchecked) for finding in findings if finding.unchecked]
        problems += [
            printable(f"{path.name}, tables[{finding.index}]: {problem}")
            for finding, problem in wrong + unchecked
        ]
        verdict = "holds", "green"
        if wrong:
            verdict = f"{len(wrong)} wrong", "red"
        elif unchecked:
            verdict = f"{len(unchecked)} not checked", "yellow"
        rows.append((printable(path.name), str(len(findings)), _deviation(findings), *verdict))
    columns = (
        Column("file", lambda row: row[0], "text"),
        Column("tables", lambda row: row[1]),
        Column("largest deviation", lambda row: row[2]),
        Column("result", lambda row: row[3], "word", style=lambda row: row[4]),
    )
    return View("", columns, rows), problems


def _deviation(findings):
    """The largest relative difference between claim and recomputation."""
    relative = [
        abs(each.recomputed - each.table.error) / each.table.error
        for each in findings
        if each.recomputed is not None and each.table.error > 0
    ]
    return f"{max(relative):.1e}" if relative else "-"


@app.command()
@click.argument("names", nargs=-1, metavar="[MODEL]...")
@click.option("--all", "every", is_flag=True, help="Every model.")
@_several_bits
@click.option(
    "--device-memory", metavar="SIZE", default="32GB", show_default=True, help="As 80GB or 11264MB."
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Samples of the forward that is counted.  [default: 1]",
)
@click.option(
    "--image-size", type=int, metavar="N", help="Pixels of a side, at least 64.  [default: 256]"
)
@click.option("--sequence-length", type=int, metavar="N", help="Tokens.  [default: 256]")
@click.option(
    "--activation",
    metavar="NAME",
    default="paper",
    help="gelu, silu, relu, ...; own is the architecture's.  [default: own, but gelu for relu]",
)
@click.option("--dropout", is_flag=True, help="Count with dropout on; the paper has it off.")
@_json
def memory(
    names,
    every,
    bits,
    device_memory,
    batch,
    image_size,
    sequence_length,
    activation,
    dropout,
    as_json,
):
    """Count what training a MODEL takes, and the largest batch on a device.

    The paper's appendix B: the model's size, what it keeps for backward, the nonlinearities' part
    of it, and the largest batch beside four copies of the model, without and with few-bit codes.

    A MODEL is a ResNet, VGG, DenseNet, EfficientNet, RoBERTa or GPT-2 by its usual name, as
    resnet50 or RoBERTa-base. Weights are random, nothing is downloaded. One MODEL is shown in
    detail, with the paper's figures.

    \b
    Examples:
      fewbit memory resnet18
      fewbit memory vgg16 densenet121 --bits 2 --device-memory 80GB
      fewbit memory resnet50 --activation relu --image-size 224 --json
    """
    if bool(names) == every:
        raise click.UsageError(
            "expected either the name of a model or --all", click.get_current_context()
        )
    from fewbit.analysis.memory import memory
    from fewbit.sizes import parse_size

    try:
        device_bytes = parse_size(device_memory)
    except FewbitError as error:
        raise FewbitError(f"--device-memory: {error}") from None
    with Progress() as progress:
        report = memory(
            names,
            device_bytes=device_bytes,
            image_size=image_size,
            sequence_length=sequence_length,
            batch=batch,
            activation=None if activation == "own" else activation,
            dropout=dropout,
            progress=progress,
            **_given(bits=bits or None),
        )
    if as_json:
        _print_json(report.records())
    else:
        _console().print(report)


@app.command("plan")
@click.argument("name", metavar="MODEL|FUNCTION")
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    metavar="N",
    help="Samples of a batch.  [default: 16 images or 4 texts]",
)
@click.option(
    "--batches",
    type=click.IntRange(min=1),
    metavar="N",
    help="Batches to measure on.  [default: 4]",
)
@click.option(
    "--size",
    type=int,
    metavar="N",
    help="Pixels of a side, at least 64, or tokens.  [default: 64]",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    help="Only of this policy, as fixed; may be repeated.  [default: all]",
)
@click.option(
    "--share",
    type=click.FloatRange(0, min_open=True),
    metavar="S",
    help="Of the variance between minibatches, for what is recommended.  [default: 0.1]",
)
@click.option(
    "--draws", type=click.IntRange(min=2), metavar="D", help="Of rounding, a batch.  [default: 2]"
)
@_output(what="the plan, JSON, HTML, CSV, PNG or SVG by its ending,")
@_force
@_json
def plan_(name, batch, batches, size, policies, share, draws, output, force, as_json):
    """Measure what settings keep and do to the gradient, before a long run.

    For each policy and bit setting: bytes kept for the backward pass, the gradient's error beside
    the variance between minibatches, and time. Recommends the setting of the fewest bytes whose
    error is at most a share of that variance.

    A MODEL is one that 'fewbit memory' knows, with random weights and synthetic data. A FUNCTION,
    as package.module:function, returns (model, batch, loss) as fewbit.plan takes them, for a model
    and data of your own. ResNet-50 and RoBERTa-base take minutes on two cores.

    \b
    Examples:
      fewbit plan resnet18 --batch 2 --batches 2 --policy fixed
      fewbit plan resnet18 --batch 2 --policy activations -o plan.html
    """
    endings = ".json", ".html", ".csv", ".png", ".svg"
    if output is not None and Path(output).suffix.lower() not in endings:
        raise FewbitError(f"{output}: expected a file name that ends in {', '.join(endings)}")
    _check_output(output, force)
    if output is not None and Path(output).suffix.lower() in (".png", ".svg"):
        from fewbit.render.figures import matplotlib

        matplotlib()  # before minutes of work, not after them
    work = _workload(name, **_given(batch=batch, batches=batches, size=size))
    from fewbit.planning.candidates import default_candidates
    from fewbit.planning.plan import plan

    candidates = default_candidates(work[0], policies) if policies else None
    found = plan(*work, **_given(candidates=candidates, share=share, draws=draws))
    if output is not None:
        found.save(output, force=force)
    if as_json:
        _print_json(found.to_dict())
        return
    _console().print(found)
    if output is not None:
        click.echo(f"\nsaved to {printable(output)}")


def _workload(name, **sizes):
    """(model, batch, loss) of a model's name, or what a function of the user's returns."""
    try:
        from fewbit.models.workload import workload
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise FewbitError("plan needs torch: pip install torch") from None
    from fewbit.analysis.gradients import CHUNKS, batches_of, size_of

    if ":" not in name:
        made = workload(name, **sizes)
        size = size_of(made.batches[0])
        if len(made.batches) == 1 and size % CHUNKS:
            raise FewbitError(
                f"expected --batches of at least 2, or --batch of a multiple of {CHUNKS}, got --batches 1 with --batch {size}"
            )
        return made
    if sizes:
        raise FewbitError(
            f"--{next(iter(sizes))}: expected the name of a model with it, got {name}, which makes its own batch"
        )
    made = _called(name)
    if not isinstance(made, tuple) or len(made) != 3:
        raise FewbitError(f"{name}: expected it to return (model, batch, loss), got {_kind(made)}")
    model, batch, loss = made
    batches = batches_of(batch)
    if len(batches) == 1 and (size := size_of(batches[0])) % CHUNKS:
        raise FewbitError(
            f"{name}: expected several batches, or one of a multiple of {CHUNKS} samples, got one of {size}"
        )
    return model, batches, loss


def _called(name):
    """What the user's function returns; what it raises is one line, as elsewhere of the user's code."""
    from fewbit.functions.callables import import_callable, misfit_of

    function = import_callable(name)
    misfit = misfit_of(function, 0)
    if misfit:
        raise FewbitError(
            f"{name}: expected a function without arguments, got one for which: {misfit}"
        )
    try:
        return function()
    except FewbitError:
        raise
    except Exception as error:
        raise FewbitError(f"{name} raised {one_line(error)}") from error


def _kind(value):
    length = f" of {len(value)}" if isinstance(value, tuple) else ""
    return f"a {type(value).__name__}{length}"


@app.command()
@click.option(
    "--steps",
    type=click.IntRange(1, 100_000),
    metavar="N",
    help="Training steps of each run.  [default: 600]",
)
@click.option(
    "--seeds",
    type=click.IntRange(1, 100),
    default=1,
    metavar="N",
    help="Repeat everything from N seeds, for means and standard deviations.  [default: 1]",
)
@click.option(
    "--bits",
    type=click.IntRange(1, 8),
    multiple=True,
    metavar="B",
    help="Of few-bit GELUs, 1 to 8; may be repeated.  [default: 3]",
)
@click.option(
    "--everything",
    type=click.IntRange(1, 8),
    multiple=True,
    metavar="B",
    help="Of whole models that are compressed, 1 to 8; may be repeated.  [default: none]",
)
@click.option(
    "--average",
    type=click.FloatRange(1, 8),
    multiple=True,
    metavar="B",
    help="Of those whose layers share the bits (level L3), 1 to 8, as 1.75; may be repeated.  [default: 2]",
)
@click.option(
    "--all",
    "all_arms",
    is_flag=True,
    help="Every arm of docs/results.md: --bits 1 to 4, --everything 2 and --average 2.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False),
    default="demo",
    metavar="DIR",
    help="Write demo_losses.png and demo.json here.  [default: demo]",
)
@_force
@_json
def demo(steps, seeds, bits, everything, average, all_arms, output, force, as_json):
    """Train a small transformer exactly and in fewer bits.

    A character-level transformer learns the help texts that Python ships, with torch's own GELU,
    with few-bit ones, and with everything that it keeps compressed, from the same seeds. Shows the
    bytes kept for the backward pass beside the final losses, and draws the losses. Three
    trainings from each seed, of which as many run at a time as there are cores: about a minute on two.
    With --all there are seven. Needs torch.

    \b
    Examples:
      fewbit demo --steps 20
      fewbit demo --all --steps 20 --output every-arm
      fewbit demo --steps 20 --seeds 2 --bits 3 --output two-seeds --json
    """
    directory = Path(output)
    paths = directory / "demo_losses.png", directory / "demo.json"
    if directory.is_dir():
        for path in paths:
            check_writable(path, force)
    try:
        import torch

        from fewbit.demo.experiment import EVERY_ARM, run_demo
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise FewbitError("demo needs torch: pip install torch") from None
    from fewbit.demo.training import Settings

    try:  # before the work: a directory that cannot be made is better known now
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FewbitError(
            f"{directory}: expected a directory or a place for one: {reason}"
        ) from None
    for path in paths:
        check_writable(path, force)
    with Progress() as progress:
        result = run_demo(
            seeds=seeds,
            settings=Settings(**_given(steps=steps)),
            progress=progress,
            processes=min(torch.get_num_threads(), 8),  # a process takes half a gigabyte of memory
            **(EVERY_ARM if all_arms else {})
            | _given(bits=bits or None, everything=everything or None, average=average or None),
        )
    for path in paths:
        result.save(path, force=force)
    if as_json:
        _print_json(result.to_dict())
        return
    _console().print(result)
    click.echo("\n" + printable(f"saved to {paths[0]} and {paths[1]}"))


# ---------------------------------------------------------------------------------------------------------
# Tables in, tables out


def _show_table(table, as_json):
    if as_json:
        click.echo(table.dumps())
        return
    from fewbit.catalog.table_report import TableReport

    _console().print(TableReport(table))


def _load(source, problem, function, several):
    """Return the tables that NAME|FILE and the options select: at least one, and exactly one unless ``several``."""
    is_file = source.endswith(".json") or "/" in source or os.sep in source
    if function is not None and not is_file:
        raise FewbitError(f"{source}: expected a FILE with --function, got the name of a function")
    if is_file:
        tables = _select(source, problem)
        if function is not None:
            tables = [
                table if table.activation is not None else table.with_activation(function)
                for table in tables
            ]
    elif problem["bits"] is None and problem["levels"] is None:
        from fewbit.catalog.store import shipped_tables

        if not several:
            raise FewbitError(f"{source}: expected --bits with the name of a function")
        if ":" in source or not (tables := _matching(shipped_tables(source), problem)):
            raise FunctionError(f"{source}: no such table is shipped; with --bits it is solved")
    else:
        from fewbit.catalog.store import load_table

        with Progress():
            tables = [load_table(source, **_given(**problem))]
    if len(tables) > 1 and not several:
        raise FewbitError(
            f"{source}: expected one table, got {len(tables)}; choose by --bits, --form and --weight"
        )
    return tables


def _select(path, problem):
    from fewbit.sizes import counted
    from fewbit.table import load_file

    tables = load_file(path)
    chosen = _matching(tables, problem)
    if not chosen:
        raise TableError(f"{path}: of its {counted(len(tables), 'table')} none matches the options")
    return chosen


def _matching(tables, problem):
    """Those that the options given describe."""
    asked = _given(**problem)
    if "weight" in asked:
        from fewbit.solver.weight import make_weight

        asked["weight"] = make_weight(asked["weight"]).document()
    return [table for table in tables if all(_has(table, *each) for each in asked.items())]


def _has(table, name, value):
    if name == "levels":
        return len(table.levels) == value
    if name == "parameters":
        return all(table.parameters.get(key) == number for key, number in value.items())
    return getattr(table, name) == value
