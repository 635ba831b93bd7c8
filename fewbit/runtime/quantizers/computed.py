"""Results of functions that later layers compute again from copies of the function's input, instead of saving them.

`copies_of` finds the copies that layers have made of a tensor in this forward pass, and `share` offers, for each of them, a
function of its dequantized values in place of a copy of the result.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fewbit.runtime.interop.checkpoint import in_checkpoint
from fewbit.runtime.interop.tensor_kinds import is_eager
from fewbit.runtime.quantizers import linear_results
from fewbit.runtime.quantizers.copies import unquantized
from fewbit.runtime.quantizers.spec import SavedTensors, can_be_combined, computed_from
from fewbit.runtime.saved.context import current
from fewbit.runtime.saved.sharing import place_of


def copies_of(x: Tensor) -> list[tuple[tuple, SavedTensors]]:
    """Return (settings, copy) of each copy of x that layers of the running model share; [] outside of a model."""
    context = current()
    if context is None or not context.shares_results or not is_eager(x):
        return []
    copies, place = context.saving(x).shared, place_of(x)
    if copies is None or place is None or not copies.keys:
        return []
    found = [(key, copies.get(place, key)) for key in copies.keys]
    found = [(key, copy) for key, copy in found if copy is not None and can_be_combined(copy)]
    if not found and copies.has_linear and not in_checkpoint():
        again = linear_results.traced(x, copies.get_linear)
        found = [] if again is None else [(key, again) for key in copies.keys]
    return found


def share(
    found: list[tuple[tuple, SavedTensors]],
    y: Tensor,
    changes: int,
    function: Callable,
    *others: Tensor,
) -> None:
    """Let later layers that would save y compute it in their backward pass.

    Args:
        found: the result of `copies_of` for the input of y.
        y: the result.
        changes: the number of in-place changes of y that its version does not count yet.
        function: the function that computes y from the input and from `others`. It can be pickled.
        *others: tensors that are saved unchanged.
    """
    for key, copy in found:
        parts = (copy, *map(unquantized, others))
        put(current(), key, y, changes, function, parts)


def put(
    context,
    key: tuple,
    y: Tensor,
    changes: int,
    function: Callable,
    copies: tuple[SavedTensors, ...],
) -> None:
    """Share the function of copies, for layers of the model with the settings `key` that would save y."""
    shared = context.saving(y).shared
    if shared is not None:
        shared.put(y, place_of(y, changes), key, computed_from(function, copies, y.dtype))
