"""cross_entropy with quantized probabilities, and linear_cross_entropy in chunks, against torch's cross_entropy."""

import gc

import pytest
import tiny_models
import torch
from layers import saved_by
from samples import normal, same
from torch import nn
from torch.nn import functional as torch_f
from transformers import AutoModelForCausalLM

import fewbit
import fewbit.functional as F
from fewbit.functional import losses

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")

CLASSES = 7
OPTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.3},
    {"weighted": True},
    {"weighted": True, "label_smoothing": 0.3},
    {"weighted": True, "label_smoothing": 0.3, "reduction": "none"},
    {"weighted": True, "ignore_index": 2},
    {"ignore_index": 2, "label_smoothing": 0.3},
    {"ignore_index": 2, "reduction": "sum"},
]


def sample(shape, dtype=torch.float32, device="cpu", seed=0, weighted=False, scale=2.0, **options):
    """Return (logits, target, options of cross_entropy)."""
    classes = shape[min(1, len(shape) - 1)]
    generator = torch.Generator().manual_seed(seed)
    logits = normal(shape, dtype, device=device, scale=scale, seed=seed)
    size = shape[:1] + shape[2:] if len(shape) > 1 else ()
    target = torch.randint(classes, size, generator=generator).to(device)
    if weighted:
        weight = torch.rand(classes, generator=generator) + 0.1
        options["weight"] = weight.to(device, dtype)
    return logits, target, options


def gradient(function, logits, *arguments, **options):
    """Return (the loss, the gradient of the logits for a normal gradient of the loss)."""
    logits = logits.detach().clone().requires_grad_()
    loss = function(logits, *arguments, **options)
    loss.backward(normal(loss.shape, loss.dtype, device=loss.device, scale=1.0, seed=5))
    return loss.detach(), logits.grad


def test_ignored_targets_only(device):
    """torch's loss is NaN, and its gradient 0."""
    logits, target, _ = sample((5, CLASSES), device=device)
    target.fill_(-100)
    loss, grad = gradient(F.cross_entropy, logits, target)
    assert loss.isnan() and not grad.any()


@pytest.mark.parametrize("kind", ["probabilities", "no gradient"])
def test_torchs_own_function_runs(kind):
    logits, target, _ = sample((5, CLASSES))
    logits.requires_grad_(kind != "no gradient")
    if kind == "probabilities":
        target = torch.rand(5, CLASSES)
    loss = F.cross_entropy(logits, target)
    assert same(loss, torch_f.cross_entropy(logits, target))
    assert "CrossEntropy" not in str(loss.grad_fn)


def test_torchs_deprecated_arguments():
    logits, target, _ = sample((5, CLASSES))
    logits.requires_grad_()
    with pytest.warns(UserWarning, match="reduction='sum'"):
        loss = F.cross_entropy(logits, target, size_average=False)
    assert same(loss, torch_f.cross_entropy(logits, target, reduction="sum"))


def test_autocast_of_confident_logits(device):
    """The mean gradient of the targets' logits is torch's, although in 16 bits probabilities near 1 would be 1."""
    logits, target, _ = sample((64, 50), torch.bfloat16, device, scale=0.5)
    logits[torch.arange(64), target] += 10
    logits.requires_grad_()

    def gradient(function, **options):
        with torch.autocast(device, torch.bfloat16):
            loss = function(logits, target, **options)
        (grad,) = torch.autograd.grad(loss, logits)
        return float(grad.double().gather(1, target[:, None]).sum())

    mean = sum(gradient(F.cross_entropy, bits=8) for _ in range(200)) / 200
    # The standard deviation of the mean is 0.9 %; with probabilities in 16 bits, the error is 6.6 %.
    assert abs(mean / gradient(torch_f.cross_entropy) - 1) < 0.035


# -- modules and converted models ------------------------------------------------------------------------------


class _WithLoss(nn.Module):
    """A model whose forward computes the loss, as those of transformers do if they get labels."""

    def __init__(self, loss):
        super().__init__()
        self.embedding, self.head = nn.Embedding(500, 32), nn.Linear(32, 500)
        self.loss = loss

    def forward(self, ids):
        logits = self.head(self.embedding(ids))
        return self.loss(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize(
    "loss", [torch_f.cross_entropy, nn.CrossEntropyLoss()], ids=["function", "module"]
)
def test_a_forward_that_computes_the_loss(loss):
    """The converted model saves no tensor of tokens times classes in full."""
    model, ids = _WithLoss(loss), torch.randint(500, (8, 65))
    expected = model(ids)
    fewbit.compress_(model, bits=2, verbose=False)
    torch.testing.assert_close(model(ids), expected)
    _, saved = saved_by(model, ids)
    logits = 8 * 64 * 500
    assert max(x.untyped_storage().nbytes() for x in saved) <= logits // 4 + 2**12
    model(ids).backward()


@pytest.mark.parametrize("make", [tiny_models.llama, tiny_models.gpt2], ids=["llama", "gpt2"])
def test_a_model_of_transformers_with_labels(make):
    """The exact model saves tokens times classes in full, and the converted one no tensor of half that size."""
    torch.manual_seed(0)
    config = make()
    config.vocab_size = 1000
    model = AutoModelForCausalLM.from_config(config).train()
    ids = torch.randint(1000, (4, 32))

    def largest():
        entries = fewbit.saved_bytes(model, ids, labels=ids, use_cache=False).kept
        return max(entry.bytes for entry in entries)

    wanted = model(ids, labels=ids, use_cache=False).loss
    full = 4 * 4 * 31 * 1000
    assert largest() >= full
    fewbit.compress_(model, bits=2, verbose=False)
    assert largest() <= full // 8
    loss = model(ids, labels=ids, use_cache=False).loss
    torch.testing.assert_close(loss, wanted)
    loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("has_chunks", [True, False], ids=["torch's chunks", "regions"])
def test_a_large_vocabulary(has_chunks, monkeypatch):
    """2048 tokens, 50,000 classes: loss and gradients are torch's, and nothing of tokens times classes is saved."""
    if not has_chunks:
        monkeypatch.setattr(losses, "_torch_supports", lambda *_: False)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2048, 16, generator=generator)
    weight = 0.25 * torch.randn(50_000, 16, generator=generator)
    target = torch.randint(50_000, (2048,), generator=generator)

    def run(function):
        """Return (the loss, the gradients, the size of the largest tensor that exists between the passes)."""
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        loss, saved = saved_by(lambda *leaves: function(*leaves, target), *leaves)
        # torch's chunked function stores gradients as attributes of its node, where no hook finds them.
        saved += [each for each in gc.get_objects() if type(each) is torch.Tensor]
        largest = max(each.numel() for each in saved)
        loss.backward()
        return loss.item(), [leaf.grad for leaf in leaves], largest

    wanted_loss, wanted, largest = run(lambda x, w, y: torch_f.cross_entropy(x @ w.t(), y))
    assert largest == 2048 * 50_000
    gc.collect()
    loss, found, largest = run(F.linear_cross_entropy)
    assert largest == weight.numel()
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    for x, y in zip(found, wanted, strict=True):
        assert (x - y).norm() <= 1e-5 * y.norm()


def test_linear_cross_entropy_module():
    torch.manual_seed(0)
    x, target = normal((4, 5, 16), scale=1.0), torch.randint(40, (4, 5))
    module = fewbit.nn.LinearCrossEntropy(16, 40, class_weight=torch.rand(40), label_smoothing=0.1)
    logits = torch_f.linear(x, module.weight, module.bias).flatten(0, 1)
    options = {"weight": module.class_weight, "label_smoothing": 0.1}
    torch.testing.assert_close(
        module(x, target), torch_f.cross_entropy(logits, target.flatten(), **options)
    )
    assert set(module.state_dict()) == {"weight", "bias", "class_weight"}


# -- chunks of logits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("by", ["torch", "regions"])
def test_linear_cross_entropy(monkeypatch, device, by, options, has_bias):
    if by == "regions":
        monkeypatch.setattr(losses, "_torch_supports", lambda *_: False)
    torch.manual_seed(0)
    _, target, options = sample((50, 40), device=device, **options)
    tensors = {
        "input": normal((50, 16), device=device, scale=1.0),
        "linear_weight": normal((40, 16), device=device, scale=1.0, seed=1),
        "linear_bias": normal((40,), device=device, seed=2) if has_bias else None,
    }

    def run(function, dtype):
        leaves = {
            name: x.to(dtype).requires_grad_() for name, x in tensors.items() if x is not None
        }
        own = dict(options)
        if "weight" in own:
            own["weight"] = own["weight"].to(dtype)
        loss = function(**leaves, target=target, **own)
        loss.backward(normal(loss.shape, dtype, device=loss.device, scale=1.0, seed=5))
        return loss.double(), [x.grad.double() for x in leaves.values()]

    def plain(input, linear_weight, target, linear_bias=None, **options):
        return torch_f.cross_entropy(
            torch_f.linear(input, linear_weight, linear_bias), target, **options
        )

    def ours(**arguments):
        return F.linear_cross_entropy(**arguments, chunk_size=16)

    expected, wanted = run(plain, torch.float64)
    loss, found = run(ours, torch.float32)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for grad, exact in zip(found, wanted, strict=True):
        assert (grad - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("by", ["torch", "regions"])
@pytest.mark.parametrize("chunk_size", [None, 64])
def test_no_logits_are_saved(monkeypatch, by, chunk_size):
    if by == "regions":
        monkeypatch.setattr(losses, "_torch_supports", lambda *_: False)
    x, weight = normal((512, 8)).requires_grad_(), normal((4000, 8)).requires_grad_()
    target = torch.randint(4000, (512,))
    _, saved = saved_by(lambda: F.linear_cross_entropy(x, weight, target, chunk_size=chunk_size))
    assert max((x.untyped_storage().nbytes() for x in saved), default=0) <= 4 * 4000 * 8
