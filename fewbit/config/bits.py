"""The configurations that say who chooses the bits per element of quantized inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

from fewbit.config.configuration import (
    Config,
    average_field,
    bits_field,
    flag,
    interval_field,
    one_of,
    positive,
)
from fewbit.config.layers import HostOffload
from fewbit.config.limits import (
    ACTIVATION_BITS,
    DEFAULT_BITS,
    MAX_BITS,
    MIN_BITS,
    check_average,
    check_bits,
    plain_number,
)
from fewbit.errors import FewbitError, InputError
from fewbit.printable import shorten
from fewbit.sizes import UNITS, hint_of_bits, parse_size

CODECS = ("quant", "quant+zvc", "error-bounded", "jpeg")
WINDOWS = ("mean", "max")
LEVELS = ("L0", "L1", "L2", "L2.5", "L3", "L4", "L5")
"""The levels of ActNN, Table 2."""


class BitConfig(Config):
    """The base class of configurations that say who chooses the bits per element of quantized inputs.

    For a policy of your own, derive a frozen dataclass from `BitConfig`, and a class from `fewbit.policies.BitPolicy`, and register a
    function that makes one from the other with `fewbit.policies.make_policy.register`. The dataclass sets `kind`, and overrides
    `initial_bits` if its first field is not the number of bits.

    Attributes:
        kind: the string that stands for the class in `to_dict`.
        has_policy: whether a policy chooses bits while the model trains. Then bits may be averages that are not whole. If False, the
            registered function has to return None.
        adapts: whether the policy chooses each layer's bits, and does not only divide them among a tensor's samples.
        chooses_activation_bits: whether the policy also chooses the bits of few-bit activations.
        fuses_norms: whether norms save their normalized input in fixed point, and layers after a norm nothing.
    """

    _kinds: ClassVar[dict[str, type[BitConfig]]] = {}

    kind: ClassVar[str]
    has_policy: ClassVar[bool] = True
    adapts: ClassVar[bool] = True
    chooses_activation_bits: ClassVar[bool] = False
    fuses_norms: ClassVar[bool] = False

    def __init_subclass__(cls, **options):
        """Register the class for `from_dict`, unless another class has its kind."""
        super().__init_subclass__(**options)
        if "kind" not in vars(cls):
            return
        other = cls._kinds.setdefault(cls.kind, cls)
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise InputError(
                f"expected a new kind for {cls.__name__}, got {cls.kind!r}, that of {other.__name__}"
            )
        cls._kinds[cls.kind] = cls  # a class can be defined again, as in a notebook

    @property
    def initial_bits(self) -> float:
        """The bits per element until a policy chooses: the first field's value, or 4."""
        names = [field.name for field in fields(self)]
        return getattr(self, names[0]) if names else DEFAULT_BITS

    @property
    def bits_of_activations(self) -> int:
        """The bits of few-bit activations if `LayerSettings` does not give them (docs/decisions/0017).

        They are 3 if `initial_bits` is below 5, else `initial_bits`, rounded down.
        """
        bits = math.floor(self.initial_bits)
        return bits if bits > DEFAULT_BITS else ACTIVATION_BITS

    def describe(self) -> str:
        """Return how bits are chosen, for the report, or "" if the repr says so."""
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Return {"kind": kind, field: value, ...} with plain JSON values.

        Raises:
            InputError: the class does not set `kind`.
        """
        if "kind" not in vars(type(self)):
            raise InputError(f"expected a kind of its own for {type(self).__name__}, got none")
        return {"kind": self.kind, **super().to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BitConfig:
        """Make a configuration from the result of `to_dict`. Missing fields get their default values.

        Raises:
            InputError: `values` is not a mapping, has no known kind or an unknown field, or lacks a field that has no
                default value.
        """
        kinds = BitConfig._kinds
        kind = values.get("kind") if isinstance(values, Mapping) else None
        if not isinstance(kind, str) or kind not in kinds:
            got = f"none in {shorten(values)}" if kind is None else shorten(kind)
            raise InputError(f"expected a kind out of {', '.join(kinds)}, got {got}")
        rest = {name: value for name, value in values.items() if name != "kind"}
        return super(BitConfig, kinds[kind]).from_dict(rest)


@dataclass(frozen=True, repr=False)
class FixedBits(BitConfig):
    """Every quantized tensor has the same number of bits per element (level L2 of ActNN).

    Attributes:
        bits: bits per element, a whole number from 1 to 8.
    """

    kind = "fixed"
    has_policy = adapts = False
    _checks = {"bits": bits_field}

    bits: int = DEFAULT_BITS

    def __post_init__(self):
        bits = plain_number(self.bits)
        if isinstance(bits, float) and MIN_BITS <= bits <= MAX_BITS:
            raise InputError(
                f"expected a whole number for FixedBits, got {bits!r}; fewbit.AdaptiveBits({bits!r}) and "
                f"fewbit.SampleBits({bits!r}) take averages"
            )
        super().__post_init__()


@dataclass(frozen=True, repr=False)
class SampleBits(BitConfig):
    """The bits of each tensor are divided among the tensor's samples (level L2.5 of ActNN).

    A sample (a slice along dimension 0) gets more bits if rounding adds more variance to it.

    Attributes:
        average: the average bits per element of each tensor, a number from 1 to 8.
    """

    kind = "samples"
    adapts = False
    _checks = {"average": average_field}

    average: float = DEFAULT_BITS

    def describe(self) -> str:
        return f"{self.average:.4g} bits on average, shared between samples"


@dataclass(frozen=True, repr=False)
class AdaptiveBits(BitConfig):
    """Bits are divided among layers and samples while the model trains (level L3 of ActNN).

    A layer or a sample gets more bits if the rounding of its tensors adds more variance to the gradient. Batched gradients, as
    with `is_grads_batched=True`, are not measured.

    Attributes:
        average: the average bits per element over all tensors, a number from 1 to 8.
        interval: bits are chosen after every `interval` steps, and at the start after steps 1, 2, 4, 8 and so on.
    """

    kind = "adaptive"
    _checks = {"average": average_field, "interval": interval_field}

    average: float = DEFAULT_BITS
    interval: int = 200

    def describe(self) -> str:
        return _adapted(self.average, self.interval)


@dataclass(frozen=True, repr=False)
class Budget(BitConfig):
    """`AdaptiveBits` with the largest average for which the saved tensors of the argument `sample` of `compress_` fit a budget.

    Attributes:
        bytes: the most bytes that a forward pass of `sample` may save, or a size such as "6 GiB" (units are powers of
            1024).
        interval: as in `AdaptiveBits`.
    """

    kind = "budget"
    _checks = {"bytes": lambda value, _: _byte_count(value), "interval": interval_field}

    bytes: int | str
    interval: int = 200

    @property
    def initial_bits(self) -> float:
        """The bits in the forward pass that measures sizes: 4."""
        return DEFAULT_BITS

    def describe(self) -> str:
        return _adapted(None, self.interval)

    def _shown(self, name: str) -> str:
        if name != "bytes":
            return super()._shown(name)
        unit = max((size, unit) for unit, size in UNITS.items() if self.bytes % size == 0)
        size, letter = unit[0], unit[1][0]
        return str(self.bytes) if size == 1 else repr(f"{self.bytes // size} {letter}iB")


@dataclass(frozen=True, repr=False)
class ErrorBound(BitConfig):
    """Bits follow from a bound on the error that each saved tensor may cause in gradients (AC-GC; docs/guides/error_bound.md).

    Batched gradients, as with `is_grads_batched=True`, are not measured.

    Attributes:
        e2: the largest allowed squared error of a gradient, divided by the gradient's squared norm; a finite number
            above 0.
        window: whether the "mean" or the "max" of the last ten measurements of an error's effect counts.
        codec: how tensors are saved: "quant", "quant+zvc", "error-bounded" or "jpeg" (docs/concepts/codecs.md).
        by_channel: whether bits are chosen for each channel of a sample separately.
        interval: the steps between measurements. At the start they happen in steps 1, 2, 4, 8 and so on up to `interval`.
    """

    kind = "error-bound"
    chooses_activation_bits = True
    _checks = {
        "e2": positive,
        "window": one_of(WINDOWS, "mean or max", "window"),
        "codec": one_of(CODECS, ", ".join(CODECS), "codec"),
        "by_channel": flag,
        "interval": interval_field,
    }

    e2: float = 0.5
    window: str = "mean"
    codec: str = "quant"
    by_channel: bool = False
    interval: int = 100

    @property
    def initial_bits(self) -> int:
        """The bits before the first measurement: 8."""
        return MAX_BITS

    def describe(self) -> str:
        unit = "channels of samples" if self.by_channel else "samples"
        how = f"bits by layers and {unit}" if self.codec == CODECS[0] else f"the codec {self.codec}"
        return (
            f"{how}, from the {self.window} of the last ten observations, one {_every(self.interval)}; "
            f"{MAX_BITS} bits before the first, as this report shows; controller.bounds shows later ones"
        )


@dataclass(frozen=True, repr=False)
class PreActivationBits(BitConfig):
    """Norms save their normalized input in fixed point, and the layers after a norm use this tensor and save none.

    The method is BLPA (Chakrabarti and Moseley, 2019; docs/guides/preactivation.md). A ReLU or LeakyReLU after a batch or
    layer norm has its exact gradient. Linear layers and convolutions after the norm or the activation use the same tensor,
    even if their own settings give other bits. Other layers save inputs quantized with `bits` bits.

    Attributes:
        bits: bits per element, a whole number from 1 to 8.
    """

    kind = "pre-activation"
    has_policy = adapts = False
    fuses_norms = True
    _checks = {"bits": bits_field}

    bits: int = DEFAULT_BITS


@dataclass(frozen=True, repr=False)
class Level(BitConfig):
    """A preset: one of the levels of ActNN, Table 2.

    "L0" compresses nothing, and "L1" quantizes only the inputs of convolutions. "L2" is FixedBits, "L2.5" SampleBits, "L3" AdaptiveBits, "L4"
    AdaptiveBits with HostOffload(), and "L5" AdaptiveBits with HostOffload(expandable_segments=True).

    Attributes:
        name: the name of the level.
        bits: bits per element, 1 to 8, whole at L1 and L2; None stands for 4, and is the only value at L0.
    """

    kind = "level"
    _checks = {
        "name": one_of(LEVELS, f"one of {', '.join(LEVELS)}", "level"),
        "bits": lambda value, _: plain_number(value),
    }

    name: str
    bits: float | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.bits is None:
            return
        if self.name == "L0":
            raise InputError("expected no bits at level L0, which compresses nothing")
        check = check_bits if self.name in ("L1", "L2") else check_average
        check(self.bits)

    @property
    def config(self) -> BitConfig | None:
        """The configuration for which the level stands; None at L0."""
        if self.name == "L0":
            return None
        classes = {"L1": FixedBits, "L2": FixedBits, "L2.5": SampleBits}
        cls = classes.get(self.name, AdaptiveBits)
        return cls() if self.bits is None else cls(self.bits)

    @property
    def has_policy(self) -> bool:
        return self.config is not None and self.config.has_policy

    @property
    def adapts(self) -> bool:
        return self.config is not None and self.config.adapts

    @property
    def convolutions_only(self) -> bool:
        """True at L1, which converts convolutions alone."""
        return self.name == "L1"

    @property
    def offload(self) -> HostOffload | None:
        """HostOffload at L4 and L5, else None."""
        return HostOffload(self.name == "L5") if self.name in ("L4", "L5") else None

    @property
    def initial_bits(self) -> float:
        return DEFAULT_BITS if self.config is None else self.config.initial_bits

    def describe(self) -> str:
        return "" if self.config is None else self.config.describe()


def as_config(bits) -> BitConfig:
    """Return the configuration for a value of the argument `bits` of `compress_`.

    Args:
        bits: a BitConfig, a mapping as BitConfig.to_dict returns it, a whole number from 1 to 8 (FixedBits), another number from 1 to 8
            (AdaptiveBits with this average), or None (FixedBits(4)).

    Raises:
        InputError: `bits` is anything else.
    """
    if bits is None:
        return FixedBits()
    if isinstance(bits, Mapping):
        return BitConfig.from_dict(bits)
    if isinstance(bits, BitConfig) and is_dataclass(bits):
        return bits
    bits = plain_number(bits)
    if isinstance(bits, bool) or not isinstance(bits, int | float) or bits != bits:
        raise InputError(
            "bits: expected a number from 1 to 8, or a configuration such as fewbit.AdaptiveBits(2.5), "
            f"got {shorten(bits)}"
        )
    check_average(bits)
    return FixedBits(bits) if isinstance(bits, int) else AdaptiveBits(bits)


def _adapted(average: float | None, interval: int) -> str:
    bits = "bits" if average is None else f"{average:.4g} bits on average,"
    return f"{bits} shared between samples and layers, adapted {_every(interval)}"


def _every(interval: int) -> str:
    return "every step" if interval == 1 else f"every {interval} steps"


def _byte_count(size) -> int:
    if isinstance(size, str):
        text = f"{size} B" if size.strip().isdecimal() else size
        try:
            return parse_size(text)
        except FewbitError:
            number = None
    else:
        number = plain_number(size)
    if not isinstance(number, int) or isinstance(number, bool) or number <= 0:
        raise InputError(
            "budget: expected a positive whole number of bytes, or a size such as '6 GiB' (units are powers of 1024, GB as well as GiB), "
            f"got {shorten(size)}{hint_of_bits(size)}"
        )
    return number
