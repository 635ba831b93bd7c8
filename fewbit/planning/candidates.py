"""Candidates: the settings that `fewbit.plan`, `fewbit.fits` and `fewbit.fit_` measure and apply."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import NamedTuple

from torch import nn

from fewbit.checkpointing import checkpoint_, supports_checkpoints
from fewbit.compiler.compiling import compile_in_place, undo_compile
from fewbit.compress.compress import compress_
from fewbit.compress.controller import Controller
from fewbit.compress.replace import replace_activations_
from fewbit.config import (
    ACTIVATION_BITS,
    AdaptiveBits,
    BitConfig,
    Budget,
    ErrorBound,
    FixedBits,
    HostOffload,
    LayerSettings,
    Level,
    PreActivationBits,
    as_config,
)
from fewbit.convert import kinds
from fewbit.convert.chunked_loss import chunk_loss_
from fewbit.convert.swap import restore_
from fewbit.errors import FewbitError, InputError
from fewbit.nn.preactivation import NORMS
from fewbit.printable import shorten
from fewbit.render.formats import amount
from fewbit.sizes import counted

EXACT, CHECKPOINT = "exact", "checkpoint"
METHODS = (
    "compress_", "replace_activations_", "checkpoint_", "cross_entropy", "compile", EXACT
)  # fmt: skip
"""The functions with which a candidate may be applied, the usual one first."""
_UNSHOWN = {"sample", "verbose"}
"""Options that do not distinguish candidates, and are not stored."""


class Regions(NamedTuple):
    """The arguments of a call of `fewbit.checkpoint_`.

    Attributes:
        bits: the bits of the regions' inputs; None if these are exact.
        include: the paths of the regions; None for those of a model of transformers.
        offload: whether the inputs are on the host until the backward pass.
    """

    bits: int | None = None
    include: tuple[str, ...] | None = None
    offload: bool = False

    @property
    def call(self) -> str:
        """The call in Python."""
        where = "" if self.include is None else f", include={list(self.include)}"
        return f"fewbit.checkpoint_(model, {self.bits}{where}{', offload=True' * self.offload})"


@dataclass(frozen=True)
class Candidate:
    """One setting of a model: a row of `fewbit.fits`, a point of `fewbit.plan`, or what `fewbit.fit_` has chosen.

    Attributes:
        policy: the name of the curve to which the point belongs.
        bits: the argument `bits` of `fewbit.compress_`; with other methods only a whole number or None.
        options: other keyword arguments of the function that `method` names.
        method: how the candidate is applied:

            - "compress_": `fewbit.compress_`.
            - "replace_activations_": `fewbit.replace_activations_` (`bits` None: 3).
            - "checkpoint_": `fewbit.checkpoint_` before `compress_`, with the same bits, for a model of transformers.
            - "cross_entropy": `compress_`, and in the loss function `fewbit.functional.cross_entropy` with the same bits.
            - "compile": `fewbit.compile` in place of `compress_`.
            - "exact": nothing is compressed. `bits` has no effect.
        checkpoints: the calls of `fewbit.checkpoint_` that come first.
        head: the path of the layer for which `fewbit.chunk_loss_` is called before, or None.

    Raises:
        InputError: `policy` is not a text, `options` is not a mapping, `method` is unknown, or `bits` cannot be used.
    """

    policy: str
    bits: BitConfig | float | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    method: str = METHODS[0]
    checkpoints: tuple[Regions, ...] = ()
    head: str | None = None

    def __post_init__(self):
        if not isinstance(self.policy, str) or not isinstance(self.options, Mapping):
            raise InputError(
                "candidates: expected a name and a mapping of options, "
                f"got {shorten(self.policy)} and {shorten(self.options)}"
            )
        if self.method not in METHODS:
            raise InputError(
                f"method: expected one of {', '.join(METHODS)}, got {shorten(self.method)}"
            )
        activations_only = self.method == "replace_activations_"
        usual = ACTIVATION_BITS if activations_only else None
        bits = usual if self.bits is None else self.bits
        object.__setattr__(self, "bits", as_config(bits))
        if self.method != METHODS[0] and not isinstance(self.bits, FixedBits):
            raise InputError(
                f"bits: expected a whole number from 1 to 8 with {self.method}, got {self.bits!r}"
            )

    @property
    def label(self) -> str:
        """A text that distinguishes candidates with the same `policy`, such as `2 bits`."""
        if self.method == EXACT:
            return CHECKPOINT if self.checkpoints else EXACT
        values = {field.name: getattr(self.bits, field.name) for field in fields(self.bits)}
        usual = {field.name: field.default for field in fields(self.bits)}
        first = next(iter(values), None)
        value = values.pop(first, None)
        if first in ("bits", "average"):
            shown = [counted(value, "bit")]
        elif isinstance(self.bits, Budget):
            shown = [f"budget={amount(value)}"]
        elif isinstance(self.bits, Level):
            shown = [f"level {value}"]
        else:
            shown = [f"{first}={_short(value)}" if first else type(self.bits).__name__]
        rest = {name: value for name, value in values.items() if value != usual[name]}
        rest |= {name: value for name, value in self.options.items() if name not in _UNSHOWN}
        layers = rest.get("layers")
        if isinstance(layers, LayerSettings):
            del rest["layers"]
            rest |= {name: value for name, value in layers.to_dict().items() if value is not None}
        shown += [
            name if value is True else f"{name}={_short(value)}" for name, value in rest.items()
        ]
        return ", ".join(shown)

    @property
    def regions(self) -> tuple[Regions, ...]:
        """The calls of `fewbit.checkpoint_`."""
        of_method = (Regions(self.bits.bits),) if self.method == "checkpoint_" else ()
        return self.checkpoints + of_method

    @property
    def call(self) -> str:
        """Python code that applies the candidate to `model`."""
        return "; ".join(self.calls)

    @property
    def calls(self) -> tuple[str, ...]:
        """The calls of `call`."""
        first = () if self.head is None else (f"fewbit.chunk_loss_(model, {self.head!r})",)
        first += tuple(each.call for each in self.regions)
        if self.method == EXACT:
            return first
        shown = {
            name: _code(name, self.options[name]) for name in self.options if name not in _UNSHOWN
        }
        if isinstance(self.bits, Budget) or "sample" in self.options:
            shown["sample"] = "sample"
        options = "".join(f", {name}={value}" for name, value in shown.items())
        if self.method == "replace_activations_":
            return *first, f"fewbit.replace_activations_(model, {self.bits.initial_bits}{options})"
        arguments = f"(model, {self.bits!r}{options})"
        if self.method == "compile":
            return *first, f"model = fewbit.compile{arguments}"
        call = f"fewbit.compress_{arguments}"
        if self.method == "cross_entropy":
            loss = f"fewbit.functional.cross_entropy(..., bits={self.bits.bits})"
            call += f"  # and in the loss function: {loss}"
        return *first, call

    def apply(self, model: nn.Module) -> Controller | None:
        """Undo an earlier conversion of the model, if any, and convert the model in place.

        With the method "cross_entropy", call `fewbit.functional.cross_entropy` in your loss function too. With "compile", calls of the model run
        the compiled code. Gradient checkpointing that is enabled stays enabled.

        Returns:
            The controller; None with the methods "exact", "replace_activations_" and "compile", which have none.
        """
        undo_compile(model)
        if self.head is not None:
            chunk_loss_(model, self.head)
        for bits, include, offload in self.regions:
            checkpoint_(model, bits, include=include, offload=offload)
        if self.method not in ("compress_", "checkpoint_", "cross_entropy"):
            restore_(model)
        if self.method == EXACT:
            return None
        if self.method == "compile":
            compile_in_place(model, self.bits, **self.options)
            return None
        options = {**self.options, "verbose": False}
        if self.method == "replace_activations_":
            replace_activations_(model, self.bits.initial_bits, **options)
            return None
        return compress_(model, self.bits, **options)

    def to_dict(self) -> dict:
        """Return plain JSON values, without a sample."""
        return {
            "policy": self.policy,
            "bits": self.bits.to_dict(),
            "options": {
                name: _plain(value) for name, value in self.options.items() if name not in _UNSHOWN
            },
            "method": self.method,
            "checkpoints": [each._asdict() for each in self.checkpoints],
            "head": self.head,
        }

    @classmethod
    def from_dict(cls, values: Mapping) -> Candidate:
        """Make a candidate from the result of `to_dict`. Raise InputError for values that are missing or not valid."""
        names = "policy", "bits", "options", "method"
        if not isinstance(values, Mapping) or not all(name in values for name in names):
            raise InputError(f"expected a candidate's {', '.join(names)}, got {shorten(values)}")
        options = values["options"]
        if isinstance(options, Mapping):
            options = {name: _read(name, value) for name, value in options.items()}
        bits = BitConfig.from_dict(values["bits"])
        regions = tuple(
            Regions(one["bits"], one["include"] and tuple(one["include"]), one["offload"])
            for one in values.get("checkpoints", ())
        )
        return cls(values["policy"], bits, options, values["method"], regions, values.get("head"))


def candidate_of(setting) -> Candidate:
    """Return the candidate that a setting stands for: a setting of `fewbit.fits`, bits of `fewbit.compress_`, or an object with a `candidate`.

    Raises:
        InputError: the setting is none of these.
    """
    setting = getattr(setting, "candidate", setting)
    if isinstance(setting, Candidate):
        return setting
    if setting == EXACT:
        return Candidate("", method=EXACT)
    if setting == CHECKPOINT:
        return Candidate("", method=EXACT, checkpoints=(Regions(),))
    if not isinstance(setting, BitConfig | int | float):
        raise InputError(
            f"expected {EXACT!r}, {CHECKPOINT!r}, bits or a fewbit.Candidate, got {shorten(setting)}"
        )
    is_fixed = not isinstance(setting, BitConfig) or isinstance(setting, FixedBits)
    return Candidate("" if is_fixed else type(setting).__name__, setting)


def _read(name: str, value):
    if name == "layers" and isinstance(value, Mapping):
        return LayerSettings.from_dict(value)
    if name == "overrides" and isinstance(value, Mapping):
        return {glob: LayerSettings.of(change) for glob, change in value.items()}
    if name == "offload" and isinstance(value, Mapping):
        return HostOffload.from_dict(value)
    return value


class CandidateCurve(NamedTuple):
    """The candidates of fewbit that form one curve in the picture of the plan.

    Attributes:
        config: makes the configuration of a candidate from one of `values`.
        values: numbers of bits, or bounds e2, one for each candidate.
        suits: returns whether the candidates are for a model.
        needed: the words for such a model in error messages.
        on_request: whether the candidates are returned only if their name is given.
    """

    policy: str
    config: Callable[[float], BitConfig]
    values: tuple[float, ...]
    suits: Callable[[nn.Module], bool] = lambda model: True
    needed: str = ""
    options: Mapping[str, object] = MappingProxyType({})
    method: str = METHODS[0]
    on_request: bool = False


def _has_norms(model: nn.Module) -> bool:
    return any(isinstance(module, tuple(NORMS)) for module in model.modules())


def _has_linear_layers(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Linear) for module in model.modules())


CROSS_ENTROPY = "cross-entropy"
CURVES = (
    CandidateCurve("fixed", FixedBits, (8, 4, 3, 2)),
    CandidateCurve("shared", AdaptiveBits, (4, 3, 2, 1.5)),
    CandidateCurve("error-bound", ErrorBound, (0.1, 0.5, 1.0, 2.0)),
    CandidateCurve(
        "pre-activation", PreActivationBits, (8, 4, 2), _has_norms, "a batch or layer norm"
    ),
    CandidateCurve(
        "recompute-linear",
        FixedBits,
        (8, 4, 3, 2),
        _has_linear_layers,
        "a linear layer",
        {"layers": LayerSettings(recompute_linear=True)},
    ),
    CandidateCurve(
        "everything",
        FixedBits,
        (4, 2),
        options={"layers": LayerSettings(everything=True)},
    ),
    CandidateCurve(
        "checkpoints",
        FixedBits,
        (8, 4),
        supports_checkpoints,
        "gradient checkpointing as in transformers",
        method="checkpoint_",
    ),
    CandidateCurve(CROSS_ENTROPY, FixedBits, (4, 2), method="cross_entropy", on_request=True),
    CandidateCurve("compile", FixedBits, (4, 2), method="compile", on_request=True),
)
ACTIVATIONS = "activations"
BITS_OF_ACTIVATIONS = (4, 3, 2)


def default_candidates(
    model: nn.Module, policies: Iterable[str] | None = None
) -> tuple[Candidate, ...]:
    """Return the candidates that `fewbit.plan` measures if none are given. docs/guides/plan.md explains their names.

    Args:
        model: the model that the candidates will convert.
        policies: names of candidates: "fixed", "shared", "error-bound", "pre-activation", "recompute-linear", "everything", "checkpoints",
            "cross-entropy", "compile" and "activations". None: all that suit the model, but "cross-entropy" and "compile".

    Raises:
        InputError: `policies` has a name that does not exist or does not suit this model.
    """
    if isinstance(policies, str) or not isinstance(policies, Iterable | None):
        raise InputError(f"policies: expected a list of names, as ['fixed'], got {policies!r}")
    found = [
        Candidate(curve.policy, curve.config(value), curve.options, curve.method)
        for curve in CURVES
        if curve.suits(model)
        for value in curve.values
    ]
    activations = [
        kind
        for kind in map(kinds.kind_of, model.modules())
        if kind is not None and kind.family == kinds.ACTIVATION
    ]
    if activations:
        bits = (1,) if all(kind.one_bit for kind in activations) else BITS_OF_ACTIVATIONS
        found += [Candidate(ACTIVATIONS, count, method="replace_activations_") for count in bits]
    if policies is None:
        on_request = {curve.policy for curve in CURVES if curve.on_request}
        return tuple(candidate for candidate in found if candidate.policy not in on_request)
    policies, names = list(policies), list(dict.fromkeys(candidate.policy for candidate in found))
    needed = {curve.policy: curve.needed for curve in CURVES} | {
        ACTIVATIONS: "activations as modules"
    }
    for name in policies:
        if name in names:
            continue
        if name in needed:
            raise InputError(
                f"policy {name}: expected a model with {needed[name]}, got one without"
            )
        raise InputError(f"policy: expected one of {', '.join(names)}, got {name!r}")
    return tuple(candidate for candidate in found if candidate.policy in policies)


def check_candidates(candidates, name: str = "candidates", model=None) -> tuple[Candidate, ...]:
    """Return one candidate or several as a tuple. With a model, names of `default_candidates` stand for these.

    Raises InputError, with the argument's `name`, if they are not valid.
    """
    is_one = isinstance(candidates, str) or not isinstance(candidates, Iterable)
    given = (candidates,) if is_one else tuple(candidates)
    if not given:
        raise InputError(f"{name}: expected at least one setting, got none")
    try:
        found: list[Candidate] = []
        for one in given:
            is_name = model is not None and isinstance(one, str) and one not in (EXACT, CHECKPOINT)
            found += default_candidates(model, [one]) if is_name else [candidate_of(one)]
        return tuple(found)
    except FewbitError as error:
        raise InputError(f"{name}: {error}") from None


def _code(name: str, value) -> str:
    """Return Python code for an option, with layers of one override in one list."""
    if name != "overrides" or not isinstance(value, Mapping):
        return repr(value)
    alike: list[tuple] = []
    for path, change in value.items():
        paths = next((paths for other, paths in alike if other == change), None)
        if paths is None:
            alike.append((change, [path]))
        else:
            paths.append(path)
    texts = [
        f"{paths[0]!r}: {change!r}" if len(paths) == 1 else f"**dict.fromkeys({paths}, {change!r})"
        for change, paths in alike
    ]
    return f"{{{', '.join(texts)}}}"


def _short(value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _plain(value):
    if isinstance(value, LayerSettings | HostOffload):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return str(value)
