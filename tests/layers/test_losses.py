"""cross_entropy with quantized probabilities, and linear_cross_entropy in chunks, against torch's cross_entropy."""

import copy
import gc

import pytest
import tiny_models
import torch
from composed import Composed
from layers import gradients, relative, saved_by
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


def test_ignored_targets_only(device):
    """torch's loss is NaN, and its gradient 0."""
    logits, target, _ = sample((5, CLASSES), device=device)
    loss = F.cross_entropy(logits.requires_grad_(), target.fill_(-100))
    assert loss.isnan() and not torch.autograd.grad(loss, logits)[0].any()


def test_torchs_own_function_runs_for_probabilities():
    logits, target = sample((5, CLASSES))[0].requires_grad_(), torch.rand(5, CLASSES)
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
    weight = options.pop("weight", None)
    layer = fewbit.nn.LinearCrossEntropy(16, 40, has_bias, weight, chunk_size=16, **options)
    layer, x = layer.to(device), normal((50, 16), device=device, scale=1.0)

    def plain(model, x):
        logits = torch_f.linear(x, model.layer.weight, model.layer.bias)
        return torch_f.cross_entropy(logits, target, model.layer.class_weight, **options)

    exact = Composed(plain, layer=copy.deepcopy(layer).double())
    (expected, wanted), (loss, found) = (
        gradients(exact, x.double()),
        gradients(Composed(lambda model, x: model.layer(x, target), layer=layer), x),
    )
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    assert all(relative(*pair) < 1e-5 for pair in zip(found, wanted, strict=True))
    assert ("class_weight" in layer.state_dict()) == (weight is not None)


@pytest.mark.parametrize("chunk_size", [None, 64])
def test_no_logits_are_held(chunks, chunk_size):
    """No tensor of tokens times classes exists between the passes, also none as an attribute of a node."""
    x, weight = normal((512, 8)).requires_grad_(), normal((4001, 8)).requires_grad_()
    target = torch.randint(4001, (512,))
    loss, saved = saved_by(lambda: F.linear_cross_entropy(x, weight, target, chunk_size=chunk_size))
    assert max((x.untyped_storage().nbytes() for x in saved), default=0) <= 4 * 4001 * 8
    assert not any(type(x) is torch.Tensor and x.numel() == 512 * 4001 for x in gc.get_objects())
    loss.backward()
