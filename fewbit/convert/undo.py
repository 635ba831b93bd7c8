"""Roll a model back if a conversion does not complete."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from fewbit.runtime.interop.module_calls import graph_class_of

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_TABLES = (
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)


class _Before:
    """A snapshot of all that a conversion changes in a model."""

    def __init__(self, model):
        self._modules, self._configs = [], []
        if not isinstance(model, nn.Module):
            return
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            own = dict(vars(module))
            tables = [(own[name], type(own[name])(own[name])) for name in _TABLES if name in own]
            made = graph_class_of(module)
            classes = type(module), made, made and made.__bases__
            self._modules.append((module, classes, own, tables))
            config = own.get("config")
            if "transformers" in sys.modules and hasattr(config, "_attn_implementation_internal"):
                self._configs.append((config, config._attn_implementation_internal))

    def put_back(self) -> None:
        for module, (cls, made, bases), own, tables in self._modules:
            for name in [name for name in vars(module) if name not in own]:
                vars(module).pop(name, None)
            vars(module).update(own)
            for table, entries in tables:
                if list(table.items()) != list(entries.items()):
                    table.clear()
                    table.update(entries)
            if type(module) is not cls:
                object.__setattr__(module, "__class__", cls)
            if made is not None and made.__bases__ != bases:
                made.__bases__ = bases
        for config, implementation in self._configs:
            config._attn_implementation_internal = implementation


def whole_or_not_at_all(
    function: Callable[_Parameters, _Result],
) -> Callable[_Parameters, _Result]:
    """Decorate a function that changes a model, its first argument. If it raises, the model is as before."""

    @wraps(function)
    def changed(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        before = _Before(args[0] if args else kwargs.get("model"))
        try:
            return function(*args, **kwargs)
        except BaseException:
            before.put_back()
            raise

    return changed
