"""Configuration objects: they say who chooses the bits of saved tensors, and they contain the settings of layers.

Configuration objects are frozen dataclasses. They check their values, compare by value, and have a repr that can be
pasted into a program. `to_dict` returns plain JSON values, and `from_dict` makes an object from these values. The
module `bits` has the classes that say who chooses bits. `layers` has the settings of layers, and `values` has the
limits of settings and checks that layers use too. `base` has what all these classes have in common. `arguments` turns
all arguments of `compress_` into plain values. This folder may import the files in the root of the package, but no
other folder. It does not import torch.
"""

from fewbit.config.arguments import plain_arguments
from fewbit.config.bits import (
    CODECS,
    LEVELS,
    WINDOWS,
    AdaptiveBits,
    BitConfig,
    Budget,
    ErrorBound,
    FixedBits,
    Level,
    PreActivationBits,
    SampleBits,
    as_config,
)
from fewbit.config.layers import HostOffload, LayerSettings
from fewbit.config.values import (
    ACTIVATION_BITS,
    BLOCK,
    DEFAULT_BITS,
    GROUP_SIZE,
    KIND_NUMBERS,
    KINDS,
    LARGEST_GROUP,
    LARGEST_ROTATED_GROUP,
    MASKED,
    MAX_BITS,
    MIN_BITS,
    QUANTIZERS,
    ROTATED,
    UNIFORM,
    check_average,
    check_bits,
    check_copies,
    check_group_size,
    check_quantizer,
    check_rotated_size,
    check_verbose,
    name_of_class,
    plain_number,
    usual_kind,
)

__all__ = [
    "ACTIVATION_BITS",
    "BLOCK",
    "CODECS",
    "DEFAULT_BITS",
    "GROUP_SIZE",
    "KIND_NUMBERS",
    "KINDS",
    "LARGEST_GROUP",
    "LARGEST_ROTATED_GROUP",
    "LEVELS",
    "MASKED",
    "MAX_BITS",
    "MIN_BITS",
    "QUANTIZERS",
    "ROTATED",
    "UNIFORM",
    "WINDOWS",
    "AdaptiveBits",
    "BitConfig",
    "Budget",
    "ErrorBound",
    "FixedBits",
    "HostOffload",
    "LayerSettings",
    "Level",
    "PreActivationBits",
    "SampleBits",
    "as_config",
    "check_average",
    "check_bits",
    "check_copies",
    "check_group_size",
    "check_quantizer",
    "check_rotated_size",
    "check_verbose",
    "usual_kind",
    "name_of_class",
    "plain_arguments",
    "plain_number",
]
