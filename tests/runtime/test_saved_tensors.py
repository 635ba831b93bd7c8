"""An input that several layers save is quantized once, and only the same tensor counts as the same."""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from composed import Composed
from expectation import drawn, pooled_z, signed_z
from layers import relative, saved_by
from quantized import quantized_bytes
from samples import normal
from torch import nn
from torch.utils.checkpoint import checkpoint

import fewbit
from fewbit.runtime import backends


class Branches(nn.Module):
    """A model of `count` linear layers with one input. `between` changes the input before the last layer."""

    def __init__(self, count=3, between=lambda x: x, features=96):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(features, 8) for _ in range(count))
        self.between = between

    def forward(self, x):
        x = x * 1.0
        parts = [layer(x) for layer in self.layers[:-1]]
        return sum(parts) + self.layers[-1](self.between(x))


def compressed(model, bits=8, **options):
    layers = {"functional": False, **options.pop("layers", {})}
    fewbit.compress_(model, bits, layers=layers, verbose=False, **options)
    return model


def copies(model, x) -> int:
    """Return the number of quantized tensors that a forward saves."""
    return sum(tensor.dtype == torch.int32 for tensor in saved_by(model, x)[1])


def check_gradients(model, exact, x, limit=0.02):
    for tested in (model, exact):
        tested.zero_grad()
        torch.manual_seed(0)
        tested(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert relative(ours.grad, theirs.grad) < limit


X = normal((5, 96))


def double_(x):
    with torch.no_grad():
        x.mul_(2.0)
    return x


SAME = {  # {case: (what is done to the input before the last layer, quantized tensors)}
    "same": (lambda x: x, 1),
    "view of the same memory, seen the same way": (lambda x: x.view(x.shape), 1),
    "detached": (lambda x: x.detach(), 1),
    "transposed, which lies in memory as it is": (lambda x: x.transpose(0, 1), 1),
    "transposed copy": (lambda x: x.transpose(0, 1).contiguous(), 2),
    "repeated row": (lambda x: x.as_strided((96, 96), (0, 1)), 2),
    "changed in place": (double_, 2),
    "copy": (lambda x: x.clone(), 2),
    "part": (lambda x: x[:60].repeat(2, 1)[:96], 2),
}


@pytest.mark.parametrize("case", SAME)
def test_what_counts_as_the_same(case, device):
    between, expected = SAME[case]
    model = Branches(between=between).to(device)
    exact = copy.deepcopy(model)
    compressed(model)
    x = normal((96, 96), device=device)
    _, saved = saved_by(model, x)
    assert sum(tensor.nbytes for tensor in saved) == expected * quantized_bytes(x.shape, 8)
    if between is not double_:  # torch refuses to go back through a changed input
        check_gradients(model, exact, x)


def data_(x):
    x.data.mul_(-3.0)
    return x


def numpy_(x):
    x.detach().numpy()[:] *= -3.0
    return x


def one_entry_(x):
    x.data[4, 95] += 2.0
    return x


def rows_(x):
    x.data.copy_(x.data.flip(0))
    return x


def signs_(x):
    x.data.neg_()
    return x


@pytest.mark.parametrize(
    "write", [data_, numpy_, one_entry_, rows_, signs_], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("shape", [(5, 96), (700, 96)], ids=str)
@pytest.mark.parametrize("activation", [False, True])
def test_a_write_that_autograd_does_not_see(write, shape, activation):
    """Each layer uses its input as it was when the layer ran. The mode that replaces functions sees accesses to memory."""
    torch.manual_seed(0)
    first = nn.GELU() if activation else nn.Identity()
    model = nn.Sequential(first, Branches(2, write))
    model[1].forward = lambda x, own=model[1]: own.layers[0](x) + own.layers[1](write(x))
    fewbit.compress_(model, 8, verbose=False)
    for _ in range(2):  # in the second forward the activation makes the copy itself
        x = normal(shape, scale=1.0)
        seen = []
        hooks = [
            layer.register_forward_pre_hook(
                lambda _, inputs, seen=seen: seen.append(inputs[0].detach().clone())
            )
            for layer in model[1].layers
        ]
        grads = torch.autograd.grad(model(x).sum(), [layer.weight for layer in model[1].layers])
        for hook in hooks:
            hook.remove()
        for grad, kept in zip(grads, seen, strict=True):
            assert relative(grad, kept.sum(0).expand(8, -1)) < 0.02


class Logging(Branches):
    """A model that reads values of freed tensors before the shared input is made, if possible at the address of one."""

    def forward(self, x):
        freed = [torch.ones(x.shape) for _ in range(50)]
        for tensor in freed:
            tensor.numpy()
        addresses = set(map(self.address, freed))
        del freed, tensor
        tensors = [x.clone() for _ in range(100)]
        again = [tensor for tensor in tensors if self.address(tensor) in addresses]
        x = (again or tensors)[0]
        parts = [layer(x) for layer in self.layers]
        return sum(parts)

    @staticmethod
    def address(x):
        with torch._C.DisableTorchFunction():
            return x.untyped_storage()._cdata


def test_an_access_to_the_memory_of_a_freed_tensor_changes_nothing():
    model = Logging(3)
    fewbit.compress_(model, 8, verbose=False)
    assert copies(model, normal((5, 96), scale=1.0)) == 1


def test_an_address_that_is_used_again_is_another_tensor():
    """Each temporary of the forward has the address of the one before it."""
    memory = np.empty((5, 96), np.float32)  # an allocator might not give an address back at once

    def forward(model, x):
        total, last = 0.0, lambda: None
        for factor, layer in enumerate(model.layers, 1):
            assert last() is None  # nothing keeps the tensor before it
            np.multiply(x.numpy(), factor, out=memory)
            scaled = torch.from_numpy(memory)
            last = weakref.ref(scaled)
            total = total + layer(scaled)
            del scaled
        return total

    model = compressed(Composed(forward, layers=nn.ModuleList(nn.Linear(96, 2) for _ in range(20))))
    x = normal((5, 96))
    model(x).sum().backward()
    for factor, layer in enumerate(model.layers, 1):
        assert relative(layer.weight.grad, factor * x.sum(0).expand(2, -1)) < 0.02


@pytest.mark.parametrize(
    "layer, override, expected",
    [
        (1, {"bits": 4}, 1),  # the first layer's copy has more bits
        (0, {"bits": 4}, 2),
        (1, {"group_size": 64}, 2),
        (1, {"quantizer": "uniform", "bits": 4}, 2),
    ],
)
def test_layers_with_other_settings_have_their_own_copy(layer, override, expected):
    assert copies(compressed(Branches(), overrides={f"layers.{layer}": override}), X) == expected


def test_nothing_outlives_a_forward():
    model = compressed(Branches())
    x = X.clone()
    y = model(x)
    context = model.layers[0].quantizer.context
    assert y.requires_grad and context.innermost_forward() is None
    # The same input again, while the first graph is alive: a copy of its own.
    a, b = saved_by(model, X)[1], saved_by(model, X)[1]
    assert {t.data_ptr() for t in a}.isdisjoint(t.data_ptr() for t in b)


@pytest.mark.parametrize("retain", [False, True])
def test_the_copy_is_freed_when_the_last_layer_has_used_it(retain):
    """It is freed neither earlier nor only at the end of backward. With retain_graph it stays."""
    kept, seen = [], []

    def watch(x):
        x.register_hook(lambda _: seen.append([reference() is not None for reference in kept]))
        return x

    def forward(model, x):
        x = watch(x * 1.0)
        return sum(watch(layer(x)) for layer in model.layers)

    model = compressed(Composed(forward, layers=nn.ModuleList(nn.Linear(96, 8) for _ in range(3))))

    def pack(tensor):
        if tensor.dtype in (torch.int32, torch.bfloat16):
            kept.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(X.clone().requires_grad_())
    # Every layer holds the codes and the ranges.
    assert len({reference().data_ptr() for reference in kept}) == 2
    y.sum().backward(retain_graph=retain)
    there, gone = [True] * len(kept), [retain] * len(kept)
    assert seen == [there, there, there, gone]


def test_two_models_share_nothing():
    a, b = compressed(Branches()), compressed(Branches())
    assert copies(lambda x: a(x) + b(x), (X * 1.0).requires_grad_()) == 2
    twin = copy.deepcopy(a)
    context = twin.layers[0].quantizer.context
    assert twin.layers[1].quantizer.context is context is not a.layers[0].quantizer.context
    pickled = pickle.loads(pickle.dumps(nn.Sequential(nn.Identity(), a.layers[0])))
    assert copies(twin, X) == copies(pickled, X) == 1


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    "layer, between, copies, vectors",
    [
        (nn.Linear(96, 8), lambda x: x, 1, 0),
        (nn.Linear(96, 8), lambda x: x.flip(0), 2, 0),
        (nn.LayerNorm(96), lambda x: x.flip(0), 2, 2 * 5),
    ],
    ids=["linear, same input", "linear, other input", "norm, other input"],
)
def test_a_layer_that_is_used_twice_keeps_each_input_once(layer, between, copies, vectors, is_tied):
    """One layer is used twice, or two layers have one weight."""
    first = copy.deepcopy(layer)
    second = copy.deepcopy(layer) if is_tied else first
    second.weight = first.weight

    def forward(model, x):
        x = x * 1.0
        return model.first(x) + model.second(between(x))

    model = Composed(forward, first=first, second=second)
    exact = copy.deepcopy(model)
    compressed(model)
    assert model.first.weight is model.second.weight
    kept = fewbit.saved_bytes(model, X.clone().requires_grad_())
    assert kept.total == copies * quantized_bytes(X.shape, 8) + 4 * vectors
    check_gradients(model, exact, X)


# -- a norm and the layers after it -----------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.q, self.k = norm, nn.Linear(96, 8), nn.Linear(96, 8)

    def forward(self, x):
        y = self.norm(x * 1.0)
        return self.q(y) * self.k(y)


@pytest.mark.parametrize("norm", [nn.LayerNorm(96), nn.LayerNorm(96, bias=False), nn.RMSNorm(96)])
def test_a_norm_and_the_linear_layers_after_it_keep_one_copy(device, norm):
    model = Normed(copy.deepcopy(norm)).to(device)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(normal(parameter.shape, device=device, scale=0.3, seed=number))
    exact = copy.deepcopy(model)
    compressed(model)
    x = X.to(device)
    codes = [tensor for tensor in saved_by(model, x)[1] if tensor.dtype == torch.int32]
    assert sum(tensor.nbytes for tensor in codes) == 4 * 8 * (5 * 96 // 32)
    check_gradients(model, exact, x)


def test_what_a_norm_offers_is_exact_in_expectation():
    torch.manual_seed(0)
    model = Normed(nn.LayerNorm(96)).double()
    nn.init.normal_(model.norm.weight)
    nn.init.normal_(model.norm.bias)
    exact = copy.deepcopy(model)
    compressed(model, bits=2)
    x, grad = normal((5, 96), torch.float64) + 10.0, normal((5, 8), torch.float64, seed=3)
    (wanted,) = torch.autograd.grad(exact(x), exact.q.weight, grad)
    (draws,) = drawn(lambda: torch.autograd.grad(model(x), [model.q.weight], grad), 100)
    # Five errors make the eight entries of a column, so they are correlated.
    assert (
        abs(pooled_z(draws.flatten(1), wanted.flatten(), 0.0, independent=wanted.numel() // 4)) < 5
    )
    assert max(map(abs, signed_z(draws, wanted, 0.0))) < 4.5


# -- checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant, as_function):
    """Blocks of a norm and two linear layers of its result, which the backward pass recomputes."""

    def forward(model, x):
        x = x * 1.0
        for block in model.blocks:
            run = (lambda x, block=block: block[1](block[0](x))) if as_function else block
            x = x + checkpoint(run, x, use_reentrant=reentrant)
        return x

    torch.manual_seed(0)
    blocks = (nn.Sequential(Normed(nn.LayerNorm(96)), nn.Linear(8, 96)) for _ in range(2))
    model = Composed(forward, blocks=nn.ModuleList(blocks))
    exact = copy.deepcopy(model)
    compressed(model)
    x = X.clone().requires_grad_()
    assert copies(model, x) == 0  # only the regions' inputs
    check_gradients(model, exact, x)
    gc.collect()
    assert not len(model.blocks[0][0].q.quantizer.context._regions)


def living() -> int:
    """Return the number of tensors of codes that exist."""
    gc.collect()
    return sum(
        type(found) is torch.Tensor and found.dtype == torch.int32 for found in gc.get_objects()
    )


class Regions(nn.Module):
    """A model of units in checkpointed regions: each in its own, as a module or in a function, or two nested."""

    def __init__(self, made, how):
        super().__init__()
        self.units = nn.ModuleList(made() for _ in range(4))
        self.how = how

    def forward(self, x):
        for first, second in zip(self.units[::2], self.units[1::2], strict=True):
            if self.how == "nested":
                x = region(lambda x, a=first, b=second: a(x) + region(b, x) + a(x), x)
            elif self.how == "functions":
                x = region(lambda x, a=first, b=second: a(x) + b(x), x)
            else:
                x = region(second, region(first, x))
        return x


def region(run, x):
    return checkpoint(run, x, use_reentrant=False)


def unit():
    return nn.Sequential(nn.LayerNorm(96), nn.ReLU(), nn.Linear(96, 96))


def block():
    return fewbit.nn.PreActivation(nn.LayerNorm(96), nn.Linear(96, 96), bits=8)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, fewbit.PreActivationBits()], ids=repr)
@pytest.mark.parametrize("how", ["modules", "functions", "nested", "whole", "apart", "blocks"])
def test_nothing_of_a_region_lives_on_after_the_forward(how, bits):
    """The hooks of a checkpoint live as long as the graph. The tensors saved within it must not."""
    model = Regions(block if how == "blocks" else unit, how)
    for part in model.units if how == "apart" else [model]:
        compressed(part, bits)
    run = (lambda x: region(lambda x: model(x) + model(x), x)) if how == "whole" else model
    x, before = X.clone().requires_grad_(), living()
    y = run(x)
    assert living() == before
    y.square().sum().backward()  # and is made again as it was, else torch complains
    del y
    assert x.grad.abs().sum() > 0 and living() == before


def test_hooks_of_others_do_not_split_a_copy():
    """With save_on_cpu or the meter around a forward there is still one copy, and nothing is held afterwards."""
    model = compressed(Branches())
    with torch.autograd.graph.save_on_cpu():
        model(X).sum().backward()
    assert fewbit.saved_bytes(model, X).by_kind()["packed"] == 4 * 8 * (5 * 96 // 32)


# -- an activation and the layer after it ----------------------------------------------------------------------


def followed(activation, width=256):
    """Return a model of an activation between two linear layers: [0], [1], [2]."""
    return nn.Sequential(nn.Linear(8, width), activation, nn.Linear(width, 8))


@pytest.fixture
def one_pass(monkeypatch):
    """Return how many times an activation also quantized its result."""
    backend = backends.on[torch.device("cpu")]
    if not hasattr(backend, "_kernels"):
        pytest.skip("the reference backend has no such pass")
    calls, original = [], type(backend).forward_quantized

    def counted(self, *arguments):
        made = original(self, *arguments)
        calls.append(made is not None)
        return made

    monkeypatch.setattr(type(backend), "forward_quantized", counted)
    return calls


IN_PLACE = nn.ReLU(inplace=True), nn.SiLU(inplace=True)


def image_model(activation):
    return nn.Sequential(nn.Conv2d(3, 8, 3), activation, nn.Conv2d(8, 4, 3))


IMAGES = normal((5, 3, 9, 9), scale=1.0)
AROUND = {  # {name: (a model of an activation between two layers, its input)}
    "linear": (followed, normal((6, 8), scale=1.0)),
    "images": (image_model, IMAGES),
    "channels last": (image_model, IMAGES.contiguous(memory_format=torch.channels_last)),
}


@pytest.mark.parametrize("activation", [nn.GELU(), nn.ReLU(), nn.SiLU(), *IN_PLACE], ids=str)
@pytest.mark.parametrize("name", AROUND)
def test_an_activation_and_the_layer_after_it_are_one_pass(one_pass, activation, name):
    """They are so from the second forward on, with the bytes, gradients and strides of the first."""
    make, x = AROUND[name]
    model = make(copy.deepcopy(activation))
    exact = copy.deepcopy(model)
    compressed(model, layers={"activation_bits": 8})
    hidden = []
    model[1].register_forward_hook(lambda module, inputs, y: hidden.append(y.stride()))
    first = fewbit.saved_bytes(model, x).total
    assert not one_pass
    assert fewbit.saved_bytes(model, x).total == first and one_pass == [True]
    check_gradients(model, exact, x)
    assert one_pass == [True, True]
    assert set(hidden) == {exact[1](exact[0](x)).stride()}


CODES = {"activation_bits": 3}


def test_an_activation_that_no_layer_follows_any_more(one_pass):
    model = compressed(followed(nn.GELU()), layers=CODES)
    x = normal((6, 8))
    model(x), model(x)
    assert one_pass == [True]
    model[2].requires_grad_(False)
    model(x)  # made in vain
    model(x)
    assert one_pass == [True, True]


def test_other_shapes_are_learned_anew(one_pass):
    model = compressed(followed(nn.GELU()), layers=CODES)
    for rows in (6, 6, 7, 7, 6):
        model(normal((rows, 8))).sum().backward()
    assert one_pass == [True, True, True]


@pytest.mark.parametrize("activation", [nn.GELU(), nn.ReLU(), *IN_PLACE], ids=str)
def test_in_one_pass_or_not_the_draws_are_the_same(backend, activation):
    """A resumed training, whose first forward has no such pass, therefore continues as if never stopped."""
    torch.manual_seed(0)
    model = nn.Sequential(*(followed(copy.deepcopy(activation)) for _ in range(2)))
    compressed(model.to(backend.device))
    x = normal((6, 8)).to(backend.device)

    def gradients():
        torch.manual_seed(1)
        model.zero_grad()
        model(x).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    for one, other in zip(gradients(), gradients(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("function", [
    lambda x, y: torch.nn.functional.scaled_dot_product_attention(x, y, y),
    lambda x, y: fewbit.functional.swiglu(x, y),
    lambda x, y: fewbit.functional.bilinear(x, y, torch.ones(3, 16, 16)),
], ids=["attention", "swiglu", "bilinear"])  # fmt: skip
@pytest.mark.parametrize("last", [nn.Identity(), nn.LayerNorm(16), nn.RMSNorm(16)], ids=str)
def test_factors_of_one_product_are_rounded_apart(function, last):
    """Otherwise the square of a rounding error would bias the gradient."""

    def forward(model, x):
        x = model.before(x)
        return function(x, x)

    model = Composed(forward, before=nn.Sequential(nn.Linear(8, 16), copy.deepcopy(last)))
    fewbit.compress_(model, bits=2, layers={"attention_bits": 2}, verbose=False)
    x = normal((2, 3, 7, 8))
    codes = [tensor for tensor in saved_by(model, x)[1] if tensor.dtype == torch.int32]
    of_factors = [tensor for tensor in codes if tensor.numel() == codes[-1].numel()]
    assert len(of_factors) >= 2
    for i, factor in enumerate(of_factors):
        assert not any(torch.equal(factor, other) for other in of_factors[:i])
