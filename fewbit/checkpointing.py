"""Gradient checkpointing whose regions save their inputs quantized.

`torch.utils.checkpoint` saves the inputs of a region and computes the region again in the backward pass. `checkpoint`
does the same, but saves the inputs with a few bits per element. The forward pass is exact. The recomputation starts from
rounded inputs, so all tensors that it computes differ slightly from those of the forward pass, and so do the gradients.
They are not exact in expectation, because a region is not linear in its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fewbit.config import (
    GROUP_SIZE,
    ROTATED,
    check_bits,
    check_group_size,
    usual_kind,
)
from fewbit.errors import InputError
from fewbit.runtime.format.buffers import FLOATING
from fewbit.runtime.format.groups import LEAST_ELEMENTS
from fewbit.runtime.interop.tensor_kinds import is_eager
from fewbit.runtime.ops import library
from fewbit.runtime.quantizers import copies
from fewbit.runtime.quantizers.spec import SavedTensors, in_storage_order
from fewbit.runtime.saved.context import current

Result = TypeVar("Result")

__all__ = ["checkpoint", "checkpoint_"]

_ENABLE = "activation_checkpointing_enable", "gradient_checkpointing_enable"
"""The method of models of transformers, with its new and its old name."""
CHECKPOINTING = "gradient_checkpointing", "_gradient_checkpointing_func"
"""The attributes of a layer of transformers that say whether it is a region, and by which function it is called."""


def checkpoint(
    function: Callable[..., Result],
    *args: Any,
    bits: int = 8,
    group_size: int = GROUP_SIZE,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Result:
    """Compute function(*args, **kwargs), save the inputs quantized, and compute it again in the backward pass.

    The result is that of torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs). The gradients
    differ, because the backward pass computes the region from rounded inputs. Floating tensors among `args` that need a
    gradient and have at least 1024 elements are quantized; other arguments, tensors in containers, `kwargs` and parameters
    are saved as they are. Outside a converted model, the seed of the rounding is drawn from torch's generator first, so
    dropout in the region draws other masks than with torch's function.
    In compiled code, torch's own function runs, and nothing is quantized.

    Args:
        function: the region, a function or module.
        *args: the positional arguments of `function`.
        bits: the bits per element, 1 to 8. With fewer than 8 bits, look at the error of the gradients first
            (docs/concepts/layers.md).
        group_size: the number of elements in a group (docs/concepts/quantizer.md), a multiple of 32.
        preserve_rng_state: whether the recomputation draws the same random numbers as the forward pass, as in torch. It must
            be False while a CUDA graph is recorded.
        **kwargs: the keyword arguments of `function`, and the arguments `context_fn`, `determinism_check`, `debug` and
            `early_stop` of torch's function.

    Returns:
        The result of `function`.

    Raises:
        InputError: `function` cannot be called, or `bits` or `group_size` is invalid.
    """
    if not callable(function):
        raise InputError(f"function: expected a function or module, got {type(function).__name__}")
    check_bits(bits)
    check_group_size(group_size)
    options = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state, **kwargs}
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return torch_checkpoint(function, *args, **options)
    region = _Region(function, args, bits, group_size)
    # torch restores the random states of the devices of the tensors that it is given, and would save the arguments.
    devices = dict.fromkeys(x.device for x in tree_leaves(args) if isinstance(x, Tensor))
    result = torch_checkpoint(region, *(torch.empty(0, device=each) for each in devices), **options)
    region.forget_arguments()
    return result


def checkpoint_(
    model: nn.Module,
    bits: int = 8,
    group_size: int = GROUP_SIZE,
    preserve_rng_state: bool = True,
) -> None:
    """Enable gradient checkpointing in a model of transformers, in place, with `checkpoint` in place of torch's function.

    The layers that ``model.gradient_checkpointing_enable()`` checkpoints (in new versions of transformers,
    ``activation_checkpointing_enable``) then save their inputs quantized. ``model.gradient_checkpointing_disable()`` undoes
    this. The model may be compressed by `fewbit.compress_`, before or after.

    Args:
        model: the model.
        bits: as in `checkpoint`.
        group_size: as in `checkpoint`.
        preserve_rng_state: as in `checkpoint`.

    Raises:
        InputError: `bits` or `group_size` is invalid, or the model has no method `gradient_checkpointing_enable`.
    """
    check_bits(bits)
    check_group_size(group_size)
    enable = _enabling(model)
    if enable is None:
        raise InputError(
            f"expected a model of transformers that supports gradient checkpointing, got {type(model).__name__}; "
            "call fewbit.checkpoint in the forward of other models, and for models of diffusers "
            "model.enable_gradient_checkpointing(fewbit.checkpoint)"
        )
    enable()
    options = {"group_size": group_size, "preserve_rng_state": preserve_rng_state}
    quantized = partial(checkpoint, bits=bits, **options)
    for module in model.modules():
        if hasattr(module, CHECKPOINTING[1]):
            setattr(module, CHECKPOINTING[1], quantized)


def supports_checkpoints(model: nn.Module) -> bool:
    """Return whether `checkpoint_` can be used with a model."""
    return _enabling(model) is not None and getattr(model, "supports_gradient_checkpointing", False)


def _enabling(model: nn.Module) -> Callable | None:
    return next((getattr(model, name) for name in _ENABLE if hasattr(model, name)), None)


class _Region:
    """A region: a function, and its arguments with quantized tensors.

    In the forward pass, the object calls the function with the arguments themselves. Later it calls the function with
    the dequantized arguments.
    """

    def __init__(self, function, args, bits, group_size):
        self._function, self._args = function, args
        self._others = [None if isinstance(x, Tensor) else x for x in args]
        tensors = {i: x for i, x in enumerate(args) if isinstance(x, Tensor)}
        self._needs_grad = {i: x.requires_grad for i, x in tensors.items()}
        saved = [
            in_storage_order(x, lambda x, i=i: _save(x, i, bits, group_size))
            for i, x in tensors.items()
        ]
        # Autograd saves the tensors, so that hooks on saved tensors see them.
        with torch.enable_grad():
            self._holder = _Holder.apply(torch.empty(0, requires_grad=True), saved)

    def forget_arguments(self) -> None:
        """Forget the arguments themselves when the forward pass is done."""
        self._args = None

    def __call__(self, *_, **kwargs):
        args = self._restored() if self._args is None else self._args
        return self._function(*args, **kwargs)

    def _restored(self) -> list:
        args = list(self._others)
        tensors, _ = copies.load(self._holder.grad_fn)
        for (i, needs_grad), x in zip(self._needs_grad.items(), tensors, strict=True):
            x = x.detach()
            args[i] = x.requires_grad_() if needs_grad else x
        return args


class _Holder(Function):
    """An autograd node that holds copies. It takes no part in the backward pass."""

    @staticmethod
    def forward(ctx, flag, saved):
        return copies.save(ctx, flag.clone(), saved)

    @staticmethod
    def backward(ctx, grad):
        raise AssertionError("no gradient reaches this node")


def _save(x: Tensor, number: int, bits: int, group_size: int) -> SavedTensors:
    """Return a quantized copy of an argument, or the argument itself if it is not to be quantized."""
    # Tensors without gradient are masks, positions or data, which exist anyway. A mask may contain -inf.
    is_large = x.dtype in FLOATING and x.layout is torch.strided and x.numel() >= LEAST_ELEMENTS
    if not (is_large and x.requires_grad) or isinstance(x, nn.Parameter) or not is_eager(x):
        return copies.unquantized(x.detach())
    context = current()
    if context is None:
        seed = library.new_seed(x)
    else:
        seed = context.seed(x, "checkpoint", number)
    kind = usual_kind(ROTATED, group_size)
    # The means are float32, because recomputed tensors depend on them nonlinearly.
    return copies.quantized(x, seed, bits, group_size, True, kind)
