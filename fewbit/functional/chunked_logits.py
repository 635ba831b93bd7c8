"""Logits that are not computed until something but a cross-entropy reads them (`fewbit.chunk_loss_`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as torch_functional
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from fewbit.errors import GradientError
from fewbit.functional.losses import linear_cross_entropy
from fewbit.runtime.interop.tensor_kinds import is_eager
from fewbit.runtime.parallel.process_groups import running_replica

_FACTS = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.is_floating_point, Tensor.is_complex,
    Tensor.element_size, Tensor.stride, Tensor.is_contiguous, Tensor.__len__, Tensor.get_device, torch.is_floating_point,
    torch.numel, torch.is_complex, torch.is_tensor,
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda",
      "is_leaf", "grad_fn", "_base", "is_sparse", "is_quantized", "is_nested", "is_meta", "is_mps", "is_xpu", "itemsize", "_backward_hooks")),
}  # fmt: skip
"""Functions and attributes that do not read values."""
_CONVERSIONS = {
    Tensor.float: torch.float32,
    Tensor.double: torch.float64,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
}
_SAME = {Tensor.contiguous, Tensor.clone}
_ROWS = {Tensor.view, Tensor.reshape, Tensor.flatten, torch.flatten, torch.reshape}


class ChunkedLogits(Tensor):
    """The logits of a linear layer, whose cross-entropy is computed in chunks.

    `torch.nn.functional.cross_entropy` of these logits is `fewbit.functional.linear_cross_entropy` of the layer's input.
    Other functions compute the logits first.

    Attributes:
        hidden: the input of the layer, (*, features).
        made: computes these logits from those of all rows; None if these are the logits of all rows.
        root: the logits of all rows.
        autocast: the state of autocast in which the layer was called, as `_autocast` returns it.
        hooks: FSDP's hooks, which call for the weights before the backward pass.
        replica: the DistributedDataParallel that looks for gradients in the graphs of the model's outputs, or None.
    """

    is_chunked = True

    hidden: Tensor
    layer: nn.Linear
    root: ChunkedLogits
    made: Callable[[Tensor], Tensor] | None
    autocast: tuple[bool, torch.dtype]
    hooks: OrderedDict[int, Callable]
    replica: nn.Module | None
    _full: Tensor | None

    @staticmethod
    def of(
        hidden: Tensor, layer: nn.Linear, dtype: torch.dtype | None = None, root=None, made=None
    ):
        """Return the logits `layer(hidden)`, converted to a dtype."""
        autocast = _autocast(hidden.device.type) if root is None else root.autocast
        if dtype is None:
            is_cast = autocast[0] and hidden.dtype != torch.float64
            dtype = autocast[1] if is_cast else hidden.dtype
        shape = *hidden.shape[:-1], len(layer.weight)
        found = Tensor._make_wrapper_subclass(
            ChunkedLogits, shape, dtype=dtype, device=hidden.device, requires_grad=True
        )
        found.hidden, found.layer, found.made, found._full = hidden, layer, made, None
        found.root, found.autocast = found if root is None else root, autocast
        if root is None:
            found.hooks, found.replica = OrderedDict(), _searching_replica()
        return found

    def computed(self) -> Tensor:
        """Return the logits as an ordinary tensor."""
        root = self.root
        full = root._full
        if full is None:
            is_on, dtype = self.autocast
            with torch.autocast(root.hidden.device.type, dtype, enabled=is_on):
                layer = root._checked_layer()
                full = torch_functional.linear(root.hidden, layer.weight, layer.bias)
            if (
                full.requires_grad
            ):  # else it is a metric within torch.no_grad, and a loss may follow
                root._full = root._hooked(full)
        return full if self.made is None else self.made(full)

    def _checked_layer(self) -> nn.Linear:
        """Return the layer, or raise GradientError if a gradient with its weight would be lost."""
        layer, root = self.layer, self.root
        if not is_eager(layer.weight):
            raise GradientError(
                "chunk_loss_: expected the weight of the head to be there when the loss is computed, got a shard; compute the loss "
                "in the module that fully_shard divides, or call fewbit.unchunk_loss_(model)"
            )
        if torch.is_grad_enabled() and root.replica is not _searching_replica():
            raise GradientError(
                "chunk_loss_: expected a loss that the model computes, because DistributedDataParallel has find_unused_parameters or "
                "static_graph, got logits that are read outside; call fewbit.unchunk_loss_(model)"
            )
        return layer

    def _takes(self, hook: Callable) -> bool:
        """Return whether a hook can be that of a loss, because it does not read the gradient."""
        module = getattr(hook, "__module__", None) or ""
        return self.root._full is None and module.startswith("torch.distributed.fsdp.")

    def _hooked(self, result: Tensor) -> Tensor:
        if result.requires_grad:
            for hook in self.root.hooks.values():
                result.register_hook(hook)
        return result

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, ChunkedLogits):
            if function is Tensor.register_hook and first._takes(args[1]):
                handle = RemovableHandle(first.root.hooks)
                first.root.hooks[handle.id] = args[1]
                return handle
            found = first._derived(function, args, kwargs)
            if found is not None:
                return found
            if function is torch_functional.cross_entropy:
                found = first._loss(*args[1:], **kwargs)
                if found is not None:
                    return found
        args, kwargs = tree_map(
            lambda x: x.computed() if isinstance(x, ChunkedLogits) else x, (args, kwargs)
        )
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise GradientError(
            f"expected no operation on logits of chunk_loss_ other than torch's functions, got {function}; call "
            "fewbit.unchunk_loss_(model)"
        )

    def _derived(self, function, args, kwargs) -> ChunkedLogits | None:
        """Return the uncomputed result of a function that changes rows or the dtype only; None for others."""
        hidden, dtype, width = self.hidden, self.dtype, self.shape[-1]
        if function in _SAME and not kwargs:
            return self
        if function in _CONVERSIONS and len(args) == 1 and not kwargs:
            dtype = _CONVERSIONS[function]
        elif function is Tensor.to and not kwargs and len(args) == 2:
            if isinstance(args[1], torch.dtype) and args[1].is_floating_point:
                dtype = args[1]
            elif args[1] != self.device:
                return None
        elif function in _ROWS:
            with torch._C.DisableTorchFunctionSubclass():
                shape = function(torch.empty(self.shape, device="meta"), *args[1:], **kwargs).shape
            if not shape or shape[-1] != width:
                return None
            hidden = hidden.reshape(*shape[:-1], hidden.shape[-1])
        elif function is Tensor.__getitem__ and _keeps_classes(args[1], self.dim()):
            hidden = hidden[args[1]]
        else:
            return None

        def made(full, before=self.made):
            return function(full if before is None else before(full), *args[1:], **kwargs)

        return ChunkedLogits.of(hidden, self.layer, dtype, self.root, made)

    def _loss(self, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0):  # fmt: skip
        """Return the cross-entropy; None if the logits exist anyway, or if classes are not in the last dimension."""
        has_indices = isinstance(target, Tensor) and not target.is_floating_point()
        is_usual = size_average is None and reduce is None and self.dim() == 2
        is_computed = self.root._full is not None
        if (
            not (has_indices and is_usual)
            or is_computed
            or self.autocast != _autocast(self.device.type)
        ):
            return None
        layer = self._checked_layer()
        loss = linear_cross_entropy(
            self.hidden,
            layer.weight,
            target,
            linear_bias=layer.bias,
            weight=weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            logits_dtype=self.dtype,
        )
        return self._hooked(loss)


def _searching_replica() -> nn.Module | None:
    """Return the DistributedDataParallel whose forward runs, if it looks for parameters in the graphs of its outputs."""
    active = running_replica()
    searches = active is not None and (active.find_unused_parameters or active.static_graph)
    return active if searches else None


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _keeps_classes(key, dim: int) -> bool:
    keys = key if isinstance(key, tuple) else (key,)
    if not all(isinstance(one, int | slice | type(Ellipsis)) for one in keys):
        return False
    if Ellipsis in keys:
        return keys[-1] is Ellipsis or keys[-1] == slice(None)
    return len(keys) < dim or (len(keys) == dim and keys[-1] == slice(None))
