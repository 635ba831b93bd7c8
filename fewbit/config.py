"""Configuration objects: they say who chooses the bits of saved tensors, and they contain the settings of layers.

Configuration objects are frozen dataclasses. They check their values, compare by value, and have a repr that can be
pasted into a program. `to_dict` returns plain JSON values, and `from_dict` makes an object from these values. This file
may import the other files in the folder fewbit/, but no folder in it. It does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from numbers import Real
from typing import Any, ClassVar

from fewbit.errors import FewbitError, InputError
from fewbit.sizes import UNITS, parse_size
from fewbit.text import shorten

MIN_BITS, MAX_BITS = 1, 8
"""The smallest and the largest number of bits per element of a quantized tensor."""
GROUP_SIZE, LARGEST_GROUP, LARGEST_ROTATED_GROUP = 256, 1 << 16, 256
"""The default and the largest number of elements of a group (ActNN, section 4.1), and the largest of a rotated copy."""
BLOCK = 32
"""The number of elements whose codes are packed together. Group sizes are multiples of this number."""
MIN_DTYPES = ("auto", "bfloat16", "float32")
UNIFORM, ROTATED, MASKED = "uniform", "rotated", "masked"
KINDS = (ROTATED, UNIFORM, MASKED)
"""The kinds of quantized copies that layers save."""
QUANTIZERS = (ROTATED, UNIFORM)
"""The kinds of quantized copies that a user can choose (docs/quantizer.md). The first one is the default of layers.

`MASKED` copies are rotated ones of a ReLU's result.
"""
CODECS = ("quant", "quant+zvc", "error-bounded", "jpeg")
WINDOWS = ("mean", "max")
LEVELS = ("L0", "L1", "L2", "L2.5", "L3", "L4", "L5")
"""The levels of ActNN, Table 2."""


# -- Checks of single values ---------------------------------------------------------------------------------


def plain_number(value):
    """Return a real number of any type (4.0, numpy.int64(4)) as an int if it is whole, else as a float.

    A value that is not a real number is returned unchanged.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    try:
        return int(value) if value == value // 1 else float(value)
    except OverflowError:  # a fraction beyond the range of floats
        return value


def check_bits(bits, name: str = "bits") -> None:
    """Raise InputError if `bits` is not a whole number from 1 to 8. The message calls the number `name`."""
    _require(_is_whole(bits, MIN_BITS, MAX_BITS), "a whole number from 1 to 8", name, bits)


def check_average(bits, name: str = "bits") -> None:
    """Raise InputError if `bits` is not a number from 1 to 8. The message calls the number `name`."""
    is_number = isinstance(bits, int | float) and not isinstance(bits, bool)
    _require(is_number and MIN_BITS <= bits <= MAX_BITS, "a number from 1 to 8", name, bits)


def check_group_size(group_size, name: str = "group_size") -> int:
    """Return the group size. Raise InputError if the group size is not a multiple of 32 from 32 to 65536.

    The message calls the group size `name`.
    """
    is_multiple = _is_whole(group_size, BLOCK, LARGEST_GROUP) and group_size % BLOCK == 0
    expected = f"a multiple of {BLOCK} from {BLOCK} to {LARGEST_GROUP}"
    return _require(is_multiple, expected, name, group_size)


def check_copies(copies, name: str = "copies") -> int:
    """Return `copies`. Raise InputError if `copies` is not 1 or 2. The message calls the number `name`.

    `copies` says how often a norm layer saves its input, each time with its own random rounding.
    """
    return _require(_is_whole(copies, 1, 2), "1 or 2", name, copies)


def check_min_dtype(min_dtype, name: str = "min_dtype") -> str:
    """Return `min_dtype`. Raise InputError if `min_dtype` is not "auto", "bfloat16" or "float32".

    `min_dtype` says in which dtype groups save their minimums or means. The message calls the value `name`.
    """
    is_known = isinstance(min_dtype, str) and min_dtype in MIN_DTYPES
    return _require(is_known, "auto, bfloat16 or float32", name, min_dtype)


def check_quantizer(quantizer, name: str = "quantizer") -> str:
    """Return `quantizer`. Raise InputError if `quantizer` is not "rotated" or "uniform".

    `quantizer` says which kind of quantized copies a layer makes. The message calls the value `name`.
    """
    is_known = isinstance(quantizer, str) and quantizer in QUANTIZERS
    return _require(is_known, "rotated or uniform", name, quantizer)


def check_rotated_size(quantizer, group_size) -> None:
    """Raise InputError if `quantizer` is "rotated" and groups have more elements than are rotated together.

    Parts of such a group would share one scale. If their energies differ, this scale biases the values.
    """
    is_possible = quantizer != ROTATED or group_size <= LARGEST_ROTATED_GROUP
    expected = f"at most {LARGEST_ROTATED_GROUP} with quantizer='rotated'"
    _require(is_possible, expected, "group_size", group_size)


def _require(is_good: bool, expected: str, name: str, value):
    """Return `value`, the value of the field `name`. Raise InputError if `is_good` is False."""
    if not is_good:
        raise InputError(f"expected {expected} for {name}, got {shorten(value)}")
    return value


def _is_whole(value, least: int, most: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


# Checks of fields. Each function takes the value and the name of a field, and returns the value that the field stores.


def _number(check: Callable) -> Callable:
    """Return a check for a field that stores the result of `plain_number`, which `check` tests."""

    def checked(value, name: str):
        value = plain_number(value)
        check(value, name)
        return value

    return checked


_bits, _average = _number(check_bits), _number(check_average)
_interval = _number(
    lambda value, name: _require(_is_whole(value, 1), "a positive whole number", name, value)
)


def _positive(value, name: str) -> float:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    try:
        number = float(value) if is_number else math.nan
    except OverflowError:
        number = math.inf
    _require(0 < number < math.inf, "a finite number above 0", name, value)
    return number


def _flag(value, name: str) -> bool:
    return _require(isinstance(value, bool), "True or False", name, value)


def _one_of(choices: tuple[str, ...], expected: str, noun: str) -> Callable:
    """Return a check for a field whose value must be one of `choices`. The error message calls the field `noun`."""
    return lambda value, name: _require(
        isinstance(value, str) and value in choices, expected, noun, value
    )


def _optional(check: Callable) -> Callable:
    return lambda value, name: None if value is None else check(value, name)


# -- The base of all configuration objects ---------------------------------------------------------------------


class _Config:
    """The base of frozen dataclasses that check their fields and can be converted to and from plain JSON values."""

    _checks: ClassVar[Mapping[str, Callable]] = {}
    """{field: check}, applied when an object is made."""

    def __post_init__(self):
        for name, check in self._checks.items():
            object.__setattr__(self, name, check(getattr(self, name), name))

    def __repr__(self) -> str:
        """Return an expression that makes an equal object, without the fields that have their default values."""
        shown = []
        for number, field in enumerate(fields(self)):
            value = getattr(self, field.name)
            if number == 0 and value is not None:
                shown.append(self._shown(field.name))
            elif value != field.default:
                shown.append(f"{field.name}={self._shown(field.name)}")
        package = "fewbit." if type(self).__module__ == __name__ else ""
        return f"{package}{type(self).__name__}({', '.join(shown)})"

    def _shown(self, name: str) -> str:
        return repr(getattr(self, name))

    def to_dict(self) -> dict[str, Any]:
        """Return {field: value} of plain JSON values."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]):
        """Make an object from the result of `to_dict`. Missing fields get their default values.

        Raises:
            InputError: `values` is not a mapping, has an unknown field, or lacks a field that has no default value.
        """
        if not isinstance(values, Mapping):
            raise InputError(
                f"expected a mapping of the fields of {cls.__name__}, got {type(values).__name__}"
            )
        names = [field.name for field in fields(cls)]
        for name in values:
            if name not in names:
                raise InputError(f"expected {', '.join(names)} for {cls.__name__}, got {name!r}")
        for field in fields(cls):
            has_default = field.default is not MISSING or field.default_factory is not MISSING
            if not has_default and field.name not in values:
                raise InputError(f"expected a value of {field.name} for {cls.__name__}, got none")
        return cls(**values)


# -- Who chooses bits ----------------------------------------------------------------------------------------


class BitConfig(_Config):
    """The base class of configurations that say who chooses the bits per element of quantized inputs.

    A policy is an object that chooses bits while the model trains. For a policy of your own, write two classes: a
    frozen dataclass derived from `BitConfig`, and a subclass of `fewbit.policies.BitPolicy`. Connect the two classes
    with a function that makes the policy from the dataclass, and register this function with
    `fewbit.policies.make_policy.register`. The dataclass has to set `kind`. If the first field of the dataclass is not
    the number of bits, the dataclass also has to override `initial_bits`. The attributes below, except `kind`, have
    default values that suit a policy that chooses bits for each layer.

    Attributes:
        kind: the string that stands for the class in the result of `to_dict`. Every subclass needs a different one.
        has_policy: whether a policy chooses bits while the model trains. If True, the user may also give numbers of
            bits that are not whole, as averages. If False, the registered function has to return None.
        adapts: whether the policy chooses the bits of each layer. False if there is no policy. Also False if the policy
            is `BitPolicy` itself, which only divides the bits of each tensor among the tensor's samples.
        chooses_activation_bits: whether the policy also chooses the bits of few-bit activations. These activations save
            a code of a few bits per element instead of their input.
        fuses_norms: whether norms save their normalized input in fixed point, so that layers after a norm save nothing.
        bits_of_activations: the bits of few-bit activations if `LayerSettings` does not give them.
    """

    _kinds: ClassVar[dict[str, type[BitConfig]]] = {}
    """{kind: class} of all subclasses."""

    kind: ClassVar[str]
    has_policy: ClassVar[bool] = True
    adapts: ClassVar[bool] = True
    chooses_activation_bits: ClassVar[bool] = False
    fuses_norms: ClassVar[bool] = False
    bits_of_activations: ClassVar[int] = 3

    def __init_subclass__(cls, **options):
        """Register the class if it sets `kind`, so that `from_dict` finds it.

        Raises:
            InputError: another class has this kind.
        """
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
        """The average bits per element until a policy chooses bits: the value of the first field, 4 without fields."""
        names = [field.name for field in fields(self)]
        return getattr(self, names[0]) if names else FixedBits.bits

    def describe(self) -> str:
        """Return the text with which the report says how bits are chosen, or "" if the repr says this already."""
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
        """Make a configuration from the result of `to_dict`. `values["kind"]` determines the class.

        Raises:
            InputError: `values` is not a mapping, has no known kind or an unknown field, or lacks a field that has no
                default value.
        """
        kinds = BitConfig._kinds
        kind = values.get("kind") if isinstance(values, Mapping) else None
        if not isinstance(kind, str) or kind not in kinds:
            raise InputError(f"expected a kind out of {', '.join(kinds)}, got {shorten(kind)}")
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
    _checks = {"bits": _bits}

    bits: int = 4

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

    A sample gets more bits if rounding adds more variance to it: if the elements of its groups differ more from each
    other.

    Attributes:
        average: the average bits per element of each tensor, a number from 1 to 8.
    """

    kind = "samples"
    adapts = False
    _checks = {"average": _average}

    average: float = 4

    def describe(self) -> str:
        """Return the text with which the report says how bits are chosen."""
        return f"{self.average:.4g} bits on average, shared between samples"


@dataclass(frozen=True, repr=False)
class AdaptiveBits(BitConfig):
    """Bits are divided among layers and samples while the model trains (level L3 of ActNN).

    A layer or a sample gets more bits if the rounding of its tensors adds more variance to the gradient.

    Attributes:
        average: the average bits per element over all tensors, a number from 1 to 8.
        interval: bits are chosen after every `interval` steps. At the start they are chosen more often: after steps 1,
            2, 4, 8 and so on up to `interval`.
    """

    kind = "adaptive"
    _checks = {"average": _average, "interval": _interval}

    average: float = 4
    interval: int = 200

    def describe(self) -> str:
        """Return the text with which the report says how bits are chosen."""
        return _adapted(self.average, self.interval)


@dataclass(frozen=True, repr=False)
class Budget(BitConfig):
    """`AdaptiveBits` with the largest average for which the saved tensors of an example batch fit a budget of bytes.

    The example batch is the argument `sample` of `compress_`.

    Attributes:
        bytes: the budget: the largest number of bytes that a forward pass of the example batch may save. Either a
            number, or a size such as "6 GiB" (powers of 1024).
        interval: bits are chosen after every `interval` steps. At the start they are chosen more often: after steps 1,
            2, 4, 8 and so on up to `interval`.
    """

    kind = "budget"
    _checks = {"bytes": lambda value, _: _byte_count(value), "interval": _interval}

    bytes: int | str
    interval: int = 200

    @property
    def initial_bits(self) -> float:
        """The bits per element in the forward pass that measures the sizes of the saved tensors: 4."""
        return 4

    def describe(self) -> str:
        """Return the text with which the report says how bits are chosen."""
        return _adapted(None, self.interval)

    def _shown(self, name: str) -> str:
        if name != "bytes":
            return super()._shown(name)
        unit = max((size, unit) for unit, size in UNITS.items() if self.bytes % size == 0)
        return str(self.bytes) if unit[0] == 1 else repr(f"{self.bytes // unit[0]} {unit[1]}")


@dataclass(frozen=True, repr=False)
class ErrorBound(BitConfig):
    """Bits follow from a bound on the error that each saved tensor may cause in gradients (AC-GC; docs/error_bound.md).

    Attributes:
        e2: the largest allowed squared error of a gradient, divided by the gradient's squared norm; a finite number
            above 0.
        window: how a policy combines the effects of an error on gradients, as measured in the last ten measurements:
            "mean" uses the mean effect, "max" the largest effect.
        codec: how tensors are saved: "quant", "quant+zvc", "error-bounded" or "jpeg" (docs/codecs.md).
        by_channel: whether bits are chosen for each channel of a sample separately.
        interval: a measurement is made every `interval` steps. At the start there are more: in steps 1, 2, 4, 8 and so
            on up to `interval`.
    """

    kind = "error-bound"
    chooses_activation_bits = True
    bits_of_activations = MAX_BITS
    _checks = {
        "e2": _positive,
        "window": _one_of(WINDOWS, "mean or max", "window"),
        "codec": _one_of(CODECS, ", ".join(CODECS), "a codec"),
        "by_channel": _flag,
        "interval": _interval,
    }

    e2: float = 0.5
    window: str = "mean"
    codec: str = "quant"
    by_channel: bool = False
    interval: int = 100

    @property
    def initial_bits(self) -> int:
        """The bits per element before the first measurement: 8."""
        return MAX_BITS

    def describe(self) -> str:
        """Return the text with which the report says how bits are chosen."""
        unit = "channels of samples" if self.by_channel else "samples"
        how = f"bits by layers and {unit}" if self.codec == CODECS[0] else f"the codec {self.codec}"
        return (
            f"{how}, from the {self.window} of the last ten observations, one {_every(self.interval)}; "
            f"{MAX_BITS} bits before the first, as this report shows; controller.bounds shows later ones"
        )


@dataclass(frozen=True, repr=False)
class PreActivationBits(BitConfig):
    """Norms save their normalized input in fixed point, and the layers after a norm use this tensor and save none.

    The method is BLPA (Chakrabarti and Moseley, 2019). In the backward pass a ReLU or LeakyReLU after a batch or layer
    norm computes its exact gradient from the norm's tensor. Linear layers and convolutions after the norm or the
    activation restore their inputs from the same tensor, even if their own settings give other bits. So a norm, an
    activation and a linear layer save one tensor in place of three (docs/preactivation.md). Other layers save inputs
    quantized with `bits` bits.

    Attributes:
        bits: bits per element, a whole number from 1 to 8.
    """

    kind = "pre-activation"
    has_policy = adapts = False
    fuses_norms = True
    _checks = {"bits": _bits}

    bits: int = 4


@dataclass(frozen=True, repr=False)
class Level(BitConfig):
    """A preset: one of the levels of ActNN, Table 2.

    "L0" compresses nothing, and "L1" quantizes only the inputs of convolutions. "L2" is FixedBits, "L2.5" is
    SampleBits, and "L3" is AdaptiveBits. "L4" is AdaptiveBits with HostOffload(), and "L5" is AdaptiveBits with
    HostOffload(expandable_segments=True).

    Attributes:
        name: the name of the level.
        bits: bits per element, a number from 1 to 8, which must be whole at L1 and L2. None stands for 4. L0 takes only
            None, because it compresses nothing.
    """

    kind = "level"
    _checks = {
        "name": _one_of(LEVELS, f"one of {', '.join(LEVELS)}", "a level"),
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
        """The value of the configuration for which the level stands."""
        return self.config is not None and self.config.has_policy

    @property
    def adapts(self) -> bool:
        """The value of the configuration for which the level stands."""
        return self.config is not None and self.config.adapts

    @property
    def convolutions_only(self) -> bool:
        """True if only convolutions are converted."""
        return self.name == "L1"

    @property
    def offload(self) -> HostOffload | None:
        """The setting of offloading at this level: HostOffload at L4 and L5, else None."""
        return HostOffload(self.name == "L5") if self.name in ("L4", "L5") else None

    @property
    def initial_bits(self) -> float:
        """The initial bits of the configuration for which the level stands."""
        return FixedBits.bits if self.config is None else self.config.initial_bits

    def describe(self) -> str:
        """Return the text with which the report says how bits are chosen."""
        return "" if self.config is None else self.config.describe()


def as_config(bits) -> BitConfig:
    """Return the configuration for a value of the argument `bits` of `compress_`.

    Args:
        bits: a BitConfig, which is returned unchanged, or a number from 1 to 8. A whole number gives FixedBits, another
            number AdaptiveBits with this average. None gives FixedBits(4).

    Raises:
        InputError: `bits` is anything else, or a number outside 1 to 8.
    """
    if bits is None:
        return FixedBits()
    if isinstance(bits, BitConfig) and is_dataclass(bits):
        return bits
    bits = plain_number(bits)
    if isinstance(bits, bool) or not isinstance(bits, int | float) or bits != bits:
        raise InputError(
            "bits: expected a number from 1 to 8, or a configuration such as fewbit.AdaptiveBits(1.75), "
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
    """Return a size as a number of bytes. Raise InputError if `size` is neither a number nor a text such as "6 GiB"."""
    if isinstance(size, str):
        try:
            return parse_size(size)
        except FewbitError:
            number = None
    else:
        number = plain_number(size)
    if not isinstance(number, int) or isinstance(number, bool) or number <= 0:
        raise InputError(
            f"budget: expected bytes, or a size such as '6 GiB' (powers of 1024), got {shorten(size)}"
        )
    return number


# -- Layers and memory ---------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class LayerSettings(_Config):
    """Settings of layers, for the arguments `layers` and `overrides` of `compress_`.

    `layers` holds for the whole model. There, None stands for the usual value, which is given below. `overrides` holds
    for the modules that a glob pattern matches. There, None stands for the value that the rest of the model has.

    Attributes:
        bits: the bits of quantized inputs. They may only be given in `overrides`, and a policy does not change them.
        activation_bits: the bits of few-bit activations, 1 to 8 (usually 3; with ErrorBound the policy usually chooses
            them). Activations whose derivative has only two values have 1 bit, which is exact.
        attention_bits: the bits of the queries, keys and values of attention. With AdaptiveBits, Budget and ErrorBound
            the policy usually chooses these bits, like those of other tensors. Otherwise they are usually the bits of
            quantized inputs, but at least 4 (docs/decisions/0008).
        group_size: the number of consecutive elements that are quantized together, a multiple of 32 (usually 256).
            These elements are called a group.
        min_dtype: the dtype in which groups save their means: "bfloat16", "float32" or "auto" (usually "auto").
            "auto" takes float32 for tensors that are far from 0 compared with their range (docs/quantizer.md).
        copies: how many copies a norm saves of its input, each with its own random rounding: 1 or 2 (usually 1). With 2
            copies the mean of a norm's gradient over the random rounding is exact.
        functional: whether to compress functions of torch and torch.nn.functional that a forward calls while the model
            trains in eager mode, such as F.gelu and F.scaled_dot_product_attention (usually True).
        quantizer: the kind of quantized copies, "rotated" or "uniform" (docs/quantizer.md). Usually the results of
            softmax have uniform copies, and all other tensors rotated ones (docs/decisions/0016).
    """

    _checks = {
        "bits": _optional(_average),
        "activation_bits": _optional(_bits),
        "attention_bits": _optional(_average),
        "group_size": _optional(_number(check_group_size)),
        "min_dtype": _optional(check_min_dtype),
        "copies": _optional(_number(check_copies)),
        "functional": _optional(_flag),
        "quantizer": _optional(check_quantizer),
    }

    bits: float | None = None
    activation_bits: int | None = None
    attention_bits: float | None = None
    group_size: int | None = None
    min_dtype: str | None = None
    copies: int | None = None
    functional: bool | None = None
    quantizer: str | None = None

    @classmethod
    def of(cls, change) -> LayerSettings | None:
        """Return the `LayerSettings` for a value in the mapping `overrides`; None for None.

        Args:
            change: LayerSettings, a mapping of its fields, or None to leave modules as they are. A number stands for
                settings with these `bits` and `attention_bits` and, if it is whole, these `activation_bits`.

        Raises:
            InputError: `change` is anything else, or a setting cannot be used.
        """
        if change is None or isinstance(change, cls):
            return change
        if isinstance(change, Mapping):
            return cls.from_dict(change)
        bits = plain_number(change)
        if isinstance(bits, bool) or not isinstance(bits, int | float):
            names = ", ".join(field.name for field in fields(cls))
            raise InputError(
                f"expected bits, fewbit.LayerSettings, a mapping of {names}, or None, got {shorten(change)}"
            )
        return cls(bits, bits if isinstance(bits, int) else None, bits)


@dataclass(frozen=True, repr=False)
class HostOffload(_Config):
    """Saved tensors of a GPU are kept in the host's memory between the forward and the backward pass (docs/offload.md).

    Attributes:
        expandable_segments: whether to make PyTorch's allocator reserve the GPU's memory in expandable segments. These
            segments can grow, which avoids fragmentation.
    """

    _checks = {"expandable_segments": _flag}

    expandable_segments: bool = False
