"""The class `Function`, and helpers that make and register Functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from fewbit.errors import FunctionError


@dataclass(frozen=True, eq=False)
class Function:
    """A pointwise function f, its derivative f', and properties of f'. Two Functions are equal only if they are the same object.

    Attributes:
        name: The canonical name, or the name of a user's callable.
        parameters: All parameters by torch's names, defaults included.
        value: Computes f of a float or an array, float64 in its shape. NaN gives NaN, and an infinity the limit of f.
        derivative: Computes f' in the same way. At a kink the result is the value of torch's backward pass.
        kinks: The points at which f' jumps or is not smooth, ascending.
        slopes: The limits of f' at minus and plus infinity: infinite if f' grows without bound, nan if unknown.
        domain: The interval (low, high) on which a table approximates f' by default.
        reference: The definition of f: a torch or transformers class, and the paper.
        even_derivative: Whether f'(-x) equals f'(x).
        accuracy: The estimated largest error of `derivative` on the domain; 0 for a formula.
        panels: For a user's callable, the ascending ends of the polynomials that approximate f or f', else empty.
    """

    name: str
    parameters: Mapping[str, float]
    value: Callable[[np.ndarray], np.ndarray]
    derivative: Callable[[np.ndarray], np.ndarray]
    kinks: tuple[float, ...]
    slopes: tuple[float, float]
    domain: tuple[float, float]
    reference: str
    even_derivative: bool
    accuracy: float = 0.0
    panels: tuple[float, ...] = ()


BUILDERS: dict[str, Callable[..., Function]] = {}
"""{name of a registered function: the builder that makes a Function from parameters}."""
MODULES: dict[str, str] = {}
"""{name of an activation's module class in `fewbit` and `fewbit.nn`: name of the function}."""


def named(module: str | None) -> Callable:
    """Return a decorator that registers a builder, which makes a `Function` from parameters, under its Python name.

    `module` is the name of the activation's class in `fewbit.nn` and, if there is one, torch.nn, or None.
    """

    def register(builder: Callable[..., Function]) -> Callable[..., Function]:
        BUILDERS[builder.__name__] = builder
        if module is not None:
            MODULES[module] = builder.__name__
        return builder

    return register


def require(condition: bool, name: str, expected: str, **got: float) -> None:
    """Raise FunctionError, with what function `name` expected and got, if the condition is false."""
    if not condition:
        came = ", ".join(f"{key}={number!r}" for key, number in got.items())
        raise FunctionError(f"{name}: expected {expected}, got {came}")


def _elementwise(f: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """Extend f, which takes float64 arrays without NaN, to numbers and NaN."""

    def call(x: np.ndarray) -> np.ndarray:
        x = np.asarray(x, dtype=np.float64)
        missing = np.isnan(x)
        with np.errstate(over="ignore", under="ignore"):
            y = f(np.where(missing, 0.0, x))
        return np.where(missing, np.nan, y)[()]

    return call


def make_function(
    value: Callable[[np.ndarray], np.ndarray],
    derivative: Callable[[np.ndarray], np.ndarray],
    *,
    slopes: tuple[float, float],
    reference: str,
    kinks: tuple[float, ...] = (),
    domain: tuple[float, float] | None = None,
    even: bool = False,
) -> Function:
    """Make a `Function` from formulas; `registry.get` fills in its name and parameters.

    Args:
        value: The formula of f for float64 arrays without NaN, but with infinities. It must neither divide by zero nor form
            inf - inf.
        derivative: The formula of f', under the same conditions.
        slopes: The limits of f' at minus and plus infinity.
        reference: The definition of f.
        kinks: The points at which f' is not smooth.
        domain: The interval on which a table approximates f' by default; None for `domain_around(*kinks)`.
        even: Whether f' is even.
    """
    return Function(
        name="",
        parameters={},
        value=_elementwise(value),
        derivative=_elementwise(derivative),
        kinks=tuple(sorted({kink + 0.0 for kink in kinks})),  # adding 0.0 turns -0.0 into 0.0
        slopes=slopes,
        domain=domain or domain_around(*kinks),
        reference=reference,
        even_derivative=even,
    )


def domain_around(*points: float, reach: float = 10.0) -> tuple[float, float]:
    """Return the smallest symmetric domain with [-10, 10], [-reach, reach] and 1.2 times each of `points`."""
    half = max(10.0, reach, *(1.2 * abs(point) for point in points))
    return (-half, half)
