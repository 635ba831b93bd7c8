"""The torch library `fewbit`: how its ops are registered with torch's dispatcher, autograd, vmap and compiler."""

from __future__ import annotations

from contextlib import contextmanager

import torch
import torch.fx.traceback
from torch.library import Library, register_autograd, register_fake, register_vmap
from torch.utils.checkpoint import CheckpointPolicy

from fewbit.errors import GradientError

LIBRARY = Library("fewbit", "DEF")
# With needs_exact_strides a compiler mostly passes inputs with the strides at tracing time, which saves a copy in the
# ops. The tag is no guarantee: Inductor preserves the strides that are left after it has removed no-ops.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

NO_SECOND_DERIVATIVE = (
    "a layer or activation of fewbit has no second derivative: it saves too little of its input; "
    "use torch's own if you differentiate twice"
)
NO_FORWARD_MODE = (
    "a layer or activation of fewbit has no forward-mode derivative; use torch's own there"
)


def define(schema: str, implementation, fake=None, key: str = "CompositeExplicitAutograd"):
    """Define an op, and return its default overload. `fake` computes results without values.

    With the key "CompositeImplicitAutograd", the implementation is traced in place of the op.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=_TAGS)
    LIBRARY.impl(name, implementation, key)
    if fake is not None:
        register_fake(f"fewbit::{name}", fake)
    return getattr(torch.ops.fewbit, name).default


def refuse_second_derivative(op) -> None:
    """Make the backward of `op`, which computes a gradient, raise GradientError."""
    register_autograd(op, _refuse, setup_context=lambda ctx, inputs, output: None)


def _refuse(ctx, grad):
    raise GradientError(NO_SECOND_DERIVATIVE)


@contextmanager
def saved_when_partitioned():
    """Mark the ops that are traced in this block, so that the compiler's partitioner does not recompute their results.

    With an `activation_memory_budget` below 1, it would save large inputs instead.
    """
    meta = torch.fx.traceback.current_meta
    if "recompute" in meta:
        yield
        return
    try:
        meta["recompute"] = CheckpointPolicy.MUST_SAVE
        yield
    finally:
        meta.pop("recompute", None)


def run_by_example(op) -> None:
    """Register a rule for `torch.func.vmap` that runs `op` for one example after the other.

    One call for the whole batch would pack codes of several examples into the same words.
    """

    def rule(info, in_dims, *arguments):
        batched = [
            argument.unbind(dim) if isinstance(dim, int) else [argument] * info.batch_size
            for argument, dim in zip(arguments, in_dims, strict=True)
        ]
        results = [op(*example) for example in zip(*batched, strict=True)]
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results), 0
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])

    register_vmap(op, rule)


def new_seed(x) -> torch.Tensor:
    """Draw a seed, (1,) int64 on x's device, from torch's generator."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=x.device)
