"""The arguments of `fewbit.compile` and `fewbit.partition_fn`, and the report."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from compiled_models import MARKS, gradient, made
from composed import Composed
from layers import relative
from samples import normal
from torch import nn
from torch._functorch.partitioners import min_cut_rematerialization_partition

import fewbit
from fewbit.compiler import partitioner, rewrite, self_check

pytestmark = MARKS


@pytest.mark.inductor
def test_overrides():
    model, x = made("gated")

    def bits(overrides):
        torch._dynamo.reset()
        compiled = fewbit.compile(model, 2, overrides=overrides, backend="aot_eager")
        gradient(model, compiled, x)
        return [(row.module, row.bits) for row in compiled.partitioner.report.rows]

    assert {number for module, number in bits({"down": None}) if module == "down"} == {None}
    # The input of `down` is computed again from the copies of its factors, which get the bits.
    assert 8 in {number for _, number in bits({"down": 8})}
    assert 8 not in {number for _, number in bits({})}
    # The norm's result is the input of both, and the one with more bits decides.
    numbers = {number for _, number in bits({"gate": 4, "up": 6})}
    assert 6 in numbers and 4 not in numbers


def activation():
    """Return a module tanh(x) sigmoid(x), whose backward pass multiplies one gradient by a single tensor."""
    return Composed(lambda model, x: torch.tanh(x) * torch.sigmoid(x))


def test_an_override_of_a_part_of_a_merged_product():
    model, x = nn.Sequential(nn.Linear(64, 64), activation()), torch.randn(32, 64)
    compiled = fewbit.compile(model, 2, overrides={"1": None}, backend="aot_eager", fullgraph=True)
    compiled(x).square().mean().backward()
    assert not [row for row in compiled.partitioner.report.rows if row.bits]


@pytest.mark.inductor
@pytest.mark.parametrize("glob", ["parts.*", "shared"])
def test_an_override_of_a_module_with_two_paths(glob):
    def forward(model, x):
        return model.shared(model.parts[0](x)).square().mean()

    part = nn.Sequential(nn.Linear(64, 64), activation())
    model, x = Composed(forward, parts=nn.ModuleList([part]), shared=part), torch.randn(32, 64)
    compiled = fewbit.compile(model, 2, overrides={glob: None}, backend="aot_eager", fullgraph=True)
    gradient(model, compiled, x)
    assert {row.bits for row in compiled.partitioner.report.rows if row.module} == {None}


@pytest.mark.inductor
def test_an_override_that_may_not_hold_warns():
    def broken(model, x):
        torch._dynamo.graph_break()
        return torch.tanh(model.layer(x)).square()

    model = nn.Sequential(nn.Linear(64, 64), Composed(broken, layer=nn.Linear(64, 64)))
    compiled = fewbit.compile(model, 2, overrides={"1.layer": 8}, backend="aot_eager")
    with pytest.warns(UserWarning, match="overrides: torch.compile calls a module"):
        compiled(torch.randn(32, 64)).sum().backward()


@pytest.mark.inductor
# torch warns when it compiles the second graph.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_broken_graph():
    """The logits are an input of the second graph, which quantizes them too."""

    def broken(model, x):
        logits = model.head(model.embed(x))
        torch._dynamo.graph_break()
        return nn.functional.cross_entropy(logits, torch.arange(len(x)) % 500)

    model = Composed(broken, embed=nn.Linear(64, 64), head=nn.Linear(64, 500))
    x = torch.randn(128, 64)
    exact = fewbit.saved_bytes(model, x)
    compiled = fewbit.compile(model, 2, backend="aot_eager")
    gradient(model, compiled, x)
    report = compiled.partitioner.report
    saved = fewbit.saved_bytes(compiled, x).total
    assert report.saved_bytes <= saved <= report.saved_bytes + x.nbytes
    assert exact.total > 8 * report.saved_bytes
    assert "summed over 2 graphs" in str(report)
    assert not any(row.op.startswith("primals") for row in report.rows)


@pytest.mark.inductor
def test_the_report():
    model, x = made("convolutions")
    compiled = fewbit.compile(model, 2, backend="aot_eager")
    assert "no graph compiled" in str(compiled.partitioner.report)
    gradient(model, compiled, x)
    report = compiled.partitioner.report
    rows = {(row.module, row.op): row for row in report.rows}
    assert rows["", "threshold_backward"].bits == 1
    assert rows["", "max_pool2d_with_indices"].bits == 2
    assert "saved for backward, in place of" in str(report)
    assert len(report.records()) == len(report.rows)


def _refuses(*_, **__):
    raise RuntimeError("no such argument")


def _torchs(_, module, inputs, **options):
    return min_cut_rematerialization_partition(module, inputs, **options)


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("place", "name", "change", "message"),
    [
        (partitioner.Partitioner, "_rewrite", _refuses, "no such argument"),
        (
            partitioner.Partitioner,
            "__call__",
            _torchs,
            "saves [0-9]+ bytes with 8 bits, and [0-9]+ in",
        ),
        (self_check, "_LARGEST_ERROR", 0, "gradient of a compiled network has an error of"),
        (
            self_check,
            "_forward",
            lambda network, x: (network(x) * float(type(network) is self_check._Network), 1),
            "results",
        ),
    ],
)
def test_a_torch_that_fails_the_check_saves_exact_tensors(
    monkeypatch, place, name, change, message
):
    model, x = made("gated")
    with monkeypatch.context() as patch:
        patch.setattr(place, name, change)
        patch.setattr(self_check, "_of_process", self_check.run)
        patch.setattr(self_check, "_answers", [])
        patch.setattr(self_check, "_mark", lambda: None)
        with pytest.warns(
            UserWarning,
            match=rf"does not work with torch {re.escape(torch.__version__)} \(.*{message}",
        ):
            compiled = fewbit.compile(model, 2, backend="aot_eager")
    assert not hasattr(compiled, "partitioner")
    torch.testing.assert_close(gradient(model, compiled, x), gradient(model, model, x))


@pytest.mark.inductor
@pytest.mark.processes
def test_the_check_runs_once_for_each_version_of_torch(monkeypatch, tmp_path):
    """It runs in a process, whose random numbers, warnings and counters are not those of this one."""
    cache, asked = tmp_path / "cache", []
    monkeypatch.setenv("FEWBIT_CACHE", str(cache))
    run = self_check._of_process

    def counted():
        asked.append(torch.__version__)
        return run() if torch.__version__ != "2.99.0" else answers.pop(0)

    answers = ["something else", None]
    monkeypatch.setattr(self_check, "_of_process", counted)

    def failure():
        monkeypatch.setattr(self_check, "_answers", [])
        assert self_check.failure() == self_check.failure()
        return self_check.failure()

    own = torch.__version__
    assert failure() is None and failure() is None and asked == [own]  # a file in the cache says so
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert failure() == "something else" and len(asked) == 2
    assert failure() is None and len(asked) == 3  # no process could be started
    assert len([*cache.iterdir()]) == 1
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    assert run() is None


@pytest.mark.inductor
def test_partition_fn():
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    model, x = made("gated")
    exact = gradient(model, model, x)
    partition = fewbit.partition_fn(bits=8)
    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    assert 0 < relative(gradient(model, torch.compile(model, backend=backend), x), exact) < 0.02
    assert partition.report.rows


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"bits": 9}, "a whole number from 1 to 8 or FixedBits, got 9"),
        ({"bits": fewbit.AdaptiveBits(2)}, "a whole number from 1 to 8 or FixedBits"),
        ({"backend": "eager"}, 'expected "inductor" or "aot_eager"'),
        ({"overrides": {"nothing": 2}}, "a glob that matches a module"),
        ({"layers": {"bits": 2}}, "bits"),
        ({"model": torch.compile(nn.Linear(4, 4), backend="aot_eager")}, "not compiled yet"),
        ({"model": torch.tanh}, "expected a torch.nn.Module, got builtin_function_or_method"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(fewbit.InputError, match=message):
        fewbit.compile(**{"model": nn.Linear(4, 4), **arguments})


CHANNELS = {  # name: (shape, order of dimensions in storage, whether attention saves the tensor, number of channels)
    "tokens": ((64, 8, 20), (0, 1, 2), False, 20),
    "rows": ((512, 20), (0, 1), False, 20),
    "few rows": ((8, 20), (0, 1), False, 0),
    "one column": ((512, 1), (0, 1), False, 0),
    "transposed rows": ((512, 20), (1, 0), False, 0),
    "channels-last images": ((4, 3, 16, 16), (0, 2, 3, 1), False, 3),
    "images": ((4, 3, 16, 16), (0, 1, 2, 3), False, 0),
    "queries of a permuted projection": ((4, 2, 256, 8), (0, 2, 1, 3), True, 16),
    "the same outside of attention": ((4, 2, 256, 8), (0, 2, 1, 3), False, 0),
    "contiguous queries": ((4, 2, 256, 8), (0, 1, 2, 3), True, 0),
    "queries of one head": ((4, 256, 8), (0, 1, 2), True, 8),
    "a vector": ((512,), (0,), False, 0),
}


@pytest.mark.parametrize("shape, order, is_attention, count", CHANNELS.values(), ids=CHANNELS)
def test_which_tensors_have_channels(shape, order, is_attention, count):
    node = SimpleNamespace(meta={"val": torch.empty(shape)})
    root = SimpleNamespace(node=node, is_attention=is_attention)
    assert rewrite._channels(root, list(order)) == count


@pytest.mark.slow
def test_channels_have_means_and_scales(monkeypatch):
    """If channels are very unequal, the gradient of the weight has a smaller error."""
    torch.manual_seed(0)
    x, scales = normal((300, 20), scale=1.0), torch.logspace(-2, 2, 20)
    errors, saved = [], []
    for least in (256, 10**9):
        monkeypatch.setattr("fewbit.compiler.rewrite.LEAST_ROWS", least)
        model = Composed(
            lambda model, x: model.linear(x * scales + 1), linear=nn.Linear(20, 3, bias=False)
        )
        compiled = fewbit.compile(model, bits=2, backend="aot_eager")
        grad = normal((300, 3), scale=1.0, seed=1)
        exact, squares = grad.t() @ (x * scales + 1), 0.0
        for _ in range(5):
            (found,) = torch.autograd.grad(compiled(x), model.linear.weight, grad)
            squares = squares + (found - exact).square().sum(0)
        errors.append(squares)
        saved.append(fewbit.saved_bytes(compiled, x).total)
        torch._dynamo.reset()
    assert saved[0] - saved[1] == 4 * 20
    assert errors[0].sum() < errors[1].sum() / 2 and errors[0][:10].sum() < errors[1][:10].sum() / 4
