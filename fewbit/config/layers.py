"""The settings of layers, and of the memory of saved tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from fewbit.config.configuration import (
    Config,
    average_field,
    bits_field,
    flag,
    number_field,
    optional,
)
from fewbit.config.limits import (
    autograd_functions,
    check_copies,
    check_group_size,
    check_quantizer,
    plain_number,
)
from fewbit.errors import InputError
from fewbit.printable import shorten


@dataclass(frozen=True, repr=False)
class LayerSettings(Config):
    """Settings of layers, for the arguments `layers` and `overrides` of `compress_`.

    In `layers`, which apply to the whole model, None stands for the usual value; in `overrides`, which apply to modules
    that a glob pattern matches, for the value of the rest of the model.

    Attributes:
        bits: the bits of quantized inputs, only in `overrides`; no policy changes them. A norm has exactly these bits, otherwise 1 bit
            more than other layers (docs/decisions/0008).
        activation_bits: the bits of the codes for derivatives that activations save, 1 to 8. Usually smooth activations save instead a copy
            of their input with 2 bits more than quantized inputs, from which their result is computed again (docs/decisions/0021); in
            compiled code, and with ErrorBound, codes of 3 bits, or of more if quantized inputs have more than 4 (docs/decisions/0017). If
            the derivative has only two values, codes have 1 bit, which is exact.
        attention_bits: the bits of queries, keys and values. Usually a policy chooses them, or queries have 2 bits more than quantized inputs,
            keys 3 and values 1 (docs/decisions/0008). A number that is not whole is an average, which FixedBits and PreActivationBits
            refuse.
        group_size: the number of consecutive elements that are quantized together, a multiple of 32 (usually 256).
        copies: how many independently rounded copies a norm saves of its normalized input: 1 (usually), or 2, with which the mean of its
            gradient over the rounding is exact.
        functional: whether to compress functions of torch that a forward calls while the model trains in eager mode, such
            as F.gelu (usually True).
        everything: whether to compress also what other operations of torch save, such as products and the gates of
            recurrent layers (usually False; docs/guides/compress.md). No policy chooses their bits.
        autograd_functions: {an autograd Function, or its name "module.Class": positions in its `ctx.saved_tensors`} of
            tensors in which the Function's gradients are linear. With `everything`, these tensors are quantized too.
        quantizer: the kind of quantized copies, "rotated" or "uniform" (docs/concepts/quantizer.md). Usually results of softmax and
            tensors with groups of more than 256 elements have uniform copies, all others rotated ones (docs/decisions/0016). It has no
            effect on tensors that ErrorBound saves with a codec other than "quant".
        recompute_linear: whether results of linear layers that other layers would save, such as queries and gates, are
            computed again in the backward pass (usually False): fewer bytes, and one more matrix product for each. Not in
            compiled code.
        gate_bits: the bits of the two factors of gated units, such as SwiGLU. Usually a policy chooses them, or they have 1 bit more than
            quantized inputs.
    """

    _checks = {
        "bits": optional(average_field),
        "activation_bits": optional(bits_field),
        "attention_bits": optional(average_field),
        "group_size": optional(number_field(check_group_size)),
        "copies": optional(number_field(check_copies)),
        "functional": optional(flag),
        "everything": optional(flag),
        "autograd_functions": optional(autograd_functions),
        "gate_bits": optional(average_field),
        "recompute_linear": optional(flag),
        "quantizer": optional(check_quantizer),
    }

    bits: float | None = None
    activation_bits: int | None = None
    attention_bits: float | None = None
    group_size: int | None = None
    copies: int | None = None
    functional: bool | None = None
    everything: bool | None = None
    quantizer: str | None = None
    autograd_functions: Mapping[str, list[int]] | None = None
    gate_bits: float | None = None
    recompute_linear: bool | None = None

    @classmethod
    def of(cls, change: float | LayerSettings | Mapping | None) -> LayerSettings | None:
        """Return the `LayerSettings` for a value in the mapping `overrides`; None for None.

        Args:
            change: LayerSettings, a mapping of its fields, or a number, which stands for `bits`, `attention_bits` and `gate_bits`.

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
        return cls(bits, attention_bits=bits, gate_bits=bits)


@dataclass(frozen=True, repr=False)
class HostOffload(Config):
    """The setting to move a GPU's saved tensors to the host until the backward pass (docs/guides/offload.md).

    Attributes:
        expandable_segments: whether PyTorch's allocator reserves memory in segments that can grow, against fragmentation.
    """

    _checks = {"expandable_segments": flag}

    expandable_segments: bool = False
