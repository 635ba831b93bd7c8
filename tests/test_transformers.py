"""Modules and attention of transformers that keep quantised tensors, in tiny random models."""

import copy
import gc
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from samples import normal
from torch import nn

pytest.importorskip("transformers")

import tiny_models
from transformers.activations import ACT2FN, NewGELUActivation
from transformers.models.bert.modeling_bert import BertModel
from transformers.models.gemma.configuration_gemma import GemmaConfig
from transformers.models.gemma.modeling_gemma import GemmaForCausalLM, GemmaRMSNorm
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel
from transformers.models.helium.modeling_helium import HeliumRMSNorm
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP, LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextRMSNorm
from transformers.models.longt5.modeling_longt5 import LongT5DenseGatedActDense
from transformers.models.mistral.modeling_mistral import MistralMLP, MistralRMSNorm
from transformers.models.modernbert.modeling_modernbert import ModernBertMLP
from transformers.models.moshi.modeling_moshi import MoshiRMSNorm
from transformers.models.nanochat.modeling_nanochat import NanoChatRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.configuration_phi3 import Phi3Config
from transformers.models.phi3.modeling_phi3 import Phi3ForCausalLM, Phi3MLP
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM
from transformers.models.t5.configuration_t5 import T5Config
from transformers.models.t5.modeling_t5 import (
    T5DenseGatedActDense,
    T5ForConditionalGeneration,
    T5LayerNorm,
)
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaMLP
from transformers.models.vit.modeling_vit import ViTModel
from transformers.pytorch_utils import Conv1D

import fewbit
from fewbit.compress.transformers_attention import install, remove
from fewbit.compress.transformers_modules import becomes, original
from fewbit.errors import GradientError
from fewbit.nn.quantised import Quantised
from fewbit.runtime.encoding import packed_words
from fewbit.runtime.groups import quantised_bytes
from fewbit.runtime.quantiser import Quantiser
from fewbit.runtime.sharing import Session

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch.*",
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:Dynamo detected a call to a `functools",
    "ignore:.*is deprecated and will be removed in v6:FutureWarning",
)
WIDTH = 96


def convert(model, bits=8, session=None):
    """As the converter does it; the classes that were found."""
    quantiser = Quantiser(bits, session=session)
    found = []
    for module in model.modules():
        cls = becomes(module)
        if cls is not None:
            found.append(type(module).__name__)
            module.__class__, module.quantiser = cls, quantiser
    return found


def restore(model):
    for module in model.modules():
        cls = original(module)
        if cls is not None:
            module.__class__ = cls
            del module.quantiser


def off(ours, theirs):
    return float((ours - theirs).detach().double().norm() / theirs.detach().double().norm())


def kept_by(function, model):
    """The result, and the bytes kept that are no parameters, each storage once."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        y = function()
    own = {x.untyped_storage()._cdata for x in model.parameters()}
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in saved}
    return y, sum(size for storage, size in storages.items() if storage not in own)


# -- modules ---------------------------------------------------------------------------------------


def mlp_config(act="silu"):
    return LlamaConfig(hidden_size=WIDTH, intermediate_size=64, hidden_act=act)


def t5_config(act="gated-gelu"):
    return T5Config(d_model=WIDTH, d_ff=64, feed_forward_proj=act, dropout_rate=0.0)


NORMS = {
    "llama": lambda: LlamaRMSNorm(WIDTH),
    "mistral": lambda: MistralRMSNorm(WIDTH, eps=1e-3),
    "gemma": lambda: GemmaRMSNorm(WIDTH),
    "t5": lambda: T5LayerNorm(WIDTH),
    "olmo2": lambda: Olmo2RMSNorm(WIDTH),
    "helium": lambda: HeliumRMSNorm(WIDTH),
    "moshi": lambda: MoshiRMSNorm(WIDTH),
    "llama4": lambda: Llama4TextRMSNorm(WIDTH),
    "unweighted": lambda: NanoChatRMSNorm(),
}
UNITS = {
    "llama": lambda: LlamaMLP(mlp_config()),
    "mistral": lambda: MistralMLP(mlp_config("gelu")),
    "gemma": lambda: LlamaMLP(mlp_config("gelu_pytorch_tanh")),
    "new gelu": lambda: LlamaMLP(mlp_config("gelu_new")),
    "relu": lambda: LlamaMLP(mlp_config("relu")),
    "phi3": lambda: Phi3MLP(Phi3Config(hidden_size=WIDTH, intermediate_size=64, pad_token_id=0)),
    "t5": lambda: T5DenseGatedActDense(t5_config()),
    "long t5": lambda: LongT5DenseGatedActDense(t5_config("gated-silu")),
}
MODULES = {
    "conv1d": lambda: Conv1D(40, WIDTH),
    **{f"norm {name}": make for name, make in NORMS.items()},
    **{f"unit {name}": make for name, make in UNITS.items()},
}


@pytest.fixture(params=MODULES)
def module(request):
    torch.manual_seed(0)
    return randomised(MODULES[request.param]())


def randomised(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return module.train()


def step(module, x):
    y = module(x)
    wanted = [x, *module.parameters()]
    wanted = [each for each in wanted if each.requires_grad]
    grad = normal(y.shape, y.dtype, y.device, scale=1.0, seed=5)
    return y, torch.autograd.grad(y, wanted, grad)


def check(module, x, within=0.02):
    y, grads = step(module, x)
    assert convert(module)
    ours, our_grads = step(module, x)
    assert torch.equal(ours, y) and ours.dtype == y.dtype and ours.stride() == y.stride()
    for a, b in zip(our_grads, grads, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert off(a, b) < within


@pytest.mark.parametrize("shape", [(5, WIDTH), (2, 7, WIDTH)])
def test_against_the_original(device, module, shape):
    check(module.to(device), normal(shape, device=device, scale=1.0, seed=1).requires_grad_())


def test_in_bfloat16(device, module):
    x = normal((2, 7, WIDTH), torch.bfloat16, device, scale=1.0, seed=1).requires_grad_()
    check(module.to(device, torch.bfloat16), x, within=0.03)


def test_under_autocast(device, module):
    x = normal((2, 7, WIDTH), device=device, scale=1.0, seed=1).requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        check(module.to(device), x, within=0.03)


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_other_dtypes(device, name):
    """A 16-bit input to a float32 weight, and float64, which some compute in float32."""
    for dtype, of_weight in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float64, torch.float64),
    ):
        torch.manual_seed(0)
        module = randomised(NORMS[name]()).to(device, of_weight)
        x = normal((2, 7, WIDTH), dtype, device, scale=1.0, seed=1).requires_grad_()
        check(module, x, within=0.03)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("frozen", [False, True])
def test_norm_bytes(name, frozen):
    module = randomised(NORMS[name]()).requires_grad_(not frozen)
    convert(module, 2)
    x = normal((2, 7, WIDTH), scale=1.0, seed=1).requires_grad_()
    _, kept = kept_by(lambda: module(x), module)
    assert kept == quantised_bytes(x.shape, 2) + 4 * 2 * 7
    if frozen or not list(module.parameters()):
        _, kept = kept_by(lambda: module(x.detach()), module)
        assert not kept


@pytest.mark.parametrize("name", [name for name in UNITS if name != "phi3"])
def test_unit_bytes(name):
    """The linear layers are torch's here, and keep x and the product."""
    module = randomised(UNITS[name]())
    convert(module, 2)
    x = normal((2, 7, WIDTH), scale=1.0, seed=1).requires_grad_()
    _, kept = kept_by(lambda: module(x), module)
    expected = 4 * x.numel() + 4 * 14 * 64 + 2 * quantised_bytes((2, 7, 64), 2)
    if name == "relu":
        expected += 4 * packed_words(14 * 64, 1)
    assert kept == expected


def test_conv1d_bytes():
    module = Conv1D(40, WIDTH)
    convert(module, 2)
    x = normal((2, 7, WIDTH), scale=1.0, seed=1).requires_grad_()
    assert kept_by(lambda: module(x), module)[1] == quantised_bytes(x.shape, 2)
    module.weight.requires_grad_(False)
    assert kept_by(lambda: module(x), module)[1] == 0


def test_two_copies_of_a_norms_input():
    torch.manual_seed(0)
    module = randomised(LlamaRMSNorm(WIDTH))
    convert(module, 4)
    x = normal((1, 1, WIDTH), scale=1.0, seed=1)
    grad = normal(x.shape, scale=1.0, seed=2)
    y = x.clone().requires_grad_()
    (exact,) = torch.autograd.grad(LlamaRMSNorm.forward(module.eval(), y), y, grad)
    module.train()
    many = x.expand(20000, 1, -1).clone().requires_grad_()
    squares = []
    for copies in (1, 2):
        module.copies = copies
        _, kept = kept_by(lambda: module(x.clone().requires_grad_()), module)
        assert kept == copies * quantised_bytes(x.shape, 4) + 4
        (drawn,) = torch.autograd.grad(module(many), many, grad.expand_as(many))
        drawn = drawn.double()
        z = (drawn.mean(0) - exact[0]) / (drawn.std(0) / 20000**0.5)
        squares.append(float(z.square().mean()))
    assert squares[1] < 2 < squares[0]


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_offers_its_copy_to_the_next_layer(name):
    """A linear layer after a norm keeps the norm's copy and no other, exact in expectation."""
    from fewbit.functional.linear import linear

    module = randomised(NORMS[name]())
    session = Session()
    convert(module, 8, session)
    weight = normal((10, WIDTH), scale=1.0, seed=3).requires_grad_()
    x = normal((2, 7, WIDTH), scale=1.0, seed=1).requires_grad_()
    both = lambda x: (y := module(x), linear(y, weight, quantiser=module.quantiser))  # noqa: E731
    (y, z), kept = kept_by(lambda: session.call(module, both, (x,)), module)
    of_weight = 4 * weight.numel()  # for y's gradient
    assert kept <= quantised_bytes(x.shape, 8) + 4 * 14 + of_weight + 4 * WIDTH
    grad = normal(z.shape, scale=1.0, seed=4)
    ours = torch.autograd.grad(z, weight, grad)[0]
    assert off(ours, grad.reshape(-1, 10).T @ y.detach().reshape(-1, WIDTH)) < 0.02


def test_modernbert_and_t5gemma():
    from transformers.models.modernbert.configuration_modernbert import ModernBertConfig
    from transformers.models.t5gemma.configuration_t5gemma import T5GemmaModuleConfig

    modern = ModernBertConfig(hidden_size=WIDTH, intermediate_size=64)
    gemma = T5GemmaModuleConfig(hidden_size=WIDTH, intermediate_size=64, dropout_rate=0.0)
    for module in (ModernBertMLP(modern), T5GemmaMLP(gemma)):
        x = normal((2, 7, WIDTH), scale=1.0, seed=1).requires_grad_()
        check(randomised(module), x)


def test_activations_that_are_not_known_stay():
    module = randomised(LlamaMLP(mlp_config("quick_gelu")))
    x = normal((2, 7, WIDTH), scale=1.0, seed=1).requires_grad_()
    before = kept_by(lambda: module(x), module)
    convert(module, 2)
    after = kept_by(lambda: module(x), module)
    assert torch.equal(before[0], after[0]) and before[1] == after[1]


def test_hooks_of_an_activation_run():
    module = randomised(LlamaMLP(mlp_config()))
    convert(module, 2)
    seen = []
    module.act_fn.register_forward_hook(lambda *_: seen.append(1))
    module(normal((7, WIDTH), seed=1))
    assert seen


def test_few_bit_activations_within_units():
    """The converter may have replaced the activation already."""
    import fewbit

    module = randomised(LlamaMLP(mlp_config()))
    module.act_fn = fewbit.SiLU(bits=2)
    plain = randomised(LlamaMLP(mlp_config()))
    plain.load_state_dict(module.state_dict())
    convert(module, 8)
    x = normal((2, 7, WIDTH), scale=1.0, seed=1).requires_grad_()
    (y, ours), (expected, theirs) = step(module, x), step(plain, x)
    assert torch.equal(y, expected)
    assert all(off(a, b) < 0.02 for a, b in zip(ours, theirs, strict=True))


def test_what_is_not_known():
    class Other(LlamaRMSNorm):
        pass

    class Changed(LlamaRMSNorm):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    Changed.__module__ = "transformers.models.llama.modeling_llama"
    for module in (nn.Linear(2, 2), NewGELUActivation(), Other(4), Changed(4), ACT2FN["silu"]):
        assert becomes(module) is None and original(module) is None


def test_eval_and_no_grad_are_the_originals(module):
    x = normal((2, 7, WIDTH), scale=1.0, seed=1).requires_grad_()
    before, size = kept_by(lambda: module.eval()(x), module)
    convert(module, 2)
    after, same = kept_by(lambda: module(x), module)
    assert torch.equal(before, after) and size == same
    with torch.no_grad():
        assert torch.equal(module.train()(x), before)


def test_classes(module):
    cls = type(module)
    keys = list(module.state_dict())
    convert(module, 3)
    assert isinstance(module, cls) and isinstance(module, Quantised)
    assert type(module).__name__ == cls.__name__ and type(module).__module__.startswith("fewbit.")
    assert becomes(module) is None and original(module) is cls
    assert list(module.state_dict()) == keys
    x = normal((2, 7, WIDTH), scale=1.0, seed=1).requires_grad_()
    for again in (copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))):
        assert type(again) is type(module) and again.quantiser.bits == 3
        assert torch.equal(again(x), module(x))
    restore(module)
    assert type(module) is cls


def test_second_derivatives_are_refused(module):
    convert(module)
    x = normal((2, 7, WIDTH), scale=1.0, seed=1).requires_grad_()
    (grad,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    with pytest.raises((RuntimeError, GradientError)):
        grad.square().sum().backward()


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", ["conv1d", "norm llama", "norm gemma", "unit t5", "unit phi3"])
def test_compiled_modules(device, name):
    torch.compiler.reset()
    torch.manual_seed(0)
    module = randomised(MODULES[name]()).to(device)
    x = normal((2, 7, WIDTH), device=device, scale=1.0, seed=1).requires_grad_()
    y, grads = step(module, x)
    convert(module)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager_decomp_partition")
    wanted = [x, *module.parameters()]
    ours = compiled(x)
    torch.testing.assert_close(ours, y)
    grad = normal(y.shape, device=device, scale=1.0, seed=5)
    for a, b in zip(torch.autograd.grad(ours, wanted, grad), grads, strict=True):
        assert off(a, b) < 0.02


# -- models ----------------------------------------------------------------------------------------


def ids(*shape):
    return torch.randint(3, 99, shape, generator=torch.Generator().manual_seed(1))


def padded(length=12):
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[1, -3:] = 0
    return mask


def bert():
    return BertModel(tiny_models.bert()), {"input_ids": ids(2, 12), "attention_mask": padded()}


def gpt2():
    return GPT2LMHeadModel(tiny_models.gpt2()), {"input_ids": ids(2, 12)}


def vit():
    return ViTModel(tiny_models.vit()), {"pixel_values": normal((2, 3, 32, 32), scale=1.0)}


def llama():
    return LlamaForCausalLM(tiny_models.llama()), {"input_ids": ids(2, 12)}


def llama_padded():
    return llama()[0], {"input_ids": ids(2, 12), "attention_mask": padded()}


def t5():
    model = T5ForConditionalGeneration(tiny_models.t5())
    return model, {
        "input_ids": ids(2, 12),
        "attention_mask": padded(),
        "decoder_input_ids": ids(2, 7),
    }


def qwen3():
    config = Qwen3Config(**tiny_models.TOKENS, num_key_value_heads=2, head_dim=16)
    return Qwen3ForCausalLM(config), {"input_ids": ids(2, 12)}


def gemma():
    config = GemmaConfig(**tiny_models.TOKENS, num_key_value_heads=1, head_dim=16)
    return GemmaForCausalLM(config), {"input_ids": ids(2, 12)}


def phi3():
    return Phi3ForCausalLM(Phi3Config(**tiny_models.TOKENS, num_key_value_heads=2)), {
        "input_ids": ids(2, 12)
    }


# The classes that are found, and how many attention modules.
MODELS = {
    "bert": (bert, {}, 2),
    "gpt2": (gpt2, {"Conv1D": 8}, 2),
    "vit": (vit, {}, 2),
    "llama": (llama, {"LlamaRMSNorm": 5, "LlamaMLP": 2}, 2),
    "llama padded": (llama_padded, {"LlamaRMSNorm": 5, "LlamaMLP": 2}, 2),
    "t5": (t5, {"T5LayerNorm": 12, "T5DenseGatedActDense": 4}, 6),
    "qwen3": (qwen3, {"Qwen3RMSNorm": 9, "Qwen3MLP": 2}, 2),
    "gemma": (gemma, {"GemmaRMSNorm": 5, "GemmaMLP": 2}, 2),
    "phi3": (phi3, {"Phi3RMSNorm": 5, "Phi3MLP": 2}, 2),
}


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


def built(name):
    torch.manual_seed(0)
    model, options = MODELS[name][0]()
    return model.train(), options


def run(model, options):
    """(result, gradients by name, bytes kept)."""
    y, kept = kept_by(lambda: first(model(**options)), model)
    grad = normal(y.shape, scale=1.0, seed=5)
    model.zero_grad()
    y.backward(grad)
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return y.detach(), grads, kept


def first(result):
    return result.logits if hasattr(result, "logits") else result.last_hidden_state


def whole(grads):
    return torch.cat([x.flatten() for x in grads.values()])


def test_attention_of_models(name):
    model, options = built(name)
    y, grads, kept = run(model, options)
    reached, left = install(model, Quantiser(8))
    assert len(reached) == MODELS[name][2] and not left
    assert all("attention" in path.lower() or "attn" in path for path in reached)
    ours, our_grads, our_kept = run(model, options)
    assert torch.equal(ours, y)
    assert our_grads.keys() == grads.keys()
    # The position biases of T5, whose scores are not scaled, come out of the scores' gradients.
    assert off(whole(our_grads), whole(grads)) < 0.02
    assert our_kept < kept
    model.eval()
    again, _, same = run(model, options)
    assert torch.equal(again, y) and same == kept
    remove(model.train())
    assert model.config._attn_implementation == "sdpa"
    _, theirs, same = run(model, options)
    assert same == kept and all(torch.equal(theirs[n], grads[n]) for n in grads)


def test_whole_models(name):
    model, options = built(name)
    y, grads, kept = run(model, options)
    found = convert(model)
    assert {each: found.count(each) for each in found} == MODELS[name][1]
    install(model, Quantiser(8))
    for again in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        ours, our_grads, our_kept = run(again, options)
        assert torch.equal(ours, y) and our_kept < kept
        assert off(whole(our_grads), whole(grads)) < 0.03
    remove(model)
    restore(model)
    ours, our_grads, same = run(model, options)
    assert same == kept and all(torch.equal(our_grads[n], grads[n]) for n in grads)


def test_attention_bytes_of_llama():
    """q, k and v at 2 bits, key and value once for the heads that share them."""
    model, options = built("llama padded")
    sizes = []
    for bits in (2, 8):
        install(model, Quantiser(bits))
        sizes.append(run(model, options)[2])
    shapes = (2, 4, 12, 16), (2, 2, 12, 16), (2, 2, 12, 16)
    each = [sum(quantised_bytes(shape, bits) for shape in shapes) for bits in (2, 8)]
    assert sizes[1] - sizes[0] == 2 * (each[1] - each[0])


def test_t5_keeps_one_position_bias_for_all_layers():
    """And one mask: their sums, a matrix for each layer and sample, are not kept."""
    model, options = built("t5")

    def matrices():
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            y = first(model(**options))  # kept, or the addresses of what it holds are used again
        encoder = [x for x in saved if x.shape[1:] in ((4, 12, 12), (1, 12, 12))]
        return y, [len(encoder), len({x.untyped_storage()._cdata for x in encoder})]

    install(model, Quantiser(2))
    _, (count, storages) = matrices()
    assert count == 4 and storages == 2  # in two layers


def test_quantisers_by_path():
    model, options = built("gpt2")
    reached, _ = install(model, lambda path, _: Quantiser(2) if ".0." in path else None)
    assert reached == ["transformer.h.0.attn"]
    run(model, options)
    reached, _ = install(model, Quantiser(2))
    assert len(reached) == 2


def test_what_is_left():
    torch.manual_seed(0)
    config = LlamaConfig(**tiny_models.TOKENS)
    config._attn_implementation = "flex_attention"
    model = LlamaForCausalLM(config)
    reached, left = install(model, Quantiser(2))
    assert not reached and set(left) == {"", "model"}
    assert all("flex_attention" in reason for reason in left.values())
    assert install(nn.Linear(2, 2), Quantiser(2)) == ([], {})
    remove(nn.Linear(2, 2))


def test_eager_models_return_attention_weights():
    """A call may ask for them, which the interface does not tell; products and softmax are few-bit all the same."""
    torch.manual_seed(0)
    model, options = built("bert")
    model.set_attn_implementation("eager")
    exact = copy.deepcopy(model)
    reached, left = install(model, Quantiser(8))
    assert not reached and all("attention weights" in reason for reason in left.values())
    fewbit.compress_(model, bits=8, verbose=False)
    for each in (model, exact):
        assert len(each(**options, output_attentions=True).attentions) == 2
    weights, expected = (
        each(**options, output_attentions=True).attentions for each in (model, exact)
    )
    torch.testing.assert_close(weights, expected)
    assert (
        fewbit.saved_bytes(model, **options).total
        < 0.5 * fewbit.saved_bytes(exact, **options).total
    )


def test_a_model_that_shares_the_configuration():
    """It was not converted: it runs torch's attention, and keeps what that keeps."""
    model, options = built("gpt2")
    twin = GPT2LMHeadModel(model.config).train()
    y, _, kept = run(twin, options)
    install(model, Quantiser(2))
    ours, _, same = run(twin, options)
    assert torch.equal(ours, y) and same == kept
    remove(model)


def test_dropout_of_attention():
    """The backward pass draws the mask of the forward pass again: gradients are of that network."""
    model, options = built("gpt2")
    for block in model.transformer.h:
        block.attn.attn_dropout.p = 0.4
    gradients = []
    for quantiser in (None, Quantiser(8), Quantiser(8)):
        remove(model)
        if quantiser is not None:
            install(model, quantiser)
        torch.manual_seed(3)
        # Only the first layer draws the same mask: after that seeds have been drawn in between.
        x = model.transformer.wte(options["input_ids"]).detach().requires_grad_()
        y, _ = model.transformer.h[0].attn(x)
        gradients.append((y.detach(), *torch.autograd.grad(y.square().sum(), x)))
    exact, *ours = gradients
    for y, grad in ours:
        assert torch.equal(y, exact[0]) and off(grad, exact[1]) < 0.02


def test_gradient_checkpointing_of_transformers():
    model, options = built("llama")
    convert(model)
    install(model, Quantiser(8))
    y, grads, kept = run(model, options)
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    ours, our_grads, our_kept = run(model, options)
    assert torch.equal(ours, y) and our_kept < kept
    assert off(whole(our_grads), whole(grads)) < 0.03


@pytest.mark.slow
def test_compiled_llama():
    torch.compiler.reset()
    model, options = built("llama")
    y, grads, _ = run(model, options)
    convert(model)
    install(model, Quantiser(8))
    compiled = torch.compile(
        lambda x: model(input_ids=x, use_cache=False).logits,
        fullgraph=True,
        backend="aot_eager_decomp_partition",
    )
    ours = compiled(options["input_ids"])
    torch.testing.assert_close(ours, y)
    model.zero_grad()
    ours.backward(normal(y.shape, scale=1.0, seed=5))
    ours = {n: p.grad for n, p in model.named_parameters()}
    assert off(whole(ours), whole(grads)) < 0.03


def test_lora():
    peft = pytest.importorskip("peft")
    for name, targets in (("llama", ["q_proj", "v_proj"]), ("gpt2", ["c_attn"])):
        model, options = built(name)
        config = peft.LoraConfig(
            target_modules=targets, lora_dropout=0.0, fan_in_fan_out=name == "gpt2"
        )
        model = peft.get_peft_model(model, config).train()
        for parameter in (p for n, p in model.named_parameters() if "lora_B" in n):
            nn.init.normal_(parameter, std=0.1)
        y, grads, kept = run(model, options)
        convert(model)
        install(model, Quantiser(8))
        ours, our_grads, our_kept = run(model, options)
        assert torch.equal(ours, y) and our_kept < kept
        assert off(whole(our_grads), whole(grads)) < 0.03


@pytest.mark.slow
def test_another_process(tmp_path):
    """It does not import transformers for us; it knows our attention when it unpickles a model."""
    model, options = built("gpt2")
    convert(model)
    install(model, Quantiser(4))
    path = tmp_path / "model.pickle"
    path.write_bytes(pickle.dumps((model, options, first(model(**options)).detach())))
    code = (
        "import pickle, sys, torch\n"
        "from fewbit.compress.transformers_attention import install, remove\n"
        "from fewbit.compress.transformers_modules import becomes\n"
        "linear = torch.nn.Linear(2, 2)\n"
        "assert becomes(linear) is None and install(linear, None) == ([], {})\n"
        "remove(linear)\n"
        "assert 'transformers' not in sys.modules\n"
        "model, options, y = pickle.loads(open(sys.argv[1], 'rb').read())\n"
        "assert torch.equal(model(**options).logits, y)\n"
        "model(**options).logits.sum().backward()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=120)


@pytest.mark.slow
def test_models_are_not_held():
    model, options = built("gpt2")
    convert(model)
    install(model, Quantiser(4))
    run(model, options)
    held = weakref.ref(model.transformer.h[0].attn)
    del model
    gc.collect()
    assert held() is None


def test_a_compressed_model_is_pickled():
    """The classes of its norms and gated units are made when they are asked for."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_models.llama()).train()
    fewbit.compress_(model, bits=4, verbose=False)
    other = pickle.loads(pickle.dumps(model))
    assert type(other.model.norm) is type(model.model.norm)
    tokens = ids(2, 12)
    torch.manual_seed(1)
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.manual_seed(1)
    other(input_ids=tokens, labels=tokens).loss.backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    fewbit.restore_(other)
    assert type(other.model.norm) is LlamaRMSNorm
