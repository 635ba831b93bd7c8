"""Whether kernels may read a tensor's memory."""

from __future__ import annotations

import torch


def is_plain(x) -> bool:
    """Whether x is an ordinary dense tensor in ordinary eager mode, so that its memory can be read."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in (torch.Tensor, torch.nn.Parameter)
        and torch._C._functorch.maybe_current_level() is None
        and not torch._C._functorch.is_legacy_batchedtensor(x)
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and not torch._C._len_torch_dispatch_stack()
        and x.layout is torch.strided
        and not x.is_nested
        and not x.is_meta
        and not x.is_neg()
    )
