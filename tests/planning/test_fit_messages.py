"""Messages of `fewbit.fit_` if nothing fits, if the model's own step raises, and on the command line: each piece of advice is true."""

import re
import traceback

import pytest
import torch
from click.testing import CliRunner
from fitting import MIB, WIDTH, fit, language, mean_loss
from quick_fit import quick_fit
from torch import nn

import fewbit
from fewbit import cli
from fewbit.errors import InputError
from fewbit.models import transformer
from fewbit.planning import examination
from fewbit.planning.all_ranks import ALONE
from fewbit.planning.block_settings import EXACT, Option
from fewbit.planning.block_steps import FakeBlockSteps, OptimizerBytes
from fewbit.sizes import parse_size

SGD = torch.optim.SGD


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Measure little, and leave the user's cache alone."""
    quick_fit(monkeypatch, tmp_path)


def refusal(model, batch, memory, **options) -> str:
    with pytest.raises(InputError) as error:
        fit(model, batch, memory, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def frozen():
    model, batch = language(layers=2, dropout=0.0)
    model.embedding.requires_grad_(False)
    return model, batch


def one_sample():
    model, batch = language(layers=2, dropout=0.0)
    return model, batch.view(1, -1)


def heavy():
    """A model whose weights take more than the tensors of a step."""
    torch.manual_seed(0)
    width = 512
    blocks = [
        nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(2)
    ]
    return nn.Sequential(*blocks).train(), torch.randn(1024, width)


def in_16_bits():
    model, x = heavy()
    return model.bfloat16(), x.bfloat16()


def without_blocks():
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
    return nn.Sequential(*layers).train(), torch.randn(8192, WIDTH)


def values_decide():
    """A model whose step needs values, so that no smaller batch can be tried on fake tensors."""

    class Sorting(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = without_blocks()[0]

        def forward(self, x):
            return self.net(x[x[:, 0] > 0])

    return Sorting().train(), torch.randn(2048, WIDTH)


def small():
    return language(layers=2, dropout=0.0)


ADVICE = [  # (model and batch, MiB, arguments, said, not said)
    (small, 3, {}, ["samples in place of 8", "than AdamW", "LoRA"], ["error=", "blocks"]),
    (small, 2, {"optimizer": SGD}, ["samples in place of 8", "LoRA"], ["optimizer"]),
    (frozen, 3, {}, ["samples in place of 8"], ["LoRA"]),
    (one_sample, 3, {}, [], ["in place of"]),
    (heavy, 21, {"loss": mean_loss}, ["an optimizer without state (8.02 MiB less than AdamW)", "LoRA (up to 12.02 MiB less"], ["alone"]),
    (heavy, 10, {"loss": mean_loss}, ["alone", "without state (8.02 MiB less than AdamW)", "LoRA", "16 bits"], []),
    (in_16_bits, 6, {"loss": mean_loss}, ["alone", "LoRA"], ["16 bits", "batch"]),
    (without_blocks, 2, {"loss": mean_loss}, ["gradients, the batch and AdamW alone", "; a smaller batch or"], []),
    (without_blocks, 4, {"loss": mean_loss}, ["samples in place of 8192", "blocks to compute again"], ["optimizer", "LoRA"]),
    (without_blocks, 4, {"loss": mean_loss, "blocks": "0"}, ["samples in place of 8192"], ["blocks to compute again"]),
    (values_decide, 1.2, {"loss": mean_loss}, ["a smaller batch"], ["in place of"]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("make, memory, options, said, unsaid", ADVICE)
def test_advice_suits_the_case(make, memory, options, said, unsaid):
    model, batch = make()
    message = refusal(model, batch, int(memory * MIB), **options)
    assert message.startswith("memory: expected at least")
    for text in said:
        assert text in message, message
    for text in unsaid:
        assert text not in message, message
    least = parse_size(re.search(r"at least (?:about )?([\d.]+ [KMG]iB)", message)[1])
    assert least > memory * MIB
    samples = re.search(r"(\d+) samples? in place", message)
    if samples:  # with so many samples the step fits
        model, batch = make()
        found = fit(model, batch[: int(samples[1])].clone(), int(memory * MIB), **options)
        assert found.peak <= memory * MIB
    less = re.search(r"without state \(([\d.]+ [KMG]iB) less", message)
    if less and "alone" not in message:  # without the state, the model needs so much less
        model, batch = make()
        found = fit(
            model, batch, int(1.01 * least - parse_size(less[1])), **{**options, "optimizer": SGD}
        )
        assert found.peak <= 1.01 * least - parse_size(less[1])


@pytest.mark.slow
def test_a_larger_error_is_advised_only_if_it_helps(monkeypatch):
    """With the advised bound a choice fits; without any bound, no choice fits in less memory, and none is advised."""
    model, batch = language(layers=2, dropout=0.0)
    monkeypatch.setattr(examination, "OPTIONS", (EXACT, Option(4), Option(2)))
    for _ in range(3):  # the second fit may find other times, and choose a smaller error
        message = refusal(model, batch, 6 * MIB, error=1e-9)
        advised = float(re.search(r"error=([\d.e-]+)", message)[1])
        found = fit(model, batch, 6 * MIB, error=advised)
        assert found.peak <= 6 * MIB and found.error <= advised
        if found.error > 0.5 * advised:
            break
    assert found.error > 0.5 * advised
    model, batch = language(layers=2, dropout=0.0)
    assert "error=" not in refusal(model, batch, 3 * MIB, error=1e-9)


class Own(Exception):
    pass


class Failing(nn.Module):
    """A model whose forward raises an exception of its own in a given call."""

    def __init__(self, call):
        super().__init__()
        self.net, self.left = language(layers=2)[0], call

    def forward(self, x):
        self.left -= 1
        if not self.left:
            raise Own("my reason")
        return self.net(x)


@pytest.mark.parametrize("call", [1, 2, 4])
def test_an_exception_of_the_model_stays_what_it_is(call):
    """Its type and traceback stay, a note says which step raised it, and the model is as before."""
    model, batch = Failing(call).train(), language()[1]
    kinds = [type(module) for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(Own, match="my reason") as error:
        fit(model, batch, 64 * MIB)
    (note,) = error.value.__notes__
    step = "exact" if call < 3 else "4 bits in blocks, the rest exact"
    assert (
        note
        == f"raised in a training step in which fewbit.fit_ examined the model ({step}); the model is unchanged"
    )
    assert traceback.extract_tb(error.tb)[-1].name == "forward"
    assert [type(module) for module in model.modules()] == kinds
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "roberta-base"])
def test_the_command_counts_the_model_that_is_trained(monkeypatch, name):
    """The printed calls convert the class with head and loss of transformers, and its step takes what was printed."""
    import transformers

    sizes = transformer.SIZES[name]
    small = (
        {"n_layer": 2, "n_embd": 64, "n_head": 2}
        if name == "gpt2"
        else {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 2,
            "intermediate_size": 256,
        }
    )
    monkeypatch.setitem(transformer.SIZES, name, sizes | small)
    arguments = (
        f"memory {name} --batch 4 --sequence-length 128 --optimizer sgd --json --fit".split()
    )
    result = CliRunner().invoke(cli.app, [*arguments, "4 GiB"])
    assert result.exit_code == 0, result.output
    exact = fewbit.FastestFit.from_json(result.stdout)
    result = CliRunner().invoke(cli.app, [*arguments, f"{exact.peak * 4 // 5 >> 20} MiB"])
    found = fewbit.FastestFit.from_json(result.stdout)
    kind = {"gpt2": "GPT2LMHeadModel", "roberta-base": "RobertaForMaskedLM"}[name]
    assert exact.code == "" and found.code and found.model == kind
    configuration = transformers.GPT2Config if name == "gpt2" else transformers.RobertaConfig
    with torch.device("meta"):
        model = getattr(transformers, kind)(
            configuration(**transformer.SIZES[name], use_cache=False, attn_implementation="sdpa")
        ).train()
        tokens = torch.zeros(4, 128, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    exec(found.code, {"fewbit": fewbit, "model": model})
    bytes_ = OptimizerBytes(model, SGD, on_gpu=False)
    steps = FakeBlockSteps(model, [], batch, None, bytes_, False, ALONE, on_gpu=False)
    monkeypatch.setattr("fewbit.planning.block_settings.Settings.apply", lambda self, model: None)
    peak = max(steps.timeline_of(found.settings).peak().size, bytes_.update(batch))
    assert peak == pytest.approx(found.peak, rel=0.001)
