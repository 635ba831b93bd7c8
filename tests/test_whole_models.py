"""compress_ on models of transformers, with LoRA from peft, and on a ResNet: one call, and they train."""

import copy

import pytest
import torch
from samples import normal
from torch import nn

import fewbit
from fewbit.compress import kinds
from fewbit.models.resnet import ResNet
from fewbit.runtime.groups import quantised_bytes

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


def test_transformers_models(case):
    model, inputs, times_less = case
    exact = copy.deepcopy(model)
    keys, before = list(model.state_dict()), fewbit.saved_bytes(exact, **inputs).total
    fewbit.compress_(model, bits=8, activation_bits=8, verbose=False)
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
    fewbit.compress_(model, bits=8, activation_bits=8, verbose=False)
    whole = fewbit.saved_bytes(model, **inputs).total
    model.gradient_checkpointing_enable()
    assert fewbit.saved_bytes(model, **inputs).total < whole
    assert (gradient(model, inputs) - wanted).norm() < 0.03 * wanted.norm()


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_lora(name):
    """Frozen layers keep no input; what an adapter needs is one copy of its input, shared, and its middle."""
    torch.manual_seed(0)
    base, inputs = MODELS[name][0]()
    targets = ["query", "value"] if name == "bert" else ["q_proj", "v_proj"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=0.0)
    model = get_peft_model(base, config).train()
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.05)  # else half of the gradient is zero
    exact = copy.deepcopy(model)
    before = fewbit.saved_bytes(exact, **inputs).total
    fewbit.compress_(model, bits=8, activation_bits=8, verbose=False)
    wanted = gradient(exact, inputs)
    assert (gradient(model, inputs) - wanted).norm() < 0.03 * wanted.norm()
    fewbit.compress_(model, bits=2, verbose=False)
    kept = fewbit.saved_bytes(model, **inputs)
    assert before > 7 * kept.total
    layers = [entry for entry in kept.kept if entry.module_type == "Linear" and entry.bytes]
    packed = [entry for entry in layers if entry.kind == "packed"]
    assert all("lora_" in entry.module for entry in packed)
    if name == "llama":
        # In the first layer nothing before the adapters is trained: q and v share a copy of their input. In the
        # second it is the norm's own. Besides, each adapter keeps the product in its middle.
        of_inputs = [entry for entry in packed if "lora_A" in entry.module]
        assert [entry.module.split(".")[4] for entry in of_inputs] == ["0"]
        input, middle = quantised_bytes((4, 24, 64), 2), quantised_bytes((4, 24, 4), 2)
        assert sum(entry.bytes for entry in layers) == input + 2 * 2 * middle


def test_resnet_152_keeps_a_twelfth():
    """Counted on the meta device, in float32 (ActNN, Table 5: 12x)."""
    with torch.device("meta"):
        model = ResNet("resnet152", nn.ReLU)
        images = torch.empty(4, 3, 224, 224)
    before = fewbit.saved_bytes(model, images).total
    fewbit.compress_(model, bits=2, verbose=False)
    assert before > 12 * fewbit.saved_bytes(model, images).total


def test_conv_bn_relu_keeps_five_and_a_quarter_bits():
    """2.125 + 2.125 + 1 bits an element (ActNN, section 6.2), and a deviation a channel."""
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())
    x = normal((4, 64, 32, 32), scale=1.0).requires_grad_()
    before = fewbit.saved_bytes(model, x)
    fewbit.compress_(model, bits=2, verbose=False)
    kept = fewbit.saved_bytes(model, x)
    by_kind = kept.by_kind()
    assert by_kind["packed"] + by_kind["range"] == 5.25 / 8 * x.numel()
    assert by_kind["statistic"] == 4 * 64
    assert by_kind["packed"] + by_kind["range"] + by_kind["statistic"] == kept.total
    assert before.total > 12 * kept.total
