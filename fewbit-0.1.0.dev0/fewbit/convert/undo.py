"""Roll a model back if a conversion does not complete."""

from __future__ import annotations

import sys

import torch
from torch import nn

from fewbit.runtime.interop.interrupts import undone_if_it_raises
from fewbit.runtime.interop.module_calls import graph_class_of

_TABLES = (
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)


class _Before:
    """A snapshot of all that a conversion changes in a model: classes, attributes, hooks, attention implementations."""

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
        """Restore the whole snapshot. Calling this twice has the same effect as calling it once."""
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


whole_or_not_at_all = undone_if_it_raises(lambda model=None, *_, **__: _Before(model))
"""A decorator for a function that changes a model, its first argument. The model is rolled back if the call raises."""
