"""The click application of the command `fewbit`, with its exit codes, errors and warnings."""

from __future__ import annotations

import difflib
import gc
import os
import re
import sys
import traceback
import warnings

import click

from fewbit._version import __version__
from fewbit.cli.interrupts import repeat_lost
from fewbit.cli.standard_streams import OutputLost, secure
from fewbit.errors import FewbitError, OutputExistsError
from fewbit.extras import needed_for
from fewbit.printable import one_line, printable

FAILED, BAD_INPUT, BUG, INTERRUPTED, OUTPUT_LOST = 1, 2, 70, 130, 141
TRACEBACK = "FEWBIT_TRACEBACK"
"""The environment variable for tracebacks of unexpected errors."""


class OnceOnly(click.Command):
    """A command that refuses an option which is given twice, unless it may be repeated."""

    def parse_args(self, ctx, args):
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for option in order:
            is_single = isinstance(option, click.Option) and not (option.multiple or option.is_flag)
            if is_single and order.count(option) > 1:
                ctx.fail(f"expected {option.opts[-1]} once, got it {order.count(option)} times")
        return super().parse_args(ctx, args)

    def invoke(self, ctx):
        """Run the command. The error for a missing package says how to install it."""
        with needed_for(ctx.command_path):
            return super().invoke(ctx)


class App(click.Group):
    """The group of all commands, with the exit codes in docs/reference/cli.md. Each warning is one line."""

    command_class = OnceOnly

    def main(self, *args, standalone_mode=True, **kwargs):
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **kwargs)
        try:
            code = super().main(*args, standalone_mode=False, **kwargs)
        except BaseException as error:
            code = _explain(error)
        sys.exit(code if isinstance(code, int) else 0)

    def resolve_command(self, ctx, args):
        """Find the command. The error for an unknown name suggests a similar one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            close = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            hint = f"did you mean {close[0]}?" if close else f"expected {', '.join(self.commands)}"
            ctx.fail(f"unknown command {args[0]!r}: {hint}")

    def invoke(self, ctx):
        _check_environment()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warnings.simplefilter("always", UserWarning)
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except KeyboardInterrupt:
            complain("interrupted")
            ctx.exit(INTERRUPTED)
        except EOFError as error:  # click would treat EOFError as an interrupt
            raise FewbitError(f"standard input has ended: {one_line(error)}") from error


@click.group(
    cls=App,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)
@click.version_option(__version__, prog_name="fewbit", message="%(prog)s %(version)s")
@click.pass_context
def app(ctx):
    """Find the best few-bit tables for the derivatives of activation functions.

    A table is a step function q with few levels that replaces f' in the backward
    pass. A layer saves the number of a level per element, in a few bits, instead of
    its input. To train a model, call fewbit.compress_(model, bits=4) in Python: all
    its layers then save a few bits per element.

    \b
    Examples:
      fewbit solve gelu --bits 3
      fewbit compare
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main():
    """Run the command `fewbit`, and end the process with its exit code."""
    # Importing numba makes many objects and no garbage. The default thresholds would make the collector scan these
    # objects repeatedly, also at exit, which takes a third of the time of a small solve.
    gc.set_threshold(100_000, 50, 50)
    secure()
    repeat_lost()
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


def complain(kind, message=None):
    """Print `fewbit: kind: message`, or `fewbit: kind`, as one line on standard error."""
    text = kind if message is None else f"{kind}: {message}"
    click.echo(f"fewbit: {printable(' '.join(text.split()))}", err=True)


def _explain(error):
    if isinstance(error, OutputLost):
        return OUTPUT_LOST
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, click.ClickException):
        complain("error", _usage_message(error))
    elif isinstance(error, OutputExistsError):
        complain("error", f"{error.path} exists; pass --force to overwrite it")
    elif isinstance(error, FewbitError):
        complain("error", error)
    elif isinstance(error, MemoryError):
        complain("error", "not enough memory for this request")
    elif not isinstance(error, Exception):  # SystemExit or the like, raised by the user's code
        complain("error", f"expected code that does not end the program, got {one_line(error)}")
    else:
        if os.environ.get(TRACEBACK):
            traceback.print_exception(error)
        complain("error", f"unexpected {one_line(error)} (the traceback: set {TRACEBACK}=1)")
        return BUG
    return BAD_INPUT


def _usage_message(error):
    message = error.format_message()
    message = message[:1].lower() + message[1:]
    command = getattr(error, "ctx", None)
    hint = f" (try '{command.command_path} --help')" if command is not None else ""
    return f"{message.rstrip('.')}{hint}"


def _check_environment():
    """Raise FewbitError if NUMBA_NUM_THREADS is less than 1, with which numba cannot be imported."""
    threads = os.environ.get("NUMBA_NUM_THREADS", "1")
    try:
        is_impossible = int(threads) < 1
    except ValueError:  # numba ignores text that is not an integer
        is_impossible = False
    if is_impossible:
        raise FewbitError(f"NUMBA_NUM_THREADS: expected 1 or more, got {threads}")


def _show_warning(message, category, filename, lineno, file=None, line=None):
    complain("warning", message)
