"""Gradients of a copy of a model on given batches, and checks of the user's arguments.

P is the number of modules that own parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from fewbit.analysis.unchanged import unchanged
from fewbit.convert import kinds
from fewbit.convert.swap import check_module
from fewbit.errors import InputError
from fewbit.functions.callables import misfit_of
from fewbit.printable import one_line, shorten
from fewbit.runtime.interop.module_calls import is_compiled

Loss = Callable[[nn.Module, object], torch.Tensor]

CHUNKS = 8
"""The default number of chunks of a single batch."""

EXPECTED_LOSS = "expected a function (model, batch) -> scalar tensor, as lambda model, batch: criterion(model(batch[0]), batch[1])"


class Measured:
    """A copy of the model whose gradients, lists with a tensor for each of `parameters`, are measured."""

    def __init__(self, model: nn.Module, loss: Loss, seed: int):
        self.model = model
        self.loss = loss
        self.seed = seed
        self.groups = groups_of(model)
        self.parameters = [parameter for group in self.groups.values() for parameter in group]

    @contextmanager
    def forward(self, batch, number: int):
        """Run a forward and yield the loss, with the graph; dropout is the same for the same number."""
        modules, tensors = dict(self.model.named_modules()), tensors_of(batch)
        with unchanged(modules, tensors):
            devices = {tensor.device for tensor in (*self.parameters, *tensors)}
            _seed_generators(devices, self.seed + number)
            with torch.enable_grad():
                value = self.value(batch)
            check_graph(value)
            if not torch.isfinite(value).all():
                raise InputError(f"loss: expected a finite value, got {value.item()}")
            yield value

    def value(self, batch) -> torch.Tensor:
        """Return a batch's loss. Raise InputError if `loss` takes the model or the batch for a tensor."""
        try:
            return self.loss(self.model, batch)
        except (TypeError, AttributeError) as error:
            if not _takes_for_tensors(error, self.model, batch):
                raise
            raise InputError(
                f"loss: {EXPECTED_LOSS}, got one that takes the model or the batch for a tensor: {shorten(error, 120)}"
            ) from error

    def backward(self, value: torch.Tensor, again: bool = False) -> list[torch.Tensor]:
        """Return the gradients: zeros for parameters without one, complex ones viewed as real. `again` retains the graph.

        Raises:
            InputError: the loss does not depend on any parameter, or the model has reentrant checkpoints.
        """
        try:
            found = torch.autograd.grad(
                value, self.parameters, retain_graph=again, allow_unused=True
            )
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            raise InputError(
                "model: expected checkpoints with use_reentrant=False, got reentrant ones, whose gradients cannot be "
                "asked for one by one"
            ) from None
        if all(gradient is None for gradient in found):
            raise InputError(
                "loss: expected a loss of the model that it is called with, got one that depends on none of "
                f"its parameters{hint_of_forward(self.model)}"
            )
        return [
            _as_real(torch.zeros_like(parameter) if gradient is None else gradient.to_dense())
            for parameter, gradient in zip(self.parameters, found, strict=True)
        ]

    def gradient(self, batch, number: int) -> list[torch.Tensor]:
        """Return the gradients of one pass."""
        with self.forward(batch, number) as value:
            return self.backward(value)

    def inner(self, a, b) -> np.ndarray:
        """Return the inner product of two gradients, (P,) float64."""
        products = [(x.double() * y.double()).sum() for x, y in zip(a, b, strict=True)]
        device = products[0].device  # a single transfer, also for a model on several devices
        products = iter(torch.stack([product.to(device) for product in products]).tolist())
        return np.array([sum(next(products) for _ in group) for group in self.groups.values()])

    def halved(self, a, b) -> np.ndarray:
        """Return half the squared norm of the difference of two gradients, (P,) float64."""
        between = difference(a, b)
        return self.inner(between, between) / 2


def _as_real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def difference(a, b) -> list[torch.Tensor]:
    """Return a - b of two gradients."""
    return [x - y for x, y in zip(a, b, strict=True)]


def squared(gradient) -> float:
    """Return the squared norm of a gradient, in float64."""
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in gradient]
    device = norms[0].device  # a single transfer, also for a model on several devices
    return float(torch.stack([norm.to(device) for norm in norms]).square().sum())


def sampling_of(exact: Measured, batch, batches: list, chunks: int) -> tuple[np.ndarray, str]:
    """Return an estimate of the gradient's variance between minibatches for each pair of them, (pairs, P) float64, and a text on it.

    Minibatches are the batches, or the chunks of one batch.
    """
    is_one, size = len(batches) == 1, size_of(batches[0])
    with explained(batch):
        parts = parts_of(batches[0], chunks) if is_one else batches
        pairs = [range(first, first + 2) for first in range(0, len(parts) - 1, 2)]
        found = [exact.halved(*(exact.gradient(parts[n], n) for n in pair)) for pair in pairs]
    if not is_one:
        return np.array(found), f"{len(batches)} batches of {size}"
    text = f"{chunks} chunks of one batch of {size}"
    norms = nn.modules.batchnorm._BatchNorm
    if any(isinstance(module, norms) and module.training for module in exact.model.modules()):
        text += " (too much, as chunks have batch norm statistics of their own: give batches)"
    return np.array(found) / chunks, text


# -- Arguments -------------------------------------------------------------------------------------------------


def groups_of(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return {path of a module: its own parameters that require grad}. A shared parameter appears once."""
    groups, seen = {}, set()
    for path, module in model.named_modules():
        if type(module) is kinds._PART_OF_ATTENTION:
            # This module is never called. Its parameters belong to the attention around it.
            path = path.rpartition(".")[0]
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                groups.setdefault(path, []).append(parameter)
    return groups


def check_model(model) -> None:
    """Raise InputError unless the argument is a module whose gradients compression can change."""
    check_module(model)
    if not model.training:
        raise InputError(
            "model: expected one in training mode, got one in evaluation mode, in which nothing is compressed"
        )
    for path, module in model.named_modules():
        if is_compiled(module):
            where = (
                f" at {path!r}; compile it in place instead, as module.compile()" if path else ""
            )
            raise InputError(
                f"model: expected one that is not compiled, got one of torch.compile{where}"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("model: expected parameters that require grad, got none")


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy, or raise InputError if the model cannot be copied."""
    try:
        return deepcopy(model)
    except Exception as error:
        raise InputError(f"model: expected one that copy.deepcopy copies, got: {error}") from error


def hint_of_forward(model: nn.Module) -> str:
    """Return a hint that a module's own forward may call the model that was copied, or "" if there is none."""
    for path, module in model.named_modules():
        if "forward" in vars(module):
            return (
                f". The module {path!r} has a forward of its own, which may call the original in place of a copy. TRL's "
                "trainers set one: measure the model before the trainer is created"
            )
    return ""


def check_optimizer(optimizer) -> None:
    """Raise InputError unless `optimizer` is an optimizer, or may make one."""
    if not callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"optimizer: expected a class, a function or an optimizer, got {shorten(optimizer)}"
        )


def check_loss(loss) -> None:
    """Raise InputError unless `loss` can be called as loss(model, batch)."""
    if not callable(loss):
        raise InputError(
            f"loss: expected a function (model, batch) -> scalar tensor, got {type(loss).__name__}"
        )
    if type(loss).__module__ == nn.modules.loss.__name__:
        raise InputError(
            f"loss: {EXPECTED_LOSS}, got {type(loss).__name__}, which takes an output and a target"
        )
    misfit = misfit_of(loss, 2)
    if misfit:
        raise InputError(
            f"loss: expected a function (model, batch) -> scalar tensor, got one for which: {misfit}"
        )


def _takes_for_tensors(error: TypeError | AttributeError, model: nn.Module, batch) -> bool:
    if isinstance(error, AttributeError):
        is_argument = error.obj is model or error.obj is batch
        return is_argument and hasattr(torch.Tensor, error.name)
    return f"must be Tensor, not {type(model).__name__}" in str(error)


def check_graph(value) -> None:
    """Raise InputError unless a loss is a scalar tensor with a graph."""
    if not isinstance(value, torch.Tensor):
        raise InputError(f"loss: expected a scalar tensor, got {type(value).__name__}")
    if value.numel() != 1 or not value.requires_grad:
        how = "one" if value.requires_grad else "one that requires no grad,"
        raise InputError(
            f"loss: expected a scalar tensor with a graph, got {how} of shape {tuple(value.shape)}"
        )


def check_count(name: str, value, least: int, even: bool = False) -> None:
    """Raise InputError unless the value is an integer, at least `least`, and even if `even` is true."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (even and value % 2):
        kind = "an even integer" if even else "an integer"
        raise InputError(f"{name}: expected {kind} of at least {least}, got {value!r}")


def batches_of(batch) -> list:
    """Return the batches that `batch` contains: a tensor, a tuple or mapping of tensors, or an iterable of such.

    Raises:
        InputError: `batch` is anything else, or has no samples.
    """
    if isinstance(batch, torch.Tensor | tuple | Mapping):
        batch = [batch]
    if not isinstance(batch, Iterable) or isinstance(batch, str):
        raise InputError(
            "batch: expected a tensor, a tuple or a mapping of tensors, or a list of batches, got "
            f"{type(batch).__name__}"
        )
    batches = [with_dict(one) for one in batch]
    if not batches:
        raise InputError("batch: expected a batch or several, got an empty list")
    sizes = [size_of(one) for one in batches]
    if 0 in sizes:
        raise InputError("batch: expected at least one sample, got 0")
    if len(set(sizes)) > 1:
        raise InputError(
            f"batch: expected batches of one size, got {', '.join(map(str, sizes))} samples"
        )
    return batches


def with_dict(batch):
    """Return the batch, as a dict if it is a mapping such as a tokenizer's output, in which `tensors_of` finds no tensors."""
    return dict(batch) if isinstance(batch, Mapping) else batch


@contextmanager
def explained(batch):
    """Turn errors within the block that a wrong argument `batch` may cause into InputErrors."""
    try:
        yield
    except (
        InputError,
        torch.OutOfMemoryError,
    ):  # InputError: the loss has run, but returned no scalar tensor
        raise
    except Exception as error:
        if isinstance(batch, list) and all(isinstance(one, torch.Tensor) for one in batch):
            raise InputError(
                f"batch: expected a list of batches, got {len(batch)} tensors that loss cannot be called with one by "
                f"one ({shorten(error, 120)}); if they are one batch, give tuple(batch)"
            ) from error
        if not isinstance(error, RuntimeError):
            raise
        shapes = shapes_of(batch[0] if isinstance(batch, list) else batch)
        raise InputError(
            f"batch: expected one that loss(model, batch) takes, got {shapes}, for which it raises {one_line(error)}"
        ) from error


def tensors_of(batch) -> list[torch.Tensor]:
    """Return all tensors of a batch or of several."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def shapes_of(batch) -> str:
    """Return a text with the shapes of a batch's tensors."""
    shapes = [str(tuple(tensor.shape)) for tensor in tensors_of(batch)]
    return f"shape{'s' * (len(shapes) != 1)} {', '.join(shapes[:4])}{', ...' * (len(shapes) > 4)}"


def size_of(batch, argument: str = "batch") -> int:
    """Return a batch's number of samples. `argument` is the batch's name in an InputError."""
    for tensor in tensors_of(batch):
        if tensor.dim():
            return len(tensor)
    raise InputError(
        f"{argument}: expected a tensor with samples in dimension 0, or a tuple or mapping with one, got {type(batch).__name__}"
    )


def parts_of(batch, chunks: int) -> list:
    """Cut a batch into `chunks` equal parts along dimension 0, or raise InputError if it is not divisible.

    Tensors without an entry for each sample stay whole.
    """
    size = size_of(batch)
    if size % chunks:
        raise InputError(
            f"batch: expected a multiple of chunks={chunks} samples, or several batches, got {size}"
        )
    step = size // chunks

    def part(start, leaf):
        is_split = isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == size
        return leaf[start : start + step] if is_split else leaf

    return [tree_map(partial(part, start), batch) for start in range(0, size, step)]


def _seed_generators(devices, seed: int) -> None:
    seed %= 2**63  # torch accepts no larger seed
    torch.default_generator.manual_seed(seed)
    for device in devices:
        if device.type != "cpu" and device.type != "meta":
            module = torch.get_device_module(device)
            with module.device(device):
                module.manual_seed(seed)
