"""Import of timm on machines without torchvision.

timm imports torchvision for its data sets, for the transforms of images, and for a frozen batch norm, which the models of
`benchmarks/networks/model_zoo.py` do not use. torchvision requires one version of torch, and may be missing where torch is not a
release. `timm_without_torchvision` then imports timm with empty classes in the place of torchvision's.
"""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

NAME = "torchvision"
# timm uses these names when it is imported.
INTERPOLATIONS = "NEAREST BILINEAR BICUBIC BOX HAMMING LANCZOS"


class _Module(types.ModuleType):
    """A module in which every public name is an empty class."""

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        is_enum = name == "InterpolationMode"
        value = enum.Enum(name, INTERPOLATIONS) if is_enum else type(name, (), {})
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torchvision and each of its submodules as a `_Module`."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != NAME:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def timm_without_torchvision():
    """Return the module timm. If torchvision is not installed, no trace of the stand-in stays in `sys.modules`.

    Raises:
        ImportError: timm is not installed.
    """
    if importlib.util.find_spec(NAME) is not None or "timm" in sys.modules:
        return importlib.import_module("timm")
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        return importlib.import_module("timm")
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
            del sys.modules[name]
