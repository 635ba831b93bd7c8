"""The interface of policies, which choose the bits of a model's saved tensors while the model trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fewbit.config import MAX_BITS
from fewbit.errors import InputError
from fewbit.printable import printable, shorten
from fewbit.runtime.saved.assignment import BitAssignment, Probe, batch_size
from fewbit.runtime.saved.sample_magnitudes import GradientMagnitudes, SampleNumbering
from fewbit.sizes import counted

if TYPE_CHECKING:
    from fewbit.render.rows import Rows

SAMPLES = ("magnitudes", "numbers")
"""The entries of a policy's state that describe numbered samples. A state has both or neither."""


class BitPolicy:
    """The object that chooses a model's bits while the model trains.

    The base class gives every slot its layer's average, and divides the bits of each tensor among the tensor's samples.
    A subclass needs only set `kind` and fill `averages`. To change more of each assignment, it overrides `assign`.

    Args:
        bits: the average number of bits per element, from 1 to 8.

    Attributes:
        averages: {(name of a layer, number of the tensor among its inputs): average bits}. Other tensors keep their layer's average.
    """

    kind = "SampleBits"
    """The name of the policy's configuration in messages."""
    shares_results = True
    """True if layers compute earlier layers' results again from copies (`quantizers/computed.py`)."""
    limit: float | None = None
    """The largest gradient ratio, E|g^|^2 / E|g|^2, that the policy allows, or None."""

    def __init__(self, bits: float = MAX_BITS):
        self.bits = bits
        self.averages: dict[tuple[str, int], float] = {}
        self.magnitudes = GradientMagnitudes()
        self._places_of_samples = SampleNumbering()
        self._numbers = None  # the numbers of the next forward's samples

    # -- The runtime asks ------------------------------------------------------------------------------------

    def begin(self, module, inputs) -> BitAssignment:
        """Return the bit assignment of a forward pass in training that begins now: a call of `module` with `inputs`.

        Raises:
            InputError: the user gave numbers for more or fewer samples (`number_samples`).
        """
        assignment = self.assign(inputs)
        numbers, self._numbers = self._numbers, None
        if numbers is not None and len(numbers) != assignment.samples:
            raise InputError(
                f"expected the numbers of {counted(assignment.samples, 'sample')}, as many as this forward has, "
                f"got {len(numbers)}"
            )
        assignment.magnitudes, assignment.numbers = self.magnitudes, numbers
        return assignment

    def assign(self, inputs, probe: Probe | None = None) -> BitAssignment:
        """Return an assignment from which the policy learns nothing, measured by the caller's probe, if any.

        `begin` calls this method, and so do measurements, such as `fewbit.saved_bytes`.
        """
        return BitAssignment(self.averages, batch_size(inputs), probe)

    def report_unobserved(self, layer: str, reason: str) -> None:
        """Record that no probe can see what a layer saves, and the reason, such as COMPILED (`assignment.py`)."""

    # -- The controller asks ---------------------------------------------------------------------------------

    def tables(self, model, ended: str) -> dict[str, Rows]:
        """Return {"allocation" or "bounds": rows} of the policy's choices, for the controller's property of this name.

        `model` is None if it no longer exists. `ended` is why it is no longer trained with this policy, or "".
        """
        return {}

    def number_samples(self, numbers) -> None:
        """Set the numbers of the samples in the next forward pass: (N,) integers on the CPU, the same in every epoch.

        Raises:
            InputError: the numbers are not such integers, or the policy does not divide bits among samples.
        """
        self._numbers = self._places_of_samples.of(numbers)

    def state_dict(self) -> dict:
        if not self.magnitudes:
            return {}
        return {"magnitudes": self.magnitudes.state(), "numbers": self._places_of_samples.state()}

    def load_state_dict(self, state: Mapping) -> None:
        """Replace all that the policy has learned by a result of `state_dict`.

        Raises:
            InputError: the state is invalid or from another kind of policy. Then nothing changes.
        """
        if len(state) == 1 or any(key not in SAMPLES for key in state):
            raise wrong_state(self.kind, state)
        magnitudes, places = GradientMagnitudes(), SampleNumbering()
        magnitudes.load(state.get("magnitudes", ()))
        places.load(state.get("numbers", places.state()))
        self.magnitudes, self._places_of_samples = magnitudes, places


def wrong_state(kind: str, state: Mapping) -> InputError:
    """Return the InputError for a state that is not from a controller with the configuration `kind`."""
    return InputError(f"expected the state of a controller of {kind}, got one {_origin(state)}")


def _origin(state: Mapping) -> str:
    if "policy" in state:
        return f"of {printable(str(state['policy']))[:60]}"
    strange = [key for key in state if key not in SAMPLES]
    if strange:
        return f"with {shorten(strange[0])}"
    if not state:
        return "of a configuration that learns nothing"
    return "of SampleBits" if len(state) == len(SAMPLES) else f"with {next(iter(state))!r} alone"
