"""Call a user's activation f, which may be written for arrays, tensors or floats, with flat float64 arrays."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import math
import numbers
import sys
import warnings
from collections.abc import Callable, Iterator

import numpy as np

from fewbit.errors import FunctionError
from fewbit.printable import one_line

Flat = Callable[[np.ndarray], np.ndarray]
"""A function of float64 arrays (n,) that returns float64 arrays (n,)."""


def adapted(f: Callable, name: str, domain: tuple[float, float]) -> tuple[Flat, Flat | None]:
    """Return f and its derivative by torch's autograd as functions of float64 arrays (n,).

    The derivative is None if f, called with 7 points of the domain, does not take tensors.
    """
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
            with quiet():
                return attempt(f, name, probe)
        except FunctionError:
            raise
        except Exception as error:  # noqa: BLE001, the next kind may work whatever f raises
            refusals.append(f"{kind} ({one_line(error)})")
    raise FunctionError(f"{name} accepts none of: {', '.join(refusals)}")


def _as_array(f: Callable, name: str, probe: np.ndarray) -> tuple[Flat, None]:
    def value(x: np.ndarray) -> np.ndarray:
        y = _called(f, name, x.copy())
        if not isinstance(y, (np.ndarray, np.generic, numbers.Number)):
            raise FunctionError(f"{name}: expected an array, got {type(y).__name__}")
        y = np.asarray(y)
        _check_output(name, x.shape, y.shape, y.dtype == np.float64, y.dtype)
        return y

    # If f returns something else, such as a tensor, `adapted` tries the next kind of argument.
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

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = _called(f, name, x.clone())  # f may change the clone in place
        if not isinstance(y, torch.Tensor):
            raise FunctionError(
                f"{name}: expected an array or a tensor as the result, got {type(y).__name__}"
            )
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
                raise FunctionError(
                    f"{name}: torch has no gradient for it; pass derivative= to fewbit.solve"
                )
            (slope,) = torch.autograd.grad(y.sum(), leaf)
        return slope.numpy()

    return value, gradient


def _is_torch_module(f: object) -> bool:
    torch = sys.modules.get("torch")  # no instance exists unless torch is imported
    return torch is not None and isinstance(f, torch.nn.Module)


def _called(f: Callable, name: str, x: object) -> object:
    try:
        with quiet():
            return f(x)
    except FunctionError:
        raise
    except Exception as error:
        raise FunctionError(f"{name} raised {one_line(error)}") from error


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
def quiet() -> Iterator[None]:
    """Suppress all warnings while the user's code runs."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def any_shape(f: Flat) -> Callable[[np.ndarray], np.ndarray]:
    """Extend f, which takes flat arrays (n,), to numbers and arrays of any shape."""

    def call(x: np.ndarray) -> np.ndarray:
        x = np.asarray(x, dtype=np.float64)
        if not x.size:
            return np.empty(x.shape)
        with quiet():
            return f(x.ravel()).reshape(x.shape)[()]

    return call
