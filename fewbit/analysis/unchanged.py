"""Helpers for measurements that leave a model, its inputs and torch's random state as they were."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from fewbit.runtime.format import layout
from fewbit.runtime.interop.tensor_kinds import is_plain


def alone(value):
    """Return a clone of a tensor in a larger storage, which the meter would count, else the value itself."""
    if not is_plain(value) or not layout.is_part(value):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


@contextmanager
def unchanged(modules: dict[str, nn.Module], inputs) -> Iterator[None]:
    """Restore buffers of {path: module}, and torch's random state for the devices of `inputs`, when the block ends or raises."""
    with _disable_current_modes():  # buffers are real tensors under a fake mode too
        buffers = [
            (module, name, buffer, _copy(buffer))
            for module in modules.values()
            for name, buffer in module._buffers.items()
        ]
        parameters = [p for module in modules.values() for p in module._parameters.values()]
        random = _random_states([*inputs, *parameters])

    try:
        yield
    finally:
        with _disable_current_modes():
            for set_state, state in random:
                set_state(state)
            for module, name, buffer, copy in buffers:
                module._buffers[name] = buffer
                # An earlier graph may have saved the buffer, so write to .data, which keeps the version, and only if
                # needed.
                if copy is None or torch.equal(buffer, copy):
                    continue
                if buffer.shape == copy.shape:
                    buffer.data.copy_(copy)
                else:  # observers of torch.ao.quantization resize their buffers in the first forward pass
                    buffer.data = copy


def _copy(buffer):
    """Return a copy of a buffer, or None if it has no memory, or a layout in which no layer writes."""
    if buffer is None or buffer.is_meta or isinstance(buffer, FakeTensor):
        return None
    return buffer.detach().clone() if buffer.layout == torch.strided else None


def _random_states(tensors) -> list[tuple]:
    states = [(torch.set_rng_state, torch.get_rng_state())]
    for device in {tensor.device for tensor in tensors if tensor is not None}:
        if device.type in ("cuda", "xpu"):
            backend = torch.get_device_module(device)
            if backend.is_available():  # a fake tensor's device need not exist
                set_state = functools.partial(backend.set_rng_state, device=device)
                states.append((set_state, backend.get_rng_state(device)))
    return states
