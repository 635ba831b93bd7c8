"""Tests of LoRA adapters over quantized bases: torchao's tensors, and Linear4bit of bitsandbytes."""

import pytest
import torch
from test_lora import adapted, cosine, gradients, language_model
from torch import nn

import fewbit

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated:UserWarning")
SAMPLES, WIDTH, OUT = 16, 128, 192
TORCHAO = ("int8", "int4", "nf4")


def torchao_quantized(model, kind):
    """Quantize the weights of the linear layers of a model in place."""
    quantization = pytest.importorskip("torchao.quantization")
    model.requires_grad_(False)
    configs = {
        "int8": quantization.Int8WeightOnlyConfig,
        "int4": lambda: quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4),
    }

    def is_linear(module, name):
        return isinstance(module, nn.Linear) and "lm_head" not in name

    if kind in configs:
        quantization.quantize_(model, configs[kind](), is_linear)
        return model
    for name, module in model.named_modules():
        if is_linear(module, name):
            weight = quantization.to_nf4(module.weight.detach(), 64, 2)
            module.weight = nn.Parameter(weight, requires_grad=False)
    return model


def bitsandbytes_quantized(model):
    """Replace the linear layers of a model by Linear4bit with NF4."""
    layers = pytest.importorskip("bitsandbytes").nn
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "lm_head" not in name:
            parent, _, own = name.rpartition(".")
            sizes = module.in_features, module.out_features, module.bias is not None
            new = layers.Linear4bit(*sizes, quant_type="nf4", compute_dtype=torch.float32)
            new.load_state_dict(module.state_dict())
            setattr(model.get_submodule(parent), own, new.requires_grad_(False).to("cpu"))
    return model


def parts(value):
    """Return the plain tensors of which a weight consists."""
    if not hasattr(value, "__tensor_flatten__"):
        return [value.detach()]
    names, _ = value.__tensor_flatten__()
    return [part for name in names for part in parts(getattr(value, name))]


def frozen(model):
    """Return copies of all tensors of frozen parameters."""
    return {
        name: [part.clone() for part in parts(p)]
        for name, p in model.named_parameters()
        if not p.requires_grad
    }


def same(first, second):
    assert first.keys() == second.keys()
    return all(
        torch.equal(*pair) for name in first for pair in zip(first[name], second[name], strict=True)
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", TORCHAO)
def test_linear_with_a_quantized_weight(kind, bias):
    layer = torchao_quantized(nn.Sequential(nn.Linear(WIDTH, OUT, bias)), kind)[0]
    if bias:
        layer.bias.requires_grad_()
    x = torch.randn(SAMPLES, WIDTH, requires_grad=True)
    wanted = [tensor for tensor in (x, layer.bias) if tensor is not None]
    upstream = torch.randn(SAMPLES, OUT)
    y = layer(x)
    exact = torch.autograd.grad(y, wanted, upstream)

    def compressed():
        return fewbit.functional.linear(x, layer.weight, layer.bias, bits=2)

    assert torch.equal(compressed(), y)
    found = torch.autograd.grad(compressed(), wanted, upstream)
    for mine, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    # torch saves the dense weight for int8 and int4.
    assert fewbit.saved_bytes(compressed).total < 4 * WIDTH * OUT / 2


def test_linear_with_a_quantized_weight_in_a_quantized_input():
    """If torchao quantizes the input as well, its own backward runs."""
    quantization = pytest.importorskip("torchao.quantization")
    layer = nn.Sequential(nn.Linear(WIDTH, OUT, bias=False)).requires_grad_(False)
    quantization.quantize_(layer, quantization.Int8DynamicActivationInt8WeightConfig())
    x = torch.randn(SAMPLES, WIDTH, requires_grad=True)
    exact = layer(x)
    y = fewbit.functional.linear(x, layer[0].weight, bits=2)
    assert torch.equal(y, exact)
    assert type(y.grad_fn) is type(exact.grad_fn)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, OUT), nn.Linear(OUT, WIDTH)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def quantized(model, kind):
    return (
        bitsandbytes_quantized(model) if kind == "bitsandbytes" else torchao_quantized(model, kind)
    )


@pytest.mark.parametrize("kind", [*TORCHAO, "bitsandbytes"])
def test_adapters_over_a_quantized_base(kind):
    model = adapted(quantized(Two(), kind))
    x = torch.randn(64, WIDTH)
    before = frozen(model)
    exact, plain = gradients(model, x=x), fewbit.saved_bytes(model, x)
    report = fewbit.compress_(model, 8, verbose=False).report
    assert cosine(exact, gradients(model, x=x)) > 0.999
    report = fewbit.compress_(model, 2, verbose=False).report
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    for _ in range(3):
        gradients(model, x=x)
        optimizer.step()
    assert same(before, frozen(model))
    assert fewbit.saved_bytes(model, x).total < plain.total / 2
    adapters = [row for row in report.converted if "lora" in row.path]
    assert {row.saves for row in adapters} == {"2 bits"} and len(adapters) == 4
    if kind == "bitsandbytes":
        assert {row.reason for row in report.left_alone} == {
            "its frozen weight is quantized, so it saves no input"
        }
    else:
        bases = [row for row in report.converted if "base_layer" in row.path]
        assert {row.saves for row in bases} == {"no input"} and len(bases) == 2
        assert not report.left_alone


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*TORCHAO, "bitsandbytes"])
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_llama_with_a_quantized_base(kind):
    torch.manual_seed(1)
    model = adapted(quantized(language_model("llama"), kind))
    ids = torch.randint(96, (4, 64))
    inputs = {"input_ids": ids, "labels": ids}
    before, plain = frozen(model), fewbit.saved_bytes(model, **inputs).total
    exact = gradients(model, **inputs)
    for bits, least in ((4, 0.9), (2, 0.7)):
        fewbit.compress_(model, bits, verbose=False)
        assert fewbit.saved_bytes(model, **inputs).total < plain / 5
        assert cosine(exact, gradients(model, **inputs)) > least
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    for _ in range(3):
        gradients(model, **inputs)
        optimizer.step()
    assert same(before, frozen(model))
