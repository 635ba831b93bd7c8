"""The command line `fewbit`. Commands call the library and show its results; they contain no mathematics.

Only click is imported here. Each command imports the modules that it needs, so that `fewbit solve` starts quickly and
`fewbit --help` at once. This folder may import everything.
"""

from fewbit.cli import tables, training  # noqa: F401, adds their commands to the application
from fewbit.cli.application import app, main

__all__ = ["app", "main"]
