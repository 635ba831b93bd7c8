"""The interface of policies. A policy chooses the bits of a model's saved tensors while the model trains.

A *slot* is one tensor that a layer saves in every forward pass. A `BitAssignment` contains the bits of every slot in
one forward pass. A *probe* measures a forward and its backward pass for the policy (`assignment.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fewbit.config import MAX_BITS
from fewbit.errors import InputError
from fewbit.runtime.saved.assignment import BitAssignment, Probe, batch_size
from fewbit.runtime.saved.sample_magnitudes import GradientMagnitudes, SampleNumbering
from fewbit.sizes import counted
from fewbit.text import printable, shorten

if TYPE_CHECKING:
    from fewbit.render.rows import Rows

SAMPLES = ("magnitudes", "numbers")
"""The entries of a policy's state that describe numbered samples. A state has both entries or neither."""


class BitPolicy:
    """The object that chooses a model's bits while the model trains.

    The base class gives every slot the average of its layer, and divides the bits of each tensor among the tensor's
    samples.

    To add a policy, write a subclass in a new file. All methods have defaults, so it is enough if a subclass sets
    `kind` and fills `averages`. The runtime calls `begin`, `assign` and `report_unobserved`. The controller, the
    object that `fewbit.compress_` returns, calls the other methods.

    Args:
        bits: the average number of bits per element, from 1 to 8.

    Attributes:
        averages: {(layer's name, number of the layer's input): average bits per element} of slots for which the policy
            replaces the layer's own average.
    """

    kind = "SampleBits"
    """The name of the policy's configuration in messages."""
    shares_results = True
    """If True, layers compute results of earlier layers again from the copies of other layers (`quantizers/computed.py`)."""
    limit: float | None = None
    """The largest ratio E|g^|^2 / E|g|^2 that the policy allows, or None if the policy has no limit.

    g^ is the gradient of the compressed model and g the exact gradient.
    """

    def __init__(self, bits: float = MAX_BITS):
        self.bits = bits
        self.averages: dict[tuple[str, int], float] = {}
        self.magnitudes = GradientMagnitudes()
        self._places_of_samples = SampleNumbering()
        self._numbers = None  # the numbers of the next forward's samples

    # -- The runtime asks ------------------------------------------------------------------------------------

    def begin(self, module, inputs) -> BitAssignment:
        """Return the bit assignment of a forward pass in training that begins now.

        Args:
            module: the module whose call is the forward pass.
            inputs: the call's arguments.

        Raises:
            InputError: the user has numbered the samples (`number_samples`), but this forward pass has fewer or more
                samples than there are numbers.
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
        """Return a bit assignment with the present bits, for a forward pass from which the policy learns nothing.

        Args:
            inputs: the arguments of a forward pass.
            probe: the caller's probe, which measures the forward pass for the caller; or None.
        """
        return BitAssignment(self.averages, batch_size(inputs), probe)

    def report_unobserved(self, layer: str, reason: str) -> None:
        """Record that no probe can see the tensors that a layer saves. The base class does nothing.

        Args:
            layer: the layer's name.
            reason: COMPILED, REENTRANT or ALONE: the layer is compiled, is in a checkpoint with use_reentrant=True, or
                was called outside a forward pass of the model.
        """

    # -- The controller asks ---------------------------------------------------------------------------------

    def tables(self, model, ended: str) -> dict[str, Rows]:
        """Return {name: table} of the policy's choices.

        A table's name is "allocation" or "bounds", which is also the name of the controller's property that shows it.

        Args:
            model: the compressed model, or None if it no longer exists.
            ended: the reason why the model is no longer trained with this policy, or "".
        """
        return {}

    def number_samples(self, numbers) -> None:
        """Set the numbers of the samples in the next forward pass of training.

        The policy recognizes a sample by its number, so the sample must have the same number in every epoch.

        Args:
            numbers: (N,) integers on the CPU, one for each sample.

        Raises:
            InputError: the numbers are not such integers, or the policy does not divide bits among samples.
        """
        self._numbers = self._places_of_samples.of(numbers)

    def state_dict(self) -> dict:
        """Return all that the policy has learned, for `load_state_dict`."""
        if not self.magnitudes:
            return {}
        return {"magnitudes": self.magnitudes.state(), "numbers": self._places_of_samples.state()}

    def load_state_dict(self, state: Mapping) -> None:
        """Replace all that the policy has learned by a saved state.

        Args:
            state: the result of `state_dict` of a policy of this kind. The policy changes only if the whole state is
                valid.

        Raises:
            InputError: the state is from another kind of policy, or has invalid entries.
        """
        if len(state) == 1 or any(key not in SAMPLES for key in state):
            raise wrong_state(self.kind, state)
        magnitudes, places = GradientMagnitudes(), SampleNumbering()
        magnitudes.load(state.get("magnitudes", ()))
        places.load(state.get("numbers", places.state()))
        self.magnitudes, self._places_of_samples = magnitudes, places


def wrong_state(kind: str, state: Mapping) -> InputError:
    """Return the InputError for a state that is from a controller with another configuration.

    Args:
        kind: the class name of the configuration whose controller should load the state.
        state: the state.
    """
    return InputError(f"expected the state of a controller of {kind}, got one {_origin(state)}")


def _origin(state: Mapping) -> str:
    """Return a phrase that says which configuration a state is from, as far as the state's entries show it."""
    if "policy" in state:
        return f"of {printable(str(state['policy']))[:60]}"
    strange = [key for key in state if key not in SAMPLES]
    if strange:
        return f"with {shorten(strange[0])}"
    if not state:
        return "of a configuration that learns nothing"
    return "of SampleBits" if len(state) == len(SAMPLES) else f"with {next(iter(state))!r} alone"
