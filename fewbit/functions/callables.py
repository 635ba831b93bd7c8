"""Make a `Function` from a user's activation f, written in NumPy, in torch, or for single floats.

The derivative is the user's or autograd's, compared with f at about 130,000 points (1e-7 of max |f'|) and then treated as exact, or else
that of a piecewise polynomial, with an estimated error of at most 1e-10 of max |f'| (docs/concepts/solver.md).
"""

import importlib
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from fewbit import functions
from fewbit.errors import FunctionError
from fewbit.functions.adapters import Flat, adapted, any_shape
from fewbit.functions.function import Function
from fewbit.functions.kinks import find_bends, jumps, segments, wide_mesh
from fewbit.functions.numerical import (
    ACCURACY,
    is_even,
    limit_of_slope,
    numerical_derivative,
    with_flat_pieces,
)
from fewbit.functions.panels import RESOLUTION, Panels, Unresolved
from fewbit.printable import one_line

_DOMAIN = (-10.0, 10.0)
_EPS = float(np.finfo(np.float64).eps)
_INTEGRAL_TOLERANCE = 1e-7  # times max |f'| and the length of the interval
_MAX_KINKS = 64
_NARROWEST_DOMAIN = 1e-10  # relative to the ends


def resolve(
    function: object,
    parameters: dict | None = None,
    *,
    derivative: Callable | None = None,
    kinks: Sequence[float] | None = None,
    domain: tuple[float, float] | None = None,
) -> Function:
    """Return the `Function` for anything that `fewbit.solve` accepts as a function, with its arguments of the same names.

    Raises:
        FunctionError: The function or an argument for it cannot be used.
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
    """Check an activation f on the domain, and return its `Function`. A torch module is copied in float64 and evaluation mode.

    Raises:
        FunctionError: f is not pointwise, not finite or not continuous on the domain, or its derivative cannot be
            determined with an error of at most 1e-10 of max |f'|.
    """
    if not callable(f):
        raise FunctionError(f"expected a callable, got {type(f).__name__}")
    if derivative is not None and not callable(derivative):
        raise FunctionError(f"derivative: expected a callable, got {type(derivative).__name__}")
    name = name or qualified_name(f)
    low, high = domain = _checked_domain(domain)
    given = None if kinks is None else _checked_kinks(kinks)

    value, slope = adapted(f, name, domain)
    if derivative is not None:
        slope, _ = adapted(derivative, f"the derivative of {name}", domain)
    mesh = wide_mesh(low, high)
    _check_finite(name, value, mesh)
    _check_pointwise(name, value, mesh)
    _check_continuous(name, value, domain, given or [])

    kinks, panels = _pieces(name, value, slope, given, domain)
    accuracy = 0.0
    if slope is None:
        slope = numerical_derivative(value, panels, domain)
        slope, accuracy = with_flat_pieces(value, slope, panels, segments(domain, kinks))
    else:
        _check_finite(f"the derivative of {name}", slope, mesh)
        remedy = "choose another domain (--domain), or pass kinks= or derivative= to fewbit.solve"
        if derivative is not None:
            remedy = "check derivative=" if given is None else "check derivative= and kinks="
        _check_integral(name, value, panels, remedy)
    return Function(
        name=name,
        parameters={},
        value=any_shape(value),
        derivative=any_shape(slope),
        kinks=tuple(kinks),
        slopes=(limit_of_slope(value, slope, -1.0), limit_of_slope(value, slope, 1.0)),
        domain=domain,
        reference=f"the callable {name}",
        even_derivative=is_even(slope, kinks, domain, accuracy),
        accuracy=accuracy,
        panels=panels.edges,
    )


# --- names --------------------------------------------------------------------------------------


def import_callable(path: str) -> Callable:
    """Import and return the callable at "package.module:function". The current directory is added to sys.path, as with python -m.

    Raises:
        FunctionError: The path has another form, the import fails, or the object is not callable.
    """
    module_name, colon, attribute = path.partition(":")
    if not (colon and module_name and attribute):
        raise FunctionError(f"expected 'package.module:function', got {path!r}")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything while it is imported
        raise FunctionError(f"cannot import {module_name!r}: {one_line(error)}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise FunctionError(f"{module_name!r} has no attribute {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise FunctionError(f"expected {path!r} to be callable, got {type(found).__name__}")
    return found


def misfit_of(f: Callable, arguments: int) -> str:
    """Explain why f cannot be called with so many positional arguments; "" if it can, or has no signature."""
    try:
        inspect.signature(f).bind(*[None] * arguments)
    except TypeError as error:
        return str(error)
    except ValueError:
        pass
    return ""


def qualified_name(f: object) -> str:
    """Return the path with which `import_callable` finds f, else its bare name, else "callable"."""
    bare = getattr(f, "__name__", None)
    module_name = getattr(f, "__module__", None)
    # In another process, __main__ is another module.
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
    """Raise FunctionError if a result depends on other elements, or changes from call to call."""
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
    found = [x for segment in segments(domain, kinks) for x in jumps(f, *segment)]
    if found:
        x = min(found)
        raise FunctionError(
            f"{name} jumps at x = {x!r}: expected a continuous function; choose a domain (--domain)"
            " without that point, or pass it in kinks= to fewbit.solve; Pointwise takes the table as table="
        )


def _pieces(
    name: str,
    value: Flat,
    slope: Flat | None,
    given: list[float] | None,
    domain: tuple[float, float],
) -> tuple[list[float], Panels]:
    """Return (kinks, polynomials between them that approximate f', or f if `slope` is None). `given` kinks are not searched for."""
    known = given or []
    if slope is not None:
        also = [x for piece in segments(domain, known) for x in jumps(slope, *piece)]
        _check_given(name, given, also, ", or leave kinks= out")
        known = sorted([*known, *also])
        _check_finite(f"the derivative of {name}", slope, np.array([*known, *domain]))
    try:
        found, panels = find_bends(
            value if slope is None else slope, known, domain, ACCURACY, order=int(slope is None)
        )
    except Unresolved as reason:
        if slope is not None:
            raise FunctionError(
                f"{name}: its derivative varies too fast, or is rounded too much, near"
                f" x = {reason.place!r}: expected a smooth float64 function between kinks, or a smaller domain"
            ) from None
        raise FunctionError(
            f"{name}: its numerical derivative is uncertain by more than {reason.allowed:.1e} near"
            f" x = {reason.place!r}; choose another domain (--domain),"
            " or pass derivative= or kinks= to fewbit.solve"
        ) from None
    if slope is None:
        _check_given(
            name, given, [x for x, first in found.items() if first == 1], " or give derivative="
        )
    kinks = sorted([*known, *found])
    if len(found) > _MAX_KINKS:
        raise FunctionError(
            f"{name}: f' has more than {_MAX_KINKS} kinks on the domain; choose a smaller one"
            " (--domain), or pass kinks= to fewbit.solve"
        )
    return kinks, panels


def _check_given(name: str, given: list[float] | None, also: list[float], choice: str) -> None:
    if given is not None and also:
        raise FunctionError(f"{name}: f' also jumps at x = {min(also)!r}; add it to kinks={choice}")


def _check_integral(name: str, f: Flat, slopes: Panels, remedy: str) -> None:
    """Raise FunctionError, ending in `remedy`, if an integral of f' between neighbors of a mesh is not f's change."""
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
        raise FunctionError(
            f"{name}: its derivative does not integrate back to it on"
            f" [{float(left[worst])!r}, {float(right[worst])!r}] (off by {error[worst]:.1e}); {remedy}"
        )
