"""Storage order: the order of a tensor's elements in memory, in which they are numbered, packed and rounded at random.

Only *dense* tensors have one: their elements fill a contiguous part of their storage.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_dense(x: torch.Tensor) -> bool:
    """Return whether x is dense."""
    # While a graph is traced, empty_like may give a dense tensor with dimensions of size 1 other strides.
    if torch.compiler.is_compiling():
        return x.is_contiguous() or are_dense(x.shape, x.stride())
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return are_dense(x.shape, x.stride())  # the strides of one example, not of the batch
    return x.is_contiguous() or _are_dense(x.shape, x.stride())


def are_dense(shape, stride) -> bool:
    """Return whether a tensor of this shape and these strides is dense, as one without elements is."""
    if 0 in shape:
        return True
    step = 1
    for dim in reversed(outermost_first(shape, stride)):
        if shape[dim] != 1 and stride[dim] != step:
            return False
        step *= shape[dim]
    return True


# The tensors of one model have few different shapes and strides, and each is checked several times.
_remembered = lru_cache(maxsize=4096)(are_dense)


def _are_dense(shape, stride) -> bool:
    try:
        return _remembered(shape, stride)
    except TypeError:  # sizes of traced graphs that vary have no hash
        return are_dense(shape, stride)


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return x if it is dense, else its contiguous copy."""
    return x if is_dense(x) else x.contiguous()


def dense_stride(x: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of `dense(x)`."""
    whole = contiguous_stride(x.shape)
    return whole if x.is_contiguous() or not is_dense(x) else _stride(x)


def pointwise_stride(x: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides that every pointwise function of torch gives its result for x; None if they may vary.

    They may if x has gaps between its elements, or dimensions of size 0 or 1 and is not contiguous. One channels-last
    image is clear.
    """
    shape, stride = x.shape, x.stride()
    sizes = shape[1:] if x.dim() == 4 and is_channels_last(x) else shape
    is_clear = stride == contiguous_stride(shape) or not (0 in shape or 1 in sizes)
    return stride if is_clear and is_dense(x) else None


def is_channels_last(x: torch.Tensor) -> bool:
    """Return whether images or volumes x, (N, C, H, W) or (N, C, D, H, W), are channels-last, and not contiguous too."""
    if x.dim() not in _CHANNELS_LAST or x.is_contiguous():
        return False
    return x.is_contiguous(memory_format=_CHANNELS_LAST[x.dim()])


def is_by_sample(x: torch.Tensor) -> bool:
    """Return whether x is dense and its samples (dimension 0) are outermost in storage."""
    if x.is_contiguous():
        return True
    if not is_dense(x):
        return False
    return x.shape[0] <= 1 or x.stride(0) * x.shape[0] == x.numel()


def is_part(x: torch.Tensor) -> bool:
    """Return whether x keeps alive a storage of more bytes than its elements, of which repeated ones all count."""
    return x.untyped_storage().nbytes() > x.numel() * x.element_size()


def storage_permutation(x: torch.Tensor) -> tuple[int, ...] | None:
    """Return the order of dimensions in which x is contiguous; None if x is not dense, or if `is_by_sample(x)`."""
    if is_by_sample(x) or not is_dense(x):
        return None
    return tuple(outermost_first(x.shape, x.stride()))


def outermost_first(shape, stride) -> list[int]:
    """Return the dimensions of a dense tensor in storage order."""
    order = []
    # An insertion sort, because torch.compile traces comparisons of symbolic strides but breaks the graph at sorted().
    for dim in range(len(shape)):
        place = len(order)
        while place and _lies_inside(stride, shape, order[place - 1], dim):
            place -= 1
        order.insert(place, dim)
    return order


def _lies_inside(stride, shape, a: int, b: int) -> bool:
    if stride[a] == stride[b]:
        return shape[a] < shape[b]
    return stride[a] < stride[b]


def moved(dims: tuple[int, ...] | None, order: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the numbers, from -1 downwards, that dimensions with such numbers have after `permute(order)`; None for None."""
    if dims is None:
        return None
    return tuple(order.index(dim % len(order)) - len(order) for dim in dims)


def place_in_storage(shape, stride) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """Return (`storage_permutation`, strides of the tensor or of its contiguous copy)."""
    if not are_dense(shape, stride):
        return None, contiguous_stride(shape)
    is_by_sample = not shape or shape[0] <= 1 or stride[0] * shape[0] == math.prod(shape)
    is_by_sample = is_by_sample or stride == contiguous_stride(shape)
    return None if is_by_sample else tuple(outermost_first(shape, stride)), stride


def by_sample_stride(x: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of x if `is_by_sample(x)`, else the strides of its contiguous copy."""
    return _stride(x) if is_by_sample(x) else contiguous_stride(x.shape)


def _stride(x: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a dense x. While a compiler traces, compute them from the sizes of x.

    A compiler would look up symbolic `x.stride()` when it has perhaps removed the operations that made it.
    """
    if not torch.compiler.is_compiling():
        return x.stride()
    if x.is_contiguous():
        return contiguous_stride(x.shape)
    stride, step = [0] * x.dim(), 1
    for dim in reversed(outermost_first(x.shape, x.stride())):
        stride[dim] = step
        step *= x.shape[dim]
    return tuple(stride)


def storage_order(x: torch.Tensor) -> torch.Tensor:
    """Return a 1-D view of the elements of a dense x in storage order."""
    return x.view(-1) if x.is_contiguous() else x.as_strided((x.numel(),), (1,))


def check_vectors(vectors, inner: int, n: int) -> int:
    """Return the number of entries of vectors, 1-D contiguous float32 of one length or None, that belong to n elements.

    `inner` is as in `channels.Normalization`.

    Raises:
        ValueError: for other arguments, or if entries * inner does not divide n.
    """
    entries = None
    for vector in vectors:
        if vector is None:
            continue
        if vector.dtype != torch.float32 or vector.ndim != 1 or not vector.is_contiguous():
            raise ValueError(
                f"expected 1-D contiguous float32 vectors, got {vector.ndim}-D {vector.dtype}"
            )
        length = vector.shape[0]
        if entries is not None and entries != length:
            raise ValueError(f"expected vectors of one length, got lengths {entries} and {length}")
        entries = length
    if entries is None:
        raise ValueError("expected vectors, got none")
    if n and (inner < 1 or not entries or n % (entries * inner)):
        raise ValueError(
            f"expected entries * inner to divide the number of elements, {n}, got {entries} * {inner}"
        )
    return entries


def is_broadcast_scalar(x: torch.Tensor) -> bool:
    """Return whether all elements of x are the same element of storage."""
    return not x.is_contiguous() and not any(x.stride())


def contiguous_stride(shape) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor. Sizes may be symbolic."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def has_stride(x: torch.Tensor, stride) -> bool:
    """Return whether x has the given strides, apart from dimensions of size 1."""
    return x.stride() == stride or all(
        size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), stride, strict=True)
    )


def bring_to(x: torch.Tensor, stride) -> torch.Tensor:
    """Return x, or a copy that has these strides."""
    if has_stride(x, stride):
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


def with_stride(x: torch.Tensor, stride, by_sample: bool = False) -> torch.Tensor:
    """Return x with exactly the given strides: x itself, a view or a copy (docs/concepts/runtime.md, "Strides").

    Raises:
        ValueError: no dense tensor has those strides, or `by_sample` and dimension 0 is not outermost.
    """
    shape, stride = tuple(x.shape), tuple(stride)
    check_stride(shape, stride, by_sample)
    x = bring_to(x, stride)
    # Strides of dimensions of size 1 mean nothing, but is_dense compares them.
    return x if x.stride() == stride else x.as_strided(shape, stride)


def check_stride(shape, stride, by_sample: bool = False) -> None:
    """Raise ValueError unless a dense tensor, if `by_sample` with samples outermost, can have the strides."""
    n = math.prod(shape)
    fits = len(stride) == len(shape) and are_dense(shape, stride)
    if fits and by_sample and n and shape and shape[0] > 1:
        fits = stride[0] * shape[0] == n
    if not fits:
        which = "a dense tensor, samples outermost," if by_sample else "a dense tensor"
        raise ValueError(
            f"stride: expected those of {which} of shape {tuple(shape)}, got {tuple(stride)}"
        )


def overlaps(x: torch.Tensor) -> bool:
    """Return whether two elements of x may share a place in storage."""
    if x.numel() <= 1 or is_dense(x):
        return False
    # The stride of a dimension must be larger than the span of all dimensions with smaller strides.
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
