"""Constructors: torch's signature plus ours, so that whatever looks for `device` finds it."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import fewbit
import fewbit.functional
import fewbit.nn

OURS = {"bits", "group_size", "quantizer", "copies", "table"}
NAMES = [name for name in fewbit.nn.__all__ if hasattr(nn, name)]


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_torchs_plus_ours(name):
    ours = inspect.signature(getattr(fewbit.nn, name)).parameters
    theirs = inspect.signature(getattr(nn, name)).parameters
    added = [gradient for gradient in ours.values() if gradient.name in OURS]
    assert all(item.kind is item.KEYWORD_ONLY for item in added)

    def described(parameters):
        return [
            (parameter.name, parameter.kind, parameter.default)
            for parameter in parameters
            if parameter not in added
        ]

    if theirs == inspect.signature(nn.Module).parameters:  # which takes nothing
        theirs = {}
    assert described(ours.values()) == described(theirs.values())


def test_bits_by_default_are_those_of_compress_():
    usual = fewbit.FixedBits().bits
    assert usual == 4
    assert fewbit.nn.Linear(3, 4).quantizer.bits == usual
    assert fewbit.nn.LayerNorm(3).quantizer.bits == usual
    functions = [getattr(fewbit.functional, name) for name in fewbit.functional.__all__]
    found = [inspect.signature(function).parameters for function in functions]
    quantizing = [parameters for parameters in found if "quantizer" in parameters]
    assert len(quantizing) > 20
    assert {parameters["bits"].default for parameters in quantizing} == {usual}


ARGUMENTS = {
    "Linear": (3, 4),
    "Bilinear": (3, 4, 5),
    **{f"Conv{dims}d": (3, 4, 2) for dims in (1, 2, 3)},
    **{f"ConvTranspose{dims}d": (3, 4, 2) for dims in (1, 2, 3)},
    **{f"BatchNorm{dims}d": (3,) for dims in (1, 2, 3)},
    **{f"InstanceNorm{dims}d": (3, 1e-5, 0.1, True) for dims in (1, 2, 3)},
    "SyncBatchNorm": (3,),
    "LayerNorm": (3,),
    "RMSNorm": (3,),
    "GroupNorm": (2, 4),
    "PReLU": (3,),
    "MultiheadAttention": (4, 2),
    "Embedding": (3, 4),
}


def test_every_class_that_takes_a_device_is_here():
    having = {name for name in NAMES if "device" in inspect.signature(getattr(nn, name)).parameters}
    assert having == set(ARGUMENTS)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_skip_init(name):
    module = nn.utils.skip_init(getattr(fewbit.nn, name), *ARGUMENTS[name], dtype=torch.float64)
    assert type(module) is getattr(fewbit.nn, name)
    expected = getattr(nn, name)(*ARGUMENTS[name])
    assert {key: value.shape for key, value in module.state_dict().items()} == {
        key: value.shape for key, value in expected.state_dict().items()
    }
    assert all(
        parameter.dtype == torch.float64 and not parameter.is_meta
        for parameter in module.parameters()
    )


def test_a_subclass_has_the_signature_of_its_own_constructor():
    class Square(fewbit.nn.Linear):
        def __init__(self, width, *, bits=4):
            super().__init__(width, width, bits=bits)

    class Named(fewbit.nn.Linear):
        pass

    class Wrapped(fewbit.nn.Linear):
        def __init__(self, name, *args, **kwargs):
            super().__init__(*args, **kwargs)

    assert str(inspect.signature(Square)) == "(width, *, bits=4)"
    assert str(inspect.signature(Wrapped)) == "(name, *args, **kwargs)"
    assert inspect.signature(Named) == inspect.signature(fewbit.nn.Linear)
    assert Square(3).quantizer.bits == 4
