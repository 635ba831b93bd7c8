"""compress_ on models of transformers, with LoRA from peft, and on a ResNet: one call, and they train."""

import copy
import gc
import pickle
import weakref
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from fresh_process import run
from layers import relative
from quantized import quantized_bytes
from samples import normal
from test_transformers import convert
from torch import nn

import fewbit
from fewbit.convert import kinds
from fewbit.convert.transformers_attention import _attention_forward, install, remove
from fewbit.models.resnet import ResNet
from fewbit.runtime.format.encoding import packed_words
from fewbit.runtime.quantizers.quantizer import Quantizer

pytest.importorskip("transformers")
pytest.importorskip("peft")

import tiny_models
from modeling import of
from peft import LoraConfig, get_peft_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


TOKENS = torch.randint(3, 90, (4, 24), generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 1, 0, 1])
PIXELS = normal((4, 3, 32, 32), scale=1.0)
MASK = torch.ones(4, 24, dtype=torch.int64).index_fill(1, torch.tensor([21, 22, 23]), 0)
TEXT = {"input_ids": TOKENS, "labels": TOKENS}
PADDED = {**TEXT, "attention_mask": MASK}


class Case(NamedTuple):
    """A tiny model of transformers.

    Attributes:
        cls: the name of its class.
        config: makes its configuration.
        inputs: keywords of its forward, with labels.
        times_less: the least factor by which its saved bytes fall at 2 bits (4 for attention, 3 for activations).
        targets: where adapters go: the projections of queries and values, or the one of all three.
        converted: how many modules of transformers' own classes are converted.
    """

    cls: str
    config: Callable
    inputs: dict
    times_less: float
    targets: tuple[str, ...]
    converted: dict[str, int]


def config(name, cls, **options):
    return lambda: of(name, cls)(**{**tiny_models.TOKENS, "num_key_value_heads": 2, **options})


SENTENCES = {"input_ids": TOKENS, "labels": CLASSES, "attention_mask": MASK}
IMAGES = {"pixel_values": PIXELS, "labels": CLASSES}
GEMMA = config("gemma", "GemmaConfig", num_key_value_heads=1, head_dim=16)
PHI3 = config("phi3", "Phi3Config")
LINEAR = "q_proj", "v_proj"
T5 = {"T5LayerNorm": 12, "T5DenseGatedActDense": 4}
MODELS = {
    "bert": Case("BertForSequenceClassification", tiny_models.bert, SENTENCES, 11, ("query", "value"), {}),
    "gpt2": Case("GPT2LMHeadModel", tiny_models.gpt2, TEXT, 8, ("c_attn",), {"Conv1D": 8}),
    "vit": Case("ViTForImageClassification", tiny_models.vit, IMAGES, 12, LINEAR, {}),
    "llama": Case("LlamaForCausalLM", tiny_models.llama, PADDED, 9, LINEAR, {"LlamaRMSNorm": 5, "LlamaMLP": 2}),
    "t5": Case("T5ForConditionalGeneration", tiny_models.t5, PADDED, 12, ("q", "v"), T5),
    "qwen3": Case("Qwen3ForCausalLM", tiny_models.qwen3, TEXT, 8, LINEAR, {"Qwen3RMSNorm": 9, "Qwen3MLP": 2}),
    "gemma": Case("GemmaForCausalLM", GEMMA, TEXT, 8, LINEAR, {"GemmaRMSNorm": 5, "GemmaMLP": 2}),
    "phi3": Case("Phi3ForCausalLM", PHI3, TEXT, 7, ("qkv_proj",), {"Phi3RMSNorm": 5, "Phi3MLP": 2}),
}  # fmt: skip


def built(name):
    torch.manual_seed(0)
    case = MODELS[name]
    return of(name, case.cls)(case.config()).train(), case.inputs


def gradient(model, inputs):
    model.zero_grad()
    model(**inputs).loss.backward()
    grads = [
        parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None
    ]
    return torch.cat(grads).double()


def losses_of(model, inputs, rate, steps=12):
    """Train the parameters that are not frozen, and return the losses."""
    torch.manual_seed(3)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    losses, optimizer = [], torch.optim.AdamW(trained, rate)
    for _ in range(steps):
        loss = model(**inputs).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_transformers_models(name):
    model, inputs = built(name)
    exact, case = copy.deepcopy(model), MODELS[name]
    keys, before = list(model.state_dict()), fewbit.saved_bytes(exact, **inputs).total
    report = fewbit.compress_(model, bits=8, layers={"activation_bits": 8}, verbose=False).report
    classes = Counter(row.before for row in report.converted)
    assert {cls: classes[cls] for cls in case.converted} == case.converted
    assert list(model.state_dict()) == keys
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).loss, exact(**inputs).loss)
    wanted = gradient(exact, inputs)
    for twin in (model, copy.deepcopy(model)):
        assert relative(gradient(twin, inputs), wanted) < 0.03
    assert relative(gradient(model.eval(), inputs), wanted) < 1e-5
    fewbit.compress_(model.train(), bits=2, verbose=False)
    assert before > case.times_less * fewbit.saved_bytes(model, **inputs).total
    losses = losses_of(model, inputs, 2e-3)
    assert losses[-1] < 0.8 * losses[0]
    fewbit.restore_(model)
    assert not any(kinds.is_fewbit(module) for module in model.modules())
    assert model.config._attn_implementation == exact.config._attn_implementation
    model.load_state_dict(exact.state_dict())
    assert torch.equal(gradient(model, inputs), wanted)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_gradient_checkpointing(name):
    """Gradients are the same within the noise of 8 bits, and less is saved, with transformers' own switch."""
    model, inputs = built(name)
    wanted = gradient(model, inputs)
    fewbit.compress_(model, bits=8, layers={"activation_bits": 8}, verbose=False)
    whole = fewbit.saved_bytes(model, **inputs).total
    model.gradient_checkpointing_enable()
    assert fewbit.saved_bytes(model, **inputs).total < whole
    assert relative(gradient(model, inputs), wanted) < 0.03


# -- attention ---------------------------------------------------------------------------------------------


def test_attention_is_named_by_module_or_left_with_a_reason():
    model, _ = built("gpt2")
    reached, _ = install(model, lambda path, _: Quantizer(2) if ".0." in path else None)
    assert reached == ["transformer.h.0.attn"]
    reached, left = install(model, Quantizer(2))
    assert len(reached) == 2 and not left
    remove(model)
    config = tiny_models.llama()
    config._attn_implementation = "flex_attention"
    reached, left = install(of("llama", "LlamaForCausalLM")(config), Quantizer(2))
    assert not reached and set(left) == {""}
    assert all("flex_attention" in reason for reason in left.values())
    assert install(nn.Linear(2, 2), Quantizer(2)) == ([], {})
    remove(nn.Linear(2, 2))


def test_attention_bytes_of_llama():
    """q, k and v are saved at their bits, key and value once for the heads that share them."""
    model, inputs = built("llama")
    sizes = []
    for bits in (2, 8):
        install(model, Quantizer(bits))
        sizes.append(fewbit.saved_bytes(model, **inputs).total)
    shapes = (4, 4, 24, 16), (4, 2, 24, 16), (4, 2, 24, 16)
    two, eight = (sum(quantized_bytes(shape, bits) for shape in shapes) for bits in (2, 8))
    assert sizes[1] - sizes[0] == 2 * (eight - two)


def test_t5_keeps_one_position_bias_for_all_layers():
    """Layers save one mask and one bias. The sums of both, a matrix for each layer and sample, are not saved."""
    model, inputs = built("t5")
    install(model, Quantizer(2))
    tensors = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: tensors.append(x) or x, lambda x: x):
        y = model(**inputs)  # kept, or the addresses of its memory are used again
    encoder = [x for x in tensors if x.shape[1:] == (4, 24, 24) or x.shape == (4, 1, 24, 24)]
    masked = [x for x in encoder if x.shape[0] in (1, 4)]
    storages = {x.untyped_storage()._cdata for x in masked}
    assert y.loss.isfinite() and len(storages) < len(masked)


def test_eager_models_return_attention_weights():
    """A call may ask for them, which the interface does not tell; products and softmax are few-bit all the same."""
    model, inputs = built("bert")
    model.set_attn_implementation("eager")
    exact = copy.deepcopy(model)
    reached, left = install(model, Quantizer(8))
    assert not reached and all("attention weights" in reason for reason in left.values())
    fewbit.compress_(model, bits=8, verbose=False)
    weights, expected = (
        either(**inputs, output_attentions=True).attentions for either in (model, exact)
    )
    assert len(weights) == 2
    torch.testing.assert_close(weights, expected)
    before, after = (fewbit.saved_bytes(either, **inputs).total for either in (exact, model))
    assert after < 0.5 * before


def test_a_model_that_shares_the_configuration():
    """A model that was not converted runs torch's attention, and saves what that saves."""
    model, inputs = built("gpt2")
    twin = of("gpt2", "GPT2LMHeadModel")(model.config).train()
    before = gradient(twin, inputs), fewbit.saved_bytes(twin, **inputs).total
    install(model, Quantizer(2))
    assert torch.equal(gradient(twin, inputs), before[0])
    assert fewbit.saved_bytes(twin, **inputs).total == before[1]
    remove(model)


@pytest.mark.parametrize("name", [None, "s_aux"])
def test_softcaps_and_sinks_are_left_to_transformers(name):
    """With them, gradients depend on the mean of the keys, which fewbit does not save. `s_aux` has the sinks."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    model, _ = built("gpt2")
    install(model, Quantizer(2))
    module = model.transformer.h[0].attn
    inputs = [normal((2, 2, 24, 16), scale=1.0, seed=i).requires_grad_() for i in range(3)]
    given = {} if name is None else {name: torch.ones(2)}
    gradients = []
    for function in (_attention_forward, sdpa_attention_forward):
        y, _ = function(module, *inputs, None, **given)
        gradients.append(torch.cat(torch.autograd.grad(y.square().sum(), inputs)))
    assert torch.equal(*gradients) == (name is not None)
    # transformers computes softcaps in its eager function only.
    with pytest.raises(ValueError, match="softcap"):
        _attention_forward(module, *inputs, None, softcap=50.0)


def test_dropout_of_attention():
    """The backward pass draws the mask of the forward pass again, so that gradients are of that network."""
    model, inputs = built("gpt2")
    for block in model.transformer.h:
        block.attn.attn_dropout.p = 0.4
    found = []
    for quantizer in (None, Quantizer(8)):
        if quantizer is not None:
            install(model, quantizer)
        torch.manual_seed(3)
        # Only the first layer draws the same mask: after that seeds have been drawn in between.
        x = model.transformer.wte(inputs["input_ids"]).detach().requires_grad_()
        y, _ = model.transformer.h[0].attn(x)
        found.append((y.detach(), *torch.autograd.grad(y.square().sum(), x)))
    (expected, exact), (y, grad) = found
    assert torch.equal(y, expected) and relative(grad, exact) < 0.02


@pytest.mark.slow
def test_another_process(tmp_path):
    """A fresh process imports no transformers for fewbit, and knows its attention when it unpickles a model."""
    model, inputs = built("gpt2")
    convert(model)
    install(model, Quantizer(4))
    path = tmp_path / "model.pickle"
    path.write_bytes(pickle.dumps((model, inputs, model(**inputs).logits.detach())))
    run(
        "import pickle, sys, torch\n"
        "from fewbit.convert.transformers_attention import install, remove\n"
        "from fewbit.convert.transformers_modules import becomes\n"
        "linear = torch.nn.Linear(2, 2)\n"
        "assert becomes(linear) is None and install(linear, None) == ([], {})\n"
        "remove(linear)\n"
        "assert 'transformers' not in sys.modules\n"
        f"model, inputs, y = pickle.loads(open({str(path)!r}, 'rb').read())\n"
        "torch.testing.assert_close(model(**inputs).logits, y)\n"
        "model(**inputs).logits.sum().backward()\n"
    )


def test_a_compressed_model_is_pickled():
    """The classes of its norms and gated units are made on first use, so pickle does not find them by name."""
    model, inputs = built("llama")
    before = type(model.model.norm)
    fewbit.compress_(model, bits=4, verbose=False)
    other = pickle.loads(pickle.dumps(model))
    assert type(other.model.norm) is type(model.model.norm) is not before
    gradients = []
    for tested in (model, other):
        torch.manual_seed(1)
        gradients.append(gradient(tested, inputs))
    assert torch.equal(*gradients)
    fewbit.restore_(other)
    assert type(other.model.norm) is before


@pytest.mark.slow
def test_a_compressed_model_is_not_held():
    model, inputs = built("gpt2")
    fewbit.compress_(model, bits=4, verbose=False)
    gradient(model, inputs)
    held = weakref.ref(model.transformer.h[0].attn)
    del model
    gc.collect()
    assert held() is None


# -- adapters, and a ResNet --------------------------------------------------------------------------------


def with_lora(name, dropout):
    base, inputs = built(name)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=list(MODELS[name].targets),
        lora_dropout=dropout,
        fan_in_fan_out=name == "gpt2",
    )
    model = get_peft_model(base, config).train()
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.05)  # else half of the gradient is zero
    return model, inputs


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "llama", "t5"])
def test_lora(name, dropout):
    """Gradients of the exact model, dropout's masks included; frozen layers keep no input, and it trains."""
    model, inputs = with_lora(name, dropout)
    exact = copy.deepcopy(model)
    before = fewbit.saved_bytes(exact, **inputs).total
    frozen = {
        key: parameter.clone()
        for key, parameter in model.named_parameters()
        if not parameter.requires_grad
    }
    fewbit.compress_(model, bits=8, layers={"activation_bits": 8}, verbose=False)
    assert fewbit.saved_bytes(model, **inputs).total < before / 3
    torch.manual_seed(1)
    wanted = gradient(exact, inputs)
    torch.manual_seed(1)
    assert relative(gradient(model, inputs), wanted) < 0.03
    if dropout:
        torch.manual_seed(2)
        assert relative(gradient(exact, inputs), wanted) > 0.1
    fewbit.compress_(model, bits=2, verbose=False)
    kept = fewbit.saved_bytes(model, **inputs)
    assert before > 7 * kept.total
    layers = [entry for entry in kept.kept if entry.module_type in ("Linear", "Conv1D")]
    assert all("lora_" in entry.module for entry in layers if entry.bytes)
    ours, theirs = (losses_of(either, inputs, 5e-2, steps=13) for either in (model, exact))
    assert ours[0] - ours[-1] > 0.5 * (theirs[0] - theirs[-1]) > 0.04
    assert all(torch.equal(model.get_parameter(key), item) for key, item in frozen.items())


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_what_adapters_keep(dropout):
    """Each the product in its middle; of their input one copy, or with dropout one each, and its mask."""
    model, inputs = with_lora("llama", dropout)
    fewbit.compress_(model, bits=2, verbose=False)
    kept = [entry for entry in fewbit.saved_bytes(model, **inputs).kept if entry.bytes]
    adapters = [entry for entry in kept if "lora_" in entry.module]

    def layers_of(part):
        found = [entry for entry in adapters if part in entry.module and entry.kind == "packed"]
        return [entry.module.split(".")[4] for entry in found]

    # The inputs of the first layer's adapters need no gradient, so they have 1 bit more.
    input, middle = quantized_bytes((4, 24, 64), 3), quantized_bytes((4, 24, 4), 2)
    mask = 4 * packed_words(4 * 24 * 64, 1)
    # In the first layer nothing before the adapters is trained, so dropout there keeps no mask, and without
    # dropout q and v share a copy of their input. In the second it is the norm's own, to which dropout applies its masks.
    assert layers_of("lora_A") == (["0", "0"] if dropout else ["0"])
    assert layers_of("lora_dropout") == (["1", "1"] if dropout else [])
    of_inputs = 2 * input + 2 * mask if dropout else input
    assert sum(entry.bytes for entry in adapters) == of_inputs + 4 * middle


@pytest.mark.slow
def test_resnet_152_keeps_little():
    """Counted on the meta device, in float32. ActNN has 12x (Table 5), with 2 bits also in batch norms, which have 3 here."""
    with torch.device("meta"):
        model = ResNet("resnet152", nn.ReLU)
        images = torch.empty(4, 3, 224, 224)
    before = fewbit.saved_bytes(model, images).total
    fewbit.compress_(model, bits=2, verbose=False)
    assert before > 11.5 * fewbit.saved_bytes(model, images).total


@pytest.mark.parametrize("inplace", [False, True])
def test_conv_bn_relu_keeps_four_and_an_eighth_bits(inplace):
    """One more block adds two float32 tensors in torch, and 3.125 + 1 bits here; in ActNN 2.125 more (section 6.2)."""

    def chain(blocks):
        layers = []
        for _ in range(blocks):
            layers += [nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace)]
        return nn.Sequential(*layers)

    x = normal((4, 64, 32, 32), scale=1.0)
    exact, ours = [], []
    for model in map(chain, (2, 3)):
        exact.append(fewbit.saved_bytes(model, x).total)
        fewbit.compress_(model, bits=2, verbose=False)
        ours.append(fewbit.saved_bytes(model, x).total)
    # Besides, torch keeps two vectors, and we two and a seed of 8 bytes.
    assert exact[1] - exact[0] == 64 / 8 * x.numel() + 2 * 4 * 64
    assert ours[1] - ours[0] == 4.125 / 8 * x.numel() + 2 * 4 * 64 + 8
