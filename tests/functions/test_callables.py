"""Derivatives, kinks and slopes of users' activations, and refusals."""

import math
import os
import sys

import numpy as np
import pytest
import torch
from scipy.special import erf

from fewbit import functions
from fewbit.errors import FunctionError
from fewbit.functions.callables import from_callable, import_callable, qualified_name, resolve


def numpy_gelu(x):
    return 0.5 * x * (1.0 + erf(x / np.sqrt(2.0)))


def scalar_elu(x):
    return x if x > 0 else math.exp(x) - 1.0


def around(kinks, domain=(-10.0, 10.0)):
    """Return points of the domain, most of them close to the kinks, none of them a kink."""
    steps = np.geomspace(1e-9, 0.1, 30)
    sides = [np.nextafter(kink, side) for kink in kinks for side in (-np.inf, np.inf)]
    near = [kink + sign * steps for kink in (0.0, *kinks) for sign in (-1.0, 1.0)]
    x = np.concatenate([np.linspace(*domain, 501), sides, *near])
    return np.setdiff1d(np.clip(x, *domain), kinks)


# --- NumPy --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "name"),
    [
        (numpy_gelu, "gelu"),
        (lambda x: np.maximum(x, 0.0), "relu"),
        (lambda x: np.clip(x, 0.0, 6.0), "relu6"),
        (lambda x: np.where(x > 0, x, 0.01 * x), "leaky_relu"),
        (lambda x: np.maximum(x, 0.0) ** 2, "relu_squared"),
        (lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0.0))), "elu"),
        (lambda x: x / (1.0 + np.exp(-x)), "silu"),
        (lambda x: x * np.clip(x + 3.0, 0.0, 6.0) / 6.0, "hardswish"),
        (lambda x: x * np.tanh(np.logaddexp(0.0, x)), "mish"),
        (lambda x: np.clip(x, -1.0, 1.0), "hardtanh"),
        (np.tanh, "tanh"),
        (lambda x: x / (1.0 + np.abs(x)), "softsign"),
        (lambda x: x, "identity"),
        (scalar_elu, "elu"),
        (functions.get("selu").value, "selu"),
        (functions.get("softshrink").value, "softshrink"),
        (functions.get("gelu_10").value, "gelu_10"),
        (functions.get("laplace").value, "laplace"),
    ],
)
def test_numpy_callables_find_what_is_known(f, name):
    known = functions.get(name)
    found = from_callable(f, domain=known.domain)
    assert found.kinks == known.kinks
    assert found.domain == known.domain and found.parameters == {}
    np.testing.assert_allclose(found.slopes, known.slopes, rtol=0, atol=1e-11)
    assert found.even_derivative == known.even_derivative
    x = around(known.kinks, known.domain)
    np.testing.assert_allclose(found.derivative(x), known.derivative(x), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(found.value(x), known.value(x), rtol=1e-14, atol=1e-14)
    for f in (found.value, found.derivative):
        assert f(x[:12].reshape(3, 4)).shape == (3, 4) and f(np.empty((0, 2))).shape == (0, 2)
        assert np.shape(f(0.5)) == ()


@pytest.mark.slow
def test_many_and_close_kinks():
    assert from_callable(lambda x: np.abs(x - np.round(x))).kinks == tuple(np.arange(-19, 20) / 2)
    assert from_callable(lambda x: np.abs(x - 0.3) + np.abs(x - 0.31)).kinks == (0.3, 0.31)
    with pytest.raises(FunctionError, match="more than 64 kinks"):
        from_callable(lambda x: np.abs(4 * x - np.round(4 * x)))


@pytest.mark.slow
def test_no_false_kinks():
    rng = np.random.default_rng(7)
    for _ in range(10):
        a, b, c = rng.normal(size=4), rng.uniform(0.2, 4.0, 4), rng.uniform(-6.0, 6.0, 4)
        found = from_callable(lambda x, a=a, b=b, c=c: np.tanh(np.multiply.outer(x, b) - c) @ a)
        assert found.kinks == ()


@pytest.mark.slow
def test_given_derivative_and_kinks():
    found = from_callable(np.tanh, derivative=lambda x: 1.0 - np.tanh(x) ** 2)
    np.testing.assert_allclose(found.derivative(0.5), 1.0 - np.tanh(0.5) ** 2, rtol=1e-15)
    assert from_callable(np.abs, kinks=[0]).kinks == (0.0,)
    # Its jump is found to the float, although no decimal is near.
    assert from_callable(
        lambda x: np.abs(x - 1 / 3), derivative=lambda x: np.sign(x - 1 / 3)
    ).kinks == (1 / 3,)
    # f' = 1.5 sqrt(|x|) defeats differences; given, it is fine.
    spiky = from_callable(
        lambda x: np.abs(x) ** 1.5, derivative=lambda x: 1.5 * np.sign(x) * np.sqrt(np.abs(x))
    )
    assert spiky.slopes == (-math.inf, math.inf)


NAN, INFINITY = math.nan, math.inf
SLOPES = [
    (np.sin, (NAN, NAN)),
    (lambda x: x + np.sin(x) ** 2, (NAN, NAN)),
    (lambda x: x * np.sin(np.log1p(x * x)), (NAN, NAN)),
    (np.exp, (0.0, INFINITY)),
    (lambda x: x * x * x - 2 * x, (INFINITY, INFINITY)),
    (np.abs, (-1.0, 1.0)),
    (lambda x: np.sqrt(np.logaddexp(0.0, x)), (0.0, 0.0)),
    (lambda x: x / (1.0 + math.exp(-x)), (NAN, 1.0)),  # which overflows
]


@pytest.mark.parametrize(("f", "slopes"), SLOPES)
def test_slopes(f, slopes):
    """They are the limits of f', or not numbers if it has none."""
    np.testing.assert_array_equal(from_callable(f).slopes, slopes)


# --- torch --------------------------------------------------------------------------------------


def test_torch_module_with_exact_kinks():
    found = from_callable(torch.nn.ReLU6(), name="my relu6")
    assert found.name == "my relu6" and found.kinks == (0.0, 6.0)
    sides = [0.0, 5e-324, math.nextafter(6.0, 0.0), 6.0]
    np.testing.assert_array_equal(found.derivative(sides), [0.0, 1.0, 1.0, 0.0])


TORCHS = "gelu relu leaky_relu hardtanh softshrink hardsigmoid hardswish elu selu softplus".split()


@pytest.mark.parametrize("name", TORCHS)
def test_torch_functions_find_what_is_known(name):
    known = functions.get(name)
    domain = (-25.0, 25.0)
    found = from_callable(getattr(torch.nn.functional, name), domain=domain)
    assert found.kinks == known.kinks
    x = np.concatenate([around(known.kinks, domain), known.kinks])
    tolerance = 1e-8 if name == "hardsigmoid" else 1e-14  # torch rounds 1/6 to float32
    np.testing.assert_allclose(found.derivative(x), known.derivative(x), rtol=0, atol=tolerance)
    np.testing.assert_allclose(found.slopes, known.slopes, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_torch_modules_are_evaluated_in_float64_and_left_alone():
    module = torch.nn.PReLU().train()
    assert from_callable(module).slopes == (0.25, 1.0)
    assert module.training and module.weight.dtype == torch.float32 and module.weight.grad is None
    assert from_callable(torch.nn.RReLU()).slopes == pytest.approx((11 / 48, 1.0))
    assert from_callable(torch.nn.ReLU(inplace=True)).kinks == (0.0,)
    with torch.no_grad():
        assert from_callable(lambda x: torch.nn.functional.silu(x)).kinks == ()


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "keywords", "message"),
    [
        (np.sqrt, {}, r"^numpy:sqrt is not finite at x = -10.0 \(nan\)$"),
        (lambda x: math.sqrt(x), {}, r"is not finite at x = -10.0 \(nan\)"),
        (lambda x: np.where(x == 0.0, np.nan, x), {}, r"is not finite at x = 0.0 \(nan\)"),
        (lambda x: np.exp(x * x * 1e3), {}, r"is not finite at x = -10.0 \(inf\)"),
        (
            np.sqrt,
            {"domain": (0.0, 10.0)},
            "^numpy:sqrt: its numerical derivative is uncertain by more than .* near x = 0.0;"
            ".* or pass derivative= or kinks= to fewbit.solve$",
        ),
        (
            lambda x: np.where(x > 0.5, 1.0, 0.0),
            {},
            r"jumps at x = 0.5: expected a continuous function; choose a domain",
        ),
        (lambda x: 1.0 / (x - 0.3), {}, "jumps at x = 0.3"),
        (np.abs, {"kinks": []}, "f' also jumps at x = 0.0; add it to kinks= or give derivative="),
        (
            np.abs,
            {"kinks": [1.0], "derivative": np.sign},
            "f' also jumps at x = 0.0; add it to kinks=, or leave kinks= out$",
        ),
        (np.sin, {"derivative": np.sin}, "does not integrate back to it on .*; check derivative=$"),
        (
            np.tanh,
            {"derivative": np.cos, "kinks": []},
            "does not integrate back to it on .*; check derivative= and kinks=",
        ),
        (
            np.sqrt,
            {"domain": (0.0, 4.0), "derivative": lambda x: 0.5 / np.sqrt(x)},
            "derivative of .* not finite at x",
        ),
        (lambda x: x.sum(), {}, r"expected a result of the input's shape \(7,\), got \(\)"),
        (lambda x: x[1:], {}, r"shape \(7,\), got \(6,\)"),
        (lambda x: x > 0, {}, "expected float64 for float64, got bool"),
        (lambda x: x.astype(np.float32), {}, "expected float64 for float64, got float32"),
        (lambda x: x - x.mean(), {}, "is not pointwise"),
        (lambda a, b: a + b, {}, r"accepts none of: an array \(TypeError"),
        ("gelu", {}, "expected a callable, got str"),
        (np.tanh, {"domain": (1.0, -1.0)}, r"\(low, high\) with low < high, got \(1.0, -1.0\)"),
        (np.tanh, {"domain": (0.0, math.inf)}, "expected a finite domain"),
        (np.tanh, {"domain": 3}, "expected a domain of two numbers, got 3"),
        (np.tanh, {"kinks": [math.nan]}, "expected finite kinks"),
        (np.tanh, {"derivative": 3}, "derivative: expected a callable, got int"),
        (lambda x: [1.0], {}, "expected an array or a tensor as the result, got list"),
        (np.tanh, {"kinks": 1.0}, "expected kinks to be a sequence of numbers, got 1.0"),
        (lambda x: torch.tanh(x).detach(), {}, "no gradient for it; pass derivative= to"),
        (
            np.sin,
            {"derivative": lambda x: np.cos(x) + 1e-3 * np.exp(-(((x - 2.1) / 0.05) ** 2))},
            r"integrate back to it on \[(1\.9|2\.)",
        ),
        *(
            (np.tanh, {"domain": domain}, "expected a domain that floats can sample, got one")
            for domain in ((0.0, 5e-324), (1.0, 1.0 + 4e-16), (-1.7e308, 1.7e308))
        ),
    ],
)
def test_refusals_name_the_point_in_one_line(f, keywords, message):
    with pytest.raises(FunctionError, match=message) as caught:
        from_callable(f, **keywords)
    assert "\n" not in str(caught.value)


# --- names --------------------------------------------------------------------------------------


def test_import_callable(tmp_path, monkeypatch):
    (tmp_path / "my_activation.py").write_text(
        "import numpy as np\nclass Own:\n    f = staticmethod(np.tanh)\n"
    )
    (tmp_path / "my_broken.py").write_text("raise RuntimeError('two\\nlines')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "path", [entry for entry in sys.path if entry not in ("", os.getcwd())]
    )
    assert import_callable("my_activation:Own.f") is np.tanh
    assert import_callable("numpy:abs") is np.abs
    with pytest.raises(FunctionError, match="^cannot import 'my_broken': RuntimeError: two lines$"):
        import_callable("my_broken:f")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module_here:f", "cannot import 'no_such_module_here': ModuleNotFoundError"),
        ("numpy:no_such_function", "'numpy' has no attribute 'no_such_function'"),
        ("numpy:pi", "expected 'numpy:pi' to be callable, got float"),
        ("numpy:", "expected 'package.module:function', got 'numpy:'"),
        (":f", "expected 'package.module:function', got ':f'"),
        ("numpy", "expected 'package.module:function', got 'numpy'"),
    ],
)
def test_import_errors(path, message):
    with pytest.raises(FunctionError) as caught:
        import_callable(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_qualified_name():
    def local(x):
        return x

    assert qualified_name(numpy_gelu) == f"{__name__}:numpy_gelu"
    assert qualified_name(np.tanh) == "numpy:tanh"
    assert qualified_name(local) == "local"
    assert qualified_name(lambda x: x) == "<lambda>"
    assert qualified_name(np.vectorize(scalar_elu).__call__) != ""
    assert qualified_name(3) == "callable"
    assert import_callable(qualified_name(numpy_gelu)) is numpy_gelu


def test_resolve():
    gelu = functions.get("gelu")
    assert resolve(gelu) is gelu
    assert resolve("swish").name == "silu"
    assert resolve("elu", {"alpha": 2.0}).parameters == {"alpha": 2.0}
    assert resolve("gelu", domain=(-5, 5)).domain == (-5.0, 5.0)
    assert resolve(gelu, domain=(-5, 5)).domain == (-5.0, 5.0) and gelu.domain == (-10.0, 10.0)
    assert resolve("numpy:tanh").name == "numpy:tanh"
    assert resolve(np.tanh, domain=(-4, 4)).domain == (-4.0, 4.0)
    assert resolve(np.abs, kinks=[0.0]).kinks == (0.0,)
    for arguments, keywords, message in (
        (("gelo",), {}, "did you mean gelu"),
        (("gelu",), {"kinks": []}, "derivative= and kinks= go with a callable"),
        ((np.tanh, {"alpha": 1.0}), {}, "parameters go with the name of a known function"),
        (("numpy:tanh", {"alpha": 1.0}), {}, "parameters go with the name of a known function"),
        (("gelu",), {"domain": (1, 1)}, "low < high"),
    ):
        with pytest.raises(FunctionError, match=message):
            resolve(*arguments, **keywords)


# --- other domains ------------------------------------------------------------------------------


@pytest.mark.parametrize("domain", [(-1e30, 1e30), (-1e3, 1e3), (-1e-9, 1e-9), (-3.0, 17.0)])
def test_a_kink_at_zero_is_zero_on_every_domain(domain):
    found = from_callable(lambda x: np.maximum(x, 0.0), domain=domain)
    assert found.kinks == (0.0,) and found.slopes == (0.0, 1.0)
    ends = found.derivative(np.array([*domain, domain[0] * 1e-6, domain[1] * 1e-6]))
    assert ends == pytest.approx([0.0, 1.0, 0.0, 1.0], rel=0, abs=1e-11)
    far = from_callable(lambda x: x / (1.0 + np.exp(-x)), domain=(1e6, 1e6 + 1))
    assert far.derivative(1e6 + 0.3) == pytest.approx(1.0, rel=0, abs=1e-10)
