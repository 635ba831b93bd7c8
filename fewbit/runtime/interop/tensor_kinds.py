"""Kinds of tensors: whether a tensor has memory, and whether kernels may read this memory."""

from __future__ import annotations

import sys

import torch
from torch._subclasses.fake_tensor import FakeTensor

from fewbit.errors import InputError
from fewbit.printable import shorten

PLAIN_CLASSES = frozenset((torch.Tensor, torch.nn.Parameter))
_FAKE = torch._C._TorchDispatchModeKey.FAKE
PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
"""The key that is included in torch's dispatch during `make_fx(..., pre_dispatch=True)`."""
modes_active = torch._C._len_torch_dispatch_stack
transforms_active = torch._C._are_functorch_transforms_active
_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
_is_legacy_batch = torch._C._functorch.is_legacy_batchedtensor
is_included = torch._C._dispatch_tls_is_dispatch_key_included
_TRACING = torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FUNCTIONAL


def is_plain(x) -> bool:
    """Return whether x is an ordinary dense tensor in ordinary eager mode, so that its memory can be read.

    Dispatch modes that only watch operations make no difference.
    """
    # Every layer calls this function, so it calls few others, and cheap ones.
    if type(x) not in PLAIN_CLASSES or torch.compiler.is_dynamo_compiling():
        return False
    if x.layout is not torch.strided or x.is_meta or x.is_nested or x.is_neg():
        return False
    if modes_active() or transforms_active() or is_included(PRE_DISPATCH):
        if _hides_values():
            return False
    return not (_is_transformed(x) or _is_legacy_batch(x))


def _hides_values() -> bool:
    return bool(
        torch.compiler.is_compiling()
        or transforms_active()
        or (modes_active() and _has_mode(_FAKE, *_TRACING))
        or is_included(PRE_DISPATCH)
    )


def has_memory(x) -> bool:
    """Return whether x is an ordinary dense tensor with memory, in any mode."""
    if type(x) not in PLAIN_CLASSES or x.layout is not torch.strided or x.is_meta:
        return False
    return not is_wrapped(x)


def is_abstract(x) -> bool:
    """Return whether x is a meta or fake tensor in ordinary eager mode."""
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return False
    is_meta = type(x) in PLAIN_CLASSES and x.is_meta
    if not (is_meta or type(x) is FakeTensor) or x.layout is not torch.strided or x.is_nested:
        return False
    return not _has_mode(*_TRACING)


def _has_mode(*keys) -> bool:
    return any(torch._C._get_dispatch_mode(key) is not None for key in keys)


def is_wrapped(x: torch.Tensor) -> bool:
    """Return whether x stands for other tensors, in `torch.func` or by `is_grads_batched=True`."""
    return _is_transformed(x) or _is_legacy_batch(x)


def is_batched(x, transforms_only: bool = False) -> bool:
    """Return whether x stands for a batch of tensors, or with `transforms_only` one of `torch.func.vmap`."""
    if x is None or torch.compiler.is_compiling():
        return False
    if torch._C._functorch.is_batchedtensor(x):
        return True
    return not transforms_only and torch._C._functorch.is_legacy_batchedtensor(x)


def overrides_functions(x) -> bool:
    """Return whether the class of x computes torch's functions in its own way."""
    cls = type(x)
    if cls in PLAIN_CLASSES:
        return False
    own = getattr(cls.__torch_function__, "__func__", None)
    return own is not None and own is not torch.Tensor.__torch_function__.__func__


def check_tensors(*values) -> None:
    """Raise InputError if one of the values is neither a tensor nor None."""
    for value in values:
        is_tensor = type(value) in PLAIN_CLASSES or isinstance(value, torch.Tensor)
        if value is not None and not is_tensor:
            raise InputError(f"expected a torch.Tensor, got {shorten(value)}")


def check_not_distributed(*tensors) -> None:
    """Raise InputError if one of the values is a DTensor, whose shards groups would cross."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and any(isinstance(tensor, module.DTensor) for tensor in tensors):
        raise InputError(
            "expected ordinary tensors, got a DTensor: call the op with its local tensor, DTensor.to_local()"
        )


def is_eager(x) -> bool:
    """Return whether x is in ordinary eager mode: `is_plain` or `is_abstract`."""
    return is_plain(x) or is_abstract(x)
