"""compress_ on models of transformers, with LoRA from peft, and on a ResNet: one call, and they train."""

import copy

import pytest
import torch
from samples import normal
from torch import nn

import fewbit
from fewbit.convert import kinds
from fewbit.models.resnet import ResNet
from fewbit.runtime.format.encoding import packed_words
from fewbit.runtime.format.groups import quantized_bytes

pytest.importorskip("transformers")
pytest.importorskip("peft")

import tiny_models
from peft import LoraConfig, get_peft_model
from transformers.models.bert.modeling_bert import BertForSequenceClassification
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.t5.modeling_t5 import T5ForConditionalGeneration
from transformers.models.vit.modeling_vit import ViTForImageClassification

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

TOKENS = torch.randint(3, 90, (4, 24), generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 1, 0, 1])
TEXT = {"input_ids": TOKENS, "labels": TOKENS}


def bert():
    model = BertForSequenceClassification(tiny_models.bert())
    return model, {"input_ids": TOKENS, "labels": CLASSES}


def gpt2():
    return GPT2LMHeadModel(tiny_models.gpt2()), TEXT


def vit():
    pixels = normal((4, 3, 32, 32), scale=1.0)
    model = ViTForImageClassification(tiny_models.vit())
    return model, {"pixel_values": pixels, "labels": CLASSES}


def llama():
    return LlamaForCausalLM(tiny_models.llama()), TEXT


def t5():
    return T5ForConditionalGeneration(tiny_models.t5()), TEXT


# The least by which bytes fall at 2 bits (4 for attention, 3 for activations); logits and labels stay.
MODELS = {
    "bert": (bert, 11),
    "gpt2": (gpt2, 8),
    "vit": (vit, 12),
    "llama": (llama, 9),
    "t5": (t5, 12),
}


@pytest.fixture(params=MODELS)
def case(request):
    make, times_less = MODELS[request.param]
    torch.manual_seed(0)
    model, inputs = make()
    return model.train(), inputs, times_less


def gradient(model, inputs):
    model.zero_grad()
    model(**inputs).loss.backward()
    grads = [each.grad.flatten() for each in model.parameters() if each.grad is not None]
    return torch.cat(grads).double()


@pytest.mark.fast(2)
def test_transformers_models(case):
    model, inputs, times_less = case
    exact = copy.deepcopy(model)
    keys, before = list(model.state_dict()), fewbit.saved_bytes(exact, **inputs).total
    fewbit.compress_(model, bits=8, layers=fewbit.LayerSettings(activation_bits=8), verbose=False)
    assert list(model.state_dict()) == keys
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).loss, exact(**inputs).loss)
    wanted = gradient(exact, inputs)
    assert (gradient(model, inputs) - wanted).norm() < 0.03 * wanted.norm()
    fewbit.compress_(model, bits=2, verbose=False)
    assert before > times_less * fewbit.saved_bytes(model, **inputs).total
    losses, optimizer = [], torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(12):
        loss = model(**inputs).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    fewbit.restore_(model)
    assert not any(kinds.is_fewbit(each) for each in model.modules())
    assert model.config._attn_implementation == exact.config._attn_implementation
    model.load_state_dict(exact.state_dict())
    assert torch.equal(gradient(model, inputs), wanted)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_gradient_checkpointing(name):
    """transformers' own switch: the same gradients within the noise of 8 bits, almost nothing kept."""
    torch.manual_seed(0)
    model, inputs = MODELS[name][0]()
    wanted = gradient(model.train(), inputs)
    fewbit.compress_(model, bits=8, layers=fewbit.LayerSettings(activation_bits=8), verbose=False)
    whole = fewbit.saved_bytes(model, **inputs).total
    model.gradient_checkpointing_enable()
    assert fewbit.saved_bytes(model, **inputs).total < whole
    assert (gradient(model, inputs) - wanted).norm() < 0.03 * wanted.norm()


# Where adapters go: the projections of queries and values, or the one of all three.
TARGETS = {
    "bert": ["query", "value"],
    "gpt2": ["c_attn"],
    "vit": ["q_proj", "v_proj"],
    "llama": ["q_proj", "v_proj"],
    "t5": ["q", "v"],
}


def with_lora(name, dropout):
    torch.manual_seed(0)
    base, inputs = MODELS[name][0]()
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=TARGETS[name],
        lora_dropout=dropout,
        fan_in_fan_out=name == "gpt2",
    )
    model = get_peft_model(base, config).train()
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.05)  # else half of the gradient is zero
    return model, inputs


def fall_of_loss(model, inputs, steps):
    """By how much training what is not frozen lowers the loss."""
    torch.manual_seed(3)
    trained = [each for each in model.parameters() if each.requires_grad]
    losses, optimizer = [], torch.optim.AdamW(trained, 5e-2)
    for _ in range(steps + 1):
        loss = model(**inputs).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0] - losses[-1]


@pytest.mark.fast(2)
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("name", MODELS)
def test_lora(name, dropout):
    """Gradients of the exact model, dropout's masks included; frozen layers keep no input, and it trains."""
    model, inputs = with_lora(name, dropout)
    exact = copy.deepcopy(model)
    before = fewbit.saved_bytes(exact, **inputs).total
    frozen = {key: each.clone() for key, each in model.named_parameters() if not each.requires_grad}
    fewbit.compress_(model, bits=8, layers=fewbit.LayerSettings(activation_bits=8), verbose=False)
    assert fewbit.saved_bytes(model, **inputs).total < before / 3
    torch.manual_seed(1)
    wanted = gradient(exact, inputs)
    torch.manual_seed(1)
    assert (gradient(model, inputs) - wanted).norm() < 0.03 * wanted.norm()
    if dropout:
        torch.manual_seed(2)
        assert (gradient(exact, inputs) - wanted).norm() > 0.1 * wanted.norm()
    fewbit.compress_(model, bits=2, verbose=False)
    kept = fewbit.saved_bytes(model, **inputs)
    assert before > 7 * kept.total
    layers = [entry for entry in kept.kept if entry.module_type in ("Linear", "Conv1D")]
    assert all("lora_" in entry.module for entry in layers if entry.bytes)
    fall = fall_of_loss(model, inputs, steps=12)
    assert fall > 0.5 * fall_of_loss(exact, inputs, steps=12) > 0.04
    assert all(torch.equal(model.get_parameter(key), each) for key, each in frozen.items())


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

    input, middle = quantized_bytes((4, 24, 64), 2), quantized_bytes((4, 24, 4), 2)
    mask = 4 * packed_words(4 * 24 * 64, 1)
    # In the first layer nothing before the adapters is trained, so dropout there keeps no mask, and without
    # dropout q and v share a copy of their input. In the second it is the norm's own.
    assert layers_of("lora_A") == (["0", "0", "1", "1"] if dropout else ["0"])
    assert layers_of("lora_dropout") == (["1", "1"] if dropout else [])
    of_inputs = 4 * input + 2 * mask if dropout else input
    assert sum(entry.bytes for entry in adapters) == of_inputs + 4 * middle


@pytest.mark.slow
def test_resnet_152_keeps_a_twelfth():
    """Counted on the meta device, in float32 (ActNN, Table 5: 12x)."""
    with torch.device("meta"):
        model = ResNet("resnet152", nn.ReLU)
        images = torch.empty(4, 3, 224, 224)
    before = fewbit.saved_bytes(model, images).total
    fewbit.compress_(model, bits=2, verbose=False)
    assert before > 12 * fewbit.saved_bytes(model, images).total


@pytest.mark.parametrize("inplace", [False, True])
def test_conv_bn_relu_keeps_five_and_a_quarter_bits(inplace):
    """What a block more adds: two float32 tensors in torch, 2.125 + 2.125 + 1 bits here (ActNN, section 6.2).

    Besides, torch keeps two vectors and we one. ReLU's result is the next convolution's input, so it costs
    torch nothing of its own.
    """

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
    assert exact[1] - exact[0] == 64 / 8 * x.numel() + 2 * 4 * 64
    assert ours[1] - ours[0] == 5.25 / 8 * x.numel() + 4 * 64
