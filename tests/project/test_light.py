"""The libraries that a training process imports, and the time that this takes."""

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from fresh_process import run
from mpmath import mp, mpf

from fewbit.functions.erfcx import erfcx

HEAVY = "numba scipy matplotlib mpmath sympy jsonschema referencing rpds rich click torch._dynamo"

TRAINING = """
import sys, torch, fewbit
from torch import nn

assert "torch._dynamo" not in sys.modules, "torch itself imports it"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 8), nn.ELU())
controller = fewbit.compress_(model, {bits}, verbose=False)
x = torch.randn(16, 64)
for _ in range(6):
    model(x).square().mean().backward()
    with torch.no_grad():  # an optimizer of torch's imports Dynamo
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
            parameter.grad = None
controller.load_state_dict(controller.state_dict())
if {is_adaptive}:
    assert controller.bounds or controller.allocation
found = set({heavy!r}.split()) & set(sys.modules)
assert not found, found
assert "fewbit.solver.dynamic_program" not in sys.modules, "tables were solved"
"""

POLICIES = {
    "2 bits": "fewbit.FixedBits(2)",
    "L3": "fewbit.AdaptiveBits(1.75, interval=2)",
    "error-bound": "fewbit.ErrorBound(interval=2)",
    "numbers of samples": "fewbit.SampleBits(2)",
}


@pytest.mark.processes
@pytest.mark.parametrize(
    "policy",
    [
        "error-bound",
        *(pytest.param(name, marks=pytest.mark.slow) for name in POLICIES if name != "error-bound"),
    ],
)
def test_a_training_process_imports_no_library_that_it_does_not_need(policy):
    bits = POLICIES[policy]
    is_adaptive = "interval" in bits
    run(TRAINING.format(bits=bits, heavy=HEAVY, is_adaptive=is_adaptive))


BARE = """
import sys
sys.modules.update(dict.fromkeys({missing!r}))  # None: an import raises ModuleNotFoundError
import json, tempfile, pathlib, torch, fewbit
from torch import nn

torch.manual_seed(0)
x = torch.randn(16, 64)
y = fewbit.GELU(bits=3)(x.requires_grad_())
y.sum().backward()
q = fewbit.load_table("gelu", bits=3)(x.detach().double().numpy())
assert torch.equal(x.grad, torch.from_numpy(q).float())
x = x.detach()
configs = fewbit.FixedBits(2), fewbit.AdaptiveBits(1.75, interval=2), fewbit.ErrorBound(interval=2), fewbit.SampleBits(2)
for bits in configs:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 8), nn.ELU())
    exact = [each.detach().clone() for each in model.parameters()]
    controller = fewbit.compress_(model, bits)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert all((a - b).abs().max() > 1e-4 for a, b in zip(exact, model.parameters(), strict=True))
    assert "GELU" in str(controller.report) and str(controller)
    controller.load_state_dict(controller.state_dict())
    assert sum(row["bytes"] for row in fewbit.saved_bytes(model, x).records()) > 0
    fewbit.restore_(model)
    assert type(model[1]) is nn.GELU

# A file of the user's is still checked.
document = fewbit.load_table("gelu", bits=3).document()
path = pathlib.Path(tempfile.mkdtemp(), "table.json")
path.write_text(json.dumps(document))
assert fewbit.Table.load(path).levels.tolist() == document["levels"]
path.write_text(json.dumps(document | {{"codes": "all"}}))
try:
    fewbit.Table.load(path)
    raise AssertionError("loaded")
except fewbit.TableError as error:
    print(error)
# Without Numba no table can be solved.
try:
    fewbit.load_table("gelu", bits=3, domain=(-3, 3))
    raise AssertionError("solved")
except fewbit.SolveError as error:
    print(error)
"""


@pytest.mark.slow
def test_training_needs_only_torch_and_numpy():
    """Also the report that `compress_` prints, policies, files of tables, and the meter of saved bytes work."""
    # sympy, which torch needs, needs mpmath.
    missing = requirements() - {"fewbit", "numpy", "torch", "mpmath"}
    assert missing > {"numba", "matplotlib", "platformdirs", "rich", "scipy", "click", "jsonschema"}
    missing |= {"referencing", "rpds", "llvmlite", "xdist", "sklearn", "_pytest"}
    *_, invalid, unsolved = run(BARE.format(missing=sorted(missing))).splitlines()
    assert re.search(r"table.json: .*codes.*expected an? array, got 'all'", invalid), invalid
    assert unsolved == (
        "no table of 'gelu' is shipped for these arguments, and solving one needs the package numba: pip install numba"
    )


def requirements():
    """Return the names of all packages that pyproject.toml lists for running, testing and benchmarking."""
    path = Path(__file__).parents[2] / "pyproject.toml"
    project = tomllib.loads(path.read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return {re.match(r"[\w-]+", line)[0] for lines in lists for line in lines}


def test_shipped_tables_need_no_library_but_numpy():
    heavy = HEAVY + " torch"
    code = (
        "import sys, fewbit\n"
        "for name in ('gelu', 'silu', 'softplus'):\n"
        "    assert fewbit.load_table(name, bits=3)(0.5) > 0\n"
        f"found = set({heavy!r}.split()) & set(sys.modules)\n"
        "assert not found, found\n"
    )
    run(code)


def test_names_of_modules_are_known_without_torch():
    code = (
        "import sys, fewbit\n"
        "assert not [name for name in sys.modules if name.startswith('fewbit.functions')]\n"
        "assert {'GELU', 'Pointwise', 'compress_'} <= set(fewbit.__all__) <= set(dir(fewbit))\n"
        "assert not hasattr(fewbit, 'GELUs') and not hasattr(fewbit, 'gelu')\n"
        "assert 'torch' not in sys.modules\n"
    )
    run(code)


MEASURED = """
import sys, time
start = time.process_time()
import torch
middle, before = time.process_time(), set(sys.modules)
import fewbit
fewbit.compress_
end = time.process_time()
others = {name.partition(".")[0] for name in set(sys.modules) - before} - {"fewbit"}
print((end - middle) / (middle - start), sum(name in sys.modules for name in ("torch._dynamo", "sympy")), len(others))
"""


@pytest.mark.slow
def test_the_import_costs_little_beside_torchs():
    """The processor time is relative to torch's own import, the best of several, so that a busy machine does not matter.

    Torch takes about a second on one core, and fewbit a fifth of that.
    """
    found = [tuple(map(float, run(MEASURED).split())) for _ in range(3)]
    assert min(ratio for ratio, _, _ in found) < 0.33
    assert all(compilers == 0 and others < 25 for _, compilers, others in found)


@pytest.mark.slow
def test_a_constant_is_marked_as_torch_marks_it():
    code = (
        "import torch\n"
        "from fewbit.runtime.interop.compiler_constants import constant\n"
        "def ours(): pass\n"
        "def theirs(): pass\n"
        "assert constant(ours) is ours and torch.compiler.assume_constant_result(theirs) is theirs\n"
        "assert vars(ours) == vars(theirs) != {}\n"
    )
    run(code)


def test_erfcx_against_mpmath():
    x = np.concatenate([np.linspace(0, 30, 601), 10.0 ** np.arange(-18, 4, 0.5)])
    mp.dps = 40
    expected = [mp.exp(mpf(number) ** 2) * mp.erfc(mpf(number)) for number in x.tolist()]
    found = erfcx(x)
    errors = [abs(float((mpf(a) - b) / b)) for a, b in zip(found.tolist(), expected, strict=True)]
    assert max(errors) < 1e-15
    assert erfcx(0.5) == found[10] and erfcx(x.reshape(5, -1)).shape == (5, len(x) // 5)
    assert erfcx(np.zeros((0, 3))).shape == (0, 3)
