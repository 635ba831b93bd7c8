"""Gradients of transformers' models, compressed and compiled, against the eager ones.

All copies are drawn with one seed and layers share none (`compilers.draw_alike`), so eager and compiled gradients differ by
float32 rounding alone. A wrong layout differs by as much as the gradient itself.
"""

import copy

import pytest
import torch

pytest.importorskip("transformers")

import tiny_models
from compilers import draw_alike, inductor_passes
from modeling import of

import fewbit

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::UserWarning",
)
MODELS = {
    "llama": (of("llama", "LlamaForCausalLM"), tiny_models.llama),
    "t5": (of("t5", "T5ForConditionalGeneration"), tiny_models.t5),
    "qwen3": (of("qwen3", "Qwen3ForCausalLM"), tiny_models.qwen3),
    "gpt2": (of("gpt2", "GPT2LMHeadModel"), tiny_models.gpt2),
    "bert": (of("bert", "BertForMaskedLM"), tiny_models.bert),
    "mixtral": (of("mixtral", "MixtralForCausalLM"), tiny_models.mixtral),
}
MOST = 1e-2
"""The largest relative difference of a parameter's gradients. Rounding moves few elements to the next code."""
FLOOR = 1e-3
"""Gradients smaller than this share of the whole gradient are compared relative to this share."""


def made(name, shape=(4, 24), **changes):
    """Return a model of one block in training, and the inputs of its forward. changes: of the configuration."""
    torch.manual_seed(0)
    kind, config = MODELS[name]
    config = config()
    config.update({"num_hidden_layers": 1, "num_decoder_layers": 1, **changes})
    ids = torch.randint(3, 60, shape)
    return kind(config).train(), {"input_ids": ids, "labels": ids}


def gradients(call, model, inputs):
    """Return the gradient of each of the model's parameters by name, after call(**inputs)."""
    model.zero_grad()
    torch.manual_seed(1)
    call(**inputs).loss.backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def check_equal(found, expected):
    assert found.keys() == expected.keys()
    least = FLOOR * float(flat(expected.values()).norm())
    errors = {
        name: float((found[name] - gradient).norm()) / max(float(gradient.norm()), least)
        for name, gradient in expected.items()
    }
    assert max(errors.values()) < MOST, sorted(errors.items(), key=lambda item: -item[1])[:3]


@pytest.mark.slow
def test_a_llama_of_mixed_bits(monkeypatch):
    """An average of 1.75 bits in eager mode, of which each layer keeps 1 bit when compiled; its heap was damaged once."""
    draw_alike(monkeypatch)
    torch.compiler.reset()
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    model, inputs = made("llama", (2, 33), **sizes)
    at_one_bit = copy.deepcopy(model)
    fewbit.compress_(
        at_one_bit,
        bits=1,
        layers={"attention_bits": 1, "gate_bits": 1},
        overrides={"*norm": {"bits": 1}},
        verbose=False,
    )
    expected = gradients(at_one_bit, at_one_bit, inputs)
    fewbit.compress_(model, bits=1.75, verbose=False)
    gradients(model, model, inputs)
    compiled = torch.compile(model)
    for _ in range(3):
        check_equal(gradients(compiled, model, inputs), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, bits, backend",
    [
        ("llama", 2, "inductor"),
        ("t5", fewbit.AdaptiveBits(2), "passes"),
        ("qwen3", 4, "aot_eager"),
        ("gpt2", 2, "passes"),
        ("bert", 2, "passes"),
        ("mixtral", 8, "passes"),
    ],
    ids=str,
)
def test_models(name, bits, backend, monkeypatch):
    draw_alike(monkeypatch)
    torch.compiler.reset()
    model, inputs = made(name)
    # Compiled, functions that a forward calls stay exact, such as those of Mixtral's experts.
    reference = copy.deepcopy(model)
    codes = {"activation_bits": 3}  # which compiled code uses in any case
    fewbit.compress_(reference, bits, layers={"functional": False, **codes}, verbose=False)
    fewbit.compress_(model, bits, layers=codes, verbose=False)
    compiled = torch.compile(model, backend=inductor_passes if backend == "passes" else backend)
    expected = gradients(reference, reference, inputs)
    check_equal(gradients(compiled, model, inputs), expected)
