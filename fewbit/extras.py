"""Packages that only some features need: how each is installed, and the error if one is missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fewbit.errors import MissingPackageError

INSTALLED_BY = {
    "torch": "torch",
    "matplotlib": "fewbit[plot]",
    "scipy": "fewbit[numerics]",
    "imagecodecs": "fewbit[codecs]",
    "transformers": "transformers",
}
"""{package: the argument of `pip install` that installs it}. The extras are in pyproject.toml."""


@contextmanager
def needed_for(feature: str) -> Iterator[None]:
    """Return a context manager that says which package a feature, such as "fewbit plot", lacks.

    Raises:
        MissingPackageError: The block imports a package of `INSTALLED_BY` that is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        # If the package itself is loaded, it is another version, which lacks a module.
        if package not in INSTALLED_BY or sys.modules.get(package):
            raise
        raise MissingPackageError(feature, package, INSTALLED_BY[package]) from None
