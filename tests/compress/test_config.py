"""Configuration objects: accepted values, printed form, and conversion to and from plain values."""

import dataclasses
import json
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

import fewbit
from fewbit import config
from fewbit.config import as_config
from fewbit.errors import InputError
from fewbit.runtime.codecs import CODECS

OBJECTS = [
    fewbit.FixedBits(),
    fewbit.FixedBits(2),
    fewbit.SampleBits(1.75),
    fewbit.AdaptiveBits(),
    fewbit.AdaptiveBits(1.75, interval=1),
    fewbit.Budget("6 GiB"),
    fewbit.Budget(1000, interval=7),
    fewbit.Budget("1.5 KB"),
    fewbit.ErrorBound(),
    fewbit.ErrorBound(1e-3, "max", "quant+zvc", True, 5),
    fewbit.PreActivationBits(8),
    *(fewbit.Level(name) for name in config.LEVELS),
    fewbit.Level("L1", 2),
    fewbit.Level("L5", 1.25),
    fewbit.LayerSettings(),
    fewbit.LayerSettings(2.5, 8, 4, 64, 2, False),
    fewbit.HostOffload(),
    fewbit.HostOffload(True),
]


@pytest.mark.parametrize("one", OBJECTS, ids=repr)
def test_an_object_comes_back_from_its_repr_and_from_json(one):
    """`compress_` takes the plain values in place of the object."""
    assert eval(repr(one), {"fewbit": fewbit}) == one
    values = json.loads(json.dumps(one.to_dict()))
    base = fewbit.BitConfig if isinstance(one, fewbit.BitConfig) else type(one)
    again = base.from_dict(values)
    assert again == one and type(again) is type(one) and hash(again) == hash(one)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(one, dataclasses.fields(one)[0].name, 3)
    name = {fewbit.LayerSettings: "layers", fewbit.HostOffload: "offload"}.get(type(one), "bits")
    assert config.plain_arguments({name: one}) == {name: values}
    assert config.plain_arguments({name: values}) == {name: values}
    assert base is not fewbit.BitConfig or as_config(values) == one


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (fewbit.AdaptiveBits(1.75), "fewbit.AdaptiveBits(1.75)"),
        (fewbit.AdaptiveBits(2.0, interval=5), "fewbit.AdaptiveBits(2, interval=5)"),
        (fewbit.ErrorBound(window="max"), "fewbit.ErrorBound(0.5, window='max')"),
        (fewbit.Budget(3 * 2**20), "fewbit.Budget('3 MiB')"),
        (fewbit.Budget(1001), "fewbit.Budget(1001)"),
        (fewbit.LayerSettings(copies=2), "fewbit.LayerSettings(copies=2)"),
        (fewbit.Level("L3"), "fewbit.Level('L3')"),
    ],
)
def test_a_repr_leaves_out_what_is_usual(one, text):
    assert repr(one) == text


@pytest.mark.parametrize(
    ("given", "expected", "average"),
    [
        (None, fewbit.FixedBits(4), 4),
        (2.0, fewbit.FixedBits(2), 2),
        (np.int64(3), fewbit.FixedBits(3), 3),
        (np.float32(1.5), fewbit.AdaptiveBits(1.5), 1.5),
        (fewbit.Level("L2", 3), fewbit.Level("L2", 3), 3),
        (fewbit.Level("L0"), fewbit.Level("L0"), None),
    ],
)
def test_numbers_stand_for_configurations(given, expected, average):
    assert as_config(given) == expected
    controller = fewbit.compress_(nn.Linear(4, 4), given, verbose=False)
    assert controller.config == expected and controller.average_bits == average


def test_the_controller_is_not_the_model():
    controller = fewbit.compress_(nn.Linear(4, 4), verbose=False)
    with pytest.raises(fewbit.InputError, match="a call of the model, which compress_ changed"):
        controller(torch.ones(4))


def test_fixed_bits_have_no_average_with_overrides():
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 128))
    assert fewbit.compress_(model, 4, verbose=False).average_bits == 4
    overrides = {"1": 8}
    assert fewbit.compress_(model, 4, overrides=overrides, verbose=False).average_bits is None
    policy = fewbit.AdaptiveBits(3)
    assert fewbit.compress_(model, policy, overrides=overrides, verbose=False).average_bits == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: as_config("2"), "a configuration such as fewbit.AdaptiveBits(2.5), got '2'"),
        (lambda: as_config(True), "bits: expected a number from 1 to 8, or a configuration"),
        (lambda: as_config(fewbit.FixedBits), "bits: expected a number from 1 to 8, or a configuration"),
        (lambda: as_config(9), "bits: expected a number from 1 to 8, got 9"),
        (lambda: fewbit.FixedBits(2.5), "fewbit.AdaptiveBits(2.5) and fewbit.SampleBits(2.5) take averages"),
        (lambda: fewbit.FixedBits(0), "bits: expected a whole number from 1 to 8, got 0"),
        (lambda: fewbit.SampleBits(9.5), "average: expected a number from 1 to 8, got 9.5"),
        (lambda: fewbit.AdaptiveBits(0), "average: expected a number from 1 to 8, got 0"),
        (lambda: fewbit.AdaptiveBits(2, 0), "interval: expected a positive whole number, got 0"),
        (lambda: fewbit.Budget("6 apples"), "budget: expected a positive whole number of bytes, or a size such as '6 GiB'"),
        (lambda: fewbit.Budget("1.5"), "(units are powers of 1024, GB as well as GiB), got '1.5'"),
        (lambda: fewbit.Budget("1 Mb"), "got '1 Mb'; Mb counts bits, write MB for bytes"),
        (lambda: fewbit.Budget(True), "budget: expected a positive whole number of bytes, or a size such as '6 GiB'"),
        (lambda: fewbit.ErrorBound(0), "e2: expected a finite number above 0, got 0"),
        (lambda: fewbit.ErrorBound(float("inf")), "e2: expected a finite number above 0, got inf"),
        (lambda: fewbit.ErrorBound(interval=0), "interval: expected a positive whole number, got 0"),
        (lambda: fewbit.ErrorBound(window="median"), "window: expected mean or max, got 'median'"),
        (lambda: fewbit.ErrorBound(codec="zip"), "codec: expected quant, quant+zvc, error-bounded, jpeg, got 'zip'"),
        (lambda: fewbit.ErrorBound(by_channel=1), "by_channel: expected True or False, got 1"),
        (lambda: fewbit.PreActivationBits(1.5), "bits: expected a whole number from 1 to 8, got 1.5"),
        (lambda: fewbit.Level("L9"), "level: expected one of L0, L1, L2, L2.5, L3, L4, L5, got 'L9'"),
        (lambda: fewbit.Level("L0", 2), "expected no bits at level L0"),
        (lambda: fewbit.Level("L2", 1.75), "bits: expected a whole number from 1 to 8, got 1.75"),
        (lambda: fewbit.LayerSettings(group_size=33), "expected a multiple of 32 from 32 to 65536"),
        (lambda: fewbit.LayerSettings(quantizer="octal"), "quantizer: expected rotated or uniform, got 'octal'"),
        (lambda: fewbit.LayerSettings(copies=3), "copies: expected 1 or 2, got 3"),
        (lambda: fewbit.nn.Linear(4, 4, group_size=256.0), "group_size: expected a multiple of 32 from 32 to 65536, got 256.0"),
        (lambda: fewbit.nn.LayerNorm(4, copies=1.0), "copies: expected 1 or 2, got 1.0"),
        (lambda: fewbit.LayerSettings(functional="yes"), "functional: expected True or False, got 'yes'"),
        (lambda: fewbit.HostOffload(1), "expandable_segments: expected True or False, got 1"),
        (lambda: fewbit.BitConfig.from_dict({"kind": "none"}), "expected a kind out of fixed, samples, adaptive"),
        (lambda: fewbit.BitConfig.from_dict([]), "expected a kind out of fixed, samples, adaptive"),
        (lambda: fewbit.BitConfig.from_dict({"kind": "fixed", "bit": 2}), "expected bits for FixedBits, got 'bit'"),
        (lambda: fewbit.BitConfig.from_dict({"kind": "budget"}), "expected a value of bytes for Budget, got none"),
        (lambda: fewbit.FixedBits(10**5000), "bits: expected a whole number from 1 to 8, got a huge int"),
        (lambda: fewbit.FixedBits("x" * 10000), "bits: expected a whole number from 1 to 8, got 'xxxx"),
        (lambda: fewbit.ErrorBound(10**400), "e2: expected a finite number above 0, got 1000"),
        (lambda: fewbit.ErrorBound(Fraction(1, 10**400)), "e2: expected a finite number above 0, got Fraction"),
        (lambda: fewbit.Budget("0.1 B"), "budget: expected a positive whole number of bytes, or a size such as '6 GiB'"),
        (lambda: fewbit.LayerSettings(quantizer=np.array(["rotated"] * 2)), "quantizer: expected rotated or uniform"),
        (lambda: as_config(fewbit.BitConfig()), "bits: expected a number from 1 to 8, or a configuration"),
        (lambda: own_config("fixed"), "expected a new kind for Own, got 'fixed', that of FixedBits"),
        (lambda: own_config(base=fewbit.ErrorBound)().to_dict(), "expected a kind of its own for Own, got none"),
        (lambda: fewbit.LayerSettings.from_dict(3), "expected a mapping of the fields of LayerSettings, got int"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_used(make, message):
    with pytest.raises(InputError) as error:
        make()
    assert message in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_fields_store_whole_numbers_of_any_type_as_integers():
    settings = fewbit.LayerSettings(4.0, 3.0, np.int64(4), group_size=np.int64(64), copies=2.0)
    assert settings == fewbit.LayerSettings(4, 3, 4, group_size=64, copies=2)
    given = settings.group_size, settings.copies, fewbit.AdaptiveBits(interval=100.0).interval
    assert all(type(number) is int for number in given)


def own_config(kind=None, base=fewbit.BitConfig):
    """Define a configuration class."""
    body = {} if kind is None else {"kind": kind}
    return type("Own", (base,), {"__module__": __name__, **body})


@pytest.mark.parametrize(
    ("size", "count"),
    [("1000", 1000), (" 7 ", 7), ("6 GB", 6 << 30), ("6 GiB", 6 << 30), ("1.5KB", 1536)],
)
def test_a_budget_is_a_number_of_bytes_or_a_size_in_powers_of_1024(size, count):
    assert fewbit.Budget(size).bytes == count


def test_a_class_can_be_defined_again_and_derive_from_another():
    first, second = (
        dataclasses.dataclass(frozen=True)(own_config("own", fewbit.ErrorBound)) for _ in range(2)
    )
    assert second is not first
    assert type(fewbit.BitConfig.from_dict(second(e2=0.1).to_dict())) is second


def test_a_level_has_the_attributes_of_its_configuration():
    for name in config.LEVELS[1:]:
        level = fewbit.Level(name)
        assert (level.has_policy, level.adapts) == (level.config.has_policy, level.config.adapts)
    assert not fewbit.Level("L0").has_policy


def test_names_of_codecs_are_those_of_the_registry():
    assert tuple(CODECS) == config.CODECS


@pytest.mark.parametrize(
    ("level", "bits", "options"),
    [
        (fewbit.Level("L2", 2), 2, {}),
        (fewbit.Level("L2.5", 1.75), fewbit.SampleBits(1.75), {}),
        (fewbit.Level("L3", 1.75), 1.75, {}),
        (fewbit.Level("L4", 2), fewbit.AdaptiveBits(2), {"offload": fewbit.HostOffload()}),
    ],
)
def test_a_level_and_its_configuration_convert_alike(level, bits, options):
    def saved(bits, **options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        x = torch.randn(32, 64)
        controller = fewbit.compress_(model, bits, **options, verbose=False)
        torch.manual_seed(1)
        model(x).square().sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        return controller, fewbit.saved_bytes(model, x).total, gradients

    (a, bytes_a, gradients_a), (b, bytes_b, gradients_b) = saved(level), saved(bits, **options)
    assert bytes_a == bytes_b and all(map(torch.equal, gradients_a, gradients_b))
    assert (a.offload is None) == (b.offload is None)
    assert a.config == level and b.config == as_config(bits)


def test_filters_see_the_classes_before_the_conversion():
    seen = []

    def include(path, module):
        seen.append(type(module))
        return type(module) is nn.GELU

    model = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    controller = fewbit.compress_(model, fewbit.ErrorBound(), include=include, verbose=False)
    assert set(seen) == {nn.Sequential, nn.Linear, nn.GELU}
    for _ in range(2):
        model(torch.randn(8, 64)).square().sum().backward()
    assert [row.name for row in controller.bounds] == ["1"]


def test_all_arguments_of_compress_come_from_json():
    """A model is converted in the same way from the arguments, and from what JSON makes of them."""
    arguments = {
        "bits": fewbit.AdaptiveBits(2.5, interval=7),
        "layers": fewbit.LayerSettings(group_size=64, quantizer="uniform"),
        "overrides": {"0": 8, "1": None, "2": fewbit.LayerSettings(bits=np.int64(3))},
        "offload": fewbit.HostOffload(True),
        "include": ("0", "2", "3"),
        "exclude": "3",
        "verbose": False,
    }
    plain = json.loads(json.dumps(config.plain_arguments(arguments)))

    def converted(arguments):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        controller = fewbit.compress_(model, **arguments)
        settings = [getattr(layer, "quantizer", None) for layer in model]
        settings = [one and (one.average, one.group_size, one.kind) for one in settings]
        return settings, controller.config, controller.offload is None, controller.allocator

    settings, given, has_no_offload, _ = converted(plain)
    assert settings == [(8, 64, "uniform"), None, (3, 64, "uniform"), None]
    assert given == arguments["bits"] and not has_no_offload
    assert converted(plain) == converted(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"include": lambda path, module: True}, "include: expected a value that JSON can store, got <function"),
        ({"sample": {"x": torch.zeros(1)}}, "sample['x']: expected a value that JSON can store, got tensor"),
        ({"overrides": {0: 2}}, "expected text as the keys of overrides, got 0"),
        ({"bits": fewbit.FixedBits}, "bits: expected a value that JSON can store, got <class"),
    ],
)  # fmt: skip
def test_arguments_that_have_no_form_in_json(arguments, message):
    with pytest.raises(InputError) as error:
        config.plain_arguments(arguments)
    assert message in str(error.value)
