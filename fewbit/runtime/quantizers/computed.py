"""Results of functions that later layers compute again from copies of the function's input, instead of saving them.

`copies_of` finds the copies that layers have made of a tensor in this forward pass, and `share` offers, for each of them, a
function of its dequantized values in place of a copy of the result.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fewbit.runtime.format.fingerprint import Content
from fewbit.runtime.interop.tensor_kinds import is_eager
from fewbit.runtime.quantizers import linear_results
from fewbit.runtime.quantizers.copies import unquantized
from fewbit.runtime.quantizers.spec import SavedTensors, can_be_combined, computed_from
from fewbit.runtime.saved.context import current


def copies_of(x: Tensor) -> list[tuple[tuple, SavedTensors]]:
    """Return (settings, copy) of each copy of x that layers of the running model share; [] outside of a model."""
    context = current()
    if context is None or not context.shares_results or not context.cache.keys():
        return []
    if not is_eager(x) or x.is_inference():
        return []
    content = Content(x)
    cache = context.cache
    found = [(key, cache.get(content, key)) for key in cache.keys()]
    found = [(key, copy) for key, copy in found if copy is not None and can_be_combined(copy)]
    if not found and cache.has_linear:
        again = linear_results.traced(x, cache.get_linear)
        found = [] if again is None else [(key, again) for key in cache.keys()]
    return found


def share(
    found: list[tuple[tuple, SavedTensors]],
    y: Tensor | Content,
    function: Callable,
    *others: Tensor,
) -> None:
    """Let later layers that would save y compute it in their backward pass.

    Args:
        found: the result of `copies_of` for the input of y.
        y: the result, a tensor or its `Content`.
        function: the function that computes y from the input and from `others`. It can be pickled.
        *others: tensors that are saved unchanged.
    """
    content = y if isinstance(y, Content) else Content(y)
    for key, copy in found:
        parts = (copy, *map(unquantized, others))
        put(current().cache, key, content, function, parts)


def put(
    cache, key: tuple, y: Content, function: Callable, copies: tuple[SavedTensors, ...]
) -> None:
    """Put the function of copies into the cache, for layers with the settings `key` that would save y."""
    cache.put(y, key, computed_from(function, copies, y.x.dtype))
