"""The controller: what `compress_` returns, and what the layers of a converted model share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from fewbit.compress.allocator import AllocatorReport, PeakMemory, peak_memory
from fewbit.convert.report import Report
from fewbit.errors import InputError
from fewbit.policies.adaptive import AdaptivePolicy
from fewbit.policies.allocation_report import Allocated, Allocation
from fewbit.policies.error_bound.bounds import Bounded, Bounds
from fewbit.policies.error_bound.policy import POLICY, ErrorBoundPolicy
from fewbit.policies.probing import SAMPLES
from fewbit.runtime.saved.offload import Offload
from fewbit.runtime.saved.session import Session, sessions_of
from fewbit.schema import shorten
from fewbit.sizes import counted
from fewbit.text import printable

if TYPE_CHECKING:
    from fewbit.analysis.gradient_ratio import GradientRatio


class Controller:
    """Stands for one compressed model; nothing in the training loop needs it.

    report: what was converted. session: shared by the model's layers. allocator: what came of setting PyTorch's,
    at level L5, else None. level, policy: those of `compress_`, else None.
    """

    def __init__(
        self,
        model: nn.Module,
        report: Report,
        session: Session,
        allocator: AllocatorReport | None = None,
        level: str | None = None,
        policy: str | None = None,
    ):
        self._model = weakref.ref(model)
        self.report = report
        self.session = session
        self.allocator = allocator
        self.level = level
        self.policy = policy
        self._was_attached = _is_attached(session, model)

    @property
    def model(self) -> nn.Module | None:
        """The compressed model, or None if it is gone."""
        return self._model()

    @property
    def allocation(self) -> Allocation:
        """From level L3 on, as of the latest adaptation; before the first, and at other levels, empty."""
        adaptation = self._adaptation
        if self._guarantee is not None:
            return Allocation(empty=f"policy {POLICY}: see bounds")
        if adaptation is None:
            level = "" if self.level is None else f"at level {self.level} "
            return Allocation(empty=f"{level}bits are not chosen by layer: levels from L3 on do so")
        rows = (
            Allocated(
                *name,
                adaptation.bits_of(name, each),
                each.is_fixed,
                each.elements,
                each.samples,
                each.sensitivity,
            )
            for name, each in adaptation.seen.items()
        )
        empty = "no bits chosen yet: that comes after the first steps of training"
        return Allocation(rows, empty, self._ended, adaptation.unobserved_layers(self.model))

    @property
    def bounds(self) -> Bounds:
        """With policy="error-bound" what may err by how much, and how it is kept, as of the latest observation; else empty."""
        guarantee = self._guarantee
        if guarantee is None:
            return Bounds(empty=f'bounds are found with policy="{POLICY}"')
        rows = (Bounded(*row) for row in guarantee.rows())
        empty = "no bounds found yet: that comes after the first steps of training, with gradients that are finite"
        unobserved = guarantee.unobserved_layers(self.model)
        e2, ratio = guarantee.bound.e2, guarantee.ratio
        return Bounds(rows, e2, ratio, empty, unobserved, self._ended)

    def gradient_ratio(
        self,
        batch,
        loss: Callable[[nn.Module, object], torch.Tensor],
        *,
        draws: int = 8,
        seed: int = 0,
    ) -> GradientRatio:
        """E|g^|^2 / E|g|^2 over all parameters, on a batch or several, of the model as it is compressed now.

        With E|g^ - g|^2 / |g|^2, which shows a bias too. batch, loss: as for `fewbit.plan`. draws: of rounding, independent,
        for each batch, 2 at least. seed: of dropout. Two copies of the model, one exact, are measured, a batch at a time; the
        model, and torch's random state, stay as they are. Takes draws + 1 forward and backward passes a batch, and memory
        for two more models, three gradients, and what the exact one keeps. Warns (BoundWarning) where the ratio is above 1 + e2 beyond chance. Raises
        InputError for what cannot be measured.
        """
        from fewbit.analysis.gradient_ratio import gradient_ratio

        if self.model is None:
            raise InputError("expected the controller's model, got one that is gone")
        limit = None if self._guarantee is None else 1.0 + self._guarantee.bound.e2
        return gradient_ratio(self.model, batch, loss, draws, seed, limit)

    @property
    def offload(self) -> Offload | None:
        """Of levels L4 and L5: bytes moved to the host and back."""
        return next((each for each in self.session.contexts if isinstance(each, Offload)), None)

    def peak_memory(self, device=None) -> PeakMemory:
        """Peaks of a GPU's memory, allocated for tensors and reserved; InputError where there is none."""
        return peak_memory(device)

    def state_dict(self) -> dict:
        """What a resumed training needs to go on alike: plain numbers, to be saved beside the model's.

        To be called between steps. Empty where nothing is learned. (With `number_samples` also tensors.)
        """
        variables = self.session.variables
        return {} if variables is None else variables.state()

    def load_state_dict(self, state: dict) -> None:
        """Continue from a state. The whole state is checked before the controller changes.

        Args:
            state: the result of `state_dict` of a controller for the same model, level and policy.

        Raises:
            InputError: the state is not from such a controller; or the model no longer exists, was restored or was
                compressed again. The message names the entry, the expected value and the value found.
        """
        if self._ended:
            raise InputError(
                f"expected the controller of a model as it is compressed now, got one {self._ended}"
            )
        if not isinstance(state, Mapping):
            raise InputError(
                f"expected what a controller's state_dict() gave, got {type(state).__name__}"
            )
        self._check_state(state)
        if self.session.variables is not None:
            self.session.variables.load(state)

    @property
    def _ended(self) -> str:
        """What has become of a model that is not this controller's any more, or ""."""
        if self.model is None:
            return "of a model that is gone"
        if self._was_attached and not _is_attached(self.session, self.model):
            return "of a model that was restored or compressed anew since"
        return ""

    def _check_state(self, state: Mapping) -> None:
        """Raises InputError for the state of another level or policy, and for entries that no state has."""
        of_policy = state.get("policy") if "version" in state else None
        expected = None if self._guarantee is None else POLICY
        is_same = isinstance(of_policy, str | None) and of_policy == expected
        if not is_same or (expected and not state):
            raise InputError(
                f"expected the state of a controller of {self._kind}, got one {_origin(state)}"
            )
        if expected:
            return
        adapts = self._adaptation is not None
        known = () if self.session.variables is None else SAMPLES
        given = [each for each in SAMPLES if each in state]
        strange = [each for each in state if not adapts and each not in known]
        if "version" in state and not adapts:
            found = "of level L3 or above"
        elif not state and adapts:
            found = "of a level below L3"
        elif strange:
            found = f"with {shorten(strange[0])}"
        elif len(given) == 1:
            found = f"with {given[0]!r} alone"
        else:
            return
        raise InputError(f"expected the state of a controller of {self._kind}, got one {found}")

    @property
    def _kind(self) -> str:
        return (
            f"policy {self.policy}" if self.level is None and self.policy else f"level {self.level}"
        )

    def number_samples(self, numbers) -> None:
        """Says which samples of the data the next forward has, so that bits go by the gradients they had before.

        numbers: (N,) int64 on the CPU, N being dimension 0 of the model's input: what tells the samples of the data
        apart. At level L2.5 and above; optional, for one forward. For each number that was ever given, 4 to 8 bytes
        are kept for each tensor that layers keep. Raises InputError for anything else.
        """
        if self._guarantee is not None:
            raise InputError(
                f"expected a level for numbers of samples, got policy {POLICY}, whose bits follow from bounds"
            )
        if self.session.variables is None:
            raise InputError(
                "expected level L2.5 or above for numbers of samples, got one with fixed bits"
            )
        self.session.variables.number(numbers)

    @property
    def _adaptation(self) -> AdaptivePolicy | None:
        variables = self.session.variables
        return variables if isinstance(variables, AdaptivePolicy) else None

    @property
    def _guarantee(self) -> ErrorBoundPolicy | None:
        variables = self.session.variables
        return variables if isinstance(variables, ErrorBoundPolicy) else None

    def __reduce__(self):
        raise InputError("a controller cannot be pickled: save its state_dict()")

    def __repr__(self) -> str:
        model = type(self.model).__name__ if self.model is not None else "a model that is gone"
        return f"Controller({model}, {counted(len(self.report.converted), 'module')} converted)"


def _origin(state: Mapping) -> str:
    """Of which policy or level a state is, as far as it tells."""
    if "version" in state:
        return (
            f"of policy {printable(str(state['policy']))[:60]}"
            if "policy" in state
            else "of level L3 or above"
        )
    if any(each in state for each in SAMPLES):
        return "of level L2.5"
    strange = next(iter(state), None)
    return "of a level below L3" if strange is None else f"with {shorten(strange)}"


def _is_attached(session: Session, model: nn.Module) -> bool:
    """Whether forwards of the model are told to that session."""
    return any(each is session for each in sessions_of(model))
