"""The recorder, which lists the tensors that autograd saves in a forward, and the modules that were running.

A saved-tensor hook gives autograd a *token* in place of each tensor. The tokens that exist after the forward stand for the tensors
that the backward pass would find.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from fewbit.runtime.interop.autograd_graph import COPIES, Metered, is_computed
from fewbit.runtime.interop.module_calls import is_compiled


@dataclass(frozen=True)
class Place:
    """A module in which tensors are saved: its path, "" for the model and for code outside of modules, and its class."""

    path: str
    type: str
    is_fewbit: bool


class Token(Metered):
    """The object that autograd holds in place of a saved tensor. It exists as long as autograd would keep the tensor.

    Attributes:
        tensor: the saved tensor, detached.
        tensors: `tensor`, or the tensors of a copy that replaces it.
        place: the module that saved the tensor.
        origin: "leaf" if the tensor is a leaf that requires grad, or a view of one; "cast" if it is a copy of a leaf in
            another dtype; else "".
        node: the name of an autograd node that holds the token, or "".
        has_fewbit_node: whether a node of an autograd Function or op of fewbit holds the token.
    """

    def __init__(self, tensor, place: Place):
        # Detached, because autograd node -> token -> tensor -> node would be a cycle that nobody collects.
        self.tensor = tensor.detach()
        self.tensors = (self.tensor,)
        self.needs_grad, self.is_computed = tensor.requires_grad, is_computed(tensor)
        self.place = place
        self.origin = _origin(tensor)
        self.node = ""
        self.has_fewbit_node = False

    def replace(self, tensors, restore) -> None:
        """Count a copy in place of the saved tensor, which stays: no backward pass follows."""
        self.tensors, self.origin, self.has_fewbit_node = tuple(tensors), "", True


class Recorder:
    """Lists the running modules, the innermost last, and the `Token`s of saved tensors in the order of saving.

    `outside` is the place of tensors that no watched module saves.
    """

    def __init__(self, outside: Place):
        self.running = [outside]
        self._tokens: list[weakref.ref[Token]] = []

    def enter(self, place: Place) -> None:
        """Record that a module begins to run."""
        self.running.append(place)

    def alive(self) -> list[Token]:
        """Return the `Token`s that autograd still holds, in the order of saving."""
        return [token for token in (ref() for ref in self._tokens) if token is not None]

    def hooks(self) -> tuple:
        """Return two hooks for `torch.autograd.graph.saved_tensors_hooks`. A compiler must not compile them."""

        def pack(tensor):
            token = Token(tensor, self.running[-1])
            self._tokens.append(weakref.ref(token))
            return token

        def unpack(token):
            return token.tensor

        # If torch._dynamo is not imported, nothing is compiled. To import it here would take seconds.
        if "torch._dynamo" in sys.modules:
            return torch.compiler.disable(pack), torch.compiler.disable(unpack)
        return pack, unpack

    @contextmanager
    def watching(self, modules: dict[str, nn.Module]) -> Iterator[None]:
        """Note which modules {path: module}, parents first, are running inside the block."""
        compiled, handles = [], []
        try:
            for path, module in _outside_compiled(modules):
                place = Place(path, type_name(module), is_fewbit(module))
                if module._compiled_call_impl is None:
                    handles += self._watch(module, place)
                else:
                    # After module.compile(), hooks would become part of the compiled code, so the compiled call is wrapped.
                    compiled.append((module, vars(module).get("_compiled_call_impl")))
                    module._compiled_call_impl = partial(
                        self._call, place, module._compiled_call_impl
                    )
            yield
        finally:
            for module, own in compiled:
                module._compiled_call_impl = own
            for handle in handles:
                handle.remove()

    def _call(self, place, compiled, /, *args, **kwargs):
        self.enter(place)
        try:
            return compiled(*args, **kwargs)
        finally:
            self.running.pop()

    def _watch(self, module, place) -> list:
        def enter(*_):
            # A compiler that traces into a module without a compiled parent finds hooks that do nothing.
            if not torch.compiler.is_compiling():
                self.enter(place)

        def leave(*_):
            # A submodule may still be in the list if it raised an exception that the module caught.
            if not torch.compiler.is_compiling() and place in self.running[1:]:
                while self.running.pop() is not place:
                    pass

        # Some layers bypass a submodule's call if the submodule has no hooks. The mark says that these hooks do not
        # count.
        enter.only_watches = leave.only_watches = True
        return [
            module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
            module.register_forward_hook(leave, with_kwargs=True, always_call=True),
        ]


def _outside_compiled(modules: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) outside compiled or scripted modules, where a hook would cause a recompilation."""
    inside: set[int] = set()
    for path, module in modules.items():
        if id(module) in inside:
            continue
        if isinstance(module, torch.jit.ScriptModule):
            inside.update(map(id, module.modules()))
            continue
        if is_compiled(module):
            inside.update(id(child) for child in module.modules() if child is not module)
        yield path, module


def _origin(tensor) -> str:
    base = tensor if tensor._base is None else tensor._base
    if base.requires_grad and base.is_leaf:
        return "leaf"
    node, is_copied = tensor.grad_fn, False
    while node is not None and node.name() in COPIES:
        is_copied |= node.name() == "ToCopyBackward0"
        node = node.next_functions[0][0]
    if is_copied and isinstance(getattr(node, "variable", None), nn.Parameter):
        return "cast"
    return ""


def name_nodes(outputs) -> None:
    """Write into each saved tensor's `Token` the name of an autograd node that holds it."""
    nodes = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        for token in _tokens_of(node):
            token.node = token.node or node.name()
            token.has_fewbit_node |= is_fewbit_node(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)


def _tokens_of(node) -> Iterator[Token]:
    for name in dir(type(node)):
        if name.startswith("_raw_saved"):
            try:
                saved = getattr(node, name)
            except RuntimeError:  # freed by a backward inside the forward
                continue
            for item in saved if isinstance(saved, tuple | list) else (saved,):
                # Tensors that other hooks have packed are not unpacked, because unpacking may recompute a forward.
                token = getattr(item, "data", None)
                if isinstance(token, Token):
                    yield token


def is_fewbit_node(node) -> bool:
    """Return whether an autograd Function or op of fewbit has made a node."""
    forward = getattr(type(node), "_forward_cls", None)
    is_own = forward is not None and _is_fewbit_class(forward)
    return is_own or "GeneratedBackwardFor_fewbit" in node.name()


def is_fewbit(model) -> bool:
    """Return whether fewbit defines the class of a model, which may be compiled."""
    return _is_fewbit_class(type(getattr(model, "_orig_mod", model)))


def _is_fewbit_class(cls) -> bool:
    return cls.__module__.split(".")[0] == "fewbit"


def type_name(model) -> str:
    """Return the name of a module's class, or of another callable."""
    if isinstance(model, nn.Module):
        original = getattr(model, "_orig_mod", model)
        return type(original).__name__ + " (compiled)" * is_compiled(model)
    return getattr(model, "__name__", type(model).__name__)
