"""Tests of LoRA adapters over quantized bases: torchao's tensors, and Linear4bit of bitsandbytes."""

import pytest
import torch
from test_lora import adapted, cosine, gradients
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
    """Return copies of the plain tensors of which a weight consists."""
    if not hasattr(value, "__tensor_flatten__"):
        return [value.detach().clone()]
    names, _ = value.__tensor_flatten__()
    return [part for name in names for part in parts(getattr(value, name))]


def frozen(model):
    """Return copies of the tensors of all frozen parameters, in order."""
    return [part for p in model.parameters() if not p.requires_grad for part in parts(p)]


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


def test_linear_with_a_quantized_weight_and_a_quantized_input():
    """If torchao quantizes the input as well, its own backward runs."""
    quantization = pytest.importorskip("torchao.quantization")
    layer = nn.Sequential(nn.Linear(WIDTH, OUT, bias=False)).requires_grad_(False)
    quantization.quantize_(layer, quantization.Int8DynamicActivationInt8WeightConfig())
    x = torch.randn(SAMPLES, WIDTH, requires_grad=True)
    exact = layer(x)
    y = fewbit.functional.linear(x, layer[0].weight, bits=2)
    assert torch.equal(y, exact) and type(y.grad_fn) is type(exact.grad_fn)


def quantized(model, kind):
    return (
        bitsandbytes_quantized(model) if kind == "bitsandbytes" else torchao_quantized(model, kind)
    )


@pytest.mark.parametrize("kind", [*TORCHAO, "bitsandbytes"])
def test_adapters_over_a_quantized_base(kind):
    model = nn.Sequential(nn.Linear(WIDTH, OUT), nn.ReLU(), nn.Linear(OUT, WIDTH))
    model = adapted(quantized(model, kind))
    x = torch.randn(64, WIDTH)
    before = frozen(model)
    exact, plain = gradients(model, input=x), fewbit.saved_bytes(model, x)
    report = fewbit.compress_(model, 8, verbose=False).report
    assert cosine(exact, gradients(model, input=x)) > 0.999
    report = fewbit.compress_(model, 2, verbose=False).report
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    for _ in range(3):
        gradients(model, input=x)
        optimizer.step()
    assert all(map(torch.equal, before, frozen(model)))
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
