"""Cross-entropy losses that save no tensor with an element for each pair of token and class in full."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fewbit.config import DEFAULT_BITS, GROUP_SIZE, UNIFORM
from fewbit.errors import InputError
from fewbit.runtime.interop.original_functions import functional as torch_functional
from fewbit.runtime.quantizers import copies
from fewbit.runtime.quantizers.quantizer import Quantizer, quantizer_of
from fewbit.runtime.saved.saving_function import SavingFunction, is_differentiated

__all__ = ["cross_entropy", "linear_cross_entropy"]

REDUCTIONS = "mean", "sum", "none"
CHUNK = 2**23
"""The number of logits that `linear_cross_entropy` computes at a time. More of them save no time."""


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    bits: int = DEFAULT_BITS,
    group_size: int = GROUP_SIZE,
    quantizer: Quantizer | str | None = None,
) -> Tensor:
    """Compute torch.nn.functional.cross_entropy and save the probabilities quantized.

    The loss is torch's to the bit. The gradient is linear in the probabilities, and therefore exact in expectation. With 2
    bits, its squared error is at most 1.1 % of its square (`benchmarks/results/cross_entropy.json`). If the target has
    probabilities of classes, or if `weight` needs a gradient, torch's own function runs, which saves the logarithms of all
    probabilities. Other arguments are those of torch's function.

    Args:
        input: the logits: (classes,), (N, classes) or (N, classes, ...), floating.
        target: indices of classes: (), (N,) or (N, ...), int64.
        weight: the weights of the classes, (classes,), or None.
        bits: bits per saved probability, 1 to 8.
        group_size: as in `linear`.
        quantizer: as in `linear`, but None stands for "uniform".

    Raises:
        InputError: `bits` or `group_size` is invalid.
    """
    if getattr(type(input), "is_chunked", False):
        options = weight, size_average, ignore_index, reduce, reduction, label_smoothing
        return torch_functional.cross_entropy(input, target, *options)
    quantizer = quantizer_of(bits, group_size, quantizer)
    if size_average is not None or reduce is not None:
        reduction = torch_functional._Reduction.legacy_get_string(size_average, reduce)
    options = {"ignore_index": ignore_index, "reduction": reduction}
    options["label_smoothing"] = label_smoothing
    has_indices = not (target.is_floating_point() or target.requires_grad)
    if not has_indices or _needs_gradient(weight) or not is_differentiated(input):
        return torch_functional.cross_entropy(input, target, weight, **options)
    return _CrossEntropy.apply(input, target, weight, options, quantizer)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk_size: int | None = None,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute cross_entropy(linear(input, linear_weight, linear_bias), target) in chunks of the input's rows.

    The gradients are torch's, up to the order of summation. From torch 2.13 on, torch's own chunked function runs, which
    computes and saves the gradients of input and weight in the forward pass. In earlier versions, and for arguments that it
    does not support, such as label smoothing, each chunk is a checkpointed region. Other arguments are those of torch's
    cross_entropy.

    Args:
        input: (*, features), floating.
        linear_weight: the weight of the linear layer, (classes, features).
        target: indices of classes, (*,), int64.
        linear_bias: the bias of the linear layer, (classes,), or None.
        weight: the weights of the classes, (classes,), or None.
        chunk_size: the number of rows in a chunk; None for as many rows as have 2**23 logits.
        logits_dtype: the dtype to which logits are converted before the loss; None for that of the linear layer's result.

    Returns:
        The loss: a scalar, or for the reduction "none" a tensor of the target's shape.

    Raises:
        InputError: the shapes of input and target do not match, the target does not have indices, `chunk_size` is less
            than 1, or `reduction` is unknown.
    """
    _check(input, linear_weight, target, chunk_size, reduction)
    if chunk_size is None:
        chunk_size = max(CHUNK // max(len(linear_weight), 1), 1)
    rows, index = input.reshape(-1, input.shape[-1]), target.reshape(-1)
    options = {"ignore_index": ignore_index, "reduction": reduction}
    tensors = {"linear_bias": linear_bias, "weight": weight}
    is_converted = logits_dtype not in (None, rows.dtype)
    if not is_converted and _torch_supports(rows, index, weight, label_smoothing):
        chunks = torch.nn.LinearCrossEntropyOptions(
            batch_chunk_size=chunk_size, chunking_method=None
        )
        loss = torch_functional.linear_cross_entropy(
            rows, linear_weight, index, **tensors, **options, options=chunks
        )
    else:
        options |= {"label_smoothing": label_smoothing, "dtype": logits_dtype}
        loss = _in_regions(rows, linear_weight, index, chunk_size, **tensors, **options)
    return loss.view(target.shape) if reduction == "none" else loss


def _check(input, linear_weight, target, chunk_size, reduction) -> None:
    for name, x in {"input": input, "linear_weight": linear_weight, "target": target}.items():
        if not isinstance(x, Tensor):
            raise InputError(f"{name}: expected a tensor, got {type(x).__name__}")
    if reduction not in REDUCTIONS:
        raise InputError(f"reduction: expected {' or '.join(REDUCTIONS)}, got {reduction!r}")
    if chunk_size is not None and chunk_size < 1:
        raise InputError(f"chunk_size: expected at least 1, got {chunk_size}")
    if target.is_floating_point():
        raise InputError(f"target: expected indices of classes (int64), got {target.dtype}")
    if linear_weight.dim() != 2 or input.shape[-1:] != linear_weight.shape[1:]:
        shapes = f"{tuple(input.shape)} and {tuple(linear_weight.shape)}"
        raise InputError(
            f"input and linear_weight: expected (*, features) and (classes, features), got {shapes}"
        )
    if target.shape != input.shape[:-1]:
        raise InputError(
            f"target: expected the shape {tuple(input.shape[:-1])}, got {tuple(target.shape)}"
        )


def _needs_gradient(weight: Tensor | None) -> bool:
    return weight is not None and weight.requires_grad


def _torch_supports(rows, index, weight, label_smoothing) -> bool:
    if not hasattr(torch.nn, "LinearCrossEntropyOptions") or torch.compiler.is_compiling():
        return False
    if torch.is_autocast_enabled(rows.device.type) or _needs_gradient(weight) or label_smoothing:
        return False
    return rows.numel() > 0 and index.dtype == torch.int64 and rows.dtype != torch.float64


def _in_regions(
    rows, linear_weight, index, size, *, linear_bias, weight, reduction, dtype, **options
):
    each = "none" if reduction == "none" else "sum"

    def loss(rows, index):
        logits = torch_functional.linear(rows, linear_weight, linear_bias)
        logits = logits if dtype is None else logits.to(dtype)
        return torch_functional.cross_entropy(logits, index, weight, reduction=each, **options)

    chunks = zip(rows.split(size), index.split(size), strict=True)
    losses = [
        checkpoint(loss, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks
    ]
    if reduction == "none":
        return torch.cat(losses)
    total = torch.stack(losses).sum()
    if reduction == "mean":
        return total / _weights_of(index, weight, options["ignore_index"]).sum().to(total.dtype)
    return total


def _weights_of(index, weight, ignore_index):
    is_used = index != ignore_index
    if weight is None:
        return is_used
    return torch.where(is_used, weight[torch.where(is_used, index, 0)], 0)


class _CrossEntropy(SavingFunction):
    @staticmethod
    def forward(ctx, x, target, weight, options, quantizer):
        ctx.options = options
        loss = torch_functional.cross_entropy(x, target, weight, **options)
        ctx.dim = min(1, x.dim() - 1)
        # In autocast on a CPU, softmax would round to 16 bits, which rounds probabilities near 1 to 1.
        probabilities = torch_functional.softmax(x, ctx.dim, dtype=loss.dtype)
        saved = quantizer.quantize(probabilities, shared=False, usual=UNIFORM)
        return copies.keep(ctx, loss, target=target, weight=weight, probabilities=saved)

    @staticmethod
    def backward(ctx, grad):
        """Compute the gradient of the logits, p_j sum_i t_i - t_j in a row with probabilities p_j and target y.

        The row's loss is the sum of -t_j log p_j with t_j = (1 - e) w_y [j = y] + e / C w_j, for the weights w of the C
        classes and the label smoothing e.
        """
        kept = copies.Kept(ctx)
        result, target = kept.values("probabilities", grad.dtype), kept.tensor("target")
        weight = kept.tensor("weight")
        ignore_index, reduction, smoothing = ctx.options.values()
        dim, classes = ctx.dim, result.shape[ctx.dim]
        of_targets = _weights_of(target, weight, ignore_index).to(grad.dtype)
        if reduction == "mean":
            grad = grad / of_targets.sum()
        is_used = target != ignore_index
        # A mean over ignored targets alone divides by 0; torch's gradients are 0 then.
        grad = torch.where(is_used, grad, 0)
        certain = (1 - smoothing) * of_targets
        share = smoothing / classes
        total = certain
        if smoothing:
            total = total + share * (classes if weight is None else weight.sum())
        index = torch.where(is_used, target, 0).long().unsqueeze(dim)
        result.mul_(total.unsqueeze(dim))
        result.scatter_(dim, index, result.gather(dim, index) - certain.unsqueeze(dim))
        if smoothing:
            shape = [-1 if at == dim else 1 for at in range(result.dim())]
            result.sub_(share if weight is None else (share * weight).view(shape))
        return result * grad.unsqueeze(dim), None, None, None, None
