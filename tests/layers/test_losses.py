"""cross_entropy with quantized probabilities, and linear_cross_entropy in chunks, against torch's cross_entropy."""

import gc

import pytest
import tiny_models
import torch
from layers import saved_by
from samples import normal, same
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


@pytest.fixture(params=["torch's chunks", "regions"])
def chunks(request, monkeypatch):
    """Let torch's function compute the chunks, or regions of fewbit."""
    if request.param == "regions":
        monkeypatch.setattr(losses, "_torch_supports", lambda *_: False)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_linear_cross_entropy(chunks, device, options, has_bias):
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


@pytest.mark.parametrize("chunk_size", [None, 64])
def test_no_logits_are_held(chunks, chunk_size):
    """No tensor of tokens times classes exists between the passes.

    torch's chunked function stores gradients as attributes of its node, where no hook finds them.
    """
    x, weight = normal((512, 8)).requires_grad_(), normal((4001, 8)).requires_grad_()
    target = torch.randint(4001, (512,))
    loss, saved = saved_by(lambda: F.linear_cross_entropy(x, weight, target, chunk_size=chunk_size))
    assert max((x.untyped_storage().nbytes() for x in saved), default=0) <= 4 * 4001 * 8
    assert not any(type(x) is torch.Tensor and x.numel() == 512 * 4001 for x in gc.get_objects())
    loss.backward()
