"""Modules: torch's classes with bits and a table, in copies, files, processes and threads."""

import copy
import inspect
import io
import math
import os
import pickle
import subprocess
import sys

import pytest
import torch
from conftest import _kernels
from samples import GELU, gradient, load_table, normal, same
from torch import nn

import fewbit
import fewbit.nn
from fewbit.errors import FewbitError, InputError, TableError

ARGUMENTS = {"Threshold": (0.1, -2.0), "Pointwise": (torch.sin,)}
NAMES = [name for name in fewbit.nn.activations.__all__ if name != "Pointwise"]
INPLACE = [
    name
    for name in NAMES
    if "inplace" in inspect.signature(getattr(fewbit.nn, name).__init__).parameters
]


def make(name, **options):
    return getattr(fewbit.nn, name)(*ARGUMENTS.get(name, ()), **options)


def gradient_of(module, x):
    x = x.clone().requires_grad_()
    torch.manual_seed(0)  # RReLU draws
    y = module(x * 1.0)
    return y, torch.autograd.grad(y.sum(), x)[0]


def model(**options):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), fewbit.GELU(**options), nn.Linear(8, 8), fewbit.ReLU(), nn.Linear(8, 2)
    )


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
    theirs = getattr(nn, name, None)
    if theirs is None:
        return
    original = theirs(*ARGUMENTS.get(name, ()))
    assert isinstance(module, theirs)
    torch.manual_seed(0)
    torch.testing.assert_close(y, original(x.clone()), rtol=1e-5, atol=1e-6)
    assert original.extra_repr() in module.extra_repr()


def saved(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_every_name_is_exported_at_the_top():
    for name in fewbit.nn.activations.__all__:
        assert getattr(fewbit, name) is getattr(fewbit.nn, name) and name in fewbit.__all__
        assert issubclass(getattr(fewbit, name), getattr(nn, name, nn.Module))


@pytest.mark.parametrize("name", fewbit.nn.activations.__all__)
def test_bad_choices_are_refused_at_construction(name):
    for bits in (0, 9, 2.5, "3", None, True):
        with pytest.raises(InputError, match="expected a whole number from 1 to 8 for bits, got"):
            make(name, bits=bits)
    with pytest.raises(TableError, match=r"expected a fewbit.Table for table=, got Tensor"):
        make(name, table=torch.ones(3))


def test_repr_names_the_table():
    assert repr(fewbit.GELU(bits=2)) == "GELU(approximate='none', bits=2)"
    assert "table=Table(gelu, 4 bits" in repr(fewbit.GELU(table=load_table("gelu", 4)))


def test_a_table_travels_with_its_module():
    table = load_table("gelu", 2, weight="normal")
    module = pickle.loads(pickle.dumps(fewbit.GELU(table=table)))
    assert module.table == table
    x = normal((50,))
    assert same(gradient_of(module, x)[1], gradient(table, x, torch.ones_like(x)))


@pytest.mark.parametrize("name", [name for name in NAMES if hasattr(nn, name)])
def test_evaluation_mode_is_torchs_own(name):
    x = normal((40,))
    y, grad = gradient_of(make(name).eval(), x)
    expected, exact = gradient_of(getattr(nn, name)(*ARGUMENTS.get(name, ())).eval(), x)
    assert same(y, expected) and same(grad, exact)


@pytest.mark.parametrize("name", INPLACE)
def test_inplace(device, name):
    module = make(name)
    x = normal((33,), device=device)
    y, grad = gradient_of(module, x)
    module.inplace = True
    start = x.clone().requires_grad_()
    inner = start * 1.0
    torch.manual_seed(0)
    out = module(inner)
    assert out.data_ptr() == inner.data_ptr() and same(out, y)
    assert same(torch.autograd.grad(out.sum(), start)[0], grad)
    with torch.no_grad():
        buffer = x.clone()
        assert module(buffer).data_ptr() == buffer.data_ptr()


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


def test_a_model_keeps_its_keys_and_moves():
    ours = model(bits=2)
    theirs = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = normal((3, 6), torch.float64)
    torch.testing.assert_close(ours.double()(x), theirs.double()(x))
    assert saved(ours)(x).dtype == torch.float64
    ours.train(), ours.eval(), ours.half(), ours.to("meta")


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

    (y, gradient), (expected, exact) = map(
        results, (fewbit.RReLU(0.1, 0.6, inplace), nn.RReLU(0.1, 0.6, inplace))
    )
    assert same(y, expected) and same(gradient, exact)


def test_rrelu_keeps_its_signs(device):
    x = normal((1000,), device=device).requires_grad_()
    report = fewbit.saved_bytes(fewbit.RReLU().to(device), x)
    state = 16 if device == "cuda" else 5056
    assert sorted(entry.bytes for entry in report.kept) == sorted([4 * 32, state])


def test_pointwise():
    table = load_table("tanh", 3)
    module = fewbit.Pointwise(torch.tanh, table=table)
    x = normal((40,))
    twin = copy.deepcopy(module)
    assert same(gradient_of(twin, x)[1], gradient(table, x, torch.ones_like(x)))
    assert pickle.loads(pickle.dumps(module)).function is torch.tanh


# -- processes ---------------------------------------------------------------------------------------------------


def run(code):
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )


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
def test_fork_after_use_and_no_setting_touched():
    if _kernels is None:
        pytest.skip("the reference backend is torch's own loops, which do not survive a fork")
    result = run(FORK)
    assert result.stdout == "done\n", result.stderr


DDP = """
import os, tempfile, torch, fewbit
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), fewbit.GELU(bits=2), nn.Linear(8, 8), fewbit.ReLU(True), nn.Linear(8, 2))

def data():
    torch.manual_seed(1)
    return torch.randn(8, 6)

def work(rank, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
    parallel = nn.parallel.DistributedDataParallel(model())
    for _ in range(2):
        parallel.zero_grad()
        parallel(data()[4 * rank : 4 * rank + 4]).square().mean().backward()
    alone = model()
    alone(data()).square().mean().backward()
    for a, b in zip(parallel.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    dist.destroy_process_group()

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(work, (os.path.join(folder, "store"),), nprocs=2, start_method="fork")
    print("done")
"""


@pytest.mark.slow
def test_distributed_data_parallel(tmp_path):
    script = tmp_path / "ddp.py"
    script.write_text(DDP)
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1"}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert result.stdout.endswith("done\n"), result.stderr[-2000:]


def test_threads_are_torchs():
    """The number of threads changes no bit, and fewbit does not change that number."""
    x = normal((100_003,))
    before = torch.get_num_threads()
    expected = gradient_of(lambda x: GELU(x), x)[1]
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert same(gradient_of(lambda x: GELU(x), x)[1], expected)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
