"""The settings of one module, resolved from the configuration, `layers` and `overrides` of `compress_`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from torch.autograd import Function

from fewbit.config import (
    ACTIVATION_BITS,
    DEFAULT_BITS,
    GROUP_SIZE,
    BitConfig,
    LayerSettings,
    check_average,
    check_bits,
    check_rotated_size,
    name_of_class,
)
from fewbit.convert import kinds
from fewbit.convert.function_mode import FunctionQuantizers
from fewbit.errors import InputError
from fewbit.printable import meant, shorten
from fewbit.runtime.format.groups import LEAST_ELEMENTS
from fewbit.runtime.graph import packs
from fewbit.runtime.graph.compressor import GraphSettings
from fewbit.runtime.quantizers.quantizer import Quantizer
from fewbit.runtime.saved.context import ForwardContext

EXTRA_BITS_OF_ATTENTION = 2, 3, 1
EXTRA_BITS_OF_GATES = 1, 1
EXTRA_BITS_OF_ACTIVATIONS = (2,)
EXTRA_BITS_OF_NORMS = (1,)
"""The bits that q, k and v, factors of gated units, and inputs of activations and norms usually have more than other tensors. Their
errors grow on the way back through the network; those of a linear layer's input stay in the gradient of one weight
(docs/decisions/0008 and 0021).
"""
EXTRA_BITS_BEFORE_LINEAR = (2,)
"""The bits that inputs of layer and RMS norms have more with `recompute_linear` (docs/decisions/0022)."""
FAMILIES = (
    kinds.ACTIVATION,
    kinds.CONVOLUTION,
    kinds.LAYER,
    kinds.EXACT,
    kinds.RECURRENT,
)


@dataclass(frozen=True)
class ResolvedSettings:
    """The settings of one module. Those not listed are as in `fewbit.config.LayerSettings`.

    Attributes:
        bits: the bits per element of quantized inputs; an average if `has_policy`.
        activation_bits: the bits of the code that a few-bit activation saves for each element.
        attention_bits: the bits per element of q, k and v; None stands for `bits`, plus EXTRA_BITS_OF_ATTENTION unless `adapts`.
        gate_bits: the same for the two factors of gated units, with EXTRA_BITS_OF_GATES.
        fuses_norms: whether norms save fixed-point copies, which the layers after them use.
        recomputes: whether activations save copies of their inputs in place of codes of `activation_bits`.
        has_policy: whether a policy chooses bits while the model trains.
        has_own_bits: whether an override gives `bits`.
        adapts: whether a policy chooses the bits of the module's inputs.
        chooses_activation_bits: whether a policy chooses `activation_bits`.
        families: the families of modules that are converted (`fewbit/convert/kinds.py`).
    """

    bits: float = DEFAULT_BITS
    activation_bits: int = ACTIVATION_BITS
    attention_bits: float | None = None
    gate_bits: float | None = None
    group_size: int = GROUP_SIZE
    copies: int = 1
    quantizer: str | None = None
    functional: bool = False
    everything: bool = False
    autograd_functions: Mapping[str, list[int]] = field(default_factory=dict, hash=False)
    recompute_linear: bool = False
    fuses_norms: bool = False
    recomputes: bool = False
    has_policy: bool = False
    has_own_bits: bool = False
    adapts: bool = False
    chooses_activation_bits: bool = False
    families: tuple[str, ...] = FAMILIES

    @property
    def bits_of_attention(self) -> float:
        """The bits per element of q, k and v, as an average."""
        return self._special(self.attention_bits, EXTRA_BITS_OF_ATTENTION, None, "").mean_bits

    def changed(self, change: LayerSettings) -> ResolvedSettings:
        """Return these settings with those that `change` gives, or raise InputError if they contradict each other."""
        given = {each.name: getattr(change, each.name) for each in fields(change)}
        given = {name: value for name, value in given.items() if value is not None}
        # A policy does not change bits that the user gives.
        has_own_bits = self.has_own_bits or "bits" in given
        adapts = self.adapts and "bits" not in given
        chooses = self.chooses_activation_bits and "activation_bits" not in given
        recomputes = self.recomputes and "activation_bits" not in given
        changed = replace(
            self,
            **given,
            has_own_bits=has_own_bits,
            adapts=adapts,
            chooses_activation_bits=chooses,
            recomputes=recomputes,
        )
        if change.autograd_functions:
            _check_functions(change.autograd_functions, changed.everything)
        return changed.checked()

    def checked(self) -> ResolvedSettings:
        """Return the settings. Raise InputError if a value is invalid or contradicts another."""
        for name in ("bits", "attention_bits", "gate_bits"):
            value = getattr(self, name)
            if isinstance(value, float) and not self.has_policy:
                raise InputError(
                    f"{name}: expected a whole number from 1 to 8, got {value!r}; averages need a configuration "
                    "such as fewbit.SampleBits or fewbit.AdaptiveBits, which divides them among samples"
                )
        check = check_average if self.has_policy else check_bits
        check(self.bits)
        for name in ("attention_bits", "gate_bits"):
            if getattr(self, name) is not None:
                check(getattr(self, name), name)
        check_rotated_size(self.quantizer, self.group_size)
        if self.fuses_norms and self.copies != 1:
            raise InputError(
                f"expected copies=1 with PreActivationBits, got {self.copies}: two fixed-point copies would be alike"
            )
        return self

    def make_quantizer(self, context: ForwardContext, name: str = "") -> Quantizer:
        """Make the quantizer for the inputs of the layer `name`."""
        return self._quantizer(self.bits, context, name, not self.adapts)

    def make_norm_quantizer(
        self, context: ForwardContext, name: str = "", is_before_linear: bool = False
    ) -> Quantizer:
        """Make the quantizer for the norm `name`; `is_before_linear` if linear layers usually get its result."""
        # The norm's copy is in fixed point, or has the bits that the user gave.
        if self.fuses_norms or self.has_own_bits:
            return self.make_quantizer(context, name)
        extra = EXTRA_BITS_OF_NORMS
        if self.recompute_linear and is_before_linear:
            extra = EXTRA_BITS_BEFORE_LINEAR
        return self._special(None, extra, context, name)

    def make_attention_quantizer(self, context: ForwardContext, name: str = "") -> Quantizer:
        """Make the quantizer for q, k and v of the attention layer `name`."""
        return self._special(self.attention_bits, EXTRA_BITS_OF_ATTENTION, context, name)

    def make_gate_quantizer(self, context: ForwardContext, name: str = "") -> Quantizer:
        """Make the quantizer for the factors of the gated unit `name`."""
        return self._special(self.gate_bits, EXTRA_BITS_OF_GATES, context, name)

    def make_activation_quantizer(
        self, context: ForwardContext, name: str = ""
    ) -> Quantizer | None:
        """Make the quantizer for the activation `name`; None if it saves codes of its derivative."""
        if not self.recomputes:
            return None
        return self._special(None, EXTRA_BITS_OF_ACTIVATIONS, context, name)

    def _special(self, given, extra, context, name) -> Quantizer:
        if self.adapts:
            bits = self.bits if given is None else given
            return self._quantizer(bits, context, name, given is not None)
        if given is not None:
            extra = (given - self.bits,) * len(extra)
        # With `bits` as its usual bits, the quantizer shares copies with the layers around it.
        return self._quantizer(self.bits, context, name, True, extra)

    def make_function_quantizers(self, context: ForwardContext) -> FunctionQuantizers:
        """Make the quantizers for the functions that a forward pass calls."""
        return FunctionQuantizers(
            self.make_quantizer(context),
            self.activation_bits,
            self.make_attention_quantizer(context),
            self.make_norm_quantizer(context, is_before_linear=True),
            self.make_activation_quantizer(context),
        )

    def make_graph_settings(self, is_cell: bool = False) -> GraphSettings | None:
        """Return the settings for tensors that torch's operations save; None if these stay exact.

        Those of a recurrent cell are compressed by default: the layers after it save copies of its results anyway.
        """
        if not (self.everything or (is_cell and self.functional)):
            return None
        return GraphSettings(
            math.floor(self.bits),
            self.activation_bits,
            self.group_size,
            self.quantizer,
            self.autograd_functions,
            packs.LEAST_ELEMENTS if is_cell else LEAST_ELEMENTS,
        )

    def _quantizer(self, bits, context, name, is_fixed, extra=()) -> Quantizer:
        return Quantizer(
            # Compiled code cannot give samples different bits, so it uses the average, rounded down.
            bits=math.floor(bits),
            group_size=self.group_size,
            context=context,
            name=name,
            average=bits,
            is_fixed=is_fixed,
            fuse=self.fuses_norms,
            kind=self.quantizer,
            extra_bits=extra,
            recomputes_linear=self.recompute_linear,
        )


def resolve(config: BitConfig, layers: LayerSettings | Mapping | None = None) -> ResolvedSettings:
    """Return the settings of all modules that no override changes. Raise InputError if `layers` or the initial bits cannot be used."""
    check_average(config.initial_bits)
    usual = ResolvedSettings(
        bits=config.initial_bits,
        activation_bits=config.bits_of_activations,
        functional=True,
        fuses_norms=config.fuses_norms,
        recomputes=not (config.fuses_norms or config.chooses_activation_bits),
        has_policy=config.has_policy,
        adapts=config.adapts,
    )
    try:
        if not isinstance(layers, LayerSettings | Mapping | None):
            raise InputError(
                f"expected fewbit.LayerSettings, or a mapping of its fields, got {layers!r}"
            )
        names = [each.name for each in fields(LayerSettings) if each.name != "bits"]
        for name in layers if isinstance(layers, Mapping) else ():
            if name not in ("bits", *names):
                raise InputError(
                    f"expected {', '.join(names)}, got {shorten(name)}{meant(name, names)}"
                )
        layers = LayerSettings.of({} if layers is None else layers)
        if layers.bits is not None:
            raise InputError(
                f"expected no bits, because the argument bits gives them, here {config!r}; got bits={layers.bits!r}"
            )
        chooses = config.chooses_activation_bits and layers.activation_bits is None
        return replace(usual.changed(layers), chooses_activation_bits=chooses)
    except InputError as error:
        raise InputError(f"layers: {error}") from None


def _check_functions(names, everything: bool) -> None:
    if not everything:
        raise InputError("expected everything=True with autograd_functions, got False")
    known, waiting = set(), [Function]
    while waiting:
        for cls in waiting.pop().__subclasses__():
            known.add(name_of_class(cls))
            waiting.append(cls)
    for name in names:
        if name not in known:
            raise InputError(
                f"autograd_functions: expected the name of a torch.autograd.Function, as module.Class, "
                f"got {shorten(name)}, which does not exist or is not imported yet"
            )
