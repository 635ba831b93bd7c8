"""Results of functions that later layers compute again from copies of the function's input, instead of saving them.

`copies_of` finds the copies that layers have made of a tensor in this forward pass, and `share` offers, for each of them, a
function of its dequantized values in place of a copy of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from fewbit.runtime.interop.checkpoint import in_checkpoint
from fewbit.runtime.quantizers import linear_results
from fewbit.runtime.quantizers.copies import unquantized
from fewbit.runtime.quantizers.spec import SavedTensors, can_be_combined, computed_from
from fewbit.runtime.saved.context import current
from fewbit.runtime.saved.sharing import FIXED_POINT, place_of


def copies_of(x: Tensor) -> list[tuple]:
    """Return (settings, copy) of each copy of x that layers of the running model share; [] outside of a model.

    Args:
        x: a tensor for which `tensor_kinds.is_eager` is true.

    Returns:
        The copies as `SharedCopies.put` received them: `SavedTensors`, or functions that return a copy or None.
    """
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
    """Let later layers that would save y compute it in their backward pass.

    Args:
        found: the result of `copies_of` for the input of y.
        y: the result.
        changes: the number of in-place changes of y that its version does not count yet.
        function: the function that computes y from the input and from `others`. It can be pickled.
        *others: tensors that are saved unchanged.
    """
    context = current()
    for key, copy in found:
        put(context, key, y, changes, partial(_computed, copy, function, others, y.dtype))


def put(context, key: tuple, y: Tensor, changes: int, make: Callable) -> None:
    """Share what `make` returns if a layer of the model with the settings `key` would save y. Most results are not saved."""
    shared = context.saving(y).shared
    if shared is not None:
        shared.put(y, place_of(y, changes), key, make)


def _computed(copy, function: Callable, others: tuple[Tensor, ...], dtype) -> SavedTensors | None:
    copy = copy() if callable(copy) else copy
    if copy is None or not can_be_combined(copy):
        return None
    return computed_from(function, (copy, *map(unquantized, others)), dtype)
