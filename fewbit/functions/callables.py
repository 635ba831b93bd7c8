"""Make a `Function` of a user's activation: find and check its derivative, kinks and slopes.

The activation may be written in NumPy, in torch, or for single floats. This module finds:

- the derivative: the given one; else torch's autograd; else the derivative of a piecewise polynomial
  that interpolates f (`fewbit.functions.panels`), with an estimated error of at most 1e-10 of max |f'|. The estimate assumes
  that f has no feature that is narrower than two distances of its samples, each 1/131,072 of the domain,
  and rounding of f may hide features of f' of some 2e-10 of max |f'|;
- the kinks: the ones that are given; else a search of the domain. Jumps of an f' that can be
  evaluated are exact to the float. Otherwise they are located where smooth fits of f from either
  side meet, and rounded to a short decimal if that is closer than the error of the location.
  Jumps of f'' are found the same way, so that f' is smooth between kinks;
- the slopes: see `_slope`.

A derivative that is given or comes from autograd is checked against f: between any two neighbors of
some 130,000 points its integral equals the change of f, within 1e-7 of max |f'| times the distance. It is
then taken as exact: what a table certifies is its error for the given derivative.
"""

import contextlib
import copy
import importlib
import importlib.util
import inspect
import math
import numbers
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from fewbit import functions
from fewbit.errors import FunctionError
from fewbit.functions import Function
from fewbit.functions.kinks import find_bends, jumps, segments, wide_mesh
from fewbit.functions.panels import RESOLUTION, Panels, Unresolved, slope_within
from fewbit.text import one_line as _one_line

__all__ = ["from_callable", "import_callable", "qualified_name", "resolve"]

_DOMAIN = (-10.0, 10.0)
_EPS = float(np.finfo(np.float64).eps)
_ACCURACY = 1e-10  # largest estimated error of a numerical f', as a share of max |f'|
_INTEGRAL_TOLERANCE = 1e-7  # times max |f'| and the length of the interval
_ROUNDINGS = 8.0  # of f and of a line, that may separate the two at a sample
_MAX_KINKS = 64
_NARROWEST_DOMAIN = 1e-10  # as a share of its ends

Flat = Callable[[np.ndarray], np.ndarray]  # 1-D float64 in, 1-D float64 of the same length out


def resolve(
    function: object,
    parameters: dict | None = None,
    *,
    derivative: Callable | None = None,
    kinks: Sequence[float] | None = None,
    domain: tuple[float, float] | None = None,
) -> Function:
    """The Function meant by a name, an alias, "module:function", a callable or a Function.

    `parameters` belong to names; `derivative` and `kinks` to callables; `domain` replaces the
    function's own.
    """
    known = isinstance(function, Function) or (isinstance(function, str) and ":" not in function)
    if known and (derivative is not None or kinks is not None):
        raise FunctionError("derivative= and kinks= go with a callable, got a known function")
    if parameters and (isinstance(function, Function) or not known):
        raise FunctionError(
            f"parameters go with the name of a known function, got {dict(parameters)!r}"
        )
    if known:
        found = function if isinstance(function, Function) else functions.get(function, parameters)
        return found if domain is None else replace(found, domain=_checked_domain(domain))
    name = function if isinstance(function, str) else None
    activation = import_callable(function) if isinstance(function, str) else function
    if domain is None:
        domain = _DOMAIN
    return from_callable(activation, name=name, derivative=derivative, kinks=kinks, domain=domain)


def from_callable(
    f: Callable,
    *,
    name: str | None = None,
    derivative: Callable | None = None,
    kinks: Sequence[float] | None = None,
    domain: tuple[float, float] = _DOMAIN,
) -> Function:
    """The Function of an activation f (not of its derivative), checked on the domain.

    f and `derivative` take float64 NumPy arrays, torch tensors or single floats. A torch module is
    copied, in float64 and evaluation mode. FunctionError if f is not pointwise, not finite or not
    continuous on the domain, or if its derivative cannot be found to the promised accuracy.

    A given `derivative` is compared with f to 1e-7 of max |f'| and then taken as exact.
    At a kink a numerical derivative is the limit from the left; autograd's is what torch returns.
    """
    if not callable(f):
        raise FunctionError(f"expected a callable, got {type(f).__name__}")
    name = name or qualified_name(f)
    low, high = domain = _checked_domain(domain)
    given = None if kinks is None else _checked_kinks(kinks)

    value, slope = _adapted(f, name, domain)
    if derivative is not None:
        slope, _ = _adapted(derivative, f"the derivative of {name}", domain)
    mesh = wide_mesh(low, high)
    _check_finite(name, value, mesh)
    _check_pointwise(name, value, mesh)
    _check_continuous(name, value, domain, given or [])

    kinks, panels = _pieces(name, value, slope, given, domain)
    accuracy = 0.0
    if slope is None:
        slope = _numerical(value, panels, domain)
        slope, accuracy = _with_flat_pieces(value, slope, panels, segments(domain, kinks))
    else:
        _check_finite(f"the derivative of {name}", slope, mesh)
        _check_integral(name, value, panels, derivative is not None)
    return Function(
        name=name,
        parameters={},
        value=_any_shape(value),
        derivative=_any_shape(slope),
        kinks=tuple(kinks),
        slopes=(_slope(value, slope, -1.0), _slope(value, slope, 1.0)),
        domain=domain,
        reference=f"the callable {name}",
        even_derivative=_is_even(slope, kinks, domain, accuracy),
        accuracy=accuracy,
        panels=panels.edges,
    )


# --- names --------------------------------------------------------------------------------------


def import_callable(path: str) -> Callable:
    """The object that "package.module:function" names; modules of the current directory count.

    Importing runs the module's code. The current directory stays on sys.path, as with python -m.
    """
    module_name, colon, attribute = path.partition(":")
    if not (colon and module_name and attribute):
        raise FunctionError(f"expected 'package.module:function', got {path!r}")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything while it is imported
        raise FunctionError(f"cannot import {module_name!r}: {_one_line(error)}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise FunctionError(f"{module_name!r} has no attribute {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise FunctionError(f"expected {path!r} to be callable, got {type(found).__name__}")
    return found


def misfit_of(f: Callable, arguments: int) -> str:
    """Why f cannot be called with so many arguments, by position; "" if it can, or does not tell, as some built-in functions."""
    try:
        inspect.signature(f).bind(*[None] * arguments)
    except TypeError as error:
        return str(error)
    except ValueError:
        pass
    return ""


def qualified_name(f: object) -> str:
    """The path by which `import_callable` finds f again, else its bare name, else "callable"."""
    bare = getattr(f, "__name__", None)
    module_name = getattr(f, "__module__", None)
    # __main__ is another module in the next process.
    if module_name and module_name != "__main__":
        for attribute in (getattr(f, "__qualname__", None), bare):
            if attribute and _lookup(module_name, attribute) is f:
                return f"{module_name}:{attribute}"
    return bare or "callable"


def _lookup(module_name: str, attribute: str) -> object:
    found = sys.modules.get(module_name)
    for part in attribute.split("."):
        found = getattr(found, part, None)
    return found


# --- calling the user's code --------------------------------------------------------------------


def _adapted(f: Callable, name: str, domain: tuple[float, float]) -> tuple[Flat, Flat | None]:
    """f on flat float64 arrays, and its autograd derivative when f is torch's."""
    if _is_torch_module(f):
        return _torch_pair(copy.deepcopy(f).double().eval(), name)
    probe = np.linspace(*domain, 7)
    refusals = []
    for kind, attempt in (
        ("an array", _as_array),
        ("a float", _as_scalar),
        ("a tensor", _as_tensor),
    ):
        try:
            with _quiet():
                return attempt(f, name, probe)
        except FunctionError:
            raise
        except Exception as error:  # noqa: BLE001, whatever f raises, the next kind may work
            refusals.append(f"{kind} ({_one_line(error)})")
    raise FunctionError(f"{name} accepts none of: {', '.join(refusals)}")


def _as_array(f: Callable, name: str, probe: np.ndarray) -> tuple[Flat, None]:
    def value(x: np.ndarray) -> np.ndarray:
        y = _called(f, name, x.copy())
        if not isinstance(y, (np.ndarray, np.generic, numbers.Number)):
            raise FunctionError(f"{name}: expected an array, got {type(y).__name__}")
        y = np.asarray(y)
        _check_output(name, x.shape, y.shape, y.dtype == np.float64, y.dtype)
        return y

    # Anything but numbers (a tensor, say) is left to the other attempts.
    if not isinstance(f(probe.copy()), (np.ndarray, np.generic, numbers.Number)):
        raise TypeError("the result is no array")
    value(probe)
    return value, None


def _as_scalar(f: Callable, name: str, probe: np.ndarray) -> tuple[Flat, None]:
    def one(x: float) -> float:
        try:
            return float(f(float(x)))
        except (OverflowError, ValueError, ZeroDivisionError):
            # An overflow inside f, such as exp(-x) in a sigmoid, does not mean that f itself is infinite there.
            return math.nan

    first = f(float(probe[-1]))
    if not isinstance(first, numbers.Real) or isinstance(first, bool):
        raise TypeError(f"the result is {type(first).__name__}, not a number")
    many = np.vectorize(one, otypes=[np.float64])
    return lambda x: _called(many, name, x), None


def _as_tensor(f: Callable, name: str, probe: np.ndarray) -> tuple[Flat, Flat]:
    if importlib.util.find_spec("torch") is None:
        raise ImportError("torch is not installed")
    import torch

    f(torch.tensor(probe))
    return _torch_pair(f, name)


def _torch_pair(f: Callable, name: str) -> tuple[Flat, Flat]:
    import torch

    def forward(x: "torch.Tensor") -> "torch.Tensor":
        y = _called(f, name, x.clone())  # the clone may be changed in place
        if not isinstance(y, torch.Tensor):
            raise FunctionError(f"{name}: expected a tensor, got {type(y).__name__}")
        _check_output(name, tuple(x.shape), tuple(y.shape), y.dtype == torch.float64, y.dtype)
        return y

    def value(x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return forward(torch.tensor(x, device="cpu")).cpu().numpy()

    def gradient(x: np.ndarray) -> np.ndarray:
        with torch.enable_grad():
            leaf = torch.tensor(x, device="cpu", requires_grad=True)
            y = forward(leaf)
            if not y.requires_grad:
                raise FunctionError(f"{name}: torch has no gradient for it; give derivative=")
            (slope,) = torch.autograd.grad(y.sum(), leaf)
        return slope.numpy()

    return value, gradient


def _is_torch_module(f: object) -> bool:
    torch = sys.modules.get("torch")  # no instance exists unless torch is imported
    return torch is not None and isinstance(f, torch.nn.Module)


def _called(f: Callable, name: str, x: object) -> object:
    try:
        with _quiet():
            return f(x)
    except FunctionError:
        raise
    except Exception as error:
        raise FunctionError(f"{name} raised {_one_line(error)}") from error


def _check_output(
    name: str, expected: tuple, shape: tuple, is_float64: bool, dtype: object
) -> None:
    if shape != expected:
        raise FunctionError(
            f"{name}: expected a result of the input's shape {expected}, got {shape}"
        )
    if not is_float64:
        raise FunctionError(f"{name}: expected float64 for float64, got {dtype}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _any_shape(f: Flat) -> Callable[[np.ndarray], np.ndarray]:
    def call(x: np.ndarray) -> np.ndarray:
        x = np.asarray(x, dtype=np.float64)
        if not x.size:
            return np.empty(x.shape)
        with _quiet():
            return f(x.ravel()).reshape(x.shape)[()]

    return call


# --- checks -------------------------------------------------------------------------------------


def _checked_domain(domain: tuple[float, float]) -> tuple[float, float]:
    try:
        low, high = map(float, domain)
    except (TypeError, ValueError, OverflowError):
        raise FunctionError(f"expected a domain of two numbers, got {domain!r}") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise FunctionError(
            f"expected a finite domain (low, high) with low < high, got ({low!r}, {high!r})"
        )
    if not _NARROWEST_DOMAIN * max(-low, high, 1e-280) < high - low < math.inf:
        raise FunctionError(
            f"expected a domain that floats can sample, got one from {low!r} to {high!r}"
        )
    return low, high


def _checked_kinks(kinks: Sequence[float]) -> list[float]:
    try:
        found = sorted({float(kink) + 0.0 for kink in kinks})
    except (TypeError, ValueError, OverflowError):
        raise FunctionError(f"expected kinks to be a sequence of numbers, got {kinks!r}") from None
    if not all(map(math.isfinite, found)):
        raise FunctionError(f"expected finite kinks, got {kinks!r}")
    return found


def _check_finite(name: str, f: Flat, mesh: np.ndarray) -> None:
    y = f(mesh)
    bad = np.flatnonzero(~np.isfinite(y))
    if bad.size:
        raise FunctionError(
            f"{name} is not finite at x = {float(mesh[bad[0]])!r} ({float(y[bad[0]])})"
        )


def _check_pointwise(name: str, f: Flat, mesh: np.ndarray) -> None:
    """Each result depends on its own element only, and does not change from call to call."""
    y, part = f(mesh), f(mesh[::3])
    bad = np.flatnonzero(np.abs(y[::3] - part) > 1e-12 * np.max(np.abs(y)))
    if bad.size:
        x = float(mesh[::3][bad[0]])
        raise FunctionError(
            f"{name} is not pointwise: f({x!r}) changes with the other elements or the call"
        )


def _check_continuous(
    name: str, f: Flat, domain: tuple[float, float], kinks: Sequence[float]
) -> None:
    """Raise FunctionError if f jumps at a point that is not a given kink."""
    found = [x for segment in segments(domain, kinks) for x in jumps(f, *segment)]
    if found:
        x = min(found)
        raise FunctionError(
            f"{name} jumps at x = {x!r}: expected a continuous function, or that point in kinks="
        )


def _pieces(
    name: str,
    value: Flat,
    slope: Flat | None,
    given: list[float] | None,
    domain: tuple[float, float],
) -> tuple[list[float], Panels]:
    """Return the kinks, and the panels between them: of f' if there is a function for it, else of f.

    If kinks are given, FunctionError is raised if a search finds a jump of f' besides them.
    """
    known = given or []
    if slope is not None:
        also = [x for piece in segments(domain, known) for x in jumps(slope, *piece)]
        _check_given(name, given, also)
        known = sorted([*known, *also])
        _check_finite(f"the derivative of {name}", slope, np.array([*known, *domain]))
    try:
        found, panels = find_bends(
            value if slope is None else slope, known, domain, _ACCURACY, order=int(slope is None)
        )
    except Unresolved as reason:
        if slope is not None:
            raise FunctionError(
                f"{name}: its derivative varies too fast, or is rounded too much, near"
                f" x = {reason.place!r}: expected a smooth float64 function between kinks, or a smaller domain"
            ) from None
        raise FunctionError(
            f"{name}: its numerical derivative is uncertain by more than {reason.allowed:.1e} near"
            f" x = {reason.place!r}; give derivative= or kinks="
        ) from None
    if slope is None:
        _check_given(name, given, [x for x, first in found.items() if first == 1])
    kinks = sorted([*known, *found])
    if len(found) > _MAX_KINKS:
        raise FunctionError(
            f"{name}: f' has more than {_MAX_KINKS} kinks on the domain; give kinks="
        )
    return kinks, panels


def _check_given(name: str, given: list[float] | None, also: list[float]) -> None:
    if given is not None and also:
        raise FunctionError(
            f"{name}: f' also jumps at x = {min(also)!r}; add it to kinks= or give derivative="
        )


def _check_integral(name: str, f: Flat, slopes: Panels, given: bool) -> None:
    """Raise FunctionError if the integral of f' between two neighbors of a mesh is not the change of f."""
    mesh = np.linspace(slopes.left[0], slopes.right[-1], RESOLUTION)
    x = np.union1d(mesh, slopes.points(16))
    left, right = x[:-1], x[1:]
    # An interval that spans a kink lies in no panel, and is not checked.
    known = slopes.contain(left, right)
    left, right = left[known], right[known]
    y = f(np.concatenate([left, right]))
    rise, size = y[len(left) :] - y[: len(left)], float(np.abs(y).max())
    steepest = slopes.largest()
    rounding = 32.0 * _EPS * (size + steepest * np.maximum(np.abs(left), np.abs(right)))
    error = np.abs(slopes.integrals(left, right) - rise)
    excess = error - (_INTEGRAL_TOLERANCE * steepest * (right - left) + rounding)
    worst = int(np.argmax(np.where(np.isnan(excess), np.inf, excess)))
    if not excess[worst] <= 0.0:
        remedy = "check derivative= and kinks=" if given else "give kinks= or derivative="
        raise FunctionError(
            f"{name}: its derivative does not integrate back to it on"
            f" [{float(left[worst])!r}, {float(right[worst])!r}] (off by {error[worst]:.1e}); {remedy}"
        )


# --- the numerical derivative -------------------------------------------------------------------


def _numerical(f: Flat, panels: Panels, domain: tuple[float, float]) -> Flat:
    """Return f', on the domain from the panels of f, beyond it interpolated around each point, without an error bound."""
    low, high = domain
    slopes = panels.derivative()

    def slope(x: np.ndarray) -> np.ndarray:
        found = slopes(np.clip(x, low, high))
        beyond = (x < low) | (x > high)
        if beyond.any():
            far = x[beyond]
            reach = np.maximum(0.25, np.abs(far) / 16.0)
            start = np.where(far > high, np.maximum(high, far - reach), far - reach)
            end = np.where(far < low, np.minimum(low, far + reach), far + reach)
            with _quiet():
                found[beyond] = slope_within(f, start, end, far)
        return found

    return slope


def _with_flat_pieces(
    value: Flat, slope: Flat, panels: Panels, pieces: list[tuple[float, float]]
) -> tuple[Flat, float]:
    """Return slope, made exactly constant on every piece on which f is a straight line, and its accuracy.

    Otherwise the solver would fit the rounding noise of numerical differentiation, and a function such as
    max(0, x) would get no exact table.
    """
    flat = []
    accuracy = panels.error
    largest = panels.derivative().largest()
    points = panels.points(32)
    for left, right in pieces:
        x = points[(points >= left) & (points <= right)]
        sample, size = slope(x), np.abs(value(x)).max() + np.abs(x).max()
        level = float(np.median(sample))
        # The largest error that rounding in f causes in a polynomial's slope, at the polynomial's ends.
        rounding = 16384.0 * _EPS * max(float(size) / (right - left), abs(level))
        if np.abs(sample - level).max() <= min(accuracy, rounding, _ACCURACY * largest):
            ends = np.array([left, right])
            level = _short(float(np.diff(value(ends))[0] / (right - left)), rounding)
            if _is_straight(value, level, left, right):
                flat.append((left, right, level))
    if not flat:
        return slope, accuracy

    def cleaned(x: np.ndarray) -> np.ndarray:
        found = slope(x)
        for left, right, level in flat:
            # A piece ends one float before its kink, and has the kink itself.
            end = right if right == pieces[-1][1] else math.nextafter(right, math.inf)
            found = np.where((x >= left) & (x <= end), level, found)
        return found

    return cleaned, accuracy if len(flat) < len(pieces) else 0.0


def _is_straight(value: Flat, level: float, left: float, right: float) -> bool:
    """Return whether f changes by ``level`` times the distance between neighboring samples, up to the rounding of both.

    The samples are an even mesh, and points around 0 that are dense on every scale, since a bend that is narrow in
    relation to the domain is most likely there.
    """
    near = np.geomspace(1e-12, max(-left, right), 1025)
    x = np.concatenate([np.linspace(left, right, RESOLUTION), -near, near])
    x = np.unique(x[(x >= left) & (x <= right)])
    y, line = value(x), level * x
    size = np.abs(y) + np.abs(line)
    # An end may be a kink, whose place is known up to the rounding of all of f only.
    size[[0, -1]] = size.max()
    change = np.abs(np.diff(y - line))
    return bool((change <= _ROUNDINGS * _EPS * (size[1:] + size[:-1])).all())


# --- what else a solver wants to know -----------------------------------------------------------


def _slope(value: Flat, slope: Flat, sign: float) -> float:
    """Return the limit of f' at sign * infinity, estimated from f' at 1e3, 1e4, 1e5 and 1e6.

    If the four values settle, or their Aitken extrapolations agree, and f' at other points is close to that
    limit, the limit is returned. If the values keep growing, or f overflows, the result is an infinity; else nan.
    """
    x = sign * np.array([1e3, 1e4, 1e5, 1e6])
    between = sign * 1e5 * np.sqrt([3.0, 19.0, 61.0, 211.0, 1117.0])
    try:
        g, y, others = slope(x), value(x), slope(between)
    except FunctionError:  # f need not work that far out
        return math.nan
    if np.isinf(g[0]) or np.isinf(y[0]):
        return float(g[0]) if np.isinf(g[0]) else float(sign * y[0])
    if not np.isfinite(g).all():
        return math.nan
    steps, scale = np.diff(g), max(1.0, abs(float(g[-1])))
    limit = math.nan
    if np.all(np.abs(steps[1:]) <= 1e-9 * scale):
        limit = _short(float(g[-1]), 1e-9)
    elif np.all(np.abs(steps[1:]) <= 0.5 * np.abs(steps[:-1])):
        limits = g[2:] - steps[1:] ** 2 / (steps[1:] - steps[:-1])
        if abs(limits[1] - limits[0]) <= 1e-6 * scale:
            limit = _short(float(limits[1]), 1e-9)
    if np.all(np.abs(others - limit) <= abs(g[2] - limit) + 1e-9 * scale):
        return limit
    same_way = np.all(steps * steps[0] > 0) and abs(g[-1]) > abs(g[0])
    if same_way and np.all(np.abs(steps[1:]) >= 0.9 * np.abs(steps[:-1])):
        return math.copysign(math.inf, g[-1])
    return math.nan


def _short(x: float, within: float) -> float:
    """Return x rounded to six decimals if this changes x by at most `within`, else x."""
    return round(x, 6) + 0.0 if abs(round(x, 6) - x) <= within else x


def _is_even(slope: Flat, kinks: list[float], domain: tuple[float, float], accuracy: float) -> bool:
    """Return whether f'(-x) equals f'(x) on a mesh. Kinks are left out, since f' has two limits there."""
    if domain[0] != -domain[1] or kinks != sorted(-kink + 0.0 for kink in kinks):
        return False
    x = np.setdiff1d(wide_mesh(0.0, domain[1]), np.abs(kinks))
    right, left = slope(x), slope(-x)
    allowed = max(1e-12 * float(np.max(np.abs(right))), 2.0 * accuracy)
    return bool(np.max(np.abs(right - left)) <= allowed)
