"""torch's stack of default hooks on saved tensors."""

from __future__ import annotations

import torch


def take_off_hooks(hooks: tuple) -> None:
    """Pop the given saved-tensor hooks from this thread's stack. Hooks on top of them stay."""
    autograd, above, found = torch._C._autograd, [], False
    try:
        while not found and (top := autograd._top_saved_tensors_default_hooks(True)):
            found = top[0] is hooks[0]
            if not found:
                above.append(top)
            autograd._pop_saved_tensors_default_hooks()
    finally:
        for pair in reversed(above):
            autograd._push_saved_tensors_default_hooks(*pair)
