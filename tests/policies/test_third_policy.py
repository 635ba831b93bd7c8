"""A user's own policy in one file: fewbit knows only its base class."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn

import fewbit
from fewbit.errors import InputError
from fewbit.policies import BitPolicy, make_policy, wrong_state
from fewbit.policies.allocation_report import Allocated, Allocation


@dataclass(frozen=True, repr=False)
class LargestBits(fewbit.BitConfig):
    """The configuration of `Largest`."""

    kind = "largest"

    many: int = 6
    few: int = 1

    @property
    def initial_bits(self):
        return 4

    def describe(self):
        return f"{self.few} bits for the largest slot, {self.many} for others"


class Saved(NamedTuple):
    average: float
    is_fixed: bool
    elements: int


class SizesProbe:
    """A probe that notes the slots that a forward pass saves, and those that its backward pass restores."""

    def __init__(self):
        self.saved, self.restored, self.watched = {}, set(), None

    def record_saved(self, slot, elements, sensitivities):
        self.saved[slot.name] = Saved(slot.average, slot.is_fixed, elements)

    def record_rounding(self, slot, record):
        return None

    def knows(self, name):
        return name in self.saved

    def watch(self, outputs):
        self.watched = outputs

    def reached(self, slots):
        self.restored |= {slot.name for slot in slots}


OF_CODES = {"functional": False, "activation_bits": 3}
"""With activations that save codes, each linear layer saves its own input."""


class Largest(BitPolicy):
    """A policy that gives the largest slot `few` bits and all others `many`."""

    kind = "LargestBits"
    limit = 3.0

    def __init__(self, many, few):
        super().__init__(many)
        self.few, self.probe, self.unobserved = few, None, []

    def begin(self, module, inputs):
        self.learn()
        assignment = super().begin(module, inputs)
        self.probe = assignment.probe = SizesProbe()
        return assignment

    def learn(self):
        if self.probe is not None:
            free = {name: slot for name, slot in self.probe.saved.items() if not slot.is_fixed}
            largest = max(free, key=lambda name: free[name].elements)
            self.averages = {name: self.few if name == largest else self.bits for name in free}

    def report_unobserved(self, layer, reason):
        self.unobserved.append((layer, reason))

    def tables(self, model, ended):
        rows = [
            Allocated(*name, bits, False, 0, 0, 0.0) for name, bits in sorted(self.averages.items())
        ]
        return {"allocation": Allocation(rows, "nothing learned yet", ended)}

    def number_samples(self, numbers):
        raise InputError("expected no numbers")

    def state_dict(self):
        return {"largest": [[*name, bits] for name, bits in self.averages.items()]}

    def load_state_dict(self, state):
        if state.keys() != {"largest"}:
            raise wrong_state(self.kind, state)
        self.averages = {(layer, number): bits for layer, number, bits in state["largest"]}


@make_policy.register
def _(config: LargestBits, facts):
    assert {"0", "2", "3"} <= set(facts.names)
    return Largest(config.many, config.few)


def compressed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), nn.Linear(64, 4))
    controller = fewbit.compress_(
        model, LargestBits(), overrides={"3": 7}, layers=OF_CODES, verbose=False
    )
    return model, controller


X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def test_its_bits_are_those_that_layers_save():
    model, controller = compressed()
    assert str(controller.allocation) == "nothing learned yet"
    assert controller.bounds.title == "bounds are found with fewbit.ErrorBound"
    before = fewbit.saved_bytes(model, X).total
    model(X).square().sum().backward()
    probe = controller.context.policy.probe
    assert probe.watched is not None and probe.restored == set(probe.saved)
    assert probe.saved["3", 0] == Saved(7, True, 32 * 64)  # what overrides gave stays
    model(X).square().sum().backward()
    assert [(row.name, row.bits) for row in controller.allocation] == [("0", 6), ("2", 1)]
    # The first forward pass had the layers' own 4 bits: 2 more for layer 0, and 3 fewer for layer 2.
    change = (2 * 32 * 64 - 3 * 32 * 256) / 8
    assert fewbit.saved_bytes(model, X).total == before + change


def test_its_state_is_that_of_the_controller():
    model, controller = compressed()
    for _ in range(2):
        model(X).square().sum().backward()
    state = controller.state_dict()
    other, again = compressed()
    before = again.allocation
    again.load_state_dict(state)
    assert again.allocation == controller.allocation != before
    with pytest.raises(InputError, match="controller of LargestBits, got one of AdaptiveBits"):
        controller.load_state_dict({"policy": "AdaptiveBits", "version": 2})


def test_its_methods_are_those_of_the_controller():
    model, controller = compressed()
    with pytest.raises(InputError, match="expected no numbers"):
        controller.number_samples(range(32))
    found = controller.gradient_ratio(X, lambda model, x: model(x).square().sum(), draws=2)
    assert found.limit == 3.0
    model[0](X).sum().backward()  # called by itself, outside of a forward of the model
    assert controller.context.policy.unobserved == [("0", "alone")]


def test_its_configuration_is_one_of_all():
    config = LargestBits(few=2)
    assert repr(config) == "LargestBits(6, few=2)"
    assert fewbit.BitConfig.from_dict(config.to_dict()) == config
    _, controller = compressed()
    assert "LargestBits(6): 1 bits for the largest slot, 6 for others" in controller.report.notes


@dataclass(frozen=True, repr=False)
class Forgotten(fewbit.BitConfig):
    """A configuration without a policy."""

    kind = "forgotten"
    initial_bits = 4


def test_a_configuration_without_a_policy_is_refused():
    model = nn.Linear(4, 4)
    with pytest.raises(InputError, match="registered policy, got Forgotten"):
        fewbit.compress_(model, Forgotten(), verbose=False)
    assert type(model) is nn.Linear


@dataclass(frozen=True, repr=False)
class LeastBits(fewbit.BitConfig):
    """The configuration of `Least`, with no more than it has to have."""

    kind = "least"
    bits: float = 2.5


class Least(BitPolicy):
    """A policy that does no more than fill `averages`."""

    kind = "LeastBits"


@make_policy.register
def _(config: LeastBits, facts):
    policy = Least(config.bits)
    policy.averages["0", 0] = 1.5
    return policy


def test_a_policy_needs_no_method_of_its_own():
    def saved(bits):
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        controller = fewbit.compress_(model, bits, layers=OF_CODES, verbose=False)
        return fewbit.saved_bytes(model, X).total, model, controller

    total, model, controller = saved(LeastBits())
    assert total == saved(fewbit.SampleBits(2.5))[0] - 32 * 64 / 8  # 1.5 bits in place of 2.5
    assert str(controller.allocation).startswith("LeastBits(2.5) reports no bits by layer")
    assert "fewbit.ErrorBound" in str(controller.bounds)
    assert "LeastBits(2.5)" in str(controller.report)
    ratio = controller.gradient_ratio(X, lambda model, x: model(x).square().sum(), draws=2)
    assert ratio.limit is None
    controller.load_state_dict(controller.state_dict())
    with pytest.raises(InputError, match="controller of LeastBits, got one of AdaptiveBits"):
        controller.load_state_dict({"policy": "AdaptiveBits", "version": 2})
    controller.number_samples(torch.arange(32))
    model(X).sum().backward()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"has_policy": False}, "has_policy = True in Changed, whose policy is Least, got False"),
        ({"adapts": False}, "adapts = True in Changed, whose policy is Least, got False"),
        ({"policy": None}, "has_policy = False in Changed, whose policy is none, got True"),
        ({"policy": None, "has_policy": False}, "adapts = False in Changed, whose policy is none, got True"),
        ({"policy": BitPolicy}, "adapts = False in Changed, whose policy is BitPolicy, got True"),
    ],
)  # fmt: skip
def test_a_configuration_that_does_not_fit_its_policy_is_refused(changes, message):
    """Layers would ignore the policy."""

    class Changed(LeastBits):
        has_policy, adapts = changes.get("has_policy", True), changes.get("adapts", True)

    @make_policy.register
    def _(config: Changed, facts):
        policy = changes.get("policy", Least)
        return None if policy is None else policy(config.bits)

    model = nn.Linear(4, 4)
    bits = 2 if "has_policy" in changes else 2.5
    with pytest.raises(InputError, match=f"^expected {message}$"):
        fewbit.compress_(model, Changed(bits), verbose=False)
    assert type(model) is nn.Linear
