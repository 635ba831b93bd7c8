"""The libraries that fewbit imports, and when it imports them."""

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from fresh_process import run
from mpmath import mp, mpf

import fewbit
from fewbit.functions.erfcx import erfcx
from fewbit.runtime.interop.compiler_tracing import constant

HEAVY = "numba scipy matplotlib mpmath sympy jsonschema referencing rpds rich click torch._dynamo"

TRAINING = """
import sys, torch, fewbit
from torch import nn

assert "torch._dynamo" not in sys.modules, "torch itself imports it"
for bits in fewbit.FixedBits(2), fewbit.SampleBits(2), fewbit.AdaptiveBits(1.75, interval=2), fewbit.ErrorBound(interval=2):
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 8), nn.ELU())
    controller = fewbit.compress_(model, bits, verbose=False)
    x = torch.randn(16, 64)
    for _ in range(6):
        model(x).square().mean().backward()
        with torch.no_grad():  # an optimizer of torch's imports Dynamo
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
    controller.load_state_dict(controller.state_dict())
    if hasattr(bits, "interval"):
        assert controller.bounds or controller.allocation
assert "fewbit.solver.dynamic_program" not in sys.modules, "tables were solved"
"""
SHIPPED = """
import fewbit
for name in ("gelu", "silu", "softplus"):
    assert fewbit.load_table(name, bits=3)(0.5) > 0
"""
NAMES = """
import sys, fewbit
assert not [name for name in sys.modules if name.startswith("fewbit.functions")]
assert {"GELU", "Pointwise", "compress_", "solve"} <= set(fewbit.__all__) <= set(dir(fewbit))
assert not hasattr(fewbit, "GELUs") and not hasattr(fewbit, "gelu")
"""


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        pytest.param(TRAINING, HEAVY, marks=pytest.mark.slow),
        (SHIPPED, f"{HEAVY} torch"),
        (NAMES, f"{HEAVY} torch"),
        ("import fewbit", f"{HEAVY} torch numpy"),
        ("import fewbit.functions", "torch mpmath matplotlib scipy"),
        (
            "import numpy, fewbit.functions.callables as c; c.from_callable(numpy.tanh)",
            "torch matplotlib",
        ),
        ("import fewbit.table", "torch jsonschema matplotlib rich scipy numba click"),
    ],
    ids=["training", "shipped tables", "names", "fewbit", "functions", "callables", "tables"],
)
def test_code_imports_no_library_that_it_does_not_need(code, unwanted):
    found = run(f"{code}\nimport sys; print(*set({unwanted!r}.split()) & set(sys.modules))")
    assert found == "\n"


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
    exact = [parameter.detach().clone() for parameter in model.parameters()]
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
for refused in lambda: fewbit.Table.load(path), lambda: fewbit.load_table("gelu", bits=3, domain=(-3, 3)):
    try:
        refused()
    except (fewbit.TableError, fewbit.SolveError) as error:
        print(error)
"""


@pytest.mark.slow
def test_training_needs_only_torch_and_numpy():
    """Also the report that `compress_` prints, policies, files of tables, and the meter of saved bytes work."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    missing = {re.match(r"[\w-]+", line)[0] for lines in lists for line in lines}
    missing -= {"fewbit", "numpy", "torch", "mpmath"}  # sympy, which torch needs, needs mpmath
    assert missing > {"numba", "matplotlib", "platformdirs", "rich", "scipy", "click", "jsonschema"}
    missing |= {"referencing", "rpds", "llvmlite", "xdist", "sklearn", "_pytest"}
    *_, invalid, unsolved = run(BARE.format(missing=sorted(missing))).splitlines()
    assert re.search(r"table.json: .*codes.*expected an? array, got 'all'", invalid), invalid
    assert unsolved == (
        "no table of 'gelu' is shipped for these arguments, and solving one needs the package numba: pip install numba"
    )


@pytest.mark.slow
def test_solving_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; import fewbit; print(len(fewbit.solve('gelu', 2).levels))"
    assert run(code) == "4\n"


def test_what_needs_torch_says_so():
    code = """
import sys
sys.modules["torch"] = None
import fewbit
for name in ("GELU", "functional", "saved_bytes"):
    try:
        getattr(fewbit, name)
    except ImportError as error:
        print(error)
"""
    needs = [f"fewbit.{name} needs torch" for name in ("GELU", "functional", "saved_bytes")]
    assert run(code).splitlines() == [f"{what}: pip install torch" for what in needs]


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="no attribute 'solv'"):
        _ = fewbit.solv


MEASURED = """
import sys, time
start = time.process_time()
import torch
middle, before = time.process_time(), set(sys.modules)
import fewbit
fewbit.compress_
end = time.process_time()
others = {name.partition(".")[0] for name in set(sys.modules) - before} - {"fewbit"}
print((end - middle) / (middle - start), len(others))
"""


@pytest.mark.slow
def test_the_import_costs_little_beside_torchs():
    """The processor time is relative to torch's own import, the best of two, so that a busy machine does not matter.

    Torch takes about a second on one core, and fewbit a fifth of that.
    """
    found = [tuple(map(float, run(MEASURED).split())) for _ in range(2)]
    assert min(ratio for ratio, _ in found) < 0.33
    assert all(others < 25 for _, others in found)


def test_a_constant_is_marked_as_torch_marks_it():
    def ours(): ...
    def theirs(): ...

    assert constant(ours) is ours and torch.compiler.assume_constant_result(theirs) is theirs
    assert vars(ours) == vars(theirs) != {}


def test_erfcx_against_mpmath():
    x = np.concatenate([np.linspace(0, 30, 601), 10.0 ** np.arange(-18, 4, 0.5)])
    mp.dps = 40
    expected = [mp.exp(mpf(number) ** 2) * mp.erfc(mpf(number)) for number in x.tolist()]
    found = erfcx(x)
    errors = [abs(float((mpf(a) - b) / b)) for a, b in zip(found.tolist(), expected, strict=True)]
    assert max(errors) < 1e-15
    assert erfcx(0.5) == found[10] and erfcx(x.reshape(5, -1)).shape == (5, len(x) // 5)
    assert erfcx(np.zeros((0, 3))).shape == (0, 3)
