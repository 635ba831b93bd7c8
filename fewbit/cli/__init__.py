"""The command line `fewbit`. Commands call the library and show its results; they contain no mathematics.

At their top, the files of this folder import no third-party package except click. Each command imports the modules that
it needs when it runs, so that `fewbit --help` and `fewbit solve` start quickly. This folder may import every part of
fewbit.
"""

from fewbit.cli import doctor, tables, training  # noqa: F401, adds their commands to the application
from fewbit.cli.application import app, main

__all__ = ["app", "main"]
