"""Results on standard output: as JSON, or as text for people."""

from __future__ import annotations

import json

import click

from fewbit.printable import printable


def print_json(value):
    """Print one JSON document."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def print_result(result, as_json, *saved):
    """Print a result as JSON, or as `print_report` does."""
    if not as_json:
        print_report(result, *saved)
    elif hasattr(result, "to_dict"):
        print_json(result.to_dict())
    else:
        print_json(result.records())


def print_report(report, *saved):
    """Print what rich can print, and a line with the written files, `saved`, which are paths or None."""
    from rich.console import Console

    Console(highlight=False, emoji=False, markup=False).print(report)
    paths = " and ".join(str(path) for path in saved if path is not None)
    if paths:
        click.echo(f"\nsaved to {printable(paths)}")
