"""The functions that create the policy for a configuration, such as `ErrorBoundPolicy` for `ErrorBound`."""

from __future__ import annotations

from functools import singledispatch

from fewbit.config import (
    AdaptiveBits,
    BitConfig,
    Budget,
    ErrorBound,
    FixedBits,
    PreActivationBits,
    SampleBits,
)
from fewbit.convert.model_facts import ModelFacts
from fewbit.errors import InputError
from fewbit.policies.adaptive import AdaptivePolicy
from fewbit.policies.error_bound.policy import ErrorBoundPolicy
from fewbit.runtime.saved.bit_policy import BitPolicy


@singledispatch
def make_policy(config: BitConfig, facts: ModelFacts) -> BitPolicy | None:
    """Return a new policy for a configuration, or None if the configuration fixes the bits.

    To connect a configuration class of your own to a policy, register a function with `make_policy.register`.

    Raises:
        InputError: no function is registered for the class of the configuration.
    """
    raise InputError(
        f"expected a configuration with a registered policy, got {config!r}; see make_policy.register"
    )


def checked_policy(config: BitConfig, facts: ModelFacts) -> BitPolicy | None:
    """Return `make_policy(config, facts)`, checked against the configuration's `has_policy` and `adapts`.

    Without `has_policy`, layers ignore the policy; without `adapts`, its `averages`. Raises InputError if these do not fit
    the policy.
    """
    policy = make_policy(config, facts)
    has_policy = policy is not None
    needed = {"has_policy": has_policy, "adapts": has_policy and type(policy) is not BitPolicy}
    for name, value in needed.items():
        if getattr(config, name) != value:
            kind = type(policy).__name__ if has_policy else "none"
            raise InputError(
                f"expected {name} = {value} in {type(config).__name__}, whose policy is {kind}, "
                f"got {getattr(config, name)!r}"
            )
    return policy


@make_policy.register
def _(config: FixedBits | PreActivationBits, facts: ModelFacts) -> None:
    return None


@make_policy.register
def _(config: SampleBits, facts: ModelFacts) -> BitPolicy:
    return BitPolicy(config.average)


@make_policy.register
def _(config: AdaptiveBits | Budget, facts: ModelFacts) -> BitPolicy:
    return AdaptivePolicy(facts.average, facts.names, config.interval, facts.elements, facts.budget)


@make_policy.register
def _(config: ErrorBound, facts: ModelFacts) -> BitPolicy:
    activations = facts.chosen_activations, facts.given_activations
    return ErrorBoundPolicy(config, facts.names, facts.channels, *activations)
