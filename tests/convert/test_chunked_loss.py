"""`fewbit.chunk_loss_`: losses and gradients of torch, logits that are never whole, and what is refused."""

import copy

import pytest
import tiny_models
import torch
from harness import most_bytes
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaForCausalLM

import fewbit
from fewbit.convert.chunked_loss import head_of
from fewbit.errors import GradientError, InputError
from fewbit.functional import losses
from fewbit.functional.chunked_logits import ChunkedLogits

WORDS, WIDTH = 500, 32


class Language(nn.Module):
    def __init__(self, words=WORDS, width=WIDTH):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(words, width), nn.Linear(width, width)
        self.head = nn.Linear(width, words)

    def forward(self, x):
        return self.head(self.layer(self.embedding(x)))


def language(**sizes):
    torch.manual_seed(0)
    return Language(**sizes).train(), torch.randint(WORDS, (4, 16))


def both(y, x):
    return F.cross_entropy(y.flatten(0, 1), x.flatten()) + y.square().mean()


LOSSES = {  # name: (loss of logits and tokens, whether logits stay chunked)
    "flat": (lambda y, x: F.cross_entropy(y.flatten(0, 1), x.flatten()), True),
    "as transformers": (lambda y, x: F.cross_entropy(y.float().view(-1, WORDS), x.view(-1), ignore_index=3), True),
    "shifted": (lambda y, x: F.cross_entropy(y[..., :-1, :].contiguous().view(-1, WORDS), x[:, 1:].reshape(-1), label_smoothing=0.1), True),
    "first rows": (lambda y, x: F.cross_entropy(y[0], x[0], reduction="sum"), True),
    "in double": (lambda y, x: F.cross_entropy(y.double().view(-1, WORDS), x.view(-1)), True),
    "fewbit's": (lambda y, x: fewbit.functional.cross_entropy(y.flatten(0, 1), x.flatten()), True),
    "classes second": (lambda y, x: F.cross_entropy(y.transpose(1, 2), x), False),
    "other functions": (lambda y, x: y.logsumexp(-1).sum() + y.max() - y[..., 3].sum(), False),
    "also another loss": (both, False),
}  # fmt: skip


def step(model, loss):
    model.zero_grad()
    value = loss()
    value.backward()
    return value.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_those_of_torch(name):
    (model, x), (loss, stays) = language(), LOSSES[name]
    exact_loss = loss if name != "fewbit's" else LOSSES["flat"][0]
    value, gradient = step(model, lambda: exact_loss(model(x), x))
    fewbit.chunk_loss_(model, "head")
    kept = []

    def chunked():
        kept.append(model(x))
        return loss(kept[-1], x)

    found, other = step(model, chunked)
    assert found == pytest.approx(value, rel=1e-6)
    assert (other - gradient).norm() <= 1e-5 * gradient.norm()
    (logits,) = kept
    assert isinstance(logits, ChunkedLogits) and logits.shape == (4, 16, WORDS)
    assert (logits.dtype, logits.requires_grad) == (torch.float32, True)
    if stays:
        assert logits._full is None
    fewbit.unchunk_loss_(model)
    torch.testing.assert_close(logits + 0, model(x))


def test_a_hook_that_reads_the_gradient():
    """The logits are computed for a hook, also for a function in C."""
    model, x = language()
    fewbit.chunk_loss_(model, "head")
    logits, gradients = model(x), []
    logits.register_hook(gradients.append)
    F.cross_entropy(logits.flatten(0, 1), x.flatten()).backward()
    assert [gradient.shape for gradient in gradients] == [logits.shape]


def test_a_metric_before_the_loss():
    """Logits that are read without gradients do not replace those of the loss, which stays chunked."""
    (model, x), flat = language(), LOSSES["flat"][0]
    value, gradient = step(model, lambda: flat(model(x), x))
    fewbit.chunk_loss_(model, "head")

    def measured():
        logits = model(x)
        with torch.no_grad():
            assert logits.argmax(-1).shape == x.shape
        loss = flat(logits, x)
        assert logits._full is None
        return loss

    found, other = step(model, measured)
    assert found == pytest.approx(value, rel=1e-6)
    assert (other - gradient).norm() <= 1e-5 * gradient.norm()


def test_logits_are_never_whole(monkeypatch):
    """The step takes less than one matrix of logits, the gradients included; torch's takes more than two."""
    torch.manual_seed(0)
    monkeypatch.setattr(losses, "CHUNK", 2**16)
    words = 1000
    model, x = Language(words=words).train(), torch.randint(words, (4, 256))

    def run():
        F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
        model.zero_grad()

    run()
    whole = most_bytes(run)
    fewbit.chunk_loss_(model, "head")
    run()
    chunked = most_bytes(run)
    logits = 4 * x.numel() * words
    assert whole > 2 * logits
    assert chunked < 0.8 * logits


@pytest.mark.parametrize("order", ["before", "after", "alone"])
def test_a_language_model_of_transformers_that_is_compressed(order):
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_models.llama()).train()
    ids = torch.randint(100, (4, 32))
    value, gradient = step(model, lambda: model(ids, labels=ids).loss)
    if order == "after":
        fewbit.compress_(model, 8, verbose=False)
    fewbit.chunk_loss_(model, "lm_head")
    if order == "before":
        fewbit.compress_(model, 8, verbose=False)
    output = model(ids, labels=ids)
    assert isinstance(output.logits, ChunkedLogits)
    found, other = step(model, lambda: model(ids, labels=ids).loss)
    assert found == pytest.approx(value, rel=1e-6)
    assert (other - gradient).norm() < 0.02 * gradient.norm()
    model.eval()
    assert type(model(ids).logits) is torch.Tensor


def test_autocast_holds_in_the_loss():
    """Logits have the dtype of autocast, and a loss outside of it sees the same values."""
    model, x = language()
    fewbit.chunk_loss_(model, "head")
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
        inside = F.cross_entropy(logits.flatten(0, 1), x.flatten())
    assert logits.dtype == torch.bfloat16 and logits._full is None
    outside = F.cross_entropy(logits.flatten(0, 1).float(), x.flatten())
    assert outside.item() == pytest.approx(inside.item(), rel=2e-3)


def test_replicas_and_copies_have_heads_of_their_own():
    model, x = language()
    fewbit.chunk_loss_(model, "head")
    twin = copy.deepcopy(model)
    assert twin.head.forward.module is twin.head
    assert twin(x).layer is twin.head
    replica = model.head._replicate_for_data_parallel()
    assert replica.forward.module is replica
    fewbit.unchunk_loss_(model)
    assert "forward" not in vars(model.head)
    assert "_replicate_for_data_parallel" not in vars(model.head)


@pytest.mark.inductor
def test_a_compiled_model_computes_its_logits():
    model, x = language()
    fewbit.chunk_loss_(model, "head")
    compiled = torch.compile(model, backend="eager")
    assert type(compiled(x)) is torch.Tensor


def test_what_is_refused():
    model, x = language()
    for head in ("nope", "embedding", 3):
        with pytest.raises(
            InputError, match=r"head: expected the path of a torch.nn.Linear, got"
        ) as error:
            fewbit.chunk_loss_(model, head)
        assert "\n" not in str(error.value)
    fewbit.chunk_loss_(model, "head")
    with pytest.raises(GradientError, match="call fewbit.unchunk_loss_"):
        with torch._C.DisableTorchFunctionSubclass():
            model(x) + 1


def test_the_head_that_is_found():
    assert head_of(language()[0]) == "head"
    model = LlamaForCausalLM(tiny_models.llama())
    assert head_of(model) == ("lm_head" if model.lm_head.out_features > WIDTH else None)
    assert head_of(language()[0], ("head",)) is None
    assert head_of(nn.Sequential(nn.Linear(8, 8))) is None
