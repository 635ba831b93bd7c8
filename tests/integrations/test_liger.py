"""Tests of Liger's modules in compressed models.

Liger needs triton, and its kernels a GPU. The tests load the real classes of its modules, with plain torch in place of the
kernels that these call.
"""

import copy
import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from composed import Composed
from layers import gradients
from torch import nn
from torch.nn import functional as F

import fewbit

if importlib.util.find_spec("liger_kernel") is None:
    pytest.skip("liger_kernel is not installed", allow_module_level=True)

WIDTH, INNER, ROWS = 64, 96, 48
CONFIG = SimpleNamespace(
    hidden_size=WIDTH, intermediate_size=INNER, hidden_act="silu", num_local_experts=2
)


def rms_norm(x, weight, eps, offset, casting_mode, in_place, row_mode):
    y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return y.to(x.dtype)
    if casting_mode == "gemma":
        return (y * (offset + weight.float())).to(x.dtype)
    return y.to(x.dtype) * (offset + weight)


def swiglu(gate, up, gate_multiplier=1.0, down_multiplier=1.0):
    return down_multiplier * F.silu(gate * gate_multiplier) * up


def geglu(gate, up):
    return F.gelu(gate, approximate="tanh") * up


def layer_norm(x, weight, bias, eps, impl=None, mode=None):
    return F.layer_norm(x, weight.shape, weight, bias, eps)


@pytest.fixture(scope="module")
def liger():
    """Return the real modules rms_norm, layer_norm, swiglu and geglu of Liger, with plain torch in place of kernels."""
    (folder,) = importlib.util.find_spec("liger_kernel").submodule_search_locations
    before = {name: sys.modules.get(name) for name in list(sys.modules) if "liger_kernel" in name}
    for name in before:
        del sys.modules[name]
    names = (
        "liger_kernel",
        "liger_kernel.transformers",
        "liger_kernel.ops",
        "liger_kernel.functional",
    )
    made = {name: ModuleType(name) for name in names}
    made["liger_kernel"].__path__ = [folder]
    made["liger_kernel.transformers"].__path__ = [f"{folder}/transformers"]
    functions = {
        "LigerRMSNormFunction": rms_norm,
        "LigerSiLUMulFunction": swiglu,
        "LigerGELUMulFunction": geglu,
        "LigerFusedMoEFunction": None,
        "LigerLayerNormFunction": layer_norm,
    }
    for name, function in functions.items():
        setattr(made["liger_kernel.ops"], name, SimpleNamespace(apply=function))
    made["liger_kernel.functional"].layer_norm = layer_norm
    sys.modules.update(made)
    parts = ("rms_norm", "layer_norm", "swiglu", "geglu")
    try:
        loaded = {
            part: importlib.import_module(f"liger_kernel.transformers.{part}") for part in parts
        }
        yield SimpleNamespace(**loaded)
    finally:
        for name in [name for name in sys.modules if "liger_kernel" in name]:
            del sys.modules[name]
        sys.modules.update({name: module for name, module in before.items() if module is not None})


def gradient(module, x):
    """Return the result, and the gradients of the input and of all parameters as a vector."""
    y, grads = gradients(Composed(lambda _, x: module(x * 1.0), module=module), x)
    return y, torch.cat([grad.flatten() for grad in grads])


MODULES = {
    "LigerRMSNorm": lambda liger: liger.rms_norm.LigerRMSNorm(WIDTH),
    "LigerRMSNormForGemma": lambda liger: liger.rms_norm.LigerRMSNormForGemma(WIDTH),
    "LigerRMSNormForOlmo2": lambda liger: liger.rms_norm.LigerRMSNormForOlmo2(WIDTH),
    "LigerLayerNorm": lambda liger: liger.layer_norm.LigerLayerNorm(WIDTH, bias=True),
    "LigerSwiGLUMLP": lambda liger: liger.swiglu.LigerSwiGLUMLP(CONFIG),
    "LigerPhi3SwiGLUMLP": lambda liger: liger.swiglu.LigerPhi3SwiGLUMLP(CONFIG),
    "LigerBlockSparseTop2MLP": lambda liger: liger.swiglu.LigerBlockSparseTop2MLP(CONFIG),
    "LigerGEGLUMLP": lambda liger: liger.geglu.LigerGEGLUMLP(CONFIG),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module(name, liger):
    """It is converted, computes the same, and saves less, and restore_ undoes it."""
    module = MODULES[name](liger).train()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    cls = type(module)
    x = torch.randn(ROWS, WIDTH)
    y, exact = gradient(module, x)
    before = fewbit.saved_bytes(lambda x: module(x * 1.0), x.clone().requires_grad_())
    controller = fewbit.compress_(module, 8, layers={"copies": 2}, verbose=False)
    assert not controller.report.left_alone
    assert "" in {row.path for row in controller.report.converted}
    compressed, found = gradient(module, x)
    torch.testing.assert_close(compressed, y)
    assert F.cosine_similarity(found, exact, dim=0) > 0.999
    fewbit.compress_(module, 2, verbose=False)
    after = fewbit.saved_bytes(lambda x: module(x * 1.0), x.clone().requires_grad_())
    assert after.total < before.total / 5
    fewbit.restore_(module)
    assert type(module) is cls
    again, restored = gradient(module, x)
    assert torch.equal(again, y) and torch.equal(restored, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["LigerRMSNorm", "LigerRMSNormForGemma"])
def test_rms_norm_rounds_as_liger_does(liger, name, dtype):
    norm = getattr(liger.rms_norm, name)(WIDTH).to(dtype).train()
    nn.init.normal_(norm.weight)
    x = torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True)
    y = norm(x)
    fewbit.compress_(norm, 2, verbose=False)
    compressed = norm(x)
    assert compressed.grad_fn.name() == "RMSNormFunctionBackward"
    assert compressed.dtype == y.dtype == dtype
    assert torch.equal(compressed, y)


def test_what_is_left_alone(liger):
    model = nn.Sequential(
        liger.rms_norm.LigerRMSNorm(WIDTH, casting_mode="none"),
        liger.rms_norm.LigerRMSNorm(WIDTH, offset=1.0),
        liger.rms_norm.LigerRMSNormForGemma4(WIDTH),
        liger.swiglu.LigerExperts(CONFIG),
    )
    report = fewbit.compress_(model, 2, verbose=False).report
    reasons = {row.path: row.reason for row in report.left_alone}
    assert reasons["0"] == "no version with casting_mode='none' and offset=0.0"
    assert reasons["1"] == "no version with casting_mode='llama' and offset=1.0"
    assert reasons["2"] == reasons["3"] == "its kernel of Liger saves what it needs in full"


def test_layers_that_liger_has_patched(liger):
    """With model=, apply_liger_kernel_to_... sets methods on the instances of torch's or transformers' classes."""
    norm = nn.LayerNorm(WIDTH)
    norm.variance_epsilon, norm.impl, norm.mode = norm.eps, None, None
    cls = liger.layer_norm.LigerLayerNorm
    for name in ("forward", "extra_repr"):
        vars(norm)[name] = getattr(cls, name).__get__(norm)
    patched = dict(vars(norm))
    x = torch.randn(ROWS, WIDTH)
    y = norm(x)
    fewbit.compress_(norm, 2, verbose=False)
    compressed = copy.deepcopy(norm)(x)
    assert compressed.grad_fn.name() == "_LayerNormBackward"
    torch.testing.assert_close(compressed, y)
    fewbit.restore_(norm)
    assert norm.forward == patched["forward"]
    assert vars(norm).keys() == patched.keys()
