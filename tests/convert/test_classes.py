"""Models whose classes are unusual: made for one instance, made by a metaclass, patched, reduced to a name."""

import copy
import pickle
from abc import ABC, ABCMeta
from typing import Generic, TypeVar

import pytest
import torch
from composed import COPIES, names_of_nodes
from layers import relative
from samples import normal
from torch import nn
from torch.ao import quantization
from torch.nn import functional as torch_f

import fewbit
from fewbit.runtime.interop.module_calls import TrackedModule


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        self.made = torch_f.gelu(self.a(x))
        return self.b(self.made)


class Traced(Block):
    def forward(self, x):
        return self.b(torch_f.gelu(self.a(x)))


X = normal((6, 8), scale=1.0)


def quiet(model, **options):
    return fewbit.compress_(model, verbose=False, **options)


# -- torch.fx.GraphModule ------------------------------------------------------------------------------------


def traced():
    torch.manual_seed(0)
    return torch.fx.symbolic_trace(Traced())


def edit(graph_module) -> None:
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            node.target = torch_f.relu
    graph_module.recompile()


def linear(layer, x):
    return torch_f.linear(x, layer.weight, layer.bias)


def check_edited(model) -> None:
    torch.testing.assert_close(model(X), linear(model.b, linear(model.a, X).relu()))


def check_compressed(model) -> None:
    """Check that the model's layers, and the function that it calls, are few-bit."""
    names = names_of_nodes(model(X))
    assert "_LinearBackward" in names
    assert names & {"ActivationBackward", "CopiedActivationBackward"}
    model(X).sum().backward()


def test_a_graph_module_is_compressed_and_restored():
    model = traced()
    cls, mro, expected = type(model), type(model).__mro__, model(X)
    quiet(model)
    check_compressed(model)
    torch.testing.assert_close(model(X), expected)
    fewbit.restore_(model)
    assert type(model) is cls and cls.__mro__ == mro
    assert torch.equal(model(X), expected)
    assert not any("fewbit" in name for name in vars(model))
    quiet(model)
    check_compressed(model)


def test_a_graph_module_is_recompiled():
    model = traced()
    quiet(model)
    model.recompile()
    check_compressed(model)
    edit(model)
    check_edited(model)
    check_compressed(model)
    model.recompile()
    fewbit.restore_(model)
    check_edited(model)
    model.recompile()
    check_edited(model)
    other = traced()
    quiet(other)
    edit(other)  # before any call
    fewbit.restore_(other)
    check_edited(other)


@pytest.mark.parametrize("travel", [copy.copy, *COPIES.values()], ids=["copy", *COPIES])
def test_copies_of_a_graph_module(travel):
    model = nn.Sequential(traced(), nn.GELU())
    quiet(model)
    outer = travel(travel(model))
    twin = travel(travel(outer[0]))
    torch.testing.assert_close(outer(X), model(X))
    check_compressed(twin)
    torch.testing.assert_close(twin(X), model[0](X))
    edit(twin)
    check_edited(twin)
    fewbit.restore_(twin)
    check_edited(twin)
    assert type(twin).__bases__ == (torch.fx.GraphModule,)
    fewbit.restore_(model)
    assert not any(isinstance(part, TrackedModule) for part in (twin, *model.modules()))


# -- metaclasses ---------------------------------------------------------------------------------------------


class WithTag(type):
    def __new__(cls, name, bases, own, *, tag):
        return super().__new__(cls, name, bases, own)

    def __init__(cls, name, bases, own, *, tag):
        super().__init__(name, bases, own)


class Registering(type):
    seen = []  # noqa: RUF012

    def __init__(cls, name, bases, own):
        super().__init__(name, bases, own)
        Registering.seen.append(name)


class RegisteringAbstract(Registering, ABCMeta):
    pass


class Tagged(Block, metaclass=WithTag, tag=1):
    pass


class Registered(Block, metaclass=Registering):
    pass


class Abstract(Block, metaclass=RegisteringAbstract):
    pass


class PlainAbstract(Block, ABC):
    pass


class AbstractFirst(ABC, Block):
    """A class whose first base has no `__dict__`, so that Python gives its objects another layout than a Block's."""


class AbstractDeeper(AbstractFirst):
    pass


class GenericFirst(Generic[TypeVar("T")], Block):
    pass


class OfNumbers(GenericFirst[int]):
    pass


@pytest.mark.parametrize(
    "cls",
    [Tagged, Registered, Abstract, PlainAbstract, AbstractFirst, AbstractDeeper, OfNumbers],
)
def test_metaclasses(cls):
    before = Registering.seen[:]
    model, other = cls(), cls()
    quiet(model)
    model(X).sum().backward()
    assert model.made.grad_fn.name().endswith("ActivationBackward")
    assert type(type(model)) is type(cls) and isinstance(model, cls)
    # Both have a registry of their own, if they are abstract classes.
    assert not isinstance(other, type(model)) and isinstance(other, cls)
    assert isinstance(model, type(model)) and issubclass(type(model), cls)
    assert type(pickle.loads(pickle.dumps(model))) is type(model)
    bases = "__orig_bases__"  # which Generic reads
    assert getattr(type(model), bases, ()) == getattr(cls, bases, ())
    fewbit.restore_(model)
    assert type(model) is cls
    assert before == Registering.seen


def test_a_metaclass_and_a_class_made_by_another_library():
    model = Tagged()
    quiet(model)
    cls = type(model)
    # Like torch's parametrize and fully_shard do.
    model.__class__ = type.__new__(type(cls), cls.__name__, (cls,), {"extra": 1})
    fewbit.restore_(model)
    assert not isinstance(model, TrackedModule)
    assert model.extra == 1 and type(model).__bases__ == (Tagged,)


# -- torch.ao.quantization -----------------------------------------------------------------------------------

eager_quantization = pytest.mark.filterwarnings(
    "ignore:torch.ao.quantization is deprecated",
    "ignore:Please use quant_min and quant_max",
    "ignore:torch.quantize_per_tensor",
)
NOT_FOUND = (
    "torch.ao.quantization finds no layers in a compressed model: call prepare_qat before compress_"
)


def quantizable():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 8))
    model.qconfig = quantization.default_qat_qconfig
    return model


@eager_quantization
def test_layers_that_quantize_their_weights_are_compressed():
    images = normal((32, 3, 8, 8), scale=1.0)
    exact = quantization.prepare_qat(quantizable())
    few = copy.deepcopy(exact)
    classes = [type(module) for module in few.modules()]
    quiet(few, bits=8, layers={"everything": True})
    saved = fewbit.saved_bytes(few, images)
    assert saved.total < fewbit.saved_bytes(exact, images).total / 2
    assert not [entry for entry in saved.entries if entry.kind == "mask" and entry.bytes > 1024]
    gradients = []
    for model in (exact, few):
        model(images).square().sum().backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    assert 0 < relative(gradients[1], gradients[0]) < 0.02
    fewbit.restore_(few)
    assert [type(module) for module in few.modules()] == classes
    quantization.convert(few.eval(), inplace=True)
    assert type(few[3]).__module__ == "torch.ao.nn.quantized.modules.linear"


@eager_quantization
def test_a_compressed_model_that_is_prepared_warns():
    model = quantizable()
    quiet(model)
    with pytest.warns(UserWarning, match=NOT_FOUND):
        quantization.prepare_qat(model)
    with pytest.warns(UserWarning, match="restore_ before convert"):
        del model.qconfig
    assert not hasattr(model, "qconfig")
    fewbit.restore_(model)
    model.qconfig = quantization.default_qat_qconfig
    assert isinstance(quantization.prepare_qat(model)[3], torch.ao.nn.qat.Linear)


class Configured(nn.Linear):
    """A class with an attribute that tracked classes have too."""

    qconfig = None

    def forward(self, x):
        return super().forward(x) if self.qconfig is None else x


def test_an_attribute_of_a_users_class_that_is_named_qconfig():
    model = nn.Sequential(Configured(64, 64))
    x = normal((4, 64))
    expected = model(x)
    quiet(model)
    assert torch.equal(model(x), expected) and type(model[0]).qconfig is None
    with pytest.warns(UserWarning, match=NOT_FOUND):
        model[0].qconfig = 1
    assert model(x) is x


# -- what is written to the class ----------------------------------------------------------------------------


def test_a_forward_that_is_patched_on_the_class_in_between_stays():
    class Own(nn.Module):
        """A class that the test patches."""

        count: int = 0

        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x):
            return self.a(x)

    model, other = Own(), Own()
    quiet(model), quiet(other)
    type(model).forward = lambda self, x: 2.0 * self.a(x)
    type(model).__annotations__  # noqa: B018 (Python writes them to the class when they are read)
    expected = 2.0 * linear(model.a, X)
    torch.testing.assert_close(model(X), expected)
    fewbit.restore_(model)
    assert type(model) is Own and Own.__annotations__ == {"count": int}
    torch.testing.assert_close(model(X), expected)
    torch.testing.assert_close(other(X), 2.0 * linear(other.a, X))  # other is still compressed
    Own.forward = lambda self, x: 3.0 * self.a(x)
    torch.testing.assert_close(other(X), 3.0 * linear(other.a, X))


# -- pickles -------------------------------------------------------------------------------------------------


class Global(Block):
    def __reduce__(self):
        return "GLOBAL"


GLOBAL = Global()


def test_a_class_that_is_pickled_by_name():
    quiet(GLOBAL)
    try:
        assert pickle.loads(pickle.dumps(GLOBAL)) is GLOBAL
        assert copy.deepcopy(GLOBAL) is GLOBAL and copy.copy(GLOBAL) is GLOBAL
    finally:
        fewbit.restore_(GLOBAL)
