"""The command line `fewbit`. Commands call the library and show its results.

Files import only click at their top, so that `fewbit --help` and `fewbit solve` start quickly.
"""

from fewbit.cli import doctor, table_commands, training_commands  # noqa: F401, adds their commands to the application
from fewbit.cli.application import app, main

__all__ = ["app", "main"]
