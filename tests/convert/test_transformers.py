"""Modules of transformers that save quantized tensors."""

import copy
import pickle

import pytest
import torch
from layers import bytes_by, gradients, relative
from modeling import of
from samples import normal
from torch import nn

pytest.importorskip("transformers")

from quantized import quantized_bytes
from transformers.activations import ACT2FN, NewGELUActivation
from transformers.pytorch_utils import Conv1D

import fewbit
from fewbit.convert.transformers_modules import becomes, is_adapted
from fewbit.nn.base import Quantized
from fewbit.runtime.format.encoding import packed_words
from fewbit.runtime.quantizers.quantizer import Quantizer

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch.*",
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:Dynamo detected a call to a `functools",
    "ignore:.*is deprecated and will be removed in v6:FutureWarning",
)
WIDTH = 96


def convert(model, bits=8):
    """Convert modules as the converter does; return the names of their classes."""
    quantizer = Quantizer(bits)
    found = []
    for module in model.modules():
        cls = becomes(module)
        if cls is not None:
            found.append(type(module).__name__)
            module.__class__, module.quantizer = cls, quantizer
    return found


def batch(dtype=torch.float32, device="cpu"):
    return normal((2, 7, WIDTH), dtype, device, scale=1.0, seed=1).requires_grad_()


# -- modules ---------------------------------------------------------------------------------------


def mlp_config(act="silu"):
    return of("llama", "LlamaConfig")(hidden_size=WIDTH, intermediate_size=64, hidden_act=act)


def t5_config(act="gated-gelu"):
    return of("t5", "T5Config")(d_model=WIDTH, d_ff=64, feed_forward_proj=act, dropout_rate=0.0)


NORMS = {
    "llama": lambda: of("llama", "LlamaRMSNorm")(WIDTH),
    "mistral": lambda: of("mistral", "MistralRMSNorm")(WIDTH, eps=1e-3),
    "gemma": lambda: of("gemma", "GemmaRMSNorm")(WIDTH),
    "t5": lambda: of("t5", "T5LayerNorm")(WIDTH),
    "olmo2": lambda: of("olmo2", "Olmo2RMSNorm")(WIDTH),
    "helium": lambda: of("helium", "HeliumRMSNorm")(WIDTH),
    "moshi": lambda: of("moshi", "MoshiRMSNorm")(WIDTH),
    "llama4": lambda: of("llama4", "Llama4TextRMSNorm")(WIDTH),
    "unweighted": lambda: of("nanochat", "NanoChatRMSNorm")(),
}
UNITS = {
    "llama": lambda: of("llama", "LlamaMLP")(mlp_config()),
    "mistral": lambda: of("mistral", "MistralMLP")(mlp_config("gelu")),
    "gemma": lambda: of("llama", "LlamaMLP")(mlp_config("gelu_pytorch_tanh")),
    "new gelu": lambda: of("llama", "LlamaMLP")(mlp_config("gelu_new")),
    "relu": lambda: of("llama", "LlamaMLP")(mlp_config("relu")),
    "t5": lambda: of("t5", "T5DenseGatedActDense")(t5_config()),
    "long t5": lambda: of("longt5", "LongT5DenseGatedActDense")(t5_config("gated-silu")),
}


def unit(name, cls, config, **options):
    """Return a function that makes a unit of the usual sizes."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, **options}
    return lambda: of(name, cls)(of(name, config)(**sizes))


OTHER_UNITS = {
    "unit phi3": unit("phi3", "Phi3MLP", "Phi3Config", pad_token_id=0),
    "unit modernbert": unit("modernbert", "ModernBertMLP", "ModernBertConfig"),
    "unit t5gemma": unit("t5gemma", "T5GemmaMLP", "T5GemmaModuleConfig", dropout_rate=0.0),
}
"""Units whose linear layers have other shapes, so that they save other bytes."""
MODULES = {
    "conv1d": lambda: Conv1D(40, WIDTH),
    **{f"norm {name}": make for name, make in NORMS.items()},
    **{f"unit {name}": make for name, make in UNITS.items()},
    **OTHER_UNITS,
}


@pytest.fixture(params=MODULES)
def module(request):
    torch.manual_seed(0)
    return randomized(MODULES[request.param]())


def randomized(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return module.train()


def check(module, x, within=0.02):
    y, grads = gradients(module, x)
    assert convert(module)
    ours, our_grads = gradients(module, x)
    assert torch.equal(ours, y) and ours.dtype == y.dtype and ours.stride() == y.stride()
    for a, b in zip(our_grads, grads, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert relative(a, b) < within


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("shape", [(5, WIDTH), (2, 7, WIDTH)])
def test_against_the_original(device, module, shape, precision):
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    x = normal(shape, dtype, device, scale=1.0, seed=1).requires_grad_()
    with torch.autocast(device, torch.bfloat16, enabled=precision == "autocast"):
        check(module.to(device, dtype), x, within=0.02 if precision == "float32" else 0.03)


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_other_dtypes(device, name):
    """The input is 16-bit with a float32 weight, or float64, which some norms compute in float32."""
    for dtype, of_weight in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float64, torch.float64),
    ):
        torch.manual_seed(0)
        module = randomized(NORMS[name]()).to(device, of_weight)
        check(module, batch(dtype, device), within=0.03)


def expected_bytes(name, x, bits=2):
    """Return the bytes that a converted module saves; linear layers inside are torch's."""
    if name == "conv1d":
        return quantized_bytes(x.shape, bits)
    if name.startswith("norm"):
        return quantized_bytes(x.shape, bits) + 4 * 2 * 7
    expected = 4 * x.numel() + 4 * 14 * 64 + 2 * quantized_bytes((2, 7, 64), 2)
    return expected + 4 * packed_words(14 * 64, 1) * (name == "unit relu")


@pytest.mark.parametrize("name", [name for name in MODULES if name not in OTHER_UNITS])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_saved_bytes(name, is_frozen):
    is_unit = name.startswith("unit")
    module = randomized(MODULES[name]()).requires_grad_(is_unit or not is_frozen)
    convert(module, 2)
    x = batch()
    expected = 0 if is_frozen and name == "conv1d" else expected_bytes(name, x)
    assert bytes_by(module, x) == expected
    if not is_unit and (is_frozen or not list(module.parameters())):
        assert not bytes_by(module, x.detach())


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_offers_its_copy_to_the_next_layer(name):
    """A linear layer after a norm uses the norm's copy and no other."""
    model, x = nn.Sequential(randomized(NORMS[name]()), nn.Linear(WIDTH, 10)), batch()
    y, exact = gradients(model, x)
    fewbit.compress_(model, 8, verbose=False)
    found_y, found = gradients(model, x)
    of_weight = 4 * WIDTH if name == "gemma" else 0  # 1 + weight
    assert torch.equal(found_y, y)
    assert all(relative(a, b) < 0.02 for a, b in zip(found, exact, strict=True))
    assert bytes_by(model, x) == expected_bytes(f"norm {name}", x, 8) + of_weight


def test_activations_that_are_not_known_stay():
    module, x = randomized(of("llama", "LlamaMLP")(mlp_config("quick_gelu"))), batch()
    before = module(x), bytes_by(module, x)
    convert(module, 2)
    assert torch.equal(module(x), before[0]) and bytes_by(module, x) == before[1]


def test_hooks_of_an_activation_run():
    module = randomized(of("llama", "LlamaMLP")(mlp_config()))
    convert(module, 2)
    seen = []
    module.act_fn.register_forward_hook(lambda *_: seen.append(1))
    module(normal((7, WIDTH), seed=1))
    assert seen


def test_few_bit_activations_within_units():
    """The converter may have replaced the activation before."""
    module, plain = (randomized(of("llama", "LlamaMLP")(mlp_config())) for _ in range(2))
    module.act_fn = fewbit.SiLU(bits=2)
    plain.load_state_dict(module.state_dict())
    convert(module, 8)
    (y, ours), (expected, theirs) = gradients(module, batch()), gradients(plain, batch())
    assert torch.equal(y, expected)
    assert all(relative(a, b) < 0.02 for a, b in zip(ours, theirs, strict=True))


def test_what_is_not_known():
    class Other(of("llama", "LlamaRMSNorm")):
        pass

    class Changed(of("llama", "LlamaRMSNorm")):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    Changed.__module__ = "transformers.models.llama.modeling_llama"
    for module in (nn.Linear(2, 2), NewGELUActivation(), Other(4), Changed(4), ACT2FN["silu"]):
        assert becomes(module) is None and not is_adapted(type(module))


@pytest.mark.parametrize(("name", "other"), [("gemma", "variance_epsilon"), ("llama", "eps")])
def test_norms_read_their_own_constant(name, other):
    ours, theirs = randomized(NORMS[name]()), randomized(NORMS[name]())
    theirs.load_state_dict(ours.state_dict())
    setattr(ours, other, 0.5)
    assert convert(ours)
    assert torch.equal(ours(batch()), theirs(batch()))


def test_unweighted_norms_ignore_a_weight():
    ours, theirs = NORMS["unweighted"](), NORMS["unweighted"]()
    ours.weight = nn.Parameter(torch.full((WIDTH,), 7.0), requires_grad=False)
    assert convert(ours)
    (y, (grad,)), (expected, (exact,)) = gradients(ours, batch()), gradients(theirs, batch())
    assert torch.equal(y, expected) and relative(grad, exact) < 0.02


def test_norms_without_their_attributes_are_left_alone():
    norm = NORMS["llama"]()
    norm.eps = vars(norm).pop("variance_epsilon")
    (row,) = fewbit.compress_(nn.Sequential(norm), 4, verbose=False).report.left_alone
    assert row.reason == "it has no attribute 'variance_epsilon', which its forward reads"


def test_eval_and_no_grad_are_the_originals(module):
    x = batch()
    before, size = module.eval()(x), bytes_by(module, x)
    convert(module, 2)
    assert torch.equal(module(x), before) and bytes_by(module, x) == size
    with torch.no_grad():
        assert torch.equal(module.train()(x), before)


def test_classes(module):
    cls, keys = type(module), list(module.state_dict())
    convert(module, 3)
    assert isinstance(module, cls) and isinstance(module, Quantized)
    assert type(module).__name__ == cls.__name__ and type(module).__module__.startswith("fewbit.")
    assert becomes(module) is None and type(module).original is cls
    assert list(module.state_dict()) == keys
    for again in (copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))):
        assert type(again) is type(module) and again.quantizer.bits == 3
        assert torch.equal(again(batch()), module(batch()))
    module.__class__ = type(module).original
    assert becomes(module) is type(again)
