"""Dropout functions: torch's values, draws and gradients to the bit, and a mask of 1 bit an element."""

from functools import partial
from importlib import import_module

import pytest
import torch
from layers import bytes_by, check_equal, saved_by
from samples import normal, same
from torch.nn import functional as torch_f

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch.*", "ignore:.*isinstance.*treespec"
)
F = import_module("fewbit.functional.dropout")  # not the function of that name
SHAPES = {
    "dropout": [(7, 33), (40, 50, 60), (2, 3, 4, 5)],
    "dropout1d": [(4, 5, 6), (40, 6)],
    "dropout2d": [(4, 9, 5, 6)],
    "dropout3d": [(4, 5, 2, 3, 3), (5, 4, 3, 3)],
    "alpha_dropout": [(7, 33)],
    "feature_alpha_dropout": [(4, 9, 5, 6), (4, 9)],
}
SAMPLES = [(name, shape) for name, shapes in SHAPES.items() for shape in shapes]


def check(call, x):
    """Compare call(functions, x) of fewbit's functions and of torch's."""
    check_equal(partial(call, F), partial(call, torch_f), x)


@pytest.mark.parametrize("name, shape", SAMPLES)
@pytest.mark.parametrize("p", [0.0, 0.3, 0.999, 1.0])
def test_equals_torch(device, name, shape, p):
    x = normal(shape, device=device)
    x.view(-1)[:4] = torch.tensor([torch.nan, torch.inf, 0.0, -0.0])
    check(lambda functions, x: getattr(functions, name)(x, p, True), x)
    check(lambda functions, x: getattr(functions, name)(x * 2.0, p, True, True), x)
    doubled = x.requires_grad_() * 2.0
    assert getattr(F, name)(doubled, p, True, True) is doubled or p in (0.0, 1.0)
    if p in (0.0, 1.0):
        assert bytes_by(lambda: getattr(F, name)(x, p, True)) <= 16 * p


def test_inplace_on_views_and_leaves(device):
    def on_a_view(functions, x):
        y = x * 2.0
        functions.dropout(y[1:, ::2], 0.3, True, True)
        return y

    x = normal((5, 8), device=device)
    check(on_a_view, x)
    leaf = x.clone().requires_grad_()
    for wrong in (leaf, leaf[1:], (leaf * 1.0).chunk(2)[0], (leaf[:1] * 1.0).expand(3, 8)):
        for functions in (torch_f, F):
            with pytest.raises(RuntimeError):
                functions.dropout(wrong, 0.3, True, True)
    assert same(leaf, x)


@pytest.mark.filterwarnings("ignore:dropout[23]d")
def test_sizes_that_torch_warns_of(device):
    for name, shape in (("dropout2d", (4, 5, 6)), ("dropout2d", (4, 5)), ("dropout3d", (4, 5, 6))):
        x = normal(shape, device=device)
        check(lambda functions, x, name=name: getattr(functions, name)(x, p=0.3), x)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("inplace", [False, True])
def test_compiled(device, name, inplace):
    """The compiler draws its own mask: one for result and gradient, and nothing else is saved."""
    torch.compiler.reset()
    first, *rest = SHAPES[name][-1]
    torch.manual_seed(4)
    compiled = torch.compile(
        lambda x: getattr(F, name)(x * 1.0, 0.3, True, inplace) * 1.0,
        fullgraph=True,
        backend="aot_eager_decomp_partition",
    )
    x = normal((30 * first, *rest), device=device).abs().add_(1.0).requires_grad_()
    y, saved = saved_by(compiled, x)
    eager = bytes_by(lambda: getattr(F, name)(x, 0.3, True))
    assert sum(tensor.nbytes for tensor in saved) <= eager
    (grad,) = torch.autograd.grad(y.sum(), x)
    if "alpha" in name:
        slope = grad.max()
        dropped = y[grad == 0]
        assert (dropped == dropped[0]).all()
        assert torch.isin(grad, torch.stack((0 * slope, slope))).all()
        shift = y[grad != 0] - (x * slope)[grad != 0]
        torch.testing.assert_close(shift, shift[:1].expand_as(shift))
    else:
        torch.testing.assert_close(grad * x, y)
    assert 0.15 < (grad == 0).float().mean() < 0.45
    torch.manual_seed(5)
    first = compiled(x)
    assert not same(compiled(x), first)
    torch.manual_seed(5)
    assert same(compiled(x), first)
