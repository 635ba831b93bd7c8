"""Modules: torch's classes with bits and a table, in copies, files, processes and threads."""

import copy
import inspect
import io
import math
import pickle
import subprocess
import sys
from functools import partial

import pytest
import torch
from conftest import _kernels
from samples import gradient, load_table, normal, same
from torch import nn
from torch.nn import functional as torch_f

import fewbit
import fewbit.nn
from fewbit.errors import FewbitError, InputError, TableError

ARGUMENTS = {"Threshold": (0.1, -2.0), "Pointwise": (torch.sin,)}
NAMES = [name for name in fewbit.nn.activations.__all__ if name != "Pointwise"]


def make(name, **options):
    return getattr(fewbit.nn, name)(*ARGUMENTS.get(name, ()), **options)


def gradient_of(module, x):
    x = x.clone().requires_grad_()
    torch.manual_seed(0)  # RReLU draws
    y = module(x * 1.0)
    return y, torch.autograd.grad(y.sum(), x)[0]


OWN = {"group_size": 256, "copies": 1, "quantizer": None, "table": None}
"""Defaults of the arguments that torch's functions do not have, besides `bits`."""


def defaults(function):
    """Return {name: default} of the parameters that have one; {} for a function of C++, which has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return {}
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def test_defaults_of_functions_are_torchs():
    """Functions of C++ are compared with torch's class, which has the same arguments."""
    compared = 0
    classes = {name.lower(): kind for name, kind in vars(nn).items() if isinstance(kind, type)}
    for name in fewbit.functional.__all__:
        ours = defaults(getattr(fewbit.functional, name))
        theirs = {"bias": None} | OWN
        theirs = defaults(classes.get(name.replace("_", ""), len)) | theirs
        theirs |= defaults(getattr(torch_f, name, len))
        both = ours.keys() & theirs.keys() - {"ignore_index", "training"}
        assert {each: ours[each] for each in both} == {each: theirs[each] for each in both}, name
        compared += len(both)
    assert compared > 150


@pytest.mark.parametrize("name", NAMES)
def test_module(device, name):
    module = make(name)
    x = normal((40,), device=device)
    y, grad = gradient_of(module, x)
    assert module.bits in (1, 3) and module.table is None
    assert not module.state_dict() and not list(module.parameters()) and not list(module.buffers())
    assert module.load_state_dict({}) and f"bits={module.bits}" in repr(module)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), saved(module)):
        assert type(twin) is type(module) and repr(twin) == repr(module)
        again = gradient_of(twin, x)
        assert same(again[0], y) and same(again[1], grad)
    if hasattr(module, "inplace"):
        twin.inplace, inner = True, x * 1.0
        with torch.no_grad():
            assert twin(inner) is inner
        again = gradient_of(twin, x)
        assert same(again[0], y) and same(again[1], grad)
    theirs = getattr(nn, name, None)
    if theirs is None:
        return
    original = theirs(*ARGUMENTS.get(name, ()))
    assert isinstance(module, theirs)
    torch.manual_seed(0)
    torch.testing.assert_close(y, original(x.clone()), rtol=1e-5, atol=1e-6)
    assert original.extra_repr() in module.extra_repr()
    (y, grad), (expected, exact) = (gradient_of(each.eval(), x) for each in (module, original))
    assert same(y, expected) and same(grad, exact)
    for bits in (0, 9, 2.5, "3", None, True):
        with pytest.raises(InputError, match="bits: expected a whole number from 1 to 8, got"):
            make(name, bits=bits)
    with pytest.raises(TableError, match=r"table: expected a fewbit.Table, got Tensor"):
        make(name, table=torch.ones(3))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("Pointwise", "RReLU")])
def test_the_table_of_another_function_is_refused_at_once(name):
    """Pointwise refuses it in its first call. In training, RReLU uses no table."""
    other = "silu" if name == "GELU" else "gelu"
    with pytest.raises(TableError, match=f"table: expected a table of .*, got one of {other}$"):
        make(name, table=load_table(other, 3))


def saved(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_a_table_travels_with_its_module():
    table = load_table("gelu", 2, weight="normal")
    module = pickle.loads(pickle.dumps(fewbit.GELU(table=table)))
    assert module.table == table and "table=Table(gelu, 2 bits" in repr(module)
    x = normal((50,))
    assert same(gradient_of(module, x)[1], gradient(table, x, torch.ones_like(x)))


def test_attributes_that_change_are_honored(device):
    x = normal((60,), device=device)
    module = fewbit.ELU(alpha=1.0)
    module.alpha, module.bits = 1.7, 2
    expected = gradient_of(fewbit.ELU(alpha=1.7, bits=2), x)
    for a, b in zip(gradient_of(module, x), expected, strict=True):
        assert same(a, b)
    module = fewbit.GELU()
    module.approximate = "tanh"
    table = load_table("gelu_tanh", 3)
    assert same(gradient_of(module, x)[1], gradient(table, x, torch.ones_like(x)))
    module.bits = 9
    with pytest.raises(FewbitError, match="bits"):
        module(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("inplace", [False, True])
def test_rrelu_draws_its_slopes_again(device, dtype, inplace):
    """Forward and gradient are torch's, from 1 bit for each element and the generator's state."""
    x = normal((3, 4, 5, 6), dtype, device).contiguous(memory_format=torch.channels_last)
    x[0, 0, 0, :5] = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf])
    grad = normal(x.shape, dtype, device, seed=4)

    def results(module):
        start = x.clone().requires_grad_()
        torch.manual_seed(3)
        y = module(start * 1)
        torch.manual_seed(4)  # what is drawn in between changes nothing
        before = torch.get_rng_state()
        (gradient,) = torch.autograd.grad(y, start, grad)
        assert torch.equal(torch.get_rng_state(), before)
        return y, gradient

    ours = fewbit.RReLU(0.1, 0.6, inplace)
    (y, gradient), (expected, exact) = map(results, (ours, nn.RReLU(0.1, 0.6, inplace)))
    assert same(y, expected) and same(gradient, exact)
    report = fewbit.saved_bytes(lambda x: ours(x * 1), x.clone().requires_grad_())
    state = 16 if device == "cuda" else 5056
    assert sorted(entry.bytes for entry in report.kept) == sorted([4 * 12, state])


def test_pointwise():
    table = load_table("tanh", 3)
    module = fewbit.Pointwise(torch.tanh, table=table)
    x = normal((40,))
    twin = copy.deepcopy(module)
    assert same(gradient_of(twin, x)[1], gradient(table, x, torch.ones_like(x)))
    assert pickle.loads(pickle.dumps(module)).function is torch.tanh


# -- processes ---------------------------------------------------------------------------------------------------


# torch's own parallel loops hang in the child of a process that ran one (GNU OpenMP does), so the child uses
# only ours on sizes at which threads are used.
FORK = """
import os, numpy as np, torch, fewbit
values = np.random.default_rng(0).normal(size=200_000).astype(np.float32)
ones = np.ones_like(values)
def step():
    x = torch.from_numpy(values.copy()).requires_grad_()
    y = fewbit.functional.gelu(x)
    return torch.autograd.grad(y, x, torch.from_numpy(ones))[0].numpy()
settings = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "KMP_AFFINITY", "GOMP_CPU_AFFINITY")}
threads = torch.get_num_threads()
expected = step()
torch.from_numpy(values).exp()  # torch's own threads exist by now
pid = os.fork()
if pid == 0:
    os._exit(0 if np.array_equal(step(), expected) else 3)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert np.array_equal(step(), expected)
assert torch.get_num_threads() == threads
assert settings == {name: os.environ.get(name) for name in settings}
print("done")
"""


@pytest.mark.slow
@pytest.mark.skipif(_kernels is None, reason="torch's own loops do not survive a fork")
def test_fork_after_use_and_no_setting_touched():
    run = partial(subprocess.run, capture_output=True, text=True, timeout=60)
    result = run([sys.executable, "-W", "ignore", "-c", FORK])
    assert result.stdout == "done\n", result.stderr
