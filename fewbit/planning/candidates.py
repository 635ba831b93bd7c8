"""Settings that a plan measures: what users may choose between, and the default choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from fewbit.compress.controller import Controller
from fewbit.compress.convert import compress_, restore_
from fewbit.compress.replace import replace_activations_
from fewbit.convert import kinds
from fewbit.errors import InputError
from fewbit.nn.preactivation import NORMS
from fewbit.sizes import counted


@dataclass(frozen=True)
class Candidate:
    """One point of a plan: a policy, which names its curve, and keywords of `compress_`.

    activations_only: keywords of `replace_activations_` instead, which leaves all else exact.
    """

    policy: str
    options: Mapping[str, object] = field(default_factory=dict)
    activations_only: bool = False

    @property
    def label(self) -> str:
        """What tells it from others of its policy: `2 bits`, `e2=0.01`."""
        rest = [f"{name}={_short(value)}" for name, value in self.options.items() if name in _TOLD]
        rest += [
            f"{name}={_short(value)}"
            for name, value in self.options.items()
            if name not in (*_TOLD, *_OF_POLICY, "bits")
        ]
        bits = self.options.get("bits")
        if bits is not None:
            rest.insert(0, counted(bits, "bit"))
        return ", ".join(rest) or "default"

    def apply(self, model: nn.Module) -> Controller | None:
        """Converts the model in place, undoing what was done before. None where there is no controller."""
        if not self.activations_only:
            return compress_(model, **{**self.options, "verbose": False})
        restore_(model)  # so that nothing else is converted
        replace_activations_(model, **{**self.options, "verbose": False})
        return None


_TOLD = ("e2", "budget")
_OF_POLICY = ("level", "policy", "fuse", "sample", "verbose")


class Policy(NamedTuple):
    """A curve of default candidates: `varies` takes each of the values, the other options stay.

    needs: classes of modules, of which a model has to have one; needed: the same in words.
    """

    name: str
    values: tuple[float, ...]
    options: Mapping[str, object]
    varies: str = "bits"
    needs: tuple[type, ...] = (nn.Module,)
    needed: str = ""


POLICIES = (
    Policy("fixed", (8, 4, 3, 2), {"level": "L2"}),
    Policy("shared", (4, 3, 2, 1.5), {"level": "L3"}),
    Policy("error-bound", (0.1, 0.5, 1.0, 2.0), {"policy": "error-bound"}, "e2"),
    Policy(
        "pre-activation",
        (8, 4, 2),
        {"fuse": "preactivation"},
        needs=tuple(NORMS),
        needed="a batch or layer norm",
    ),
)
ACTIVATIONS = "activations"
ACTIVATION_BITS = (4, 3, 2)


def default_candidates(
    model: nn.Module, policies: Iterable[str] | None = None
) -> tuple[Candidate, ...]:
    """The same bits for all layers ("fixed"); shared between layers ("shared"); by a bound on the gradient's error
    ("error-bound"); fused norms; "activations" alone.

    The last where the model has activations as modules; of those with two slopes alone, as ReLU, with 1 bit, which
    is exact. policies: names, only these. InputError for one that there is not for this model.
    """
    if isinstance(policies, str) or not isinstance(policies, Iterable | None):
        raise InputError(f"policies: expected a list of names, as ['fixed'], got {policies!r}")
    found = [
        Candidate(policy.name, {**policy.options, policy.varies: value})
        for policy in POLICIES
        if any(isinstance(each, policy.needs) for each in model.modules())
        for value in policy.values
    ]
    activations = [
        kind
        for kind in map(kinds.kind_of, model.modules())
        if kind is not None and kind.family == kinds.ACTIVATION
    ]
    if activations:
        bits = (1,) if all(each.one_bit for each in activations) else ACTIVATION_BITS
        found += [Candidate(ACTIVATIONS, {"bits": each}, True) for each in bits]
    if policies is None:
        return tuple(found)
    policies, names = list(policies), list(dict.fromkeys(each.policy for each in found))
    needed = {each.name: each.needed for each in POLICIES} | {ACTIVATIONS: "activations as modules"}
    for name in policies:
        if name in names:
            continue
        if name in needed:
            raise InputError(
                f"policy {name}: expected a model with {needed[name]}, got one without"
            )
        raise InputError(f"expected one of {', '.join(names)} for policy, got {name!r}")
    return tuple(each for each in found if each.policy in policies)


def check_candidates(candidates) -> tuple[Candidate, ...]:
    """Those that are given, as a tuple. InputError for anything else, or none."""
    if not isinstance(candidates, Iterable):
        candidates = (candidates,)
    found = tuple(candidates)
    if not found:
        raise InputError("candidates: expected a Candidate or several, got none")
    for each in found:
        if not isinstance(each, Candidate):
            raise InputError(
                f"candidates: expected instances of fewbit.Candidate, got {type(each).__name__}"
            )
        if not isinstance(each.policy, str) or not isinstance(each.options, Mapping):
            raise InputError(
                f"candidates: expected a name and a mapping of options, got {each.policy!r} and {each.options!r}"
            )
    return found


def _short(value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
