"""Norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fewbit import functional as F
from fewbit.config import check_copies
from fewbit.functional.batch_norm import sync_batch_norm
from fewbit.nn.base import Quantized
from fewbit.runtime.interop.bypass import bypass

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "RMSNorm",
    "SyncBatchNorm",
]


class Norm(Quantized):
    """A mixin with the argument `copies`: with 2 independently rounded copies of the normalized input, the mean of its gradient is exact."""

    copies = 1

    def __init__(self, *args, copies: int = 1, **kwargs):
        check_copies(copies)
        super().__init__(*args, **kwargs)
        self.copies = copies

    @property
    def _options(self) -> dict:
        return {"copies": self.copies, "quantizer": self.quantizer}

    def extra_repr(self) -> str:
        return super().extra_repr() + ", copies=2" * (self.copies == 2)


class LayerNorm(Norm, nn.LayerNorm):
    """A torch.nn.LayerNorm that computes `fewbit.functional.layer_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return self._exact(input)
        vectors = self.weight, self.bias
        return F.layer_norm(input, self.normalized_shape, *vectors, self.eps, **self._options)


class RMSNorm(Norm, nn.RMSNorm):
    """A torch.nn.RMSNorm that computes `fewbit.functional.rms_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self._exact(x)
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps, **self._options)


class GroupNorm(Norm, nn.GroupNorm):
    """A torch.nn.GroupNorm that computes `fewbit.functional.group_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return self._exact(input)
        vectors = self.weight, self.bias
        return F.group_norm(input, self.num_groups, *vectors, self.eps, **self._options)


class _BatchNorm(Norm):
    """A mixin for batch norms and SyncBatchNorm."""

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # the average over all batches
                momentum = 1.0 / float(self.num_batches_tracked)
        # Without running statistics, the statistics of the batch are used in evaluation mode too.
        by_batch = self.training or (self.running_mean is None and self.running_var is None)
        tracked = not self.training or self.track_running_stats
        vectors = (
            self.running_mean if tracked else None,
            self.running_var if tracked else None,
            self.weight,
            self.bias,
        )
        if by_batch and not self.training:
            with bypass():
                return nn.functional.batch_norm(input, *vectors, True, momentum, self.eps)
        return self._normalize(input, vectors, by_batch, momentum)

    def _normalize(self, input, vectors, by_batch, momentum) -> Tensor:
        return F.batch_norm(input, *vectors, by_batch, momentum, self.eps, **self._options)


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """A torch.nn.BatchNorm1d that computes `fewbit.functional.batch_norm`."""


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """A torch.nn.BatchNorm2d that computes `fewbit.functional.batch_norm`."""


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """A torch.nn.BatchNorm3d that computes `fewbit.functional.batch_norm`."""


class SyncBatchNorm(_BatchNorm, nn.SyncBatchNorm):
    """A torch.nn.SyncBatchNorm that saves its normalized input quantized, in one copy if there are several processes.

    `convert_sync_batchnorm` creates layers of torch's class, so call it before `compress_`.
    """

    def _normalize(self, input, vectors, by_batch, momentum) -> Tensor:
        group = self._group() if by_batch else None
        if group is None:
            return super()._normalize(input, vectors, by_batch, momentum)
        mean, var, weight, bias = vectors
        statistics = mean, var, self.eps, momentum, group
        return sync_batch_norm(input, weight, bias, *statistics, quantizer=self.quantizer)

    def _group(self):
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return None
        group = self.process_group or torch.distributed.group.WORLD
        return group if group.size() > 1 else None


class _InstanceNorm(Norm):
    """A mixin that replaces `_apply_instance_norm` of torch's instance norms."""

    def _apply_instance_norm(self, input: Tensor) -> Tensor:
        if not self.training:
            with bypass():
                return super()._apply_instance_norm(input)
        momentum = 0.0 if self.momentum is None else self.momentum
        vectors = self.running_mean, self.running_var, self.weight, self.bias
        return F.instance_norm(input, *vectors, True, momentum, self.eps, **self._options)


class InstanceNorm1d(_InstanceNorm, nn.InstanceNorm1d):
    """A torch.nn.InstanceNorm1d that computes `fewbit.functional.instance_norm`."""


class InstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d):
    """A torch.nn.InstanceNorm2d that computes `fewbit.functional.instance_norm`."""


class InstanceNorm3d(_InstanceNorm, nn.InstanceNorm3d):
    """A torch.nn.InstanceNorm3d that computes `fewbit.functional.instance_norm`."""
