"""A training step on fake tensors, which shows how many bytes a step of real size takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
)
from torch.nn import functional as torch_functional
from torch.utils._pytree import tree_leaves, tree_map

from fewbit.analysis.gradients import check_graph, hint_of_forward
from fewbit.errors import InputError
from fewbit.planning.storages import StorageTracker
from fewbit.planning.timeline import LOSS, STEP, TRANSIENT, UPDATE, Event, Mark, Timeline
from fewbit.planning.watching import watched
from fewbit.printable import one_line
from fewbit.runtime.interop.original_functions import functional as original_functional

PARTS = ("weights", "gradients", "optimizer", "saved", "transient")
"""The roles of storages. "saved" are all that the forward pass leaves."""
_NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)


class FakeTraining:
    """A copy of a model whose parameters are fake tensors, with an optimizer.

    Args:
        model: the model, which does not change, perhaps on the meta device.
        convert: changes the copy in place, for example compresses it.
        loss: called as loss(model, batch); returns a scalar tensor. None stands for `loss_of_output`.
        on_gpu: whether torch's optimizers and attention take the memory that they take on a GPU (`as_on_gpu`).

    Attributes:
        model: the copy of the model.
        gradient_bytes: after `step`, the bytes of all gradients of parameters.
        state_bytes: after `step`, the bytes of the optimizer's state.

    Raises:
        InputError: the model or the optimizer cannot be copied, or the optimizer cannot be made.
    """

    def __init__(
        self,
        model: nn.Module,
        convert: Callable[[nn.Module], object],
        loss: Callable | None,
        optimizer,
        on_gpu: bool,
    ):
        self.tracker = StorageTracker()
        self._loss = loss_of_output if loss is None else loss
        self._on_gpu = on_gpu
        memo = _fakes(model, self.tracker)
        self.device = next(iter(memo.values())).device
        copies = dict(memo)
        try:
            self.model = deepcopy(model, memo)
        except Exception as error:
            raise InputError(
                f"model: expected one that copy.deepcopy copies, got: {one_line(error)}"
            ) from error
        convert(self.model)
        self._optimizer = _optimizer_of(optimizer, self.model, copies, on_gpu)
        self.tracker.claim([*self.model.parameters(), *self.model.buffers()], PARTS[0])

    def step(
        self,
        batch,
        blocks: Sequence[nn.Module] = (),
        *,
        updates: bool = True,
        accumulates: bool = False,
        dim=0,
        size=None,
    ) -> Timeline:
        """Run one training step.

        In the first step, the optimizer makes its state. Only the shapes and dtypes of the batch count; `size` replaces that of
        dimension `dim`. `blocks` are modules of the copy whose passes are marked, `updates` says whether the optimizer's
        step is run, and `accumulates` whether gradients of an earlier batch exist.

        Raises:
            InputError: the step cannot run on fake tensors, or the loss is not a scalar that depends on the model.
        """
        tracker = self.tracker
        marks: list[tuple[int, Mark]] = []

        def mark(kind, block=-1, inputs=()):
            marks.append((tracker.moment, Mark(kind, block, tuple(tracker.keys_of(inputs)))))

        self.model.zero_grad(set_to_none=True)
        if accumulates:
            with tracker:
                for parameter in self.model.parameters():
                    if parameter.requires_grad:
                        parameter.grad = torch.zeros_like(parameter)
            tracker.claim([each.grad for each in self.model.parameters()], "gradients")
        tracker.start()
        with tracker, as_on_gpu(self._on_gpu), torch.enable_grad(), _refusing_values():
            fake = _fake_batch(batch, dim, size, self.device)
            tracker.add(tree_leaves(fake), TRANSIENT)
            with watched(blocks, mark):
                value = self._loss(self.model, fake)
                _check_loss(value, self.model)
                tracker.claim_transient("saved")
                mark(LOSS)
                value.backward()
            tracker.claim([each.grad for each in self.model.parameters()], "gradients")
            if updates:
                self.gradient_bytes, before = tracker.total("gradients"), tracker.total()
                mark(UPDATE)
                self._update()
                tracker.claim(tree_leaves(list(self._optimizer.state.values())), "optimizer")
                self.state_bytes = tracker.total("optimizer")
        found = tracker.timeline(marks)
        if updates:
            self._growth = found.peak(STEP).size - before
        return found

    def _update(self) -> None:
        try:
            self._optimizer.step()
        except Exception as error:
            raise InputError(
                "optimizer: expected one whose step takes no closure and does not depend on values, got "
                f"{self.optimizer_name}, which raises {one_line(error)}"
            ) from error

    def peak(self, batch, dim: int, size: int) -> int:
        """Return the peak of a step without the optimizer's, whose batch has another size in one dimension. Call this after `step`."""
        found = self.step(batch, updates=False, dim=dim, size=size)
        left = sum(found.existing.values()) + sum(
            one.change for one in found.happened if isinstance(one, Event)
        )
        return max(found.peak().size, left + self._growth)

    def forward(self, batch, mode) -> None:
        """Run a forward pass within a dispatch mode."""
        with self.tracker, as_on_gpu(self._on_gpu), torch.enable_grad(), _refusing_values():
            fake = _fake_batch(batch, 0, None, self.device)
            with mode:
                self._loss(self.model, fake)

    @property
    def optimizer_name(self) -> str:
        """The class name of the optimizer."""
        return type(self._optimizer).__name__


def own_loss(model: nn.Module, batch) -> torch.Tensor:
    """Call the model with a batch, a tuple as positional and a mapping as keyword arguments, and return its own loss.

    Raises:
        InputError: the output is neither a scalar nor has a `loss`.
    """
    output = _output(model, batch)
    found = _loss_in(output)
    if found is None:
        raise InputError(
            "loss: expected a function loss(model, batch), because the model returns neither a scalar nor an output with a "
            f"loss, got None and an output {type(output).__name__}"
        )
    return found


def loss_of_output(model: nn.Module, batch) -> torch.Tensor:
    """Return what `own_loss` returns; the sum of the means of the output's floating tensors if there is no loss."""
    output = _output(model, batch)
    found = _loss_in(output)
    if found is not None:
        return found
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    means = [leaf.mean() for leaf in leaves if leaf.is_floating_point() and leaf.requires_grad]
    if not means:
        raise InputError(
            "loss: expected a model whose output has a floating tensor that requires grad, or a function loss(model, "
            f"batch), got {type(output).__name__}"
        )
    return sum(means)


def _loss_in(output) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor) and output.numel() == 1:
        return output
    found = getattr(output, "loss", None)
    return found if isinstance(found, torch.Tensor) else None


def _output(model: nn.Module, batch):
    try:
        if isinstance(batch, torch.Tensor):
            return model(batch)
        if isinstance(batch, tuple | list):
            return model(*batch)
        return model(**batch)
    except TypeError as error:
        raise InputError(
            "batch: expected the arguments of the model's forward (a tuple is passed as positional arguments, a mapping as "
            "keyword arguments), or a function loss(model, batch) in the argument loss; got the error "
            f"{one_line(error)}"
        ) from error


# -- Fake copies -----------------------------------------------------------------------------------------------


def _fakes(model: nn.Module, mode: StorageTracker) -> dict[int, torch.Tensor]:
    """Return {id of a parameter or buffer: fake tensor}, on the CPU for the meta device."""
    found = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise InputError(
                "model: expected parameters with shapes, got lazy ones: call the model once"
            )
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            device = torch.device("cpu") if tensor.is_meta else tensor.device
            with mode:
                fake = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
                )
        else:
            fake = mode.from_tensor(tensor.detach())
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            # A training script may keep settings of its own in a parameter's attributes.
            vars(fake).update({k: v for k, v in vars(tensor).items() if k not in vars(fake)})
        found[id(tensor)] = fake
    return found


def _fake_batch(batch, dim: int, size: int | None, device: torch.device):
    length = length_of(batch, dim) if size is not None else None

    def fake(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shape = list(leaf.shape)
        if length is not None and leaf.dim() > dim and shape[dim] == length:
            shape[dim] = size
        order = sorted(range(leaf.dim()), key=lambda i: -leaf.stride(i))
        where = leaf.device if leaf.device.type not in ("cpu", "meta") else device
        made = torch.empty_permuted(shape, order, dtype=leaf.dtype, device=where)
        return made.requires_grad_(leaf.requires_grad)

    return tree_map(fake, batch)


def length_of(batch, dim: int) -> int:
    """Return the size of dimension `dim` of the first tensor that has it, or raise InputError."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > dim:
            return leaf.shape[dim]
    raise InputError(f"batch: expected a tensor with a dimension {dim}, got none")


# -- The optimizer ---------------------------------------------------------------------------------------------


def _optimizer_of(optimizer, model: nn.Module, copies: dict[int, torch.Tensor], on_gpu: bool):
    if isinstance(optimizer, torch.optim.Optimizer):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(id(parameter) not in copies for parameter in parameters):
            raise InputError(
                "optimizer: expected an optimizer of the model's parameters, got one of other parameters too"
            )
        # The first step makes a new state, because a fake tensor would have lost the numbers of steps.
        memo = {**copies, id(optimizer.state): defaultdict(dict)}
        made = deepcopy(optimizer, memo)
    else:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        try:
            made = optimizer(trained)
        except Exception as error:
            raise InputError(
                "optimizer: expected a class or function that makes an optimizer from parameters, got one that "
                f"raises {one_line(error)}"
            ) from error
        if not callable(getattr(made, "step", None)) or not hasattr(made, "state"):
            raise InputError(
                f"optimizer: expected it to make a torch optimizer, got {type(made).__name__}"
            )
    if on_gpu:
        # On a GPU, torch's optimizers work on all parameters at once by default, which takes temporary memory of about
        # the size of the parameters.
        for group in made.param_groups:
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True
    return made


# -- The step --------------------------------------------------------------------------------------------------


@contextmanager
def as_on_gpu(on_gpu: bool):
    """Return a context manager in which attention with dropout takes the memory of a GPU's fused kernels.

    Attention on the CPU saves the probabilities.
    """
    if not on_gpu:
        yield
        return
    name = "scaled_dot_product_attention"
    original = getattr(original_functional, name)
    holders = torch_functional, original_functional
    before = [getattr(holder, name) for holder in holders]

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, *args, **kwargs):
        return original(query, key, value, attn_mask, 0.0, *args, **kwargs)

    try:
        for holder in holders:
            setattr(holder, name, attention)
        yield
    finally:
        for holder, function in zip(holders, before, strict=True):
            setattr(holder, name, function)


@contextmanager
def _refusing_values():
    try:
        yield
    except _NEEDS_VALUES as error:
        raise InputError(
            "model: expected one whose operations do not depend on values, because fits runs it on fake tensors, "
            f"which have shapes only; got {one_line(error)}"
        ) from error


def _check_loss(value, model: nn.Module) -> None:
    check_graph(value)
    nodes, seen = [value.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        # The backward pass would put a fake gradient into a real parameter.
        if isinstance(variable, torch.Tensor) and not isinstance(variable, FakeTensor):
            raise InputError(
                "loss: expected a loss of the model that it is called with, got one that depends on a parameter of "
                f"shape {tuple(variable.shape)} outside of this model{hint_of_forward(model)}"
            )
        nodes += [following for following, _ in node.next_functions]
