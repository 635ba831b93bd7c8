"""fewbit.checkpoint: exact forward passes, regions that are computed again from quantized inputs, and the bytes they save."""

import copy
import math
from collections import OrderedDict, defaultdict
from functools import partial

import pytest
import tiny_models
import torch
from composed import Composed
from layers import bytes_by, relative, saved_by
from quantized import quantized_bytes
from samples import normal, same
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM
from transformers.models.t5.modeling_t5 import T5ForConditionalGeneration

import fewbit
from fewbit.errors import InputError

WIDTH = 64


def block(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(4 * WIDTH, WIDTH),
    )


def through(blocks, x, checkpoint):
    """Return the result of residual blocks that are regions of `checkpoint`."""
    for body in blocks:
        x = x + checkpoint(body, x)
    return x


def residual(checkpoint, *blocks):
    """Return a model of such blocks."""
    return Composed(
        lambda model, x: through(model.blocks, x, checkpoint), blocks=nn.ModuleList(blocks)
    )


def trained(checkpoint, blocks, x):
    """Return (the result, the gradients) of residual blocks that are regions of `checkpoint`."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    y = through(blocks, x, checkpoint)
    y.square().mean().backward()
    found = [x.grad, *(weight.grad for each in blocks for weight in each.parameters())]
    return y.detach(), found


def exact(function, *args):
    return torch_checkpoint(function, *args, use_reentrant=False)


def few(bits):
    return lambda function, *args: fewbit.checkpoint(function, *args, bits=bits)


@pytest.mark.parametrize(
    "bits, least, most, times_less", [(8, 1e-4, 0.01, 3.5), (4, 0.01, 0.1, 7), (2, 0.04, 0.4, 12)]
)
def test_eight_regions(device, bits, least, most, times_less):
    """The forward pass is exact, gradients have the error of docs/concepts/layers.md, and the inputs of regions take few bits."""
    blocks = [block().to(device) for _ in range(8)]
    x = normal((8, 16, WIDTH), device=device, scale=1.0)
    y, wanted = trained(exact, copy.deepcopy(blocks), x)
    found_y, found = trained(few(bits), copy.deepcopy(blocks), x)
    assert same(found_y, y)
    found, wanted = (torch.cat([g.flatten() for g in gradient]) for gradient in (found, wanted))
    assert least < relative(found, wanted) < most  # the recomputation starts from rounded inputs

    def kept(checkpoint):
        return fewbit.saved_bytes(through, blocks, x.clone().requires_grad_(), checkpoint).total

    assert kept(exact) == 8 * 4 * x.numel()
    assert kept(few(bits)) * times_less <= kept(exact)
    for dtype in (torch.float32, torch.bfloat16):  # nothing else than the quantized input
        model, one = copy.deepcopy(blocks[0]).to(dtype), x.to(dtype).requires_grad_()
        found = bytes_by(lambda one, model=model: fewbit.checkpoint(model, one, bits=bits), one)
        assert found == quantized_bytes(x.shape, bits)


def test_the_input_is_freed():
    """The object that autograd holds has no reference to the input itself."""
    import weakref

    model = block()
    x = normal((8, 16, WIDTH)).requires_grad_()
    middle = x * 2
    reference = weakref.ref(middle)
    y = fewbit.checkpoint(model, middle).sum()
    del middle
    assert reference() is None
    y.backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("container", [list, tuple, lambda args: {"x": args[0]}, None])
def test_dropout_is_drawn_again(device, container):
    """With 8 bits and one mask, a gradient of dropout's input is 0 exactly at the elements that were dropped."""
    torch.manual_seed(0)
    x = normal((64, WIDTH), device=device, scale=1.0).requires_grad_()

    def region(x):
        while not isinstance(x, torch.Tensor):
            x = next(iter(x.values() if isinstance(x, dict) else x))
        return nn.functional.dropout(x.sin(), 0.5)

    y = fewbit.checkpoint(region, x if container is None else container([x]))
    y.sum().backward()
    assert torch.equal(x.grad == 0, y == 0)


def test_other_arguments(device):
    """Small tensors, integers, parameters, containers and keyword arguments are as they were."""
    weight = nn.Parameter(normal((WIDTH, WIDTH), device=device))
    index, x = (
        torch.arange(2000, device=device) % WIDTH,
        normal((WIDTH, WIDTH), device=device).requires_grad_(),
    )
    small = normal((5,), device=device)
    seen = []

    def region(x, weight, index, small, pair, *, scale):
        seen.append((weight, index, small, pair, scale))
        return (x @ weight)[:, index % WIDTH].sum() * scale + pair[0].sum() * small.sum()

    pair = (normal((2000,), device=device), "text")
    fewbit.checkpoint(region, x, weight, index, small, pair, scale=3.0).backward()
    first, again = seen
    for one, other in zip(first[:3], again[:3], strict=True):
        assert same(one.detach(), other.detach())
    assert again[3] is pair and again[4] == 3.0
    assert weight.grad is not None and x.grad is not None


@pytest.mark.parametrize("order", [(2, 0, 1), (1, 0, 2), (2, 1, 0)], ids=str)
def test_restored_inputs_have_the_strides_of_the_input(order):
    """The region views its input as a vector, which only these strides allow."""
    x = normal((8, 16, WIDTH), scale=1.0).requires_grad_()
    back = [order.index(dim) for dim in range(3)]
    fewbit.checkpoint(
        lambda y: y.permute(back).view(-1).sin().sum(), (x * 1).permute(order)
    ).backward()
    assert relative(x.grad, x.detach().cos()) < 0.01


@pytest.mark.parametrize("as_image", [False, True])
def test_channels_of_the_input_have_means_and_scales(as_image):
    """Small channels have small errors beside large ones, although all have a mean that is 30 times their spread."""
    x = (normal((300, 64), scale=1.0) + 30) * torch.logspace(0, 2, 64)
    if as_image:
        x = x.view(3, 10, 10, 64).permute(0, 3, 1, 2)
    seen = []

    def region(x):
        seen.append(x.detach())
        return x.sin()

    fewbit.checkpoint(region, x.requires_grad_(), bits=4).sum().backward()
    dims = (0, 2, 3) if as_image else (0,)
    error = (seen[1] - seen[0]).square().mean(dims).sqrt()
    assert (error < seen[0].std(dims).sqrt()).all()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_a_sparse_argument(layout):
    x = normal((WIDTH, WIDTH), scale=1.0).requires_grad_()
    matrix = normal((WIDTH, WIDTH), seed=3).relu()
    sparse = matrix.to_sparse(layout=layout)
    fewbit.checkpoint(lambda x, sparse: sparse @ x.sin(), x, sparse).sum().backward()
    assert relative(x.grad, (matrix.T @ torch.ones(WIDTH, WIDTH)) * x.detach().cos()) < 0.03


def test_without_gradients_nothing_is_saved():
    model, x = block(), normal((16, WIDTH))
    with torch.no_grad():
        assert same(fewbit.checkpoint(model, x), model(x))
    x.requires_grad_()
    _, saved = saved_by(lambda x: fewbit.checkpoint(lambda x: x.detach() * 2, x), x)
    assert all(each.dtype != torch.float32 or each.numel() < x.numel() for each in saved)


def test_inside_a_converted_model():
    """Seeds come from the forward pass, so dropout draws the masks that it draws in the exact model."""
    x = normal((8, 16, WIDTH), scale=1.0)
    model = residual(fewbit.checkpoint, *(block(0.1) for _ in range(3)))
    fewbit.compress_(model, bits=4, verbose=False)
    torch.manual_seed(3)
    y = model(x)
    y.square().mean().backward()
    fewbit.restore_(model)
    torch.manual_seed(3)
    expected = through(model.blocks, x, lambda body, x: body(x))
    torch.testing.assert_close(y, expected)
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inner", ["model", "part"])
def test_dropout_after_a_model_in_a_region(reentrant, inner):
    """The model draws a number for its seeds in both runs of the region, so what follows draws the same numbers."""
    masks = []

    def region(x):
        y = body(x)
        mask = nn.functional.dropout(torch.ones_like(y), 0.5)
        masks.append(mask.detach())
        return y * mask

    model = nn.Sequential(block(), nn.Linear(WIDTH, WIDTH))
    body = model if inner == "model" else model[0]
    fewbit.compress_(model, 8, verbose=False)
    x = normal((4, 8, WIDTH), scale=1.0).requires_grad_()
    torch_checkpoint(region, x, use_reentrant=reentrant).sum().backward()
    assert len(masks) == 2 and torch.equal(*masks)


CHAINS = {  # layers whose results are computed again from a copy that an earlier layer has saved
    "relu": lambda: [
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.ReLU(),
    ],
    "gelu": lambda: [nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Conv2d(4, 4, 3)],
    "dropout": lambda: [nn.BatchNorm2d(4), nn.GELU(), nn.Dropout(0.1), nn.Conv2d(4, 4, 3)],
    "padding": lambda: [nn.BatchNorm2d(4), nn.ReLU(), nn.ZeroPad2d(1), nn.Conv2d(4, 4, 3)],
}


@pytest.mark.parametrize("region", [exact, few(8)], ids=["torch", "fewbit"])
@pytest.mark.parametrize("name", CHAINS)
def test_a_forward_that_is_a_region(name, region):
    """The second run calls the layers one by one, outside of any call of the model, and saves the same tensors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(*CHAINS[name]()))
    x, found = normal((4, 3, 16, 16), scale=1.0), []
    for bits in (None, 8):
        if bits is not None:
            fewbit.compress_(model, bits, verbose=False)
            model[1].forward = partial(region, model[1].forward)
        model.zero_grad()
        torch.manual_seed(1)
        model(x).square().sum().backward()
        found.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    assert relative(found[1], found[0]) < 0.05


REFUSED = [  # (function, its options, the message)
    *((block(), options, "expected .*, got") for options in ({"bits": 0}, {"bits": 9}, {"group_size": 33})),
    (block(), {"use_reentrant": True}, "no gradients; use torc"),
    (3, {}, "function: expected a function or module, got int"),
]  # fmt: skip
REFUSED_MODELS = [
    (None, {"use_reentrant": True}, "expected False, got True"),
    (None, {"determinism_check": "all"}, "expected 'default' or 'none', got"),
    (None, {"early": True}, "expected arguments among use_reentrant, .*, got early"),
    (None, {"offload": 1}, "offload: expected True or False, got 1"),
    (None, {"offload": True, "bits": None}, "offload: expected bits from 1 to 8 with it, got None"),
    (None, {"include": "layers"}, "include: expected a glob that matches a module, got 'layers'"),
    (None, {"include": 3}, "include: expected a glob or several, got 3"),
    (
        None,
        {"include": "model.layers"},
        "include: .* a ModuleList; name its parts, as 'model.layers.\\*'",
    ),
    (None, {"bits": 9}, "1 to 8"),
    (nn.Linear(2, 2), {}, "supports gradient checkpointing, got Linear"),
]


def test_refusals():
    """A model is refused before it changes."""
    x = normal((16, WIDTH)).requires_grad_()
    for function, options, message in REFUSED:
        with pytest.raises(InputError, match=message):
            fewbit.checkpoint(function, x, **options)
        with torch.no_grad(), pytest.raises(InputError, match=message):
            fewbit.checkpoint(function, x, **options)
    llama = LlamaForCausalLM(tiny_models.llama())
    for model, options, message in REFUSED_MODELS:
        with pytest.raises(InputError, match=message):
            fewbit.checkpoint_(model or llama, **options)
    assert not any(getattr(module, "gradient_checkpointing", False) for module in llama.modules())


@pytest.mark.parametrize("value", [-math.inf, -1e9])
def test_a_mask_is_saved_as_it_is(value):
    """A quantized mask would have large errors, and -inf has no quantized copy."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True)
    mask = torch.full((64, 64), value).triu(1)
    gradients = []
    for run in (lambda f, *args: f(*args), fewbit.checkpoint):
        layer.zero_grad()
        x = normal((4, 64, 64), seed=1).requires_grad_()
        run(lambda x, mask: layer(x, src_mask=mask), x, mask).square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in layer.parameters()]))
    exact, found = gradients
    assert (found - exact).norm() < 0.05 * exact.norm()


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("compresses", [False, True])
def test_a_model_of_transformers(compresses):
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_models.llama()).train()
    ids = torch.randint(100, (4, 32))

    def gradient(model):
        model.zero_grad()
        model(ids, use_cache=False).logits.square().mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    def inputs_of_layers(model):
        entries = fewbit.saved_bytes(model, ids, use_cache=False).entries
        return sum(entry.bytes for entry in entries if entry.module.startswith("model.layers."))

    model.gradient_checkpointing_enable()
    exact, before = gradient(model), inputs_of_layers(model)
    fewbit.checkpoint_(model, bits=8)
    if compresses:
        fewbit.compress_(model, bits=8, layers={"activation_bits": 8}, verbose=False)
    error = (gradient(model) - exact).norm() / exact.norm()
    assert 0 < error < 0.03
    assert inputs_of_layers(model) * 3.5 < before
    model.gradient_checkpointing_disable()
    fewbit.restore_(model)
    assert torch.equal(gradient(model), exact)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    "experts, compresses", [("grouped_mm", False), ("eager", False), ("eager", True)]
)
def test_a_model_with_routers(experts, compresses):
    """The second run sends each token to the experts of the first run, so experts and routers have the errors of other layers."""
    torch.manual_seed(0)
    config = tiny_models.mixtral()
    config._experts_implementation = experts
    model, ids = MixtralForCausalLM(config).train(), torch.randint(100, (4, 32))

    def gradients():
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    exact = gradients()
    fewbit.checkpoint_(model, bits=8)
    if compresses:
        layers = {"activation_bits": 8, "attention_bits": 8}
        fewbit.compress_(model, bits=8, layers=layers, verbose=False)
    found = gradients()
    for part in ("experts", "mlp.gate.", "self_attn"):
        names = [name for name in exact if part in name]
        one, other = (torch.cat([g[name].flatten() for name in names]) for g in (found, exact))
        assert 0 < relative(one, other) < 0.02


def plain_gradients(run):
    model, x = nn.Linear(WIDTH, WIDTH), normal((WIDTH, WIDTH)).requires_grad_()
    run(model, x).sum().backward()
    return model.weight.grad, x.grad


def test_hooks_on_what_a_policy_saves(monkeypatch):
    """Torch 2.14 and newer ask whether such tensors pass through hooks; fewbit's meter has to see them."""
    seen = []

    def newer(function, *args, respect_saved_tensors_hooks=None, **options):
        seen.append(respect_saved_tensors_hooks)
        return torch_checkpoint(function, *args, **options)

    monkeypatch.setattr("fewbit.checkpointing.torch_checkpoint", newer)
    monkeypatch.setattr("fewbit.checkpointing._HAS_HOOKS", True)
    for choice in (None, True, False):
        plain_gradients(partial(fewbit.checkpoint, respect_saved_tensors_hooks=choice))
    assert seen == [True, True, False]
    monkeypatch.undo()
    monkeypatch.setattr("fewbit.checkpointing._HAS_HOOKS", False)
    options = {"determinism_check": "default", "early_stop": False, "debug": False}
    for use_reentrant in (False, None):
        options |= {"use_reentrant": use_reentrant, "respect_saved_tensors_hooks": False}
        weight, x = plain_gradients(partial(fewbit.checkpoint, **options))
        assert weight.norm() > 0 and x.norm() > 0
    with pytest.raises(InputError, match="expected None or False .* needs torch 2.14"):
        plain_gradients(partial(fewbit.checkpoint, respect_saved_tensors_hooks=True))


@pytest.mark.parametrize("number", [0, 1, 2], ids=["fewbit", "torch", "reentrant"])
@pytest.mark.parametrize("as_function", [False, True])
def test_a_region_is_differentiated_twice(number, as_function):
    """With 2 bits, new codes would change the gradients. The layers of all three kinds of regions draw the same codes again."""
    run = (
        fewbit.checkpoint,
        partial(torch_checkpoint, use_reentrant=False),
        partial(torch_checkpoint, use_reentrant=True),
    )[number]

    def region(body, x):
        return run((lambda x: body(x)) if as_function else body, x)

    model = residual(region, block(0.1), block(0.1))
    x = normal((16, WIDTH), scale=1.0).requires_grad_()
    fewbit.compress_(model, bits=2, verbose=False)
    loss, gradients = model(x * 1).square().sum(), []
    for _ in range(2):
        model.zero_grad()
        x.grad = None
        loss.backward(retain_graph=True)
        gradients.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(same(one, other) for one, other in zip(*gradients, strict=True))


# -- Regions of any model -------------------------------------------------------------------------------------


def encoder(dropout=0.1):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).train()


def gradient_of(model, *args, **kwargs):
    model.zero_grad()
    torch.manual_seed(3)
    output = model(*args, **kwargs)
    output.square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_named_regions(device):
    """Each call changes the modules that it names; the gradients are those of torch's function, or close to them."""
    model, x = encoder().to(device), normal((8, 16, WIDTH), device=device, scale=1.0)
    exact = gradient_of(model, x)
    keys = set(model.state_dict())
    fewbit.checkpoint_(model, None, include="layers.*")
    assert torch.equal(gradient_of(model, x), exact)
    assert fewbit.saved_bytes(model, x).total == 4 * x.nbytes
    fewbit.checkpoint_(model, 8, include=["layers.1", "layers.2"])
    assert 0 < relative(gradient_of(model, x), exact) < 0.1
    expected = 2 * x.nbytes + 2 * quantized_bytes(x.shape, 8)
    assert fewbit.saved_bytes(model, x).total == expected
    assert set(model.state_dict()) == keys
    twin = copy.deepcopy(model)
    assert torch.equal(gradient_of(twin, x), gradient_of(model, x))
    assert twin.layers[0].forward.module is twin.layers[0]
    fewbit.compress_(model, 8, verbose=False)
    assert fewbit.saved_bytes(model, x).total == expected
    with torch.no_grad():
        model(x)
    fewbit.restore_(model)
    fewbit.uncheckpoint_(model)
    assert torch.equal(gradient_of(model, x), exact)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_forward_of_its_own_comes_back():
    """A module whose forward is an attribute runs this forward in the region, and has it again afterwards."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    own = model[1].forward = lambda x: nn.functional.linear(x, model[1].weight).sin()
    x = normal((32, WIDTH))
    y = model(x)
    for bits in (8, None):
        fewbit.checkpoint_(model, bits, include="1")
        assert torch.equal(model(x), y)
    fewbit.uncheckpoint_(model)
    assert vars(model[1])["forward"] is own


def test_keyword_arguments_are_quantized():
    """A region that gets its input by name saves it with few bits, and masks as they are."""

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.body = nn.Linear(WIDTH, WIDTH), Inner()

        def forward(self, x, mask):
            return self.body(hidden=self.first(x), mask=mask)

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, hidden, mask):
            return self.linear(hidden * mask).sin()

    torch.manual_seed(0)
    model, x, mask = Named(), normal((64, WIDTH)), torch.ones(64, 1)
    exact = gradient_of(model, x, mask)
    fewbit.checkpoint_(model, 8, include="body")
    assert 0 < relative(gradient_of(model, x, mask), exact) < 0.02
    found = fewbit.saved_bytes(model, x, mask)
    kept = sum(entry.bytes for entry in found.entries if entry.kind != "input")
    assert kept == quantized_bytes((64, WIDTH), 8)


def test_named_layers_of_transformers():
    """One layer is a region; a model that keeps its cache trains, and the other layer is as before."""
    torch.manual_seed(0)
    model, ids = LlamaForCausalLM(tiny_models.llama()).train(), torch.randint(100, (4, 32))

    def run():
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    exact, before = run(), fewbit.saved_bytes(model, ids).total
    fewbit.checkpoint_(model, 8, include="model.layers.1")
    assert 0 < relative(run(), exact) < 0.02
    assert fewbit.saved_bytes(model, ids).total < 0.6 * before
    fewbit.uncheckpoint_(model)
    assert torch.equal(run(), exact)
    assert fewbit.saved_bytes(model, ids).total == before


@pytest.mark.parametrize("name", ["t5", "llama"])
def test_undone_models_of_transformers_run_as_before(name):
    """T5's modules read in each forward pass an attribute that their __init__ has set."""
    classes = {"t5": T5ForConditionalGeneration, "llama": LlamaForCausalLM}
    torch.manual_seed(0)
    model = classes[name](getattr(tiny_models, name)()).train()
    ids = torch.arange(8)[None] % 16
    run = partial(model, input_ids=ids, labels=ids)
    before = run().loss.detach()
    fewbit.checkpoint_(model)
    fewbit.uncheckpoint_(model)
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert torch.equal(run().loss, before)


def test_replicas_of_data_parallel_run_with_their_own_weights():
    """`torch.nn.DataParallel` replicates each module by the method that is called here, and gives replicas other weights."""
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH)).train(), normal((32, WIDTH)).requires_grad_()
    fewbit.checkpoint_(model, 8, include="0")
    fewbit.checkpoint_(model, 4, include="0")
    replica = model[0]._replicate_for_data_parallel()
    replica.weight = torch.zeros(WIDTH, WIDTH, requires_grad=True)
    replica.bias = torch.ones(WIDTH)
    y = replica(x)
    assert torch.equal(y, torch.ones_like(y))
    y.sum().backward()
    assert replica.weight.grad is not None and model[0].weight.grad is None
    fewbit.uncheckpoint_(model)
    assert "forward" not in vars(model[0]) and "_replicate_for_data_parallel" not in vars(model[0])


def test_replicas_of_modules_with_a_forward_of_another_library_are_refused():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    model[0].forward = lambda x: x
    fewbit.checkpoint_(model, 8, include="0")
    with pytest.raises(InputError, match="use DistributedDataParallel") as error:
        model[0]._replicate_for_data_parallel()
    assert "\n" not in str(error.value)


class Dense(nn.Module):
    """A network whose blocks get the list of all results so far, which grows after each block."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(64 * (number + 1), 64) for number in range(3)])
        for block in self.blocks:
            block.forward = lambda features, own=block: nn.functional.linear(
                torch.cat(features, -1), own.weight, own.bias
            )

    def forward(self, x):
        features = [x]
        for block in self.blocks:
            features.append(block(features))
        return features[-1]


@pytest.mark.parametrize("bits", [None, 8])
def test_a_list_that_grows_after_the_region(bits):
    """The second run gets the list as it was, in each of two backward passes."""
    torch.manual_seed(0)
    model, x = Dense().train(), torch.randn(32, 64)
    parameters = list(model.parameters())
    exact = torch.autograd.grad(model(x).square().sum(), parameters)
    fewbit.checkpoint_(model, bits, include="blocks.*")
    y = model(x).square().sum()
    for _ in range(2):
        found = torch.autograd.grad(y, parameters, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize("bits", [None, 8])
def test_containers_inside_of_containers_come_back(bits):
    """The region changes its own dict and list; the caller sees this once, and the second run does the same again."""
    weight = torch.randn(8, 8, requires_grad=True)
    inputs = {"seen": [], "pair": (torch.ones(8), [torch.ones(8)])}

    def region(x, state):
        state["seen"].append(len(state["seen"]))
        state["pair"][1].append(x)
        return (x * weight * sum(state["pair"][1])).sum()

    y = fewbit.checkpoint(region, torch.ones(8, 8), inputs, bits=bits)
    assert inputs["seen"] == [0] and len(inputs["pair"][1]) == 2
    (found,) = torch.autograd.grad(y, weight)
    assert torch.equal(found, torch.full((8, 8), 2.0))
    assert inputs["seen"] == [0] and len(inputs["pair"][1]) == 2


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("kind", [list, OrderedDict, partial(defaultdict, float)])
def test_a_container_that_is_passed_twice_stays_one(kind, bits):
    weight = torch.randn(8, requires_grad=True)

    def region(x, written, read):
        if isinstance(written, list):
            written.append(x)
        else:
            written[0] = x
        return (weight * read[0] * len(read)).sum()

    shared = kind()
    y = fewbit.checkpoint(region, torch.full((8,), 3.0), shared, shared, bits=bits)
    (found,) = torch.autograd.grad(y, weight)
    assert torch.equal(found, torch.full((8,), 3.0)) and len(shared) == 1
