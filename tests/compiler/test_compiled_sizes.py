"""`fewbit.compile` of models whose tensors vary in size."""

import pytest
import torch
from compiled_models import EXACT, MARKS, gradient, made
from composed import Composed
from layers import relative
from torch import nn

import fewbit
from fewbit.compiler import self_check

pytestmark = MARKS


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("name", "dynamic", "backend"),
    [
        ("attention", True, "aot_eager"),
        ("attention written out", None, "aot_eager"),
        ("convolutions", None, "aot_eager"),
        ("gated", True, "aot_eager"),
        pytest.param("gated", None, "inductor", marks=pytest.mark.slow),
    ],
)
def test_sizes_that_vary(name, dynamic, backend):
    """The gradients of every size are right, and torch compiles as often as without copies."""
    model, x = made(name)
    model.dropout = 0.0  # compiled code draws other masks than eager mode
    batches = [x[:size] for size in (len(x), len(x) * 3 // 4, len(x) // 2)]
    assert self_check.failure() is None  # which compiles a graph
    graphs = {}
    for bits, overrides in ((None, EXACT), (8, None)):
        torch._dynamo.reset()
        torch._dynamo.pgo.reset_code_state()  # the sizes that torch has seen change
        torch._dynamo.utils.counters.clear()
        settings = {"backend": backend, "dynamic": dynamic}
        compiled = fewbit.compile(model, bits, overrides=overrides, **settings)
        found = [gradient(model, compiled, batch) for batch in batches]
        graphs[bits] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs[8] <= graphs[None] <= 2
    for batch, few_bit in zip(batches, found, strict=True):
        assert 0 < relative(few_bit, gradient(model, model, batch)) < 0.02


@pytest.mark.inductor
def test_copies_of_sizes_that_vary_have_the_bytes_of_other_copies():
    model, x = made("attention")
    compiled = fewbit.compile(model, 2, backend="aot_eager", dynamic=True)
    of_all = [fewbit.saved_bytes(compiled, batch).total for batch in (x, x[:5])]
    rows = compiled.partitioner.report.rows
    assert sum(row.exact_bytes for row in rows) / sum(row.saved_bytes for row in rows) > 8
    for batch, found in zip((x, x[:5]), of_all, strict=True):
        torch._dynamo.reset()
        static = fewbit.compile(model, 2, backend="aot_eager", dynamic=False)
        assert found == pytest.approx(fewbit.saved_bytes(static, batch).total, rel=0.05)


@pytest.mark.inductor
def test_a_size_that_depends_on_values_stays_exact():
    def forward(model, x):
        x = model.a(x)
        return model.b(x.tanh())[x[:, 0] > 0].tanh().square().mean()

    model = Composed(forward, a=nn.Linear(64, 64), b=nn.Linear(64, 64))
    x = torch.randn(512, 64)
    exact = gradient(model, model, x)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = fewbit.compile(model, 8, backend="aot_eager", fullgraph=True)
        assert 0 < relative(gradient(model, compiled, x), exact) < 0.02
    reasons = {row.reason for row in compiled.partitioner.report.rows}
    assert "its size depends on values of tensors" in reasons
