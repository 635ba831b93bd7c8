"""`fewbit memory`: counted bytes against sums by hand, real tensors and the paper's appendix B."""

import functools
import json
import sys
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from fewbit import cli, models
from fewbit.analysis import memory
from fewbit.analysis.memory import DEVICE_BYTES, GB, MB, PAPER, MemoryReport, ModelMemory
from fewbit.analysis.meter import saved_bytes
from fewbit.errors import FewbitError

measure = functools.cache(memory.measure)


def run(*arguments):
    arguments = ["memory", *arguments]
    return CliRunner().invoke(cli.app, arguments, prog_name="fewbit", env={"COLUMNS": "80"})


def vgg_by_hand(convolutions, size):
    """Bytes of a VGG with GELU: (inputs of the nonlinearities, everything), one image."""
    pixels, inputs, nonlinear, rest = size * size, 3, 0, 0
    for width, depth in zip((64, 128, 256, 512, 512), convolutions, strict=True):
        for _ in range(depth):
            rest += 4 * inputs * pixels  # the convolution's input
            nonlinear += 4 * width * pixels
            inputs = width
        rest += 4 * width * pixels  # the pool's input and, of eight bytes, where its maxima are
        pixels //= 4
        rest += 8 * width * pixels
    rest += 4 * inputs * pixels  # the average pool's input
    rest += 4 * (inputs * 49 + 4096 + 4096)  # those of the linear layers
    nonlinear += 4 * 2 * 4096
    return nonlinear, nonlinear + rest


@pytest.mark.parametrize(
    ("name", "convolutions"), [("vgg11", (1, 1, 2, 2, 2)), ("vgg16", (2, 2, 3, 3, 3))]
)
@pytest.mark.parametrize("size", [256, 128])
def test_vgg_is_the_sum_by_hand(name, convolutions, size):
    counted = measure(name, size=size)
    assert (counted.nonlinear_bytes, counted.activation_bytes) == vgg_by_hand(convolutions, size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet18", {"size": 64, "batch": 2}),
        ("resnet18", {"size": 64, "activation": None}),
        ("densenet121", {"size": 64, "activation": "selu"}),
        ("efficientnet_b0", {"size": 96, "dropout": True}),
    ],
)
def test_fake_tensors_are_counted_like_real_ones(name, options):
    counted = measure(name, **options)
    torch.manual_seed(0)
    model = models.build(name, counted.activation)
    if not counted.dropout:
        memory.freeze_dropout(model)
    real = saved_bytes(model, torch.randn(counted.batch, 3, counted.size, counted.size))
    assert real.total == counted.activation_bytes


def test_the_size_of_the_model_is_its_state():
    state = models.build("resnet18").state_dict()
    assert measure("resnet18", size=64).model_bytes == sum(
        tensor.numel() * tensor.element_size() for tensor in state.values()
    )


@pytest.mark.slow
def test_an_in_place_relu_keeps_nothing_that_the_next_layer_does_not():
    gelu, relu = measure("resnet18"), measure("resnet18", activation=None)
    # But for the last: the average pool that follows keeps nothing.
    assert relu.nonlinear_bytes == 4 * 512 * 8 * 8
    assert gelu.nonlinear_bytes == sum(4 * elements for elements in gelu.activation_inputs)
    assert gelu.activation_inputs == relu.activation_inputs
    assert "codes gain nothing" in run("resnet18", "--activation", "own").stdout
    assert "codes gain nothing" not in run("resnet18", "--activation", "gelu").stdout


@pytest.mark.slow
def test_gpt2_keeps_four_tensors_per_nonlinearity_and_few_bits_pack_one():
    counted = measure("gpt2", size=128)
    elements = 128 * 3072
    assert counted.activation_inputs == (elements,) * 12
    assert counted.nonlinear_bytes == 12 * 4 * 4 * elements
    fused = measure("gpt2", size=128, activation="gelu_tanh")
    assert fused.nonlinear_bytes == 12 * 4 * elements
    assert fused.saved_packed(3) == counted.saved_packed(3) == fused.saved(3)


def example(**changes):
    example = ModelMemory(
        model="vgg11",
        size=256,
        batch=1,
        activation="gelu",
        dropout=False,
        parameters=25,
        model_bytes=100,
        activation_bytes=1000,
        nonlinear_bytes=640,
        activation_inputs=(33, 127),
    )
    return replace(example, **changes)


def test_kept_by_the_papers_arithmetic_and_as_packed():
    measured = example()
    assert measured.saved(None) == 1000
    assert measured.saved(4) == 360 + 640 * 4 / 32
    assert measured.saved_packed(4) == 360 + 4 * 4 * (2 + 4)
    assert measured.share == 0.64


@pytest.mark.parametrize(
    ("device", "batch", "largest"),
    [(1400, 1, 1), (1399, 1, 0), (2400, 1, 2), (399, 1, 0), (3400, 2, 6), (0, 1, 0)],
)
def test_the_largest_batch(device, batch, largest):
    measured = example(batch=batch)
    assert measured.max_batch(measured.saved(None), device) == largest


# Relative tolerance of (model, all, nonlinear) and of the batches; docs/results/memory.md says why.
WIDER = {"efficientnet_b0": 0.055, "vgg11": 0.055, "vgg16": 0.055, "gpt2": 0.055}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["resnet18", "resnet50", "vgg11", "vgg16", "densenet121", "efficientnet_b0"]
    + ["roberta-base", "roberta-large", "gpt2"],
)
def test_the_papers_figures(name):
    measured = measure(name)
    assert measured.like_paper
    counted = [measured.model_bytes, measured.activation_bytes, measured.nonlinear_bytes]
    sizes = [value / MB for value in counted]
    batches = [
        measured.max_batch(measured.saved(bits), DEVICE_BYTES) for bits in (None, 1, 2, 3, 4)
    ]
    assert sizes + batches == pytest.approx(PAPER[name], rel=WIDER.get(name, 0.04))
    # The paper's megabytes carry an allocator's rounding, so they are never below ours.
    assert all(a <= b + 0.06 for a, b in zip(sizes, PAPER[name], strict=False))
    if name == "roberta-large":  # whose sizes the allocator does not round
        assert [round(size, 1) for size in sizes] + batches == list(PAPER[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"size": 224}, {"activation": None}, {"dropout": True}], ids=str
)
def test_other_settings_are_not_set_beside_the_paper(options):
    measured = measure("resnet18", **options)
    assert not measured.like_paper
    assert "40.0  for backward" not in str(MemoryReport((measured,)))
    assert "40.0  for backward" in str(MemoryReport((measure("resnet18"),)))


def test_one_model_is_shown_in_detail():
    result = run("ResNet-18", "--bits", "2", "--device-memory", "32GB")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "resnet18, gelu, 256 x 256 pixels, on a 32 GB device"
    row = next(line.split() for line in lines if line.startswith("2 bits"))
    assert row == ["2", "bits", "28.3", "27.6", "%", "1153", "+38.2", "%", "1153", "1113"]
    assert max(map(len, lines)) <= 80


def test_several_models_have_a_line_each():
    result = run("vgg11", "resnet18", "resnet18", "--device-memory", "16GB", "--bits", "1")
    rows = [line.split() for line in result.stdout.splitlines()[4:6]]
    assert [row[0] for row in rows] == ["vgg11", "resnet18"]
    assert rows[1][1:] == ["44.6", "39.0", "11.5", "29", "%", "415", "580"]


@pytest.mark.slow
def test_json_has_the_counted_bytes():
    result = run("resnet18", "--json", "--bits", "3", "--batch", "2", "--image-size", "64")
    (record,) = json.loads(result.stdout)
    measured = measure("resnet18", size=64, batch=2)
    assert record["activation_bytes"] == measured.activation_bytes
    assert record["parameters"] == 11_689_512
    assert record["batch"] == 2
    assert record["kept_bytes_3bit"] == measured.saved_packed(3)
    assert record["max_batch_3bit"] == measured.max_batch(measured.saved(3), 32 * GB)
    assert "max_batch_2bit" not in record


def test_a_batch_is_shown_with_its_total():
    measured = measure("vgg11", batch=4)
    lines = [line.split() for line in run("vgg11", "--batch", "4").stdout.splitlines()]
    assert [f"{measured.activation_bytes / MB:.1f}", *"saved at batch 4".split()] in lines
    total = 4 * measured.model_bytes + measured.activation_bytes
    assert [f"{total / MB:.1f}", *"with 4 copies of the model".split()] in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected either the name of a model or --all (try 'fewbit memory --help')"),
        (["--all", "gpt2"], "expected either the name of a model or --all"),
        (["resnet9"], "unknown model 'resnet9': did you mean resnet"),
        (["resnet18", "--bits", "9"], "bits: expected 1 to 8, got 9"),
        (["resnet18", "--device-memory", "3x"], "--device-memory: expected a size such as 32GB"),
        (["resnet18", "--activation", "geluu"], "unknown activation 'geluu': did you mean gelu?"),
        (["resnet18", "--image-size", "32"], "resnet18: expected an image size of 64 to 8192"),
        (["gpt2", "--image-size", "224"], "gpt2: expected a sequence length, got an image size"),
        (["vgg11", "--sequence-length", "9"], "vgg11: expected an image size, got a sequence"),
        (["gpt2", "--sequence-length", "1025"], "gpt2: expected 1 to 1024 tokens, got 1025"),
    ],
)
def test_bad_input_is_a_line_and_exit_code_2(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"fewbit: error: {message}")


def test_torch_missing_is_said_in_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("resnet18", "gpt2"):
        with pytest.raises(FewbitError, match=f"^the model {name} needs torch: pip install torch$"):
            memory.measure(name)


def test_every_model_by_default(monkeypatch):
    seen = []

    def stand_in(name, **options):
        seen.append((name, options["size"]))
        return example(model=name)

    monkeypatch.setattr("fewbit.analysis.memory.measure", stand_in)
    memory.memory(image_size=224)
    assert [name for name, _ in seen] == list(models.names())
    assert dict(seen)["vgg11"] == 224 and dict(seen)["gpt2"] is None
