"""Gradients of transformers' models, compressed and compiled, against the eager ones and the exact ones.

Compiled layers draw by other seeds than eager ones, and share no copies, so that gradients differ; but they are as far
from the exact ones: an error of rounding at that many bits, in each parameter. What is out of order is farther: a copy
whose elements are permuted is no nearer than any other tensor of its size.
"""

import pytest
import torch

pytest.importorskip("transformers")

import tiny_models
from compilers import inductor_passes
from transformers.models.bert.modeling_bert import BertForMaskedLM
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM
from transformers.models.t5.modeling_t5 import T5ForConditionalGeneration

import fewbit

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::UserWarning",
)
MODELS = {
    "llama": (LlamaForCausalLM, tiny_models.llama),
    "t5": (T5ForConditionalGeneration, tiny_models.t5),
    "qwen3": (Qwen3ForCausalLM, tiny_models.qwen3),
    "gpt2": (GPT2LMHeadModel, tiny_models.gpt2),
    "bert": (BertForMaskedLM, tiny_models.bert),
    "mixtral": (MixtralForCausalLM, tiny_models.mixtral),
}
SETTINGS = {
    "8 bits": {"bits": 8},
    "4 bits": {"bits": 4},
    "2 bits": {"bits": 2},
    "L3": {"bits": 2, "level": "L3"},
}
# Two standard deviations of what rounding adds may be twice each other by chance in small parameters, and layers that
# share a copy in eager mode have errors that add up where those of copies of their own average out, and the reverse.
MOST = 3.0
ROUNDING = 1e-4
"""The relative error that float32 rounding may add to a whole gradient."""


def made(name, **changes):
    """The model, in training, and what its forward takes; `use_cache` is at its default. changes: of the configuration."""
    torch.manual_seed(0)
    kind, config = MODELS[name]
    config = config()
    config.update(changes)
    model = kind(config).train()
    ids = torch.randint(3, 90, (4, 24))
    return model, {"input_ids": ids, "labels": ids}


def gradients(call, model, inputs, seed):
    """By the names of parameters."""
    model.zero_grad()
    torch.manual_seed(seed)
    call(**inputs).loss.backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def check(name, settings, backend, dynamic=None, **changes):
    torch.compiler.reset()
    model, inputs = made(name, **changes)
    exact = gradients(model, model, inputs, 1)
    eager = []
    for seed in (2, 3):
        # In eager mode L3 shares bits better after each step; compiled, each layer keeps those that it was given.
        fewbit.compress_(model, **settings)
        eager.append(gradients(model, model, inputs, seed))
        if seed == 2:
            fewbit.restore_(model)
    ours = gradients(torch.compile(model, backend=backend, dynamic=dynamic), model, inputs, 4)
    assert ours.keys() == exact.keys()
    whole = whole_norm(exact.values())
    for parameter, gradient in exact.items():
        expected = max(float((each[parameter] - gradient).norm()) for each in eager)
        error = float((ours[parameter] - gradient).norm())
        allowed = MOST * expected + ROUNDING * whole
        assert error <= allowed, (parameter, error / whole, expected / whole)
    errors = [whole_norm(of[key] - exact[key] for key in exact) / whole for of in (ours, *eager)]
    assert errors[0] <= 1.5 * max(errors[1:]) + ROUNDING, errors
    return errors


def whole_norm(tensors):
    return float(torch.stack([each.norm() for each in tensors]).norm())


def test_a_llama():
    """The cat with an empty cache is gone when Inductor's passes have run."""
    error, *_ = check("llama", SETTINGS["8 bits"], inductor_passes, num_hidden_layers=1)
    assert error < 0.03  # 1 % a copy, a few of them


@pytest.mark.slow
def test_a_llama_of_mixed_bits():
    """Its heap was damaged once. Compiled, each layer has the whole bits of its own, 1 here."""
    torch.compiler.reset()
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "vocab_size": 128,
    }
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    ).train()
    ids = torch.randint(64, (2, 33))
    inputs = {"input_ids": ids, "labels": ids}
    exact = gradients(model, model, inputs, 1)
    whole = whole_norm(exact.values())
    fewbit.compress_(model, bits=1, level="L2")
    eager = gradients(model, model, inputs, 2)
    fewbit.restore_(model)
    fewbit.compress_(model, bits=1.75)
    gradients(model, model, inputs, 2)
    compiled = torch.compile(model)
    for step in range(3):
        ours = gradients(compiled, model, inputs, step)
        error, expected = (
            whole_norm(of[key] - exact[key] for key in exact) / whole for of in (ours, eager)
        )
        assert error <= 1.5 * expected, (error, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["inductor", "aot_eager", "aot_eager dynamic", "passes dynamic"]
)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_models(name, settings, backend):
    kind, _, dynamic = backend.partition(" ")
    kind = inductor_passes if kind == "passes" else kind
    check(name, SETTINGS[settings], kind, bool(dynamic) or None)
