"""Layers of tensor parallelism: run a layer on the local shards of its DTensors, and return a DTensor.

Layers return None if an argument is no DTensor, or if the placements need communication.
"""

from __future__ import annotations

import sys
import threading

import torch
from torch.autograd import Function

from fewbit.runtime.interop.tensor_kinds import PLAIN_CLASSES


class _RunningShard(threading.local):
    place: tuple = ()


running = _RunningShard()


def is_distributed(x) -> bool:
    """Return whether x is a DTensor."""
    if type(x) in PLAIN_CLASSES:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def runs_on_shards(x) -> bool:
    """Return whether x is a DTensor in eager mode, and may be computed from its local tensor."""
    return is_distributed(x) and torch.is_grad_enabled() and not torch.compiler.is_compiling()


def has_arrived(x: torch.Tensor) -> torch.Tensor:
    """Return x as an ordinary tensor: wait for it if it is the result of a collective."""
    if type(x) in PLAIN_CLASSES or torch.compiler.is_compiling():
        return x
    module = sys.modules.get("torch.distributed._functional_collectives")
    if module is None or not isinstance(x, module.AsyncCollectiveTensor):
        return x
    return _Arrived.apply(x)


def elementwise(function, *tensors):
    """Return function(*tensors), for DTensors that are alike in shape and placements, and no sums over processes."""
    first = tensors[0]
    if any(placement.is_partial() for placement in first.placements):
        return None
    if not _are_alike(tensors) or any(x.shape != first.shape for x in tensors):
        return None
    given = [(x, x.placements) for x in tensors]
    return _on_shards(function, given, first.placements, first.shape)


def linear(function, x, weight, bias):
    """Return x times the transposed weight plus the bias, by `function`."""
    if not _are_on_one_mesh(x, weight, *([] if bias is None else [bias])):
        return None
    from torch.distributed.tensor import Partial, Shard

    last, partial = x.dim() - 1, Partial()
    results, of_x, of_weight, of_bias, sums_up = [], [], [], [], False
    biases = [None] * len(x.placements) if bias is None else bias.placements
    for at_x, at_weight, at_bias in zip(x.placements, weight.placements, biases, strict=True):
        is_copy = at_bias is None or at_bias.is_replicate()
        if at_x.is_replicate() and at_weight.is_replicate() and is_copy:
            result, grads = at_x, (at_x, at_weight, at_bias)
        elif _is_shard(at_x) and at_x.dim != last and at_weight.is_replicate() and is_copy:
            result, grads = at_x, (at_x, partial, partial)
        elif (
            at_x.is_replicate()
            and _is_shard(at_weight, 0)
            and (bias is None or _is_shard(at_bias, 0))
        ):
            result, grads = Shard(last), (partial, at_weight, at_bias)
        elif _is_shard(at_x, last) and _is_shard(at_weight, 1) and is_copy:
            result, grads, sums_up = partial, (at_x, at_weight, at_bias), True
        else:
            return None
        results.append(result)
        for grad, placements in zip(grads, (of_x, of_weight, of_bias), strict=True):
            placements.append(grad)
    # Each process would add the whole bias to its summand of the result.
    is_later = bias is not None and sums_up
    given = (x, of_x), (weight, of_weight), (None if is_later else bias, of_bias)
    y = _on_shards(function, given, results, (*x.shape[:-1], weight.shape[0]))
    return y + bias if is_later else y


def norm(function, x, dims: int, *vectors):
    """Return function(x, *vectors), a norm over the last `dims` dimensions."""
    given = [vector for vector in vectors if vector is not None]
    if not _are_on_one_mesh(x, *given):
        return None
    if not all(placement.is_replicate() for vector in given for placement in vector.placements):
        return None
    from torch.distributed.tensor import Partial

    leading, of_vectors = x.dim() - dims, []
    for placement in x.placements:
        if not (placement.is_replicate() or (_is_shard(placement) and placement.dim < leading)):
            return None
        of_vectors.append(placement if placement.is_replicate() else Partial())
    given = (x, x.placements), *((vector, of_vectors) for vector in vectors)
    return _on_shards(function, given, x.placements, x.shape)


def attention(function, query, key, value):
    """Return function(query, key, value), attention without mask and dropout.

    The three must be replicated, or sharded alike by sample or by head.
    """
    tensors = query, key, value
    if not _are_on_one_mesh(*tensors) or not _are_alike(tensors) or query.dim() != 4:
        return None
    for placement, size in zip(query.placements, query.device_mesh.shape, strict=True):
        is_whole = placement.is_replicate()
        if not (is_whole or _is_shard(placement, 0) or _is_shard(placement, 1)):
            return None
        # With uneven shards, a process might have a head of the query without the head of the key.
        if not is_whole and any(x.shape[placement.dim] % size for x in tensors):
            return None
    given = [(x, x.placements) for x in tensors]
    shape = *query.shape[:-1], value.shape[-1]
    return _on_shards(function, given, query.placements, shape)


class _Arrived(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.wait()
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        return grad


class _LocalTensor(Function):
    """The local tensor of a DTensor. The gradient of the local tensor is a part of the DTensor's gradient."""

    @staticmethod
    def forward(ctx, x, placements):
        ctx.place, ctx.shape = (x.device_mesh, placements), x.shape
        local = x.to_local()  # waits for a collective that runs, because gradients are off here
        return local.view_as(local)

    @staticmethod
    def backward(ctx, grad):
        return _whole(grad, *ctx.place, ctx.shape), None


def _on_shards(function, given, placements, shape):
    """Return the DTensor that `function` of local tensors gives. `given` has pairs (DTensor or None, placements of its gradient)."""
    first, _ = given[0]
    coordinates = first.device_mesh.get_coordinate()
    places = enumerate(zip(first.placements, coordinates, strict=True))
    before = running.place
    running.place = tuple((dim, at) for dim, (placement, at) in places if placement.is_shard())
    try:
        y = function(
            *(x if x is None else _LocalTensor.apply(x, tuple(grads)) for x, grads in given)
        )
    finally:
        running.place = before
    return _whole(y, first.device_mesh, tuple(placements), shape)


def _whole(local, mesh, placements, shape):
    from torch.distributed.tensor import DTensor

    stride = _stride(shape, local.stride())
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _stride(shape, local_stride) -> tuple[int, ...]:
    stride, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (local_stride[dim], -dim)):
        stride[dim] = step
        step *= shape[dim]
    return tuple(stride)


def _are_on_one_mesh(*tensors) -> bool:
    return all(is_distributed(x) and x.device_mesh == tensors[0].device_mesh for x in tensors)


def _are_alike(tensors) -> bool:
    return _are_on_one_mesh(*tensors) and all(
        x.placements == tensors[0].placements for x in tensors
    )


def _is_shard(placement, dim: int | None = None) -> bool:
    from torch.distributed.tensor import Shard

    # Subclasses of Shard distribute the elements in another order.
    return type(placement) is Shard and (dim is None or placement.dim == dim)
