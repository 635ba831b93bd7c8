"""The gradient of torch.clamp at the ends of its interval, which changed in torch 2.14."""

from __future__ import annotations

import torch

from fewbit.runtime.interop import VERSION

HAS_GRADIENT_AT_ENDS = VERSION < (2, 14)


def is_inside(x: torch.Tensor, least, greatest) -> torch.Tensor:
    """Return where the gradient of torch.clamp(x, least, greatest) is 1."""
    is_above, is_below = (torch.ge, torch.le) if HAS_GRADIENT_AT_ENDS else (torch.gt, torch.lt)
    if least is None or greatest is None:
        return is_below(x, greatest) if least is None else is_above(x, least)
    # Not in place, because selective checkpointing keeps the results of operations.
    return is_above(x, least) & is_below(x, greatest)
