"""Results of functions that layers compute again from copies of the function's input, instead of saving them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from fewbit.runtime.interop.checkpoint import in_checkpoint
from fewbit.runtime.interop.tensor_kinds import PLAIN_CLASSES, is_abstract, is_eager
from fewbit.runtime.quantizers import linear_results
from fewbit.runtime.quantizers.copies import unquantized
from fewbit.runtime.quantizers.spec import (
    SavedTensors,
    can_be_combined,
    computed_from,
    products_of,
)
from fewbit.runtime.saved.context import current
from fewbit.runtime.saved.sharing import FIXED_POINT, place_of


def copies_of(x: Tensor) -> list[tuple]:
    """Return (key, copy) of each copy of x that layers of the running model share, as `SharedCopies.put` received them."""
    context = current()
    if context is None or not context.shares_results:
        return []
    copies = context.saving(x).shared
    if copies is None or not copies.keys:
        return []
    entries = copies.entries(place_of(x))
    if entries:
        return [(key, copy) for key, copy in entries.items() if key != FIXED_POINT]
    if copies.has_linear and not in_checkpoint():
        again = linear_results.traced(x, copies.get_linear)
        return [] if again is None else [(key, again) for key in copies.keys]
    return []


def share(found: list[tuple], y: Tensor, changes: int, function: Callable, *others: Tensor) -> None:
    """Let later layers that would save y compute function(x, *others) in their backward pass.

    `found` is the result of `copies_of` for x, `changes` is as in `sharing.place_of`, the function can be pickled, and
    `others` are saved unchanged.
    """
    context = current()
    for key, copy in found:
        put(context, key, y, changes, partial(_computed, copy, function, others, y.dtype))


def share_result(
    quantizer, y: Tensor, function: Callable, copies: tuple[SavedTensors, ...], changes: int = 0
) -> None:
    """Let later layers compute a layer's result y from the layer's copies of its inputs, as in `share`."""
    if _can_share(quantizer, y, copies):
        make = partial(computed_from, function, copies, y.dtype)
        put(quantizer.context, quantizer.key, y, changes, make)


def _can_share(quantizer, y: Tensor, copies: tuple[SavedTensors, ...]) -> bool:
    if quantizer.context is None or not quantizer.context.shares_results:
        return False
    is_usual = type(y) in PLAIN_CLASSES or is_abstract(y)
    # A compiler's copies have an anchor.
    if not is_usual:
        return False
    for copy in copies:
        if copy.trace_anchor is not None or not can_be_combined(copy):
            return False
    return True


def copy_of(quantizer, x: Tensor) -> SavedTensors | None:
    """Return the copy of x that a layer has made in this forward pass with the quantizer's settings, or None."""
    if quantizer.context is None or not is_eager(x) or not x.is_contiguous():
        return None
    copies, place = quantizer.context.saving(x).shared, place_of(x)
    return None if copies is None or place is None else copies.get(place, quantizer.key)


def share_linear(quantizer, node, y: Tensor, function: Callable, *copies: SavedTensors) -> None:
    """Let `again` find the result y of a linear layer, function(*copies)."""
    # Otherwise the tensors of a chain of layers would all be computed from the input of the first one.
    is_first = not any(map(products_of, copies))
    if is_first and _can_share(quantizer, y, copies):
        # A checkpointed region keeps its saved tensors only while it is differentiated.
        shared = None if in_checkpoint() else quantizer.context.saving(y).shared
        if shared is not None:
            shared.put_linear(node, y, computed_from(function, copies, y.dtype, products=1))


def again(quantizer, x: Tensor) -> SavedTensors | None:
    """Return what computes x again from results of linear layers, or None."""
    if not quantizer.recomputes_linear or quantizer.context is None:
        return None
    if not is_eager(x) or in_checkpoint():
        return None
    shared = quantizer.context.saving(x).shared
    return None if shared is None else linear_results.traced(x, shared.get_linear)


def put(context, key: tuple, y: Tensor, changes: int, make: Callable) -> None:
    """Share what `make` returns if a layer with the settings `key` would save y."""
    shared = context.saving(y).shared
    if shared is not None:
        shared.put(y, place_of(y, changes), key, make)


def _computed(copy, function: Callable, others: tuple[Tensor, ...], dtype) -> SavedTensors | None:
    copy = copy() if callable(copy) else copy
    if copy is None or not can_be_combined(copy):
        return None
    return computed_from(function, (copy, *map(unquantized, others)), dtype)
