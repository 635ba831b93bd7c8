"""Settings and fixtures that every test shares."""

import gc
import os
import sys
from types import SimpleNamespace

import budget
import pytest
import tiers
from hypothesis import settings

try:
    from fewbit import _kernels
except ImportError:
    _kernels = None

# The same examples in every run: a failure is a change, not luck.
settings.register_profile("steady", derandomize=True, deadline=None, database=None)
settings.load_profile("steady")

CUDA = pytest.mark.cuda  # see pytest_collection_modifyitems
ISAS = () if _kernels is None else _kernels.cpu_isas()


def pytest_addoption(parser):
    parser.addoption(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="run the files, and the tests of a file, in an order drawn from SEED",
    )
    parser.addoption(
        "--budget",
        action="store_true",
        help="fail tests of the fast tier that take too much processor time, as tests/budget.py says",
    )
    parser.addoption(
        "--share",
        type=int,
        default=1,
        metavar="N",
        help="of the cases of sweeps that a short run leaves out (tests/tiers.py), run one in N",
    )
    parser.addoption(
        "--threads",
        type=int,
        metavar="N",
        help="the number of torch's threads, which may exceed the number of cores as OMP_NUM_THREADS does not",
    )


def pytest_configure(config):
    if config.option.budget:
        config.pluginmanager.register(budget.Budget())
    if config.option.threads is not None:
        import torch

        torch.set_num_threads(config.option.threads)
        assert torch.get_num_threads() == config.option.threads


@pytest.fixture(scope="session", autouse=True)
def full_float32():
    """On a GPU, let cuDNN compute in full float32: by default it rounds the factors of a convolution to TF32."""
    import torch

    torch.backends.cudnn.allow_tf32 = False


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    """Seed torch before each test, so that rounding at random does not depend on the tests before it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


def pytest_ignore_collect(collection_path, config):
    """Leave out the folders of other tiers than the fast one, unless they are asked for."""
    return tiers.skips_folder(collection_path, config) or None


@pytest.hookimpl(tryfirst=True)  # before pytest itself looks at -m
def pytest_collection_modifyitems(session, config, items):
    """Put tests into tiers, deselect tests that were not asked for or cannot run here, and shuffle the others.

    Tests of other tiers than the fast one run if `-m` names tiers, or if they are named by file::test or by the folder of
    their tier; see CONTRIBUTING.md. Tests marked `cuda` are deselected without a CUDA device, since the same test functions
    run on the CPU.
    """
    # Filters of the session come after those of tests, which therefore cannot hide that fewbit uses something deprecated.
    for category in ("DeprecationWarning", "FutureWarning"):
        session.add_marker(pytest.mark.filterwarnings(f"error::{category}:fewbit"))
    for item in items:
        if tier := tiers.of_folder(item.path):
            item.add_marker(tier)
    rest = list(tiers.rest_of_sweeps(items))
    for item in filter(tiers.is_fast, rest):
        item.add_marker(pytest.mark.slow)
    left_out = [item for item in items if item.get_closest_marker("cuda")]
    if left_out:
        import torch

        left_out = [] if torch.cuda.is_available() else left_out
    left_out += [item for number, item in enumerate(rest) if number % config.option.share]
    if not config.option.markexpr:
        named = tiers.named(config)
        left_out += [item for item in items if not (tiers.is_fast(item) or named(item))]
    if left_out:
        config.hook.pytest_deselected(items=list(dict.fromkeys(left_out)))
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
    if config.option.shuffle is not None:
        items[:] = tiers.shuffled(items, config.option.shuffle)


def pytest_collection_finish():
    """Keep what collection has made out of later garbage collections, which would walk through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def terminal():
    """Give commands a terminal of 80 columns, whatever the developer's terminal has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        yield


@pytest.fixture(scope="session", autouse=True)
def table_cache(tmp_path_factory):
    """Cache the tables that tests solve in a folder of the test session, and nowhere else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEWBIT_CACHE", str(tmp_path_factory.mktemp("tables")))
        yield


@pytest.fixture(scope="session", autouse=_kernels is None)
def choice():
    """Return the runtime's choice of backends. Without compiled kernels, choose here, which warns nobody."""
    import torch

    from fewbit.runtime import backends
    from fewbit.runtime.backends import reference

    if _kernels is None:
        backends.on[torch.device("cpu")] = reference
    return backends.on


@pytest.fixture
def compiled_anew():
    """Let torch.compile forget the code that it has compiled in earlier tests, also that in its cache on disk.

    Reports are empty for code from the cache.
    """
    import torch._functorch.config

    torch._dynamo.reset()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=CUDA)])
def device(request, choice):
    """Run the test on every device, with the backend that the runtime chooses for it."""
    return request.param


@pytest.fixture(
    params=[
        "reference",
        *ISAS,
        pytest.param("cuda", marks=CUDA),
        pytest.param("reference-cuda", marks=CUDA),
    ]
)
def backend(request, choice, monkeypatch):
    """Run the test with every backend in place of the one that the runtime chose: .name, .kernels, .device."""
    import torch

    from fewbit.runtime import backends
    from fewbit.runtime.backends import reference

    found = _backend(request.param)
    empty = torch.zeros(0, device=found.device)
    usual = backends.on[empty.device]
    monkeypatch.setitem(choice, empty.device, found.kernels)
    if usual is not reference:  # the ops of compiled graphs, too
        if found.kernels is reference:
            usual._kernels.unregister_ops()
        else:
            found.kernels.register_ops()
    yield found
    if usual is not reference:
        usual.register_ops()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=CUDA)])
def backends(request):
    """Return every backend of a device, for tests whose oracle takes longer than the backends."""
    names = ("reference", *ISAS) if request.param == "cpu" else ("cuda", "reference-cuda")
    return [_backend(name) for name in names]


def _backend(name):
    from fewbit.runtime.backends import reference

    device = "cuda" if "cuda" in name else "cpu"
    if "reference" in name:
        kernels = reference
    else:
        from fewbit.runtime.backends import native

        kernels = native.cuda() if device == "cuda" else native.cpu(name)
    return SimpleNamespace(name=name, kernels=kernels, device=device)


@pytest.fixture
def usual_backend(device):
    """Run the test with the backend that the runtime chooses for each device: .name, .kernels, .device.

    For tests of what random numbers do on average. All backends draw the same numbers, as other tests show bit for bit.
    """
    import torch

    from fewbit.runtime import backends

    kernels = backends.on[torch.zeros(0, device=device).device]
    return SimpleNamespace(name=kernels.name, kernels=kernels, device=device)


@pytest.fixture(params=[1, 3])
def threads(request):
    """Run the test with torch using one thread, and three."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def cuda(request, tmp_path_factory, monkeypatch):
    """Return an emulation of the CUDA kernels on the CPU. Tensors say that they are on its device."""
    import torch
    from cuda_emulation import DEVICE, emulation_in

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # which all workers share
    emulation = emulation_in(folder, getattr(request, "param", "pairs") == "pairs")
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: DEVICE)
    emulation.library.emulated_driver(13000, 90)
    yield emulation
    emulation.memory.check()
    assert emulation.library.emulated_current_device() == 0  # it is DEVICE during calls
