"""The blocks of a model: the repeated modules that `fewbit.fit_` gives options of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from fewbit.errors import InputError
from fewbit.printable import shorten
from fewbit.runtime.interop.module_calls import class_of

_LISTS = nn.ModuleList, nn.ModuleDict
_CONTAINERS = nn.Sequential, *_LISTS


def find_blocks(model: nn.Module, which: str | Iterable[str] | None = None) -> dict[str, nn.Module]:
    """Return {path: module} of the blocks of a model, none inside another.

    A list (`nn.ModuleList`, `nn.Sequential`, `nn.ModuleDict`) has blocks if at least two of its modules have parts of their own, in the
    latter two of one class. A list inside a list, or inside a stage, counts by itself. In a model without such lists, the outermost modules
    of one class whose names end in numbers, such as b1 and b2, are blocks, or stages with such blocks. If `which` is given, blocks are the
    modules that match its glob patterns.

    Raises:
        InputError: a pattern matches no module.
    """
    if which is not None:
        return _named(model, which)
    found: dict[str, nn.Module] = {}
    _search(model, "", found)
    # A module may have several paths, of which globs match the first.
    first = {module: path for path, module in model.named_modules()}
    return {path: one for path, one in found.items() if first[one] == path} or _numbered_blocks(
        model
    )


def _search(module: nn.Module, path: str, found: dict) -> None:
    children = [(f"{path}.{name}".lstrip("."), child) for name, child in module.named_children()]
    if not (isinstance(module, _CONTAINERS) and _is_repeated(module)):
        for inner, child in children:
            _search(child, inner, found)
        return
    for inner, child in children:
        if not _has_parts(child):
            continue
        deeper: dict[str, nn.Module] = {}
        if isinstance(child, _CONTAINERS) or _is_stage(child):
            _search(child, inner, deeper)
        if deeper:
            found |= deeper
        elif not isinstance(child, _LISTS):
            found[inner] = child


def _is_repeated(container: nn.Module) -> bool:
    classes = [class_of(child) for child in container.children() if _has_parts(child)]
    least = 2 if isinstance(container, nn.ModuleList) else max(Counter(classes).values(), default=0)
    return len(classes) >= 2 and least >= 2


def _is_stage(module: nn.Module) -> bool:
    return "stage" in class_of(module).__name__.lower()


def _numbered_blocks(model: nn.Module) -> dict[str, nn.Module]:
    level = {"": model}
    while level:
        found = {path: child for one in level.items() for path, child in _numbered(*one).items()}
        if found:
            return {
                inner: block
                for path, child in found.items()
                for inner, block in (
                    _is_stage(child) and _numbered(path, child) or {path: child}
                ).items()
            }
        level = {
            f"{path}.{name}".lstrip("."): child
            for path, module in level.items()
            for name, child in module.named_children()
        }
    return {}


def _numbered(path: str, module: nn.Module) -> dict[str, nn.Module]:
    """Return {path: child} of the children that have parts, one class, and names such as b1 and b2."""
    kinds = {
        name: (name.rstrip("0123456789"), class_of(child))
        for name, child in module.named_children()
        if name[-1].isdigit() and _has_parts(child) and not isinstance(child, _LISTS)
    }
    counts = Counter(kinds.values())
    return {
        f"{path}.{name}".lstrip("."): module.get_submodule(name)
        for name, kind in kinds.items()
        if counts[kind] >= 2
    }


def _has_parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and next(module.parameters(), None) is not None


def _named(model: nn.Module, which) -> dict[str, nn.Module]:
    patterns = (which,) if isinstance(which, str) else tuple(which)
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InputError(f"blocks: expected globs of module paths, got {shorten(pattern)}")
        matching = {
            path: module
            for path, module in model.named_modules()
            if path and fnmatchcase(path, pattern)
        }
        if not matching:
            raise InputError(f"blocks: expected a glob that matches a module, got {pattern!r}")
        found |= matching
    outer = {}
    for path, module in model.named_modules():
        if path in found and not any(path.startswith(f"{other}.") for other in outer):
            outer[path] = module
    return outer
