"""What one forward keeps for backward, counted: saved tensors, each storage once, by module and kind.

Nothing is estimated. Every tensor that autograd saves passes through a saved-tensor hook, which
hands autograd a token in its place. Autograd drops the token when it drops the tensor, so the
tokens that are still alive when the forward has returned are exactly what backward would find;
what was saved on the way and thrown away again (a branch whose result is not used) is not counted.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from fewbit.analysis.saved_bytes import Entry, SavedBytes
from fewbit.errors import FewbitError
from fewbit.runtime.format import layout
from fewbit.runtime.format.groups import FP32_MIN_COLUMNS
from fewbit.runtime.interop.containers import tensors_in
from fewbit.runtime.interop.interrupts import leaves_nothing, undo_after
from fewbit.runtime.interop.module_calls import is_compiled
from fewbit.runtime.interop.tensor_kinds import is_plain
from fewbit.runtime.saved.context import measuring

_OF_HOOKS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
MASKS = (torch.bool, torch.uint8)
# Nodes between a parameter and its copy in another dtype (autocast), and views of either.
COPIES = {
    "ToCopyBackward0",
    "TBackward0",
    "TransposeBackward0",
    "ViewBackward0",
    "PermuteBackward0",
}
SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


@leaves_nothing
def saved_bytes(model, *inputs, **kwargs) -> SavedBytes:
    """Runs ``model(*inputs, **kwargs)`` once, with gradients, and counts what it keeps for backward.

    model: a torch.nn.Module, or any callable; the modules that a callable refers to (closure,
    globals, attributes) are found and named. The model stays as it was: training flags and
    gradients are not touched, buffers and torch's random state are put back, hooks are removed.
    Works on real, meta and fake tensors, and on compiled models (as one module).
    docs/meter.md says what is counted. Raises FewbitError if model cannot be called; what the
    forward itself raises is passed on.
    """
    if not callable(model):
        raise FewbitError(
            f"model: expected a torch.nn.Module or another callable, got {type(model).__name__}"
        )
    roots, compiled = _roots(model)
    modules = _named_modules(roots)
    tensors = tensors_in((inputs, kwargs))
    recorder = _Recorder(_Place("", _type_name(model), _is_fewbit(model)))
    with ExitStack() as stack:
        stack.enter_context(unchanged(modules, tensors))
        stack.enter_context(measuring())
        stack.enter_context(recorder.watching({} if compiled else modules))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*_hooks(recorder)))
        output = model(*inputs, **kwargs)
    # The output keeps the graph alive, the graph keeps the tokens alive.
    tokens = recorder.alive()
    _name_nodes(tensors_in(output))
    with _disable_current_modes():
        entries = _entries(tokens, _known(roots, tensors))
    del output
    return SavedBytes(_type_name(model), entries)


def alone(value):
    """A tensor in memory of its own, as the meter counts whole storages; anything else as it is."""
    if not is_plain(value) or not layout.is_part(value):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


# ---------------------------------------------------------------------------------------------------------
# Recording


@dataclass(frozen=True)
class _Place:
    """A module that saves: its path, its class, and whether the class is one of fewbit's."""

    path: str
    type: str
    fewbit: bool


class _Token:
    """Stands for a saved tensor inside autograd, and lives as long as autograd keeps it."""

    def __init__(self, tensor, place: _Place):
        # Detached: autograd node -> token -> tensor -> node would be a cycle nobody collects.
        self.tensor = tensor.detach()
        self.place = place
        self.origin = _origin(tensor)
        self.node = ""
        self.fewbit_node = False


class _Recorder:
    """The modules that are running, innermost last, and the tokens in the order of saving."""

    def __init__(self, outside: _Place):
        self.running = [outside]
        self._tokens: list[weakref.ref[_Token]] = []

    def enter(self, place: _Place) -> None:
        self.running.append(place)

    def save(self, tensor) -> _Token:
        token = _Token(tensor, self.running[-1])
        self._tokens.append(weakref.ref(token))
        return token

    def alive(self) -> list[_Token]:
        return [token for token in (ref() for ref in self._tokens) if token is not None]

    @contextmanager
    def watching(self, modules: dict[str, nn.Module]) -> Iterator[None]:
        """Keeps ``running`` while the modules are called."""
        watched = list(_outside_compiled(modules))
        compiled = [
            (module, vars(module).get("_compiled_call_impl"))
            for _, module in watched
            if module._compiled_call_impl is not None
        ]

        def put_back():
            for module, own in compiled:
                module._compiled_call_impl = own
            for _, module in watched:
                self._unwatch(module)

        with undo_after(put_back):
            for path, module in watched:
                self._watch(module, path)
            yield

    def _watch(self, module, path) -> None:
        place = _Place(path, _type_name(module), _is_fewbit(module))
        if module._compiled_call_impl is not None:
            # module.compile(): hooks would be compiled in, so the compiled call itself is wrapped.
            compiled = module._compiled_call_impl

            def call(*args, **kwargs):
                self.enter(place)
                try:
                    return compiled(*args, **kwargs)
                finally:
                    self.running.pop()

            module._compiled_call_impl = call
            return

        def enter(*_):
            # Where a compiler traces into a module that belongs to nobody compiled, it finds no-ops.
            if not torch.compiler.is_compiling():
                self.enter(place)

        def leave(*_):
            # A child that raised, and was caught, may not have left.
            if not torch.compiler.is_compiling() and place in self.running[1:]:
                while self.running.pop() is not place:
                    pass

        # For layers that call a submodule's function themselves unless somebody listens to it.
        enter.only_watches = leave.only_watches = self
        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(leave, with_kwargs=True, always_call=True)

    def _unwatch(self, module) -> None:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number, hook in list(hooks.items()):
                if getattr(hook, "only_watches", None) is self:
                    # The hook itself goes last: an interrupted removal, done again, finds what is left by it.
                    for table in _OF_HOOKS:
                        getattr(module, table).pop(number, None)
                    del hooks[number]


def _hooks(recorder: _Recorder):
    """The pack and unpack hooks. Where a model's code is compiled, the hooks must not be."""

    def pack(tensor):
        return recorder.save(tensor)

    def unpack(token):
        return token.tensor

    if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it takes seconds
        return torch.compiler.disable(pack), torch.compiler.disable(unpack)
    return pack, unpack


def _outside_compiled(modules: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Modules to put hooks on: a hook inside a compiled or scripted one would have it recompiled."""
    inside: set[int] = set()
    for path, module in modules.items():  # parents come first
        if id(module) in inside:
            continue
        if isinstance(module, torch.jit.ScriptModule):
            inside.update(map(id, module.modules()))
            continue
        if is_compiled(module):
            inside.update(id(child) for child in module.modules() if child is not module)
        yield path, module


def _origin(tensor) -> str:
    """ "leaf" for a leaf that requires grad or a view of one, "cast" for its copy in another dtype, else ""."""
    base = tensor if tensor._base is None else tensor._base
    if base.requires_grad and base.is_leaf:
        return "leaf"
    node, copied = tensor.grad_fn, False
    while node is not None and node.name() in COPIES:
        copied |= node.name() == "ToCopyBackward0"
        node = node.next_functions[0][0]
    if copied and isinstance(getattr(node, "variable", None), nn.Parameter):
        return "cast"
    return ""


def _name_nodes(outputs) -> None:
    """Writes into the tokens which autograd nodes hold them, as far as the outputs lead to them."""
    nodes = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        for token in _tokens_of(node):
            token.node = token.node or node.name()
            token.fewbit_node |= _is_fewbit_node(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)


def _tokens_of(node) -> Iterator[_Token]:
    for name in dir(type(node)):
        if name.startswith("_raw_saved"):
            try:
                saved = getattr(node, name)
            except RuntimeError:  # freed by a backward inside the forward
                continue
            for each in saved if isinstance(saved, tuple | list) else (saved,):
                # What the hook returned; other hooks' tensors are not unpacked (that may recompute).
                token = getattr(each, "data", None)
                if isinstance(token, _Token):
                    yield token


def _is_fewbit_node(node) -> bool:
    forward = getattr(type(node), "_forward_cls", None)
    return "GeneratedBackwardFor_fewbit" in node.name() or (
        forward is not None and _is_fewbit_class(forward)
    )


def _is_fewbit(model) -> bool:
    return _is_fewbit_class(type(getattr(model, "_orig_mod", model)))


def _is_fewbit_class(cls) -> bool:
    return cls.__module__.split(".")[0] == "fewbit"


def _type_name(model) -> str:
    if isinstance(model, nn.Module):
        original = getattr(model, "_orig_mod", model)
        return type(original).__name__ + " (compiled)" * is_compiled(model)
    return getattr(model, "__name__", type(model).__name__)


# ---------------------------------------------------------------------------------------------------------
# What the model is made of, and leaving it as it was


def _roots(model) -> tuple[dict[str, nn.Module], bool]:
    """{path: module} that the model is, or that a callable refers to; whether the callable is compiled."""
    found, compiled = {}, False
    while not isinstance(model, nn.Module):
        if hasattr(model, "_torchdynamo_orig_callable"):
            model, compiled = model._torchdynamo_orig_callable, True
        elif isinstance(model, functools.partial):
            found |= _only_modules(_by_type([*model.args, *model.keywords.values()]))
            model = model.func
        elif hasattr(model, "__wrapped__"):
            model = model.__wrapped__
        elif inspect.ismethod(model):
            owner, model = model.__self__, model.__func__
            found |= {"": owner} if isinstance(owner, nn.Module) else _only_modules(_fields(owner))
        else:
            break
    if isinstance(model, nn.Module):
        found |= {"": model}
    elif inspect.isfunction(model):
        variables = inspect.getclosurevars(model)
        found |= _only_modules({**variables.globals, **variables.nonlocals})
    else:
        found |= _only_modules(_fields(model))
    return found, compiled


def _by_type(values) -> dict:
    return {type(value).__name__: value for value in values}


def _fields(instance) -> dict:
    return getattr(instance, "__dict__", {})


def _only_modules(names) -> dict[str, nn.Module]:
    return {name: value for name, value in names.items() if isinstance(value, nn.Module)}


def _named_modules(roots: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """{path: module}; a module with several paths has the first."""
    memo: set[nn.Module] = set()
    found = {}
    for prefix, root in roots.items():
        found |= dict(root.named_modules(memo, prefix))
    return found


@contextmanager
def unchanged(modules: dict[str, nn.Module], inputs) -> Iterator[None]:
    """Puts buffers and torch's random state back, whatever happens inside."""
    with _disable_current_modes():  # under a fake mode too: these are real
        kept = [
            (module, name, buffer, _copy(buffer))
            for module in modules.values()
            for name, buffer in module._buffers.items()
        ]
        tensors = [
            *inputs,
            *(p for module in modules.values() for p in module._parameters.values()),
        ]
        random = _random_states(tensors)

    def put_back():
        with _disable_current_modes():
            for dequantize, state in random:
                dequantize(state)
            for module, name, buffer, copy in kept:
                module._buffers[name] = buffer
                # Through .data, and only if it changed: a graph built earlier may have saved it.
                if copy is not None and not torch.equal(buffer, copy):
                    buffer.data.copy_(copy)

    with undo_after(put_back):
        yield


def _copy(buffer):
    if buffer is None or buffer.is_meta or isinstance(buffer, FakeTensor):
        return None
    if buffer.layout != torch.strided:  # cannot be compared, and no layer writes to one
        return None
    return buffer.detach().clone()


def _random_states(tensors) -> list[tuple]:
    states = [(torch.set_rng_state, torch.get_rng_state())]
    devices = {tensor.device for tensor in tensors if tensor is not None}
    for device in devices:
        if device.type in ("cuda", "xpu"):
            backend = torch.get_device_module(device)
            if backend.is_available():  # a fake tensor's device need not exist
                dequantize = functools.partial(backend.set_rng_state, device=device)
                states.append((dequantize, backend.get_rng_state(device)))
    return states


# ---------------------------------------------------------------------------------------------------------
# Counting


@dataclass
class _Storage:
    """One storage and who saved it; places in the order of saving."""

    kind: str
    bytes: int
    views: dict = field(default_factory=dict)
    savers: dict[_Place, list] = field(default_factory=dict)  # (token, part) of each tensor


def _entries(tokens: list[_Token], known: dict) -> tuple[Entry, ...]:
    storages: dict[object, _Storage] = {}
    for token in tokens:
        for part in _parts(token.tensor):
            key, size = _identity(part)
            if size == 0:
                continue
            storage = storages.get(key)
            if storage is None:
                kind = known.get(key) or _kind(part, token)
                storage = storages[key] = _Storage(kind, size)
            storage.bytes = max(storage.bytes, size)
            view, viewed = _view(part)
            storage.views[view] = viewed
            storage.savers.setdefault(token.place, []).append((token, part))
    return tuple(entry for storage in storages.values() for entry in _entries_of(storage))


def _entries_of(storage: _Storage) -> Iterator[Entry]:
    first, *others = storage.savers
    for place, saves in storage.savers.items():
        token, part = saves[0]
        yield Entry(
            module=place.path,
            module_type=place.type,
            kind=storage.kind,
            shape=tuple(part.shape),
            dtype=str(part.dtype).removeprefix("torch."),
            device=str(part.device),
            bytes=storage.bytes if place is first else 0,
            viewed_bytes=min(storage.bytes, sum(storage.views.values())),
            saves=len(saves),
            node=token.node,
            first_saver=None if place is first else first.path,
            shared_with=tuple(other.path for other in others) if place is first else (),
        )


def _parts(tensor) -> list[torch.Tensor]:
    """The plain strided tensors that a tensor consists of."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in _parts(getattr(tensor, name))]
    if tensor.layout in SPARSE_PARTS:
        return [getattr(tensor, name)() for name in SPARSE_PARTS[tensor.layout]]
    return [tensor]


def _identity(tensor) -> tuple[object, int]:
    """What tells the storage of a living tensor from every other, and its bytes."""
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:  # an opaque layout (mkldnn)
        return id(tensor), tensor.numel() * tensor.element_size()
    if not isinstance(tensor, FakeTensor) and storage.data_ptr():
        # Two storage objects may hold the same memory (NumPy, DLPack).
        return (tensor.device, storage.data_ptr()), storage.nbytes()
    return storage._cdata, storage.nbytes()  # meta and fake: no memory, but an object each


def _view(tensor) -> tuple[object, int]:
    """Which elements of its storage a tensor reaches, and how many bytes they are (expanded: once)."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return id(tensor), tensor.numel() * tensor.element_size()
    # The order of dimensions makes no difference, nor do those that repeat or have one element.
    strides = sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if stride and size != 1
    )
    elements = math.prod(size for _, size in strides) if tensor.numel() else 0
    view = (tensor.storage_offset(), tensor.element_size(), tuple(strides))
    return view, elements * tensor.element_size()


def _known(roots: dict[str, nn.Module], inputs) -> dict[object, str]:
    """{identity of a storage: kind} of what existed before the forward."""
    modules = roots.values()
    existing = {
        "input": inputs,
        "buffer": [buffer for module in modules for buffer in module.buffers()],
        "parameter": [parameter for module in modules for parameter in module.parameters()],
    }
    return {
        _identity(part)[0]: kind
        for kind, tensors in existing.items()
        for tensor in tensors
        if not nn.parameter.is_lazy(tensor)
        for part in _parts(tensor)
    }


def _are_ranges(tensor) -> bool:
    """Whether it looks like the minimums and ranges of groups (docs/quantizer.md)."""
    return (
        tensor.dtype == torch.bfloat16
        and tensor.ndim == 2
        and tensor.shape[1] in (2, FP32_MIN_COLUMNS)
    )


def _kind(tensor, token: _Token) -> str:
    """The kind of a storage that is none of the known ones."""
    if token.origin:
        return {"leaf": "parameter", "cast": "cast"}[token.origin]
    # The packed format is 1-D int32; a compiled node does not tell whose payload it holds.
    if token.place.fewbit or token.fewbit_node or "CompiledFunction" in token.node:
        if tensor.dtype == torch.int32 and tensor.ndim == 1:
            return "packed"
        if _are_ranges(tensor) or (tensor.dtype == torch.uint8 and tensor.ndim == 1):
            return "range"  # or the bits of each sample
    if token.fewbit_node and "Norm" in token.node and tensor.dtype.is_floating_point:
        return "statistic"
    if tensor.dtype in MASKS:
        return "mask"
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return "integer"
    return "activation"
