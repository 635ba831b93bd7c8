"""Subclasses of module classes that run the calls of a converted model's modules inside `try` / `finally`.

A module gets a *tracked* class, whose `__call__` passes the call to the model's `CallGuard` (docs/decisions/0013).
"""

from __future__ import annotations

import copy
import warnings
import weakref
from abc import ABCMeta
from inspect import unwrap
from types import CodeType

import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch.fx import GraphModule
from torch.nn.utils.parametrize import is_parametrized

GUARD = "_fewbit_guard"
"""The attribute of a module or activation that holds the model's `CallGuard`."""

PATH = "_fewbit_path"
"""The attribute of a module that holds its path in the converted model."""

_callback = eval_frame.get_eval_frame_callback
_made = weakref.WeakKeyDictionary()  # {class: weak reference to the class made from it}


def leave_to_interpreter(code: CodeType, with_callees: bool = False) -> None:
    """Let torch.compile trace a function only as a part of its callers, and with `with_callees` compile none that it calls.

    Otherwise Dynamo could reuse the code that it has compiled for one call of the function in a different call.
    """
    actions = eval_frame._FrameAction
    callees = actions.SKIP if with_callees else actions.DEFAULT
    strategy = eval_frame._FrameExecStrategy(actions.SKIP, callees)
    eval_frame.set_code_exec_strategy(code, strategy)


def is_compiled_code() -> bool:
    """Return whether torch.compile traces the running code, has compiled the caller or compiles what is called next."""
    return torch.compiler.is_compiling() or _callback() is not None


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` or the module's own method `compile` has compiled the module."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


class _QConfig:
    """The attribute `qconfig` of tracked modules, which warns when torch.ao.quantization sets it or deletes it.

    torch.ao.quantization finds layers by their exact class, so it would silently pass over compressed ones.
    """

    def __get__(self, module, owner=None):
        if module is not None and "qconfig" in vars(module):
            return vars(module)["qconfig"]
        of_class = super(TrackedModule, owner if module is None else module)
        return of_class.qconfig  # an attribute of the user's class

    def __set__(self, module, value):
        self._warn(module)
        vars(module)["qconfig"] = value

    def __delete__(self, module):
        self.__get__(module)
        self._warn(module)
        del vars(module)["qconfig"]

    def _warn(self, module) -> None:
        if GUARD in vars(module):
            warnings.warn(
                "torch.ao.quantization finds no layers in a compressed model: call prepare_qat before compress_, and "
                "fewbit.restore_ before convert",
                stacklevel=4,
            )


class TrackedModule:
    """A mixin for module classes: calls run within the module's call guard, if it has one and no compiler is at work."""

    qconfig = _QConfig()

    def __init_subclass__(cls, **kwargs):
        # A user's class may register its subclasses; classes that `tracked_class` makes must not be registered.
        if "_fewbit_base" not in vars(cls):
            super().__init_subclass__(**kwargs)

    def __call__(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        attributes = self.__dict__
        guard = attributes[GUARD] if GUARD in attributes else None
        is_compiled = self._compiled_call_impl is not None or _callback() is not None
        if guard is None or is_compiled:
            return super().__call__(*args, **kwargs)
        return guard.call(self, super().__call__, args, kwargs)

    def __reduce_ex__(self, protocol):
        reduced = super().__reduce_ex__(max(protocol, 2))
        base = vars(type(self)).get("_fewbit_base")
        if base is None or isinstance(reduced, str):
            # The class is another library's subclass of a tracked class, or `reduced` is the name of a global. pickle
            # looks up both by name.
            return reduced
        made, args, *rest = reduced
        args = tuple(base if value is type(self) else value for value in args)
        return _recreated, (made, args), *rest


class TrackedGraph(TrackedModule):
    """The `TrackedModule` for torch.fx.GraphModule, which copies only what the graph uses, and pickles the graph as code."""

    def __reduce_ex__(self, protocol):
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str):
            return reduced
        made, args, *rest = reduced
        return _recreated, (made, args), *rest

    def __copy__(self):
        return self._tracked_alike(super().__copy__(), lambda guard: guard)

    def __deepcopy__(self, memo):
        return self._tracked_alike(
            super().__deepcopy__(memo), lambda guard: copy.deepcopy(guard, memo)
        )

    def _tracked_alike(self, other, copied):
        guard = vars(self).get(GUARD)
        if guard is not None:
            vars(other)[PATH] = vars(self).get(PATH, "")
            track(other, copied(guard), tracked_class_for(other))
        return other


leave_to_interpreter(TrackedModule.__call__.__code__)


def _recreated(made, args) -> nn.Module:
    module = made(*args)
    _set_class(module, tracked_class_for(module))
    return module


def tracked_class(base: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of `base` whose calls run within the call guard, the same for every call."""
    reference = _made.get(base)
    made = None if reference is None else reference()
    if made is None:
        own = {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "_fewbit_base": base,
        }
        mixin = TrackedGraph if issubclass(base, GraphModule) else TrackedModule
        made = _new_class(type(base), base.__name__, (*_layout_of(base), mixin, base), own)
        made._fewbit_names = frozenset(vars(made))
        _made[base] = weakref.ref(made)
    return made


def _layout_of(base: type) -> tuple[type, ...]:
    """Return the classes that must come first among the bases of a subclass, so that modules may change to it.

    Python changes an object's class only if both classes have added `__dict__` to the same class.
    """
    first = base
    while getattr(first.__base__, "__dictoffset__", 0):
        first = first.__base__
    if first.__base__ is object:
        return ()
    # typing.Generic expects this attribute in its direct subclasses, in which it would hide that of `base`.
    layout = _new_class(type(first.__base__), "_Layout", (first.__base__,), {"__orig_bases__": ()})
    del layout.__orig_bases__
    return (layout,)


def _new_class(metaclass: type, name: str, bases: tuple[type, ...], own: dict) -> type:
    """Make a class without running the code of a user's metaclass."""
    maker = next(cls for cls in metaclass.__mro__ if cls in (ABCMeta, type))
    return maker.__new__(metaclass, name, bases, own)


def graph_class_of(module: nn.Module) -> type | None:
    """Return the class that torch.fx made for this module alone, with the code of the graph; None if there is none.

    torch.fx refers to that class, so `track` changes its bases instead.
    """
    if not isinstance(module, GraphModule):
        return None
    made = (cls for cls in type(module).__mro__ if cls.__qualname__.endswith(".GraphModuleImpl"))
    return next(made, None)


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the module's class before `track`."""
    return vars(type(module)).get("_fewbit_base", type(module))


def tracked_class_for(module: nn.Module) -> type[nn.Module]:
    """Return the class that `track` should give the module."""
    cls = class_of(module)
    if isinstance(module, TrackedModule) or graph_class_of(module) is not None:
        return type(module)
    if is_parametrized(module) and len(cls.__bases__) == 1:
        # The class is torch's subclass for parametrized modules. When the last parametrization is removed, torch gives
        # the module the base of that class, so the base has to be the tracked class.
        (base,) = cls.__bases__
        return rebase(cls, base, tracked_class(base))
    return tracked_class(cls)


def track(module: nn.Module, guard, cls: type[nn.Module]) -> None:
    """Make calls of the module run within a call guard; `cls` is `tracked_class_for(module)`."""
    vars(module)[GUARD] = guard
    _set_class(module, cls)


def _set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    object.__setattr__(module, "__class__", cls)
    own = graph_class_of(module)
    if own is not None and not issubclass(own, TrackedModule):
        own.__bases__ = tuple(
            tracked_class(base) if issubclass(base, GraphModule) else base for base in own.__bases__
        )


def untrack(module: nn.Module) -> None:
    """Undo `track`. If the class has to keep `TrackedModule` as a base, calls behave like torch's without the guard."""
    vars(module).pop(GUARD, None)
    cls, own = untracked_class(module), graph_class_of(module)
    for made in [kind for kind in type(module).__mro__ if "_fewbit_base" in vars(kind)]:
        base = vars(made)["_fewbit_base"]
        _move_writes(made, base)
        if own is not None and made in own.__bases__:
            own.__bases__ = tuple(base if parent is made else parent for parent in own.__bases__)
    object.__setattr__(module, "__class__", cls)


def _move_writes(made: type, base: type) -> None:
    """Move attributes that were set on a tracked class later, such as a patched forward, to its base."""
    for name in set(vars(made)) - vars(made)["_fewbit_names"] - {"_fewbit_names"}:
        value = vars(made)[name]
        if name.startswith("__annot") or (name.startswith("__") and not callable(value)):
            continue  # a cache, such as Python's __annotations__ or pickle's __slotnames__
        setattr(base, name, value)
        delattr(made, name)


def untracked_class(module: nn.Module) -> type[nn.Module]:
    """Return the module's class without `TrackedModule`, also if another library has made a subclass."""
    cls = type(module)
    if graph_class_of(module) is not None:
        return cls
    made = next((kind for kind in cls.__mro__ if "_fewbit_base" in vars(kind)), None)
    return cls if made is None else rebase(cls, made, vars(made)["_fewbit_base"]) or cls


def rebase(cls: type, old: type, new: type) -> type | None:
    """Return a copy of a class with the base `new` in place of `old`; None if a method uses super() without arguments."""
    if cls is old:
        return new
    if old not in cls.__mro__:
        return cls
    own = {
        name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")
    }
    codes = [
        getattr(unwrap(member), "__code__", None) for member in own.values() if callable(member)
    ]
    if any("__class__" in code.co_freevars for code in codes if code is not None):
        return None  # super() without arguments refers to cls itself
    bases = [rebase(base, old, new) for base in cls.__bases__]
    return None if None in bases else _new_class(type(cls), cls.__name__, tuple(bases), own)
