"""The settings of layers, and of the memory of saved tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from fewbit.config.base import Config, average_field, bits_field, flag, number_field, optional
from fewbit.config.values import (
    autograd_functions,
    check_copies,
    check_group_size,
    check_quantizer,
    plain_number,
)
from fewbit.errors import InputError
from fewbit.text import shorten


@dataclass(frozen=True, repr=False)
class LayerSettings(Config):
    """Settings of layers, for the arguments `layers` and `overrides` of `compress_`.

    Settings in `layers` apply to the whole model. There, None stands for the usual value, which is given below.
    Settings in `overrides` apply to the modules that a glob pattern matches. There, None stands for the value that the
    rest of the model has.

    Attributes:
        bits: the bits of quantized inputs. They may only be given in `overrides`, and a policy does not change them. A norm then has
            exactly these bits, otherwise usually 1 bit more than other layers (docs/decisions/0008).
        activation_bits: the bits of the codes for derivatives that activations save, 1 to 8. If they are not given, smooth
            activations save a copy of their input with 2 bits more than quantized inputs, from which their result is computed
            again (docs/decisions/0021). Compiled code, and ErrorBound, which usually chooses these bits, use codes in any case:
            of 3 bits if the configuration gives quantized inputs at most 4 bits, else of as many bits as quantized inputs,
            rounded down (docs/decisions/0017). Activations whose derivative has only two values have 1 bit, which is exact.
        attention_bits: the bits of the queries, keys and values of attention. With AdaptiveBits, Budget and ErrorBound
            the policy usually chooses these bits, like those of other tensors. Otherwise queries have usually 2 bits more than
            quantized inputs, keys 3 and values 1 (docs/decisions/0008). A number that is not whole is an average, which
            FixedBits and PreActivationBits refuse.
        group_size: the number of consecutive elements that are quantized together, a multiple of 32 (usually 256).
            These elements are called a group.
        copies: how many copies a norm saves of its normalized input, each with its own random rounding: 1 or 2 (usually
            1). With 2 copies the mean of a norm's gradient over the random rounding is exact.
        functional: whether to compress functions of torch and torch.nn.functional that a forward calls while the model
            trains in eager mode, such as F.gelu and F.scaled_dot_product_attention (usually True).
        everything: whether to compress also the tensors that other operations of torch save, such as products, einsum and
            the gates of recurrent layers (usually False; docs/guides/compress.md). Their bits are fixed: no policy chooses them.
        autograd_functions: {an autograd Function, or its name "module.Class": positions in its `ctx.saved_tensors`} of
            tensors in which the Function's gradients are linear. With `everything`, these tensors are quantized too.
        quantizer: the kind of quantized copies, "rotated" or "uniform" (docs/concepts/quantizer.md). Usually,
            results of softmax and tensors with groups of more than 256 elements have uniform copies, and all other
            tensors have rotated copies (docs/decisions/0016). The setting has no effect on tensors that ErrorBound
            saves with a codec other than "quant".
        recompute_linear: whether results of linear layers are computed again in the backward pass, from the copies of the layers'
            inputs, where other layers would save them: queries, keys, values, gates, inputs of activations (usually False). The
            model then saves fewer bytes, and the backward pass computes one more matrix product for each of these tensors. In
            compiled code nothing is computed again.
        gate_bits: the bits of the two factors of gated units, such as SwiGLU. Usually they have 1 bit more than quantized inputs,
            or the bits that the policy chooses, as `attention_bits`.
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
            change: LayerSettings, a mapping of its fields, or None to leave modules as they are. A number stands for
                settings with these `bits`, `attention_bits` and `gate_bits`.

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
    """The setting to move saved tensors of a GPU to the host's memory until the backward pass (docs/guides/offload.md).

    Attributes:
        expandable_segments: whether to make PyTorch's allocator reserve the GPU's memory in expandable segments. These
            segments can grow, which avoids fragmentation.
    """

    _checks = {"expandable_segments": flag}

    expandable_segments: bool = False
