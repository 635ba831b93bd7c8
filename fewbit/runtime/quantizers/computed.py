"""Results of functions that layers compute again from copies of the function's input, instead of saving them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from fewbit.runtime.interop.checkpoint import in_checkpoint
from fewbit.runtime.interop.tensor_kinds import PLAIN_CLASSES, is_abstract, is_eager
from fewbit.runtime.quantizers import linear_results
from fewbit.runtime.quantizers.copies import unquantized
from fewbit.runtime.quantizers.spec import (
    SavedTensors,
    computed_from,
    products_of,
)
from fewbit.runtime.saved.context import current
from fewbit.runtime.saved.sharing import FIXED_POINT, SharedCopies, place_of


class CopiesOfInput(NamedTuple):
    """The copies of a tensor x that layers share, as pairs (key, copy), from which functions of x are computed again."""

    shared: SharedCopies
    copies: list[tuple]

    def share(self, y: Tensor, place: tuple | None, function: Callable, *others: Tensor) -> None:
        """Let later layers that would save y compute function(x, *others) in their backward pass.

        Args:
            y: the result of the function.
            place: `place_of` y.
            function: a function that can be pickled.
            *others: tensors that are saved unchanged.
        """
        for key, copy in self.copies:
            make = partial(_computed, copy, function, others, y.dtype)
            self.shared.put(y, place, key, make)


def copies_of(x: Tensor) -> CopiesOfInput | None:
    """Return the copies of x that layers of the running model share, or None."""
    context = current()
    return None if context is None else copies_in(context, context.saving(x).shared, x)


def copies_in(context, shared: SharedCopies | None, x: Tensor) -> CopiesOfInput | None:
    """Return the copies of x that layers of a model share now, or None."""
    if shared is None or not shared.keys or not context.shares_results:
        return None
    entries = shared.entries(place_of(x))
    if entries:
        found = [(key, copy) for key, copy in entries.items() if key != FIXED_POINT]
        return CopiesOfInput(shared, found) if found else None
    if shared.has_linear and not in_checkpoint():
        again = linear_results.traced(x, shared.get_linear)
        if again is not None:
            return CopiesOfInput(shared, [(key, again) for key in shared.keys])
    return None


def share_result(
    quantizer, y: Tensor, function: Callable, copies: tuple[SavedTensors, ...], changes: int = 0
) -> None:
    """Let later layers compute a layer's result y from the layer's copies of its inputs; `changes`: as in `place_of`."""
    if _can_share(quantizer, y, copies):
        make = partial(computed_from, function, copies, y.dtype)
        shared = quantizer.context.saving(y).shared
        if shared is not None:
            shared.put(y, place_of(y, changes), quantizer.key, make)


def _can_share(quantizer, y: Tensor, copies: tuple[SavedTensors, ...]) -> bool:
    if quantizer.context is None or not quantizer.context.shares_results:
        return False
    if type(y) not in PLAIN_CLASSES and not is_abstract(y):
        return False
    for copy in copies:
        if copy.trace_anchor is not None:  # a compiler's copy
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


def _computed(copy, function: Callable, others: tuple[Tensor, ...], dtype) -> SavedTensors | None:
    copy = copy() if callable(copy) else copy
    return copy and computed_from(function, (copy, *map(unquantized, others)), dtype)
