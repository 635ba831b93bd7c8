"""A user's own activation as a Function: its derivative, kinks and slopes, found and checked.

The activation may be written in NumPy, in torch, or for single floats. What is found:

- the derivative: the one that is given; else torch's autograd; else that of a piecewise polynomial
  through f (`fewbit.panels`), whose error is estimated everywhere and at most 1e-10 of max |f'|;
- the kinks: the ones that are given; else a search of the domain. Jumps of an f' that can be
  evaluated are exact to the float. Otherwise they are located where smooth fits of f from either
  side meet, and rounded to a short decimal if that is closer than the error of the location.
  Jumps of f'' are found the same way, so that f' is smooth between kinks;
- the slopes: see `_slope`.

A derivative that is given, or autograd's, is checked against f itself: between any two neighbors of
some 130,000 points it has to integrate back to f, within 1e-7 of max |f'| times the distance.
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
from fewbit.panels import RESOLUTION, Panels, Unresolved, resolve_panels, slope_within
from fewbit.text import one_line as _one_line

__all__ = ["from_callable", "import_callable", "qualified_name", "resolve"]

_DOMAIN = (-10.0, 10.0)
_EPS = float(np.finfo(np.float64).eps)
_ACCURACY = 1e-10  # of a numerical derivative, times max |f'|
_INTEGRAL_TOLERANCE = 1e-7  # times max |f'| and the length of the interval
# A given derivative is exact; polynomials stand for it only where it is integrated.
_GIVEN_ACCURACY = 1e-8
_GIVEN_NARROWEST = 1e-12
_MAX_KINKS = 64

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
    mesh = _mesh(low, high)
    _check_finite(name, value, mesh)
    _check_pointwise(name, value, mesh)
    _check_continuous(name, value, domain, given or [])

    kinks = _all_kinks(name, value, slope, given, domain)
    inside = [kink for kink in kinks if low <= kink <= high]
    segments = _segments(domain, inside)
    accuracy = 0.0
    if slope is None:
        panels = _differentiable(name, value, segments)
        slope, accuracy = _with_flat_pieces(
            _numerical(value, panels, domain), panels.error, segments, domain
        )
    else:
        _check_finite(f"the derivative of {name}", slope, np.union1d(mesh, inside))
        panels = _integrable(name, slope, segments)
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
        except OverflowError:
            return math.inf
        except (ValueError, ZeroDivisionError):  # how the math module says nan
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
    except (TypeError, ValueError):
        raise FunctionError(f"expected a domain of two numbers, got {domain!r}") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise FunctionError(
            f"expected a finite domain (low, high) with low < high, got ({low!r}, {high!r})"
        )
    return low, high


def _checked_kinks(kinks: Sequence[float]) -> list[float]:
    try:
        found = sorted({float(kink) + 0.0 for kink in kinks})
    except (TypeError, ValueError):
        raise FunctionError(f"expected kinks to be a sequence of numbers, got {kinks!r}") from None
    if not all(map(math.isfinite, found)):
        raise FunctionError(f"expected finite kinks, got {kinks!r}")
    return found


def _mesh(low: float, high: float) -> np.ndarray:
    """1025 even points from low to high, and around zero finer and finer ones."""
    fine = np.geomspace(1e-12, 0.1, 45)
    mesh = np.unique(np.concatenate([np.linspace(low, high, 1025), -fine, [0.0], fine]))
    return mesh[(mesh >= low) & (mesh <= high)]


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
    """f does not jump, but at kinks that were given: there its derivative is that of both sides."""
    jumps = [x for segment in _segments(domain, kinks) for x in _jumps(f, *segment)]
    if jumps:
        x = min(jumps)
        raise FunctionError(
            f"{name} jumps at x = {x!r}: expected a continuous function, or that point in kinks="
        )


def _differentiable(name: str, f: Flat, segments: list[tuple[float, float]]) -> Panels:
    """The panels of f by which it is differentiated; FunctionError where they are not accurate enough."""
    try:
        return resolve_panels(f, segments, _ACCURACY, order=1)
    except Unresolved as reason:
        raise FunctionError(
            f"{name}: its numerical derivative is uncertain by {reason.error:.1e} near"
            f" x = {reason.place!r} (expected at most {reason.allowed:.1e}); give derivative= or kinks="
        ) from None


def _integrable(name: str, slope: Flat, segments: list[tuple[float, float]]) -> Panels:
    """The panels of a derivative that was given."""
    try:
        return resolve_panels(slope, segments, _GIVEN_ACCURACY, order=0, narrowest=_GIVEN_NARROWEST)
    except Unresolved as reason:
        raise FunctionError(
            f"{name}: its derivative varies too fast, or is rounded too much, near x = {reason.place!r}:"
            " expected a smooth float64 function between kinks"
        ) from None


def _check_integral(name: str, f: Flat, slopes: Panels, given: bool) -> None:
    """f' integrates back to f between neighbors of a mesh, on every panel of f'."""
    mesh = np.linspace(slopes.left[0], slopes.right[-1], RESOLUTION)
    x = np.union1d(mesh, slopes.points(16))
    left, right = x[:-1], x[1:]
    # A jump at a kink lies between two panels.
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


# --- kinks --------------------------------------------------------------------------------------


def _all_kinks(
    name: str,
    value: Flat,
    slope: Flat | None,
    given: list[float] | None,
    domain: tuple[float, float],
) -> list[float]:
    """Where f' jumps, and where it bends; given kinks are believed as long as no jump is missing."""

    def jumps(low: float, high: float) -> list[float]:
        return _corners(value, low, high, 1) if slope is None else _jumps(slope, low, high)

    known = given or []
    found = _search(name, jumps, known, domain)
    if given is not None:
        if found:
            raise FunctionError(
                f"{name}: f' also jumps at x = {found[0]!r}; add it to kinks= or give derivative="
            )
        return given
    return sorted(found + _search(name, lambda a, b: _corners(value, a, b, 2), found, domain))


def _search(
    name: str,
    find: Callable[[float, float], list[float]],
    known: list[float],
    domain: tuple[float, float],
) -> list[float]:
    """What `find` finds between the known points, then between those it found, until nothing new."""
    found: list[float] = []
    pending = _segments(domain, known)
    while pending:
        low, high = pending.pop()
        new = find(low, high)
        if not new:
            continue
        found += new
        pending += _segments((low, high), new)
        if len(found) > _MAX_KINKS:
            raise FunctionError(
                f"{name}: f' has more than {_MAX_KINKS} kinks on the domain; give kinks="
            )
    return sorted(found)


def _segments(domain: tuple[float, float], points: Sequence[float]) -> list[tuple[float, float]]:
    """The closed intervals that remain when the points are taken out of the domain."""
    low, high = domain
    inside = sorted(point for point in points if low <= point <= high)
    starts = [low, *(math.nextafter(point, math.inf) for point in inside)]
    ends = [*(math.nextafter(point, -math.inf) for point in inside), high]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]


def _jumps(g: Flat, low: float, high: float) -> list[float]:
    """Where g jumps by more than 1e-7 of max |g|, exact to the float.

    Every mesh interval is halved towards the larger difference: over a smooth stretch the
    difference dies away, at a jump it stays until the ends are adjacent floats. Of those two the
    one that is shorter to write is returned.
    """
    mesh = _mesh(low, high)
    y = g(mesh)
    floor = 1e-7 * np.max(np.abs(y))
    left, right, at_left, at_right = mesh[:-1], mesh[1:], y[:-1], y[1:]
    found: set[float] = set()
    while True:
        alive = np.abs(at_right - at_left) > floor
        adjacent = np.nextafter(left, np.inf) >= right
        for pair in zip(
            left[alive & adjacent].tolist(), right[alive & adjacent].tolist(), strict=True
        ):
            found.add(min(pair, key=lambda x: len(repr(x))) + 0.0)
        alive &= ~adjacent
        if not alive.any():
            return sorted(found)
        left, right, at_left, at_right = left[alive], right[alive], at_left[alive], at_right[alive]
        middle = _between(left, right)
        at_middle = g(middle)
        goes_left = np.abs(at_middle - at_left) >= np.abs(at_right - at_middle)
        left, at_left = np.where(goes_left, left, middle), np.where(goes_left, at_left, at_middle)
        right, at_right = (
            np.where(goes_left, middle, right),
            np.where(goes_left, at_middle, at_right),
        )


def _between(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The float halfway in the order of floats, which reaches adjacent floats in 64 halvings."""
    lowest = np.iinfo(np.int64).min
    a, b = ((np.where(i < 0, lowest - i, i)) for i in (left.view(np.int64), right.view(np.int64)))
    middle = (a >> 1) + (b >> 1) + (a & b & 1)
    return np.where(middle < 0, lowest - middle, middle).view(np.float64)


def _corners(f: Flat, low: float, high: float, order: int) -> list[float]:
    """Where the derivative of f of that order (1 or 2) jumps.

    Overlapping windows are halved, each time keeping the left, middle or right half with the
    largest difference of f of order + 1, divided by the spacing to the power `order`. Where f is
    smooth that quotient falls by half per step; at a jump it stays.
    """
    levels = 12 if order == 1 else 6  # further down, rounding drowns the quotient
    width = (high - low) / 2048.0
    starts = low + 0.5 * width * np.arange(4095)
    history = []
    for _ in range(levels):
        width *= 0.5
        choices = starts + 0.5 * width * np.arange(3)[:, None]
        bends = _bend(f, choices, width, order, low, high)
        best = np.argmax(bends, axis=0), np.arange(starts.size)
        starts = choices[best]
        history.append(bends[best])
    # f may be a small difference of numbers as large as 1 or x, as 1 + erf(x) is far left.
    size = 1.0 + np.abs(starts) + np.abs(f(np.clip(starts, low, high)))
    noise = 2.0 ** (order + 1) * _EPS * size / (width / (order + 1)) ** order
    persists = (history[-1] > 30.0 * noise) & (
        history[-1] > 0.125 * np.max(history[: levels // 2], axis=0)
    )
    # Next to an end sits the kink that the segment was cut at.
    inside = (starts > low + 2.0 * width) & (starts + width < high - 2.0 * width)
    hits = _strongest(starts, history[-1], persists & inside, 2.0 * width)
    return [_located(f, start, width, order, low, high, hits) for start in hits]


def _bend(
    f: Flat, starts: np.ndarray, width: float, order: int, low: float, high: float
) -> np.ndarray:
    spacing = width / (order + 1)
    x = starts[..., None] + spacing * np.arange(order + 2)
    y = f(np.clip(x, low, high).ravel()).reshape(x.shape)
    return np.nan_to_num(np.abs(np.diff(y, order + 1)[..., 0]) / spacing**order)


def _strongest(starts: np.ndarray, bends: np.ndarray, hit: np.ndarray, gap: float) -> list[float]:
    """One start for every group of hits less than a gap apart."""
    groups: list[list[int]] = []
    for i in sorted(np.flatnonzero(hit), key=lambda i: starts[i]):
        if groups and starts[i] - starts[groups[-1][-1]] < gap:
            groups[-1].append(i)
        else:
            groups.append([i])
    return [float(starts[max(group, key=lambda i: bends[i])]) for group in groups]


def _located(
    f: Flat, start: float, width: float, order: int, low: float, high: float, hits: list[float]
) -> float:
    """The kink inside one window: where smooth fits from both sides agree.

    Two degrees of fit tell how far to trust the place; within that, a short decimal is preferred.
    """
    end = start + width
    reach = (high - low) / 1024.0
    left = max([low, start - reach, *(hit + width for hit in hits if hit < start)])
    right = min([high, end + reach, *(hit for hit in hits if hit > start)])
    places = [_meeting(f, (left, start), (end, right), order, degree) for degree in (6, 8)]
    kink, spread = places[1][0], abs(places[0][0] - places[1][0]) + places[1][1]
    if not (start <= kink <= end and spread <= width):
        kink, spread = start + 0.5 * width, 0.5 * width
    for digits in range(7):
        near = abs(round(kink, digits) - kink) <= 4.0 * spread
        if near and spread < 0.002 * 0.1**digits:  # else it is near one by chance
            return round(kink, digits) + 0.0
    return kink


def _meeting(
    f: Flat, before: tuple[float, float], after: tuple[float, float], order: int, degree: int
) -> tuple[float, float]:
    """Where the fits' derivatives of order - 1 are equal, and the rounding error of that place."""
    if before[0] >= before[1] or after[0] >= after[1]:
        return math.nan, math.inf
    # Everything is taken relative to a point inside the window, lest the fit round its offsets.
    origin = 0.5 * (before[1] + after[0])
    height = f(np.array([origin]))[0]
    size = 0.0
    fits = []
    for a, b in (before, after):
        x = 0.5 * (a + b) + 0.5 * (b - a) * np.cos(np.pi * (np.arange(12) + 0.5) / 12)
        y = f(x)
        size = max(size, float(np.abs(x).max() + np.abs(y).max()))
        fit = np.polynomial.Chebyshev.fit(
            x - origin, y - height, degree, domain=(a - origin, b - origin)
        )
        fits.append(fit)
    one, two = (fit.deriv(order - 1) if order > 1 else fit for fit in fits)
    one_slope, two_slope = one.deriv(), two.deriv()
    x = 0.0
    for _ in range(5):
        steepness = two_slope(x) - one_slope(x)
        if steepness == 0.0:
            return math.nan, math.inf
        x -= (two(x) - one(x)) / steepness
        if not before[0] <= origin + x <= after[1]:
            return math.nan, math.inf
    shortest = min(before[1] - before[0], after[1] - after[0])
    # Of a derivative of the fit.
    rounding = 4.0 * _EPS * size * (degree * degree / shortest) ** (order - 1)
    return float(origin + x), float(rounding / abs(steepness)) + 4.0 * _EPS * abs(origin)


# --- the numerical derivative -------------------------------------------------------------------


def _numerical(f: Flat, panels: Panels, domain: tuple[float, float]) -> Flat:
    """f' from its panels; beyond the domain, where nothing is promised, from f around each point."""
    low, high = domain
    slopes = panels.derivative()

    def slope(x: np.ndarray) -> np.ndarray:
        found = slopes(x)
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
    slope: Flat, accuracy: float, segments: list[tuple[float, float]], domain: tuple[float, float]
) -> tuple[Flat, float]:
    """slope, free of rounding on every piece between kinks where f is a straight line, and its accuracy.

    Without this the noise of numerical differentiation would be taken for a shape of f', and a
    function like max(0, x) would have no exact table.
    """
    flat = []
    for left, right in segments:
        sample = slope(left + (right - left) * np.linspace(0.0, 1.0, 257))
        level = float(np.median(sample))
        if np.abs(sample - level).max() <= accuracy:
            flat.append((left, right, _short(level, accuracy)))
    if not flat:
        return slope, accuracy

    def cleaned(x: np.ndarray) -> np.ndarray:
        found = slope(x)
        for left, right, level in flat:
            # A piece ends one float before its kink, and has the kink itself.
            end = right if right == domain[1] else math.nextafter(right, math.inf)
            found = np.where((x >= left) & (x <= end), level, found)
        return found

    return cleaned, accuracy if len(flat) < len(segments) else 0.0


# --- what else a solver wants to know -----------------------------------------------------------


def _slope(value: Flat, slope: Flat, sign: float) -> float:
    """The limit of f' at sign * infinity, estimated from f' at 1e3, 1e4, 1e5 and 1e6.

    A sequence that settles, or whose extrapolations (Aitken's) agree, gives its limit, if f' stays near
    it between and beyond; one that keeps growing, or an f that overflows, an infinity; anything else nan.
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
    """x, or the decimal of six digits that it comes so near to."""
    return round(x, 6) + 0.0 if abs(round(x, 6) - x) <= within else x


def _is_even(slope: Flat, kinks: list[float], domain: tuple[float, float], accuracy: float) -> bool:
    """f'(-x) equals f'(x) on a mesh; at a kink, where f' has two limits, it need not."""
    if domain[0] != -domain[1] or kinks != sorted(-kink + 0.0 for kink in kinks):
        return False
    x = np.setdiff1d(_mesh(0.0, domain[1]), np.abs(kinks))
    right, left = slope(x), slope(-x)
    allowed = max(1e-12 * float(np.max(np.abs(right))), 2.0 * accuracy)
    return bool(np.max(np.abs(right - left)) <= allowed)
