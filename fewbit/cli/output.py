"""Results on standard output: as JSON, or as text for people."""

from __future__ import annotations

import json
from contextlib import contextmanager

import click

from fewbit.errors import FewbitError
from fewbit.text import printable


def print_json(value):
    """Print one JSON document on standard output."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def print_result(result, as_json, *saved):
    """Print a result: as JSON if `as_json` is true, else as text for people, with the paths of the files `saved`."""
    if not as_json:
        print_report(result, *saved)
    elif hasattr(result, "to_dict"):
        print_json(result.to_dict())
    else:
        print_json(result.records())


def print_report(report, *saved):
    """Print a result for people.

    Args:
        report: An object that rich can print.
        saved: The paths of the files that were written; None for an option that was not given.
    """
    from rich.console import Console

    Console(highlight=False, emoji=False, markup=False).print(report)
    paths = " and ".join(str(path) for path in saved if path is not None)
    if paths:
        click.echo(f"\nsaved to {printable(paths)}")


@contextmanager
def needs_torch(command):
    """Raise FewbitError if an import inside the `with` block fails because torch is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise FewbitError(f"{command} needs torch: pip install torch") from None
