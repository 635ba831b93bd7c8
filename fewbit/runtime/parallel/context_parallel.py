"""Context parallelism: torch's `context_parallel` replaces attention by a function that exchanges keys and values."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from fewbit.runtime.interop import original_functions

_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"

_OWN = original_functions.functional.scaled_dot_product_attention
"""torch's function as it was when fewbit was imported."""


def exchanging_attention() -> Callable | None:
    """Return the function by which `context_parallel` has replaced torch's attention now, or None."""
    now = torch.nn.functional.scaled_dot_product_attention
    if now is _OWN:
        return None
    replaced = getattr(sys.modules.get(_MODULE), "_replaced_functions", None)
    return now if replaced and now in replaced else None
