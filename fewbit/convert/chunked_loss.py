"""`fewbit.chunk_loss_`: the loss over a vocabulary in chunks of tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fewbit.errors import InputError
from fewbit.functional.chunked_logits import ChunkedLogits
from fewbit.runtime.interop.own_forward import OwnForward
from fewbit.runtime.interop.tensor_kinds import is_eager
from fewbit.runtime.parallel.process_groups import is_sharded


def chunk_loss_(model: nn.Module, head: str) -> None:
    """Compute the cross-entropy of a model's logits in chunks of tokens, in place.

    The head is the linear layer that computes the logits. In training, its result stands for logits that are not computed yet.
    `torch.nn.functional.cross_entropy` of it, in the model or in the training loop, is `fewbit.functional.linear_cross_entropy`
    of the head's input. Rows may be selected, and the logits viewed or converted to another dtype, before. Any other function
    computes the logits first. In evaluation, without gradients, in compiled code, and if `fully_shard` divides the head apart
    from its model, the head computes the logits at once.

    Args:
        model: a model. `fewbit.compress_` may convert it before or after.
        head: the path of the head, such as "lm_head".

    Raises:
        InputError: there is no `torch.nn.Linear` at this path.
    """
    module = dict(model.named_modules()).get(head) if isinstance(head, str) else None
    if not isinstance(module, nn.Linear):
        got = "none" if module is None else type(module).__name__
        raise InputError(f"head: expected the path of a torch.nn.Linear, got {head!r} with {got}")
    _HeadForward(module).put()


def unchunk_loss_(model: nn.Module) -> None:
    """Undo `chunk_loss_`, in place."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, _HeadForward):
            forward.remove()


def head_of(model: nn.Module, outside: tuple[str, ...] = ()) -> str | None:
    """Return the path of the linear layer that seems to compute logits of a vocabulary, or None.

    This is the output embedding of a model of transformers, else the layer with the most outputs of those that have more outputs than
    inputs. Layers of modules at the paths `outside` do not count.
    """
    known = getattr(model, "get_output_embeddings", lambda: None)()
    found = {
        path: module.out_features
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and known in (None, module)
        and module.out_features > module.in_features
        and not any(path == one or path.startswith(f"{one}.") for one in outside)
    }
    return max(found, key=lambda path: found[path], default=None)


class _HeadForward(OwnForward):
    def __call__(self, x):
        head = self.module
        is_usual = isinstance(x, Tensor) and is_eager(x) and is_eager(head.weight)
        if not (head.training and torch.is_grad_enabled() and is_usual and x.dim() > 1):
            return self.original(x)
        if torch.compiler.is_compiling() or not (x.requires_grad or head.weight.requires_grad):
            return self.original(x)
        if is_sharded(head):  # its weight is there in its own forward only
            return self.original(x)
        return ChunkedLogits.of(x, head)
