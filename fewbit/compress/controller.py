"""The controller, which `compress_` returns: what was converted, chosen and measured."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from fewbit.compress.allocator import AllocatorReport, PeakMemory, peak_memory
from fewbit.config import BitConfig, Level
from fewbit.convert.conversion_report import Report
from fewbit.convert.swap import as_now
from fewbit.errors import InputError
from fewbit.policies.allocation_report import Allocation
from fewbit.policies.error_bound.bounds import Bounds
from fewbit.runtime.saved.bit_policy import BitPolicy, wrong_state
from fewbit.runtime.saved.context import ForwardContext, contexts_of
from fewbit.runtime.saved.offload import Offload
from fewbit.sizes import counted

if TYPE_CHECKING:
    from fewbit.analysis.gradient_ratio import GradientRatio


class Controller:
    """The object that `compress_` returns for a compressed model, which it does not keep alive.

    The training loop does not need it.
    """

    def __init__(
        self,
        model: nn.Module,
        report: Report,
        context: ForwardContext,
        allocator: AllocatorReport | None = None,
        config: BitConfig | None = None,
        has_overrides: bool = False,
    ):
        self._model = weakref.ref(model)
        self._report = report
        self.context = context
        self.allocator = allocator
        self.config = config
        self._has_overrides = has_overrides
        self._was_attached = _is_attached(context, model)

    @property
    def model(self) -> nn.Module | None:
        """The compressed model, or None if it no longer exists."""
        return self._model()

    @property
    def report(self) -> Report:
        """The modules that were converted, and what they save now."""
        return self._report if self._ended else as_now(self._report, self.model)

    @property
    def allocation(self) -> Allocation:
        """A table with the latest bits of each saved tensor, if AdaptiveBits or Budget chooses them; else empty."""
        empty = f"{self.config!r} reports no bits by layer: fewbit.AdaptiveBits does"
        return self._tables.get("allocation", Allocation(empty=empty))

    @property
    def bounds(self) -> Bounds:
        """A table with the error that ErrorBound now allows for each saved tensor; empty for other configurations."""
        return self._tables.get("bounds", Bounds(empty="bounds are found with fewbit.ErrorBound"))

    def __call__(self, *_, **__):
        """Raise InputError: `compress_` changed the model in place, so the model is to be called."""
        raise InputError(
            "expected a call of the model, which compress_ changed in place, got one of its controller"
        )

    @property
    def average_bits(self) -> float | None:
        """The latest average bits per element that a policy has chosen, or the argument `bits`.

        None if nothing is quantized (level L0), and with fixed bits and `overrides`.
        """
        if isinstance(self.config, Level) and self.config.config is None:
            return None
        if self._policy is None:
            return None if self._has_overrides else float(self.config.initial_bits)
        return float(self.allocation.bits or self.bounds.bits or self._policy.bits)

    @property
    def _tables(self) -> dict:
        return {} if self._policy is None else self._policy.tables(self.model, self._ended)

    def gradient_ratio(
        self,
        batch: object,
        loss: Callable[[nn.Module, object], torch.Tensor],
        *,
        draws: int = 8,
        seed: int = 0,
    ) -> GradientRatio:
        """Compare the gradients of the model, as it is compressed now, with exact gradients.

        The model and torch's random state do not change. The measurement takes the memory of two more models and three
        gradients. With ErrorBound, a BoundWarning says that the ratio exceeds 1 + e2 by more than three standard errors.

        Args:
            batch: one batch or several, as in `fewbit.plan`.
            loss: called as ``loss(model, batch)`` with a copy of the model; returns a scalar tensor.
            draws: the number of passes over each batch with independent rounding, at least 2.
            seed: the seed of dropout.

        Returns:
            A `GradientRatio` with the ratio E|g^|^2 / E|g|^2 and the relative error E|g^ - g|^2 / |g|^2 over all
            parameters, of the compressed gradient g^ and the exact gradient g.

        Raises:
            InputError: the model or the batch cannot be measured.
        """
        from fewbit.analysis.gradient_ratio import gradient_ratio

        if self.model is None:
            raise InputError("expected the controller's model, got one that is gone")
        limit = None if self._policy is None else self._policy.limit
        return gradient_ratio(self.model, batch, loss, draws, seed, limit)

    @property
    def offload(self) -> Offload | None:
        """The counts of bytes moved to the host and back; None without HostOffload."""
        return next(
            (context for context in self.context.contexts if isinstance(context, Offload)), None
        )

    def peak_memory(self, device: torch.device | str | int | None = None) -> PeakMemory:
        """Return the peaks of a GPU's allocated and reserved memory.

        Args:
            device: a CUDA device; None for the current one.

        Raises:
            InputError: `device` is not a CUDA device, or there is no GPU.
        """
        return peak_memory(device)

    def state_dict(self) -> dict:
        """Return what a resumed training needs to continue with the same bits: plain values, and tensors with `number_samples`."""
        return {} if self._policy is None else self._policy.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Continue from a saved state. The whole state is checked before the controller changes.

        Args:
            state: the result of `state_dict` of a controller for the same model and configuration.

        Raises:
            InputError: the state is from another model or configuration, or this controller's model no longer exists,
                was restored or was compressed again.
        """
        if self._ended:
            raise InputError(
                f"expected the controller of a model as it is compressed now, got one {self._ended}"
            )
        if not isinstance(state, Mapping):
            raise InputError(
                f"expected what a controller's state_dict() gave, got {type(state).__name__}"
            )
        if self._policy is not None:
            self._policy.load_state_dict(state)
        elif state:
            raise wrong_state(repr(self.config), state)

    @property
    def _ended(self) -> str:
        """The reason why the controller no longer belongs to a compressed model, or ""."""
        if self.model is None:
            return "of a model that is gone"
        if self._was_attached and not _is_attached(self.context, self.model):
            return "of a model that was restored or compressed anew since"
        return ""

    def number_samples(self, numbers: torch.Tensor) -> None:
        """Number the samples of the next forward pass, so that those with larger gradients in earlier passes get more bits.

        Each sample number takes 4 to 8 bytes of memory for each tensor that layers save.

        Args:
            numbers: (N,) int64 on the CPU, with N samples in the model's input. A sample must always have the same number.

        Raises:
            InputError: the numbers do not have this shape and dtype, or bits are not chosen by sample, as with
                FixedBits and ErrorBound.
        """
        if self._policy is None:
            raise InputError(
                f"expected SampleBits or AdaptiveBits for numbers of samples, got {self.config!r}"
            )
        self._policy.number_samples(numbers)

    @property
    def _policy(self) -> BitPolicy | None:
        return self.context.policy

    def __reduce__(self):
        raise InputError("a controller cannot be pickled: save its state_dict()")

    def __repr__(self) -> str:
        model = type(self.model).__name__ if self.model is not None else "a model that is gone"
        return f"Controller({model}, {counted(len(self.report.converted), 'module')} converted)"


def _is_attached(context: ForwardContext, model: nn.Module) -> bool:
    return any(other is context for other in contexts_of(model))
