"""The meter, which counts the bytes that one forward saves for backward; a storage counts once."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from fewbit.analysis.reasons import Reasons
from fewbit.analysis.recorder import Place, Recorder, Token, is_fewbit, name_nodes, type_name
from fewbit.analysis.saved_bytes import IN_FULL, Entry, SavedBytes
from fewbit.analysis.unchanged import unchanged
from fewbit.errors import InputError
from fewbit.runtime.interop.containers import tensors_in
from fewbit.runtime.saved.context import measuring

MASKS = (torch.bool, torch.uint8)
_COMPRESSED_ROWS = ("crow_indices", "col_indices", "values")
_COMPRESSED_COLUMNS = ("ccol_indices", "row_indices", "values")
SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _COMPRESSED_ROWS,
    torch.sparse_bsr: _COMPRESSED_ROWS,
    torch.sparse_csc: _COMPRESSED_COLUMNS,
    torch.sparse_bsc: _COMPRESSED_COLUMNS,
}


def saved_bytes(model: Callable, *inputs: Any, **kwargs: Any) -> SavedBytes:
    """Run ``model(*inputs, **kwargs)`` once, with gradients, and count the bytes that the forward saves for backward.

    The model does not change: buffers and torch's random state are restored. Tensors may be real, meta or fake
    (docs/guides/meter.md).

    Args:
        model: A torch.nn.Module, or a callable with modules in its closure, globals or attributes.
        *inputs: The arguments of the model. A mapping alone, such as the output of a tokenizer, gives keyword arguments
            if its keys are names of arguments of a module's forward. If the forward saves a slice of a larger tensor,
            the whole storage counts.
        **kwargs: The keyword arguments of the model.

    Returns:
        The storages that were saved.

    Raises:
        InputError: The model cannot be called. Exceptions of the forward itself are passed on.
    """
    if not callable(model):
        raise InputError(
            f"model: expected a torch.nn.Module or another callable, got {type(model).__name__}"
        )
    if len(inputs) == 1 and not kwargs and _are_keywords(model, inputs[0]):
        inputs, kwargs = (), dict(inputs[0])
    return saved_in_call(model, inputs, kwargs)


def saved_in_call(model: Callable, inputs, kwargs) -> SavedBytes:
    """Do what `saved_bytes` does, with exactly these arguments."""
    roots, compiled = _roots(model)
    modules, memo = {}, set()  # {first path: module}, with all modules inside of the roots
    for prefix, root in roots.items():
        modules |= dict(root.named_modules(memo, prefix))
    tensors = tensors_in((inputs, kwargs))
    recorder = Recorder(Place("", type_name(model), is_fewbit(model)))
    with ExitStack() as stack:
        stack.enter_context(unchanged(modules, tensors))
        stack.enter_context(measuring())
        stack.enter_context(recorder.watching({} if compiled else modules))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*recorder.hooks()))
        output = model(*inputs, **kwargs)
    # The output holds the graph, and the graph holds the tokens.
    tokens = recorder.alive()
    name_nodes(tensors_in(output))
    with _disable_current_modes():
        reasons = Reasons(modules, "" in roots)
        entries = _entries(tokens, existing_kinds(roots, tensors), reasons)
    del output
    return SavedBytes(type_name(model), entries)


def _are_keywords(model, batch) -> bool:
    """Return whether a batch is a mapping of arguments that the forward of a module has, not of one argument's values."""
    if not (isinstance(model, nn.Module) and isinstance(batch, Mapping)):
        return False
    try:
        signature = inspect.signature(getattr(model, "_orig_mod", model).forward)
        signature.bind(**batch)
    except (TypeError, ValueError):  # a function written in C may have no signature
        return False
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    is_open = kinds <= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return is_open or not signature.parameters.keys().isdisjoint(batch)


# -- The modules of a model ----------------------------------------------------------------------------------


def _roots(model) -> tuple[dict[str, nn.Module], bool]:
    found, compiled = {}, False
    while not isinstance(model, nn.Module):
        if hasattr(model, "_torchdynamo_orig_callable"):
            model, compiled = model._torchdynamo_orig_callable, True
        elif isinstance(model, functools.partial):
            values = [*model.args, *model.keywords.values()]
            found |= _only_modules({type(value).__name__: value for value in values})
            model = model.func
        elif hasattr(model, "__wrapped__"):
            model = model.__wrapped__
        elif inspect.ismethod(model):
            owner, model = model.__self__, model.__func__
            found |= {"": owner} if isinstance(owner, nn.Module) else _attributes(owner)
        else:
            break
    if isinstance(model, nn.Module):
        found |= {"": model}
    elif inspect.isfunction(model):
        variables = inspect.getclosurevars(model)
        found |= _only_modules({**variables.globals, **variables.nonlocals})
    else:
        found |= _attributes(model)
    return found, compiled


def _attributes(instance) -> dict[str, nn.Module]:
    return _only_modules(getattr(instance, "__dict__", {}))


def _only_modules(names) -> dict[str, nn.Module]:
    return {name: value for name, value in names.items() if isinstance(value, nn.Module)}


# -- Counting ------------------------------------------------------------------------------------------------


@dataclass
class _Storage:
    """One storage, with {identity of a view: its bytes} and {module: pairs (token, plain tensor)}."""

    kind: str
    bytes: int
    views: dict = field(default_factory=dict)
    savers: dict[Place, list] = field(default_factory=dict)


def _entries(tokens: list[Token], known: dict, reasons: Reasons) -> tuple[Entry, ...]:
    storages: dict[object, _Storage] = {}
    for token in tokens:
        for part in (part for tensor in token.tensors for part in parts_of(tensor)):
            key, size = identity_of(part)
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
    return tuple(entry for storage in storages.values() for entry in _entries_of(storage, reasons))


def _entries_of(storage: _Storage, reasons: Reasons) -> Iterator[Entry]:
    first, *others = storage.savers
    tokens = [token for saves in storage.savers.values() for token, _ in saves]
    for place, saves in storage.savers.items():
        token, part = saves[0]
        # Integers and masks of fewbit's own layers have the narrowest dtype already.
        is_own = place.is_fewbit or token.has_fewbit_node
        kinds = IN_FULL[:1] if is_own else IN_FULL
        is_full = storage.kind in kinds and place is first
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
            reason=reasons.of(tokens, part.numel()) if is_full else "",
        )


def parts_of(tensor) -> list[torch.Tensor]:
    """Return the plain tensors that a tensor consists of."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in parts_of(getattr(tensor, name))]
    if tensor.layout in SPARSE_PARTS:
        return [getattr(tensor, name)() for name in SPARSE_PARTS[tensor.layout]]
    return [tensor]


def identity_of(tensor) -> tuple[object, int]:
    """Return an object that identifies the storage of an existing tensor, and the storage's bytes."""
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:  # an opaque layout (mkldnn)
        return id(tensor), tensor.numel() * tensor.element_size()
    if not isinstance(tensor, FakeTensor) and storage.data_ptr():
        # Two storage objects may hold the same memory (NumPy, DLPack).
        return (tensor.device, storage.data_ptr()), storage.nbytes()
    return (
        storage._cdata,
        storage.nbytes(),
    )  # meta and fake tensors have no memory, but a storage object


def _view(tensor) -> tuple[object, int]:
    """Return what identifies a tensor's elements in its storage, and their bytes; repeated elements count once."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return id(tensor), tensor.numel() * tensor.element_size()
    # The order of dimensions makes no difference. Dimensions of size 1 and expanded dimensions add no elements.
    strides = sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if stride and size != 1
    )
    elements = math.prod(size for _, size in strides) if tensor.numel() else 0
    view = (tensor.storage_offset(), tensor.element_size(), tuple(strides))
    return view, elements * tensor.element_size()


def existing_kinds(roots: dict[str, nn.Module], inputs) -> dict[object, str]:
    """Return {identity of a storage: kind} of the parameters, buffers and inputs."""
    modules = roots.values()
    existing = {
        "input": inputs,
        "buffer": [buffer for module in modules for buffer in module.buffers()],
        "parameter": [parameter for module in modules for parameter in module.parameters()],
    }
    return {
        identity_of(part)[0]: kind
        for kind, tensors in existing.items()
        for tensor in tensors
        if not nn.parameter.is_lazy(tensor)
        for part in parts_of(tensor)
    }


def _are_ranges(tensor) -> bool:
    return tensor.dtype == torch.bfloat16 and tensor.ndim == 2 and tensor.shape[1] == 2


def _kind(tensor, token: Token) -> str:
    if token.origin:
        return {"leaf": "parameter", "cast": "cast"}[token.origin]
    # Packed codes are 1-D int32. A compiled autograd node may hold fewbit's tensors without showing it.
    if token.place.is_fewbit or token.has_fewbit_node or "CompiledFunction" in token.node:
        if tensor.dtype == torch.int32 and tensor.ndim == 1:
            return "packed"
        if _are_ranges(tensor) or (tensor.dtype == torch.uint8 and tensor.ndim == 1):
            return "range"  # or the bits of each sample
    if token.has_fewbit_node and "Norm" in token.node and tensor.dtype.is_floating_point:
        return "statistic"
    if tensor.dtype in MASKS:
        return "mask"
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return "integer"
    return "activation"
