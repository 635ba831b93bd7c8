"""The arguments and options of the commands. The library checks ranges of numbers."""

from __future__ import annotations

import os
from pathlib import Path

import click

from fewbit.errors import FewbitError
from fewbit.files import check_writable

PICTURES = (".png", ".svg")


def given(**options):
    """Return the options that the user gave; others get the library's defaults."""
    return {name: value for name, value in options.items() if value not in (None, ())}


def is_file(source):
    """Return whether an argument NAME|FILE ends in .json or has a slash."""
    return source.endswith(".json") or "/" in source or os.sep in source


class FunctionName(click.ParamType):
    """A function's name, as `fewbit list` shows it or as "package.module:name"."""

    name = "name"

    def convert(self, value, param, ctx):
        expected = "a function that 'fewbit list' shows, or package.module:name"
        if ":" not in value and is_file(value):
            raise FewbitError(
                f"{value}: expected {expected}, got a file; 'fewbit show' reads files"
            )
        if ":" not in value and "." in value:
            raise FewbitError(f"{value}: expected {expected}")
        return value


class TableSource(click.ParamType):
    """The name of a function or the path of a file of tables."""

    name = "source"

    def convert(self, value, param, ctx):
        if ":" not in value and "." in value and not is_file(value):
            raise FewbitError(
                f"{value}: expected a function that 'fewbit list' shows, or a JSON file of tables: a path that ends in "
                ".json, or has a slash"
            )
        return value


class Parameter(click.ParamType):
    """A parameter of an activation function: the text NAME=NUMBER."""

    name = "parameter"

    def convert(self, value, param, ctx):
        name, _, text = value.partition("=")
        try:
            number = float(text)
        except ValueError:
            name = ""
        if not name:
            self.fail(f"expected NAME=VALUE with a number, got {value!r}", param, ctx)
        return name, number


class Size(click.ParamType):
    """A size in bytes, such as 32GB."""

    name = "size"

    def convert(self, value, param, ctx):
        from fewbit.sizes import parse_size

        try:
            return parse_size(value)
        except FewbitError as error:
            raise FewbitError(f"{param.opts[0]}: {error}") from None


def _unique(ctx, option, pairs):
    for index, (name, _) in enumerate(pairs):
        if name in dict(pairs[:index]):
            raise click.BadParameter(f"expected every name once, got {name!r} twice")
    return dict(pairs) or None


def output_options(what, *endings, required=False):
    """Return a decorator that adds the options `--output`, for a file of `what` with one of the `endings`, and `--force` to a command.

    The file is checked before the command runs.
    """

    def check(ctx, option, path):
        if path is None:
            return None
        suffix = Path(path).suffix.lower()
        if suffix not in endings:
            expected = " or ".join(filter(None, [", ".join(endings[:-1]), endings[-1]]))
            raise FewbitError(f"{path}: expected a file name that ends in {expected}")
        check_writable(path, ctx.params["force"])
        if suffix in PICTURES:
            from fewbit.render.figures import matplotlib

            feature = ctx.command_path if required else f"{ctx.command_path} -o {path}"
            matplotlib(feature)  # a missing matplotlib is reported now, not after minutes of work
        return path

    output = click.option(
        "-o",
        "--output",
        metavar="FILE",
        required=required,
        callback=check,
        help=f"Write {what} to FILE.",
    )
    return lambda command: output(force_option(command))


# Eager, so that click parses --force before the check of an output file needs its value.
force_option = click.option(
    "--force", is_flag=True, is_eager=True, help="Overwrite an existing output file."
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON on standard output, and nothing else."
)
function_option = click.option(
    "--function",
    metavar="MODULE:NAME",
    help="For a FILE: its function if that is not built in, package.module:name, which is imported.",
)


def number(name, help, metavar="N", type=int):
    """Return an option for a number."""
    return click.option(name, type=type, metavar=metavar, help=help)


def several_bits(name="--bits", of="", default="1 to 4", type=int):
    """Return an option for bits that may be repeated. Its help begins with `of`."""
    return click.option(
        name,
        type=type,
        multiple=True,
        metavar="B",
        help=f"{of or 'Numbers of bits'}, 1 to 8; may be repeated.  [default: {default}]",
    )


_REQUEST = (
    number("--bits", "Bits per element, 1 to 8. A table has up to 2^B levels.", metavar="B"),
    click.option(
        "--form",
        type=click.Choice(["levels", "intervals"]),
        help="Whether pieces may share a level (levels, default), or each has its own, as in the "
        "paper (intervals).",
    ),
    click.option(
        "--weight",
        metavar="W",
        help="The density of inputs: uniform (default), normal, "
        "normal:MEAN,STD, scales, scales:LOW,HIGH, or a .npy or .npz file with pre-activations or a histogram.",
    ),
    click.option(
        "--domain",
        type=float,
        nargs=2,
        metavar="A B",
        help="The interval on which the error is measured, such as -5 5.",
    ),
    click.option(
        "--objective",
        type=click.Choice(["mse", "unbiased", "minimax"]),
        help="What is minimized: the squared error (mse, default), the largest error (minimax), or "
        "the variance of levels that are drawn with the right mean (unbiased).",
    ),
    click.option(
        "--tails",
        type=click.Choice(["free", "pinned"]),
        help="The outermost levels: any (free, default), or the limits of f' (pinned).",
    ),
    number("--levels", "The number of levels, instead of 2^B.", metavar="K"),
    click.option(
        "--param",
        "parameters",
        type=Parameter(),
        multiple=True,
        metavar="NAME=VALUE",
        callback=_unique,
        help="A parameter of the function, by torch's name; may be repeated.",
    ),
)


def table_options(command):
    """Add the options that describe a table, named as arguments of `fewbit.load_table`."""
    for option in reversed(_REQUEST):
        command = option(command)
    return command
