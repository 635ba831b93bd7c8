"""fewbit.fits: bytes counted by hand, the peak that torch's profiler measures, sizes that fit beside sizes that do not."""

import json
import math
from collections import UserDict
from copy import deepcopy

import pytest
import torch
from click.testing import CliRunner
from composed import Composed
from measured import measured_peak
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import fewbit
from fewbit import cli
from fewbit.errors import InputError
from fewbit.models.workload import workload
from fewbit.planning.candidates import Candidate
from fewbit.planning.fits_result import Fit, FitRow
from fewbit.planning.largest import largest
from fewbit.planning.storages import StorageTracker
from fewbit.planning.timeline import LOSS, TRANSIENT, UPDATE, Mark
from fewbit.render.formats import amount
from fewbit.render.terminal import plain
from fewbit.runtime import backends

MIB = 2**20


def fits(*args, **kwargs):
    return fewbit.fits(*args, progress=False, **kwargs)


def net(width=256, dropout=0.0):
    return nn.Sequential(
        nn.Linear(64, width),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.LayerNorm(width),
        nn.Linear(width, 8),
    )


def batch_of(size):
    return torch.randn(size, 64), torch.randint(8, (size,))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def nbytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)


def gpt2():
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100, "n_positions": 128}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)
    return GPT2LMHeadModel(config).train()


def tokens(batch=4, length=32):
    words = torch.randint(100, (batch, length))
    return {"input_ids": words, "labels": words.clone()}


def scale(n):
    """Return a model of one parameter of n elements, which multiplies a batch of rows."""
    return Composed(lambda model, x: (model.weight * x).sum(), weight=nn.Parameter(torch.ones(n)))


def test_the_peak_of_one_product_is_that_by_hand():
    """Backward: the weight, x, the gradient of the product, and the sum of its rows; the loss has 4 bytes."""
    n, rows = 1000, 16
    options = {"optimizer": torch.optim.SGD, "settings": ["exact"]}
    (row,) = fits(scale(n), torch.randn(rows, n), **options).rows
    assert (row.weights, row.optimizer, row.all_gradients) == (4 * n, 0, 4 * n)
    assert row.all_saved == 4 * rows * n + 4
    gradient, product = 4 * n, 4 * rows * n
    assert row.phase == "backward"
    # The gradient of the loss, 4 bytes, is an expanded tensor.
    assert row.peak == pytest.approx(row.weights + row.all_saved + product + gradient, abs=8)


@pytest.mark.parametrize("setting", ["exact", 4, 2])
def test_parts_are_those_of_a_real_step(setting):
    model, batch = net(dropout=0.1), batch_of(128)
    (row,) = fits(model, batch, loss, settings=[setting]).rows
    real = deepcopy(model)
    if setting != "exact":
        fewbit.compress_(real, setting, verbose=False)
    assert row.weights == nbytes(model.parameters())
    # The loss exists too, and the input, of which a compressed layer saves a quantized copy.
    others = 4 + (0 if setting == "exact" else batch[0].nbytes)
    assert row.all_saved == fewbit.saved_bytes(lambda: loss(real, batch)).total + others
    optimizer = torch.optim.AdamW(real.parameters())
    loss(real, batch).backward()
    optimizer.step()
    assert row.all_gradients == nbytes(parameter.grad for parameter in real.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert row.optimizer == nbytes(states)
    parts = row.weights + row.gradients + row.optimizer + row.saved + row.transient
    assert parts == row.peak


def encoder():
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def resnet():
    model, (batch,), loss = workload("resnet18", batch=32, size=64, batches=1)
    return model, batch, loss


MEASURED = {
    "net": lambda: (net(), batch_of(1024), loss),
    "gpt2": lambda: (gpt2(), tokens(16, 128), lambda model, batch: model(**batch).loss),
    "encoder": lambda: (encoder(), torch.randn(16, 128, 64), lambda model, x: model(x).mean()),
    "resnet18": resnet,
}


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.parametrize("setting", ["exact", 4])
@pytest.mark.parametrize(
    "name",
    [name if name == "net" else pytest.param(name, marks=pytest.mark.slow) for name in MEASURED],
)
def test_the_peak_is_the_measured_one(name, setting):
    if setting != "exact" and backends.on[torch.device("cpu")].name == "reference":
        pytest.skip("the reference backend takes temporary memory that kernels do not need")
    model, batch, loss = MEASURED[name]()
    (row,) = fits(model, batch, loss, settings=[setting]).rows
    if setting != "exact":
        fewbit.compress_(model, setting, verbose=False)
    # Convolutions of oneDNN copy tensors into other layouts, which depend on the processor.
    with torch.backends.mkldnn.flags(enabled=False):
        measured = measured_peak(model, batch, loss)
    assert row.peak == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("checkpoint", [None, 4])
@pytest.mark.parametrize("bits", [None, 2])
def test_fake_tensors_save_as_many_bytes_as_real_ones(bits, checkpoint):
    """Attention with dropout, dropout, and checkpoints whose inputs are quantized."""
    model, batch = gpt2(), tokens()
    if checkpoint:
        fewbit.checkpoint_(model, checkpoint)
    if bits:
        fewbit.compress_(model, bits, verbose=False)
    real = fewbit.saved_bytes(lambda: model(**batch).loss).total
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {name: mode.from_tensor(tensor) for name, tensor in batch.items()}
        found = fewbit.saved_bytes(lambda: model(**fake).loss).total
    # Some masks are saved in a larger storage than with real tensors.
    assert found == pytest.approx(real, abs=8 * batch["input_ids"].numel() * 4)


def test_multihead_attention_on_fake_tensors_saves_as_many_bytes_as_on_real_ones():
    model, x = encoder(), torch.randn(4, 32, 64)
    fewbit.compress_(model, 4, verbose=False)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = fewbit.saved_bytes(model, mode.from_tensor(x)).total
    assert found == fewbit.saved_bytes(model, x).total


def test_an_activation_on_fake_tensors_takes_the_memory_of_its_result_and_its_codes():
    tracker = StorageTracker()
    with tracker:
        x = torch.empty(64, 1024, requires_grad=True)
        tracker.start()
        y = fewbit.functional.gelu(x, bits=2)
        # With the 4 bytes of a scalar that ties the result to the codes in compiled code.
        assert tracker.timeline().peak().size == pytest.approx(
            x.nbytes + y.nbytes + x.numel() // 4, abs=4
        )


def test_a_norm_on_fake_tensors_takes_no_memory_for_normalized_values():
    norm, tracker = fewbit.nn.LayerNorm(256, bits=2), StorageTracker()
    with tracker:
        x = torch.empty(64, 256, requires_grad=True)
        tracker.start()
        y = norm(x)
        assert x.nbytes + y.nbytes < tracker.timeline().peak().size < 1.5 * (x.nbytes + y.nbytes)


def test_frozen_parameters_have_neither_gradients_nor_state():
    model = net()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    (row,) = fits(model, batch_of(16), loss, settings=["exact"]).rows
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert row.weights == nbytes(model.parameters())
    assert row.all_gradients == nbytes(trained)
    assert row.optimizer == 2 * nbytes(trained) + 4 * len(trained)  # with the numbers of steps


@pytest.mark.slow
def test_the_model_its_optimizer_and_the_random_state_stay_the_same():
    model, batch = net(dropout=0.1), batch_of(16)
    optimizer = torch.optim.AdamW(model.parameters())
    loss(model, batch).backward()
    optimizer.step()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    before, state = deepcopy(model.state_dict()), deepcopy(optimizer.state_dict())
    random = torch.get_rng_state()
    found = fits(model, batch, loss, optimizer=optimizer)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert torch.equal(parameter.grad, grad)
    after = optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"]
    for number, values in state["state"].items():
        assert all(torch.equal(after["state"][number][name], x) for name, x in values.items())
    assert [type(module) for module in model] == [type(module) for module in net(dropout=0.1)]
    assert found.rows == fits(model, batch, loss).rows


def test_a_compressed_model_gives_the_same_result():
    model, batch = net(), batch_of(16)
    before = fits(model, batch, loss, settings=["exact", 2])
    fewbit.compress_(model, 4, verbose=False)
    assert fits(model, batch, loss, settings=["exact", 2]).rows == before.rows
    assert isinstance(model[0], fewbit.nn.Linear)


def test_a_model_too_large_for_this_machine():
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(2**17, 2**17, bias=False) for _ in range(8)])
        x = torch.empty(4, 2**17)
    found = fits(model, x, device="80 GiB", settings=["exact"])
    assert found.rows[0].weights == 8 * 2**36
    assert (found.rows[0].fits, found.rows[0].largest_batch) == (False, 0)
    assert fits(nn.Linear(8, 8), torch.randn(4, 8), device=2e6, settings=4).rows[0].fits


def test_a_loss_that_fails_with_a_larger_batch_is_named():
    """The labels, outside of the batch, have its size."""
    labels, options = torch.zeros(4, 8), {"device": 2e6, "settings": 4}
    found = fits(nn.Linear(8, 8), torch.randn(4, 8), lambda m, x: (m(x) - labels).sum(), **options)
    assert found.rows[0].largest_batch == 4 and found.limit.startswith("RuntimeError: ")
    assert "a larger batch raises RuntimeError: " in plain(found, 120)
    assert fits(nn.Linear(8, 8), torch.randn(4, 8), **options).limit is None


@pytest.mark.slow
@pytest.mark.parametrize(("name", "setting"), [("batch", 2), ("sequence", "exact")])
def test_the_largest_size_fits_and_the_next_does_not(name, setting):
    """The attention of this layer saves a matrix of length x length, so the peak is quadratic in the length."""
    layer, capacity = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 16 * MIB

    def row_of(*shape, device=2**60):
        x = torch.randn(*shape, 32)
        return fits(layer, x, device=device, settings=[setting], sequence_dim=1).rows[0]

    size = getattr(row_of(2, 16, device=capacity), f"largest_{name}")
    shapes = [(n, 16) if name == "batch" else (2, n) for n in (size, size + 1)]
    fitting, larger = (row_of(*shape).peak for shape in shapes)
    assert fitting <= capacity < larger


@pytest.mark.slow
def test_the_configuration_limits_the_sequence():
    found = fits(gpt2(), tokens(), device="8 GiB", settings=["exact"], sequence_dim=1)
    assert found.most_sequence == found.rows[0].largest_sequence == 128
    assert "128+" in plain(found)


@pytest.mark.slow
def test_on_a_gpu_optimizers_take_all_parameters_at_once_and_attention_is_fused():
    model, batch = gpt2(), tokens(2, 64)
    (cpu,) = fits(model, batch, settings=["exact"]).rows
    (gpu,) = fits(model, batch, settings=["exact"], device="24 GiB").rows
    probabilities = 4 * 2 * 4 * 64 * 64  # bytes, of one layer
    # torch saves two matrices and the mask for each of the two layers.
    assert cpu.all_saved - gpu.all_saved > 2 * 2 * probabilities
    small = tokens(1, 8)
    (cpu,) = fits(model, small, settings=["exact"]).rows
    (gpu,) = fits(model, small, settings=["exact"], device="24 GiB").rows
    assert cpu.phase == gpu.phase == "step"
    assert gpu.transient > 0.9 * nbytes(model.parameters()) > cpu.transient
    attention = F.scaled_dot_product_attention
    assert attention.__module__ != "fewbit.planning.fake_steps"


@pytest.mark.parametrize("capacity", [0, 99, 100, 1000, 12345, 10**9])
@pytest.mark.parametrize("start", [1, 7, 1000])
@pytest.mark.parametrize(
    "peak",
    [
        lambda n: 100 + 10 * n,
        lambda n: 100 + 3 * n + n * n,
        lambda n: max(1000, 7 * n),
        lambda n: 100 + 64 * math.ceil(n / 5),
        lambda n: None if n > 50 else 10 * n,
    ],
    ids=["affine", "quadratic", "flat first", "steps", "at most 50"],
)
def test_the_search_finds_the_largest_size(peak, start, capacity):
    if peak(start) is None:
        start = 1
    tried = []
    found = largest(lambda n: tried.append(n) or peak(n), start, peak(start), capacity)
    assert found == 0 or peak(found) <= capacity
    assert peak(found + 1) is None or peak(found + 1) > capacity
    assert len(tried) <= 24
    assert largest(peak, start, peak(start), capacity, most=start) in (start, min(found, start))


def test_the_search_in_an_affine_peak_takes_few_steps():
    tried = []
    found = largest(lambda n: tried.append(n) or 1000 + 321 * n, 16, 1000 + 321 * 16, 10**7)
    assert found == (10**7 - 1000) // 321
    assert len(tried) <= 4


def test_the_tracker_follows_allocations_and_releases():
    tracker = StorageTracker()
    with tracker:
        kept = torch.empty(100)
        tracker.claim([kept], "weights")
        tracker.start()
        first = torch.empty(1000)
        view = first[:10]
        del first
        assert tracker.total(TRANSIENT) == 4000  # the view keeps the storage
        moment = tracker.moment
        del view
        assert tracker.total() == 400
        second = torch.empty(200)
        tracker.claim([second], "saved")
    found = tracker.timeline([(moment, Mark(LOSS)), (moment + 1, Mark(UPDATE))])
    assert found.peak() == (4400, {"weights": 400, TRANSIENT: 4000}, "forward")
    assert found.peak("backward").size == 4400  # when the backward pass begins
    parts = {"weights": 400, TRANSIENT: 0, "saved": 800}
    assert found.peak("step") == (1200, parts, "step")
    assert [len(one.happened) for one in (found, tracker.timeline())] == [5, 3]


@pytest.mark.slow
def test_how_the_result_is_shown(tmp_path):
    model, batch = net(), batch_of(4096)
    peaks = [row.peak for row in fits(model, batch, loss, settings=["exact", 2]).rows]
    assert peaks[0] > 1.2 * peaks[1]
    found = fits(model, batch, loss, device=sum(peaks) // 2, settings=["exact", 2])
    exact, few = found.rows
    assert (exact.fits, few.fits) == (False, True)
    text = plain(found, 120)
    size = amount(sum(peaks) // 2)
    assert f"Sequential, batch 4096: fits in {size} with 2 bits, but not with exact" in text
    assert f"{few.largest_batch:,}" in text and "AdamW" in text
    found.save(tmp_path / "fits.json")
    document = json.loads((tmp_path / "fits.json").read_text())
    assert document["rows"] == found.records()
    assert document["device_bytes"] == sum(peaks) // 2
    assert found.to_csv().count("\n") == 3
    assert "<table" in found.to_html()
    bare = fits(model, batch, loss, settings=["exact"])
    assert bare.rows[0].fits is None and "takes at most" in bare.title


def test_the_optimizer_is_shown_in_100_characters():
    def row(setting, phase):
        return FitRow(
            setting, *range(2**37, 6 * 2**37, 2**37), 2**40, phase, 1, 1, True, 123, 12345
        )

    rows = row("exact", "backward"), row("4 bits", "forward"), row("checkpoint", "step")
    text = plain(Fit("Model", "AdamW", 2**41, 8, 1024, None, rows), 100)
    assert " optimizer " in text and text.endswith("columns left out: fits")


def test_a_batch_may_be_a_mapping_that_is_no_dict():
    found = fits(nn.Linear(8, 8), UserDict(input=torch.randn(4, 8)), settings=["exact"])
    assert found == fits(nn.Linear(8, 8), {"input": torch.randn(4, 8)}, settings=["exact"])


@pytest.mark.slow
def test_the_command():
    arguments = "memory resnet18 --fits --device 2GiB --batch 2 --image-size 64 --bits 2 --json"
    result = CliRunner().invoke(cli.app, arguments.split())
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert [row["setting"] for row in document["rows"]] == ["exact", "2 bits"]
    assert document["rows"][0]["weights"] == 4 * 11_689_512 + 4 * 2 * 4800 + 8 * 20
    assert document["device_bytes"] == 2 * 2**30


@pytest.mark.slow
def test_the_command_that_chooses():
    """`--fit` prints the document of `fit_`, or one line if nothing fits."""
    arguments = "memory resnet18 --batch 4 --image-size 64 --optimizer sgd --json --fit"
    result = CliRunner().invoke(cli.app, [*arguments.split(), "110 MiB"])
    assert result.exit_code == 0, result.stderr
    found = fewbit.FastestFit.from_json(result.stdout)
    assert found.peak <= found.memory == 110 * 2**20 and len(found.settings.blocks) == 8
    result = CliRunner().invoke(cli.app, [*arguments.split(), "60 MiB"])
    assert result.exit_code == 2
    assert "memory: expected at least" in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("resnet18 --optimizer sgd", "--optimizer: expected --fits"),
        ("resnet18 vgg11 --fits", "--fits: expected one MODEL, got 2"),
        ("resnet18 --fits --dropout", "--dropout: expected it without --fits"),
        ("resnet18 --fits --fit 1GB", "--fit: expected it without --fits"),
        ("resnet18 --fit 1GB --bits 2", "--bits: expected it without --fit"),
        ("--fit 1GB", "--fit: expected one MODEL, got 0"),
        ("resnet18 --fits --optimizer best", "--optimizer: expected a class of torch.optim"),
        ("resnet18 --fits --sequence-length 8", "--sequence-length: expected a model of texts"),
    ],
)
def test_the_command_refuses(arguments, message):
    result = CliRunner().invoke(cli.app, ["memory", *arguments.split()])
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("\n") == 1


def branches():
    """Return a model whose operations depend on values."""
    return Composed(
        lambda model, x: model.layer(x) if x.sum() > 0 else model.layer(-x), layer=nn.Linear(4, 4)
    )


def test_a_loss_of_another_model_is_refused_before_it_changes_that_model():
    model, other = net(), net()
    with pytest.raises(InputError, match="outside of this model"):
        fits(model, batch_of(4), lambda model, batch: loss(other, batch))
    assert all(parameter.grad is None for parameter in other.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "fast"}, "device: expected a size such as '24 GiB' or a device"),
        ({"device": 0}, "or at least 1,048,576 bytes, got 0"),
        ({"device": 24}, "device: expected a size such as '24 GiB', or at least"),
        ({"device": 2.5}, "device: expected a size such as '24 GiB', a torch.device or None"),
        ({"device": "meta"}, "device: expected a device of this machine with a known memory"),
        ({"settings": []}, "settings: expected at least one setting"),
        ({"settings": "best"}, "settings: expected 'exact', 'checkpoint'"),
        ({"settings": [2.5]}, "expected bits that do not depend on values"),
        ({"settings": Candidate("a", 2, method="compile")}, "one of the methods compress_"),
        ({"settings": "checkpoint"}, "expected a model of transformers for 'checkpoint'"),
        ({"optimizer": "adamw"}, "optimizer: expected a class, a function or an optimizer"),
        ({"optimizer": lambda parameters: None}, "expected it to make a torch optimizer"),
        ({"optimizer": torch.optim.LBFGS}, "optimizer: expected one whose step takes no closure"),
        ({"optimizer": nn.Linear}, "that makes an optimizer from parameters, got one that raises"),
        ({"optimizer": torch.optim.SGD(net().parameters())}, "expected an optimizer of the model's parameters"),
        ({"sequence_dim": 0}, "sequence_dim: expected an integer of at least 1, got 0"),
        ({"sequence_dim": 5}, "batch: expected a tensor with a dimension 5"),
        ({"loss": lambda model, batch: 1.0}, "loss: expected a scalar tensor, got float"),
        ({"loss": lambda model, batch: model(batch[0])}, "loss: expected a scalar tensor"),
        ({"batch": (torch.randn(2, 3), torch.zeros(2).long())}, "batch: expected one that loss"),
        ({"loss": None}, "batch: expected the arguments of the model's forward"),
        ({"model": branches(), "batch": torch.randn(2, 4), "loss": None}, "expected one whose operations do not depend on values"),
    ],
)  # fmt: skip
def test_what_is_refused(changes, message):
    arguments = {"model": net(), "batch": batch_of(4), "loss": loss, "settings": ["exact"]}
    with pytest.raises(InputError) as found:
        fits(**(arguments | changes))
    assert message in str(found.value)


@pytest.mark.parametrize(
    "measure",
    [
        fewbit.fits,
        lambda *args, **more: fewbit.plan(*args, lambda model, x: model(x).mean(), **more),
    ],
)
def test_a_forward_that_a_copy_does_not_have(measure):
    """The forward refers to the layer that was current when the model was made, as in TRL's trainers."""
    model = nn.Sequential(nn.Linear(8, 8))
    layer = model[0]
    model.forward = lambda x: layer(x)
    expected = "loss: expected a loss of the model .* has a forward of its own.*before the trainer is created"
    with pytest.raises(InputError, match=expected):
        measure(model, torch.randn(8, 8), progress=False)
