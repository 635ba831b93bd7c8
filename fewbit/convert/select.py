"""The modules of a model that `include`, `exclude` and `overrides` select."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from fewbit.config import LayerSettings
from fewbit.convert import kinds
from fewbit.convert.module_settings import ResolvedSettings
from fewbit.errors import InputError
from fewbit.printable import meant
from fewbit.runtime.interop.module_calls import class_of

Filter = str | Iterable[str] | Callable[[str, nn.Module], bool]
"""One or several glob patterns of dotted module paths, or a function (path, module) -> bool."""
SHOWN = 6
"""The most modules that a message names."""


@dataclass(frozen=True)
class Selection:
    """The arguments `include`, `exclude` and `overrides` of `compress_`."""

    include: Filter = "*"
    exclude: Filter = ()
    overrides: Mapping[str, object] | None = None

    def of(self, model: nn.Module, settings: ResolvedSettings) -> list[Selected]:
        """Return a `Selected` for every module, and for every activation function that a module has as an attribute.

        Raises InputError if an argument is invalid.
        """
        found = _found(model)
        included = _matches(found, self.include, "include")
        excluded = _matches(found, self.exclude, "exclude")
        own = _overridden(found, settings, {} if self.overrides is None else self.overrides)
        result = []
        for place, is_in, is_out, given in zip(found, included, excluded, own, strict=True):
            given = given if is_in and not is_out else None
            result.append(Selected(place.paths[0], place.module, place.attribute, given))
        return result


class Selected(NamedTuple):
    """One module, or one activation function that a module has as an attribute, and its settings.

    Attributes:
        path: the dotted path, the first one if there are several; "" for the model itself.
        module: the module, or the module that has the function.
        attribute: the name of the attribute that is the function; None for a module.
        settings: the settings of the conversion, or None.
    """

    path: str
    module: nn.Module
    attribute: str | None
    settings: ResolvedSettings | None


def settings_by_module(selected: Iterable[Selected]) -> dict[int, ResolvedSettings | None]:
    """Return {id(module): its settings, or None if it must not be converted}."""
    return {id(one.module): one.settings for one in selected if one.attribute is None}


class _Place(NamedTuple):
    paths: list[str]
    module: nn.Module
    attribute: str | None


def _found(model: nn.Module) -> list[_Place]:
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        found.setdefault((id(module), None), _Place([], module, None)).paths.append(path)
        attribute = kinds.FUNCTION_ATTRIBUTE
        is_owner = class_of(module) in kinds.FUNCTION_OWNERS
        if is_owner and getattr(module, attribute, None) in kinds.FUNCTIONS:
            of_owner = found.setdefault((id(module), attribute), _Place([], module, attribute))
            of_owner.paths.append(f"{path}.{attribute}".lstrip("."))
    return list(found.values())


def _matches(found: list[_Place], which: Filter, name: str) -> list[bool]:
    if callable(which) and not isinstance(which, type):
        return [any(which(path, place.module) for path in place.paths) for place in found]
    globs = (which,) if isinstance(which, str) else which
    if not isinstance(globs, Iterable) or isinstance(globs, type):
        raise InputError(
            f"{name}: expected a glob, a list of globs or a function (path, module) -> bool, "
            f"got {which!r}"
        )
    result = [False] * len(found)
    for glob in tuple(globs):
        if not isinstance(glob, str):
            raise InputError(f"{name}: expected a glob over dotted module paths, got {glob!r}")
        of_glob = [any(is_within(path, glob) for path in place.paths) for place in found]
        if not any(of_glob):
            paths = [path for place in found for path in place.paths]
            raise InputError(
                f"{name}: expected a glob that matches a module, got {glob!r}{_meant(glob, paths)}"
            )
        result = [a or b for a, b in zip(result, of_glob, strict=True)]
    return result


def _meant(glob: str, paths: list[str]) -> str:
    """Return the end of an error message that suggests another glob, or names the outermost modules."""
    anywhere = f"*{glob}"
    if any(is_within(path, anywhere) for path in paths):
        return f"; did you mean {anywhere!r}?"
    outermost = [path for path in paths if path and "." not in path][:SHOWN]
    names = f"; the outermost modules are {', '.join(outermost)}" if outermost else ""
    return meant(glob, paths) or names


def is_within(path: str, glob: str) -> bool:
    """Return whether the glob matches the path of a module or of one around it."""
    parts = path.split(".")
    return any(fnmatchcase(".".join(parts[:n]), glob) for n in range(len(parts) + 1))


def _overridden(found, settings, overrides) -> Iterator[ResolvedSettings | None]:
    """Yield the settings of each entry of `found`; None if an override says that it must not be converted."""
    if not isinstance(overrides, Mapping):
        raise InputError(f"overrides: expected a mapping of globs to settings, got {overrides!r}")
    result = [settings] * len(found)
    for glob, change in overrides.items():
        if not isinstance(glob, str):
            raise InputError(f"overrides: expected a glob over dotted module paths, got {glob!r}")
        try:
            change = LayerSettings.of(change)
            own = None if change is None else settings.changed(change)
        except InputError as error:
            raise InputError(f"overrides[{glob!r}]: {error}") from None
        matches = _matches(found, glob, "overrides")
        result = [own if matched else now for now, matched in zip(result, matches, strict=True)]
    return result
