"""Results on standard output: as JSON, or as text for people."""

from __future__ import annotations

import json

import click

from fewbit.text import printable


def print_json(value):
    """Print one JSON document on standard output."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def print_result(result, as_json, *saved):
    """Print a result: as JSON if `as_json` is true, else as `print_report` does."""
    if not as_json:
        print_report(result, *saved)
    elif hasattr(result, "to_dict"):
        print_json(result.to_dict())
    else:
        print_json(result.records())


def print_report(report, *saved):
    """Print a result as text for people. If the command has written files, the last line names them.

    Args:
        report: An object that rich can print.
        saved: The values of the command's options for output files: a path, or None if an option was not given.
    """
    from rich.console import Console

    Console(highlight=False, emoji=False, markup=False).print(report)
    paths = " and ".join(str(path) for path in saved if path is not None)
    if paths:
        click.echo(f"\nsaved to {printable(paths)}")
