"""The weight w(x), the density by which the squared error of a table counts at x (Few-bit Backward, eq. 3).

docs/reference/table_schema.md describes the JSON document of each kind.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np

from fewbit.errors import FewbitError, SolveError, WeightError
from fewbit.functions.erfcx import GAUSS_END, INV_SQRT_2PI, normal_tail
from fewbit.functions.kinks import halfway
from fewbit.printable import one_line, shorten
from fewbit.schema.documents import open_regular
from fewbit.solver.request import check_extent
from fewbit.table import MOST_BINS

# A sample is cut into at most 512 equally likely bins of at least 32 values.
_MOST_BINS = 512
_SAMPLES_PER_BIN = 32
# The width of the bin of an atom, relative to the largest absolute value of a sample.
_ATOM_WIDTH = 1e-9
# A density changes steeply between points if it changes by more than 1/32 of its largest value.
_STEEP = 32
# A density is sampled at 4,097 points, and then at 32,769 points to find peaks that the first ones miss.
_COARSE, _FINE = 2**12, 2**15
_MOST_POINTS = 2**24
# The end of the support of a density is a node of the solver if the density rises beside it to this share of its
# largest value.
_NEGLIGIBLE = 1e-12
# The weight "scales" has so many points for each factor e of |x|, and its integral is a power series below this argument.
_POINTS_PER_E, _SERIES_END = 32, 0.1
# The standard deviations that the solver can resolve: absolute limits, and a limit relative to the mean.
_LEAST_STD, _MOST_STD, _LEAST_SHARE = 1e-30, 1e30, 1e-12
# A weight is scaled if its integral is beyond 2**20 or below 2**-20.
_ORDINARY = 20
_LEAST_NORMAL = float(np.finfo(np.float64).tiny)
# Largest size in bytes of a compressed file of samples after decompression.
_MOST_BYTES = 2**32


class Weight:
    """The base class of weights.

    Attributes:
        domain: The interval outside which w is 0, or None if no such interval is known.
    """

    domain = None

    def density(self, x):
        """Return w(x) >= 0 for float64 x of any shape."""
        raise NotImplementedError

    def edges(self, domain):
        """Return the points at which w jumps, ascending, perhaps also outside the domain."""
        return np.empty(0)

    def support(self, x):
        """Return whether w(x) > 0, in the shape of x."""
        return np.ones(np.shape(x), bool)

    def support_edges(self, domain):
        """Return the points at which w becomes or ceases to be 0, perhaps also outside the domain."""
        return self.edges(domain)

    def absence(self):
        """Return the end of the message for a domain on which w has no mass."""
        return ""

    def mesh(self, domain):
        """Return ascending points between which w changes little, or none."""
        return np.empty(0)

    def document(self):
        """Return the weight as a dict for JSON (docs/reference/table_schema.md)."""
        raise NotImplementedError


class Uniform(Weight):
    """The constant weight 1."""

    def density(self, x):
        return np.ones_like(x)

    def document(self):
        return {"kind": "uniform"}


class Normal(Weight):
    """The density of the normal distribution with a mean and a standard deviation."""

    def __init__(self, mean=0.0, std=1.0):
        if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
            raise WeightError(
                f"weight normal:MEAN,STD: expected finite numbers with STD > 0, got {mean:g},{std:g}"
            )
        if abs(mean) > _MOST_STD:
            raise WeightError(
                f"weight normal:MEAN,STD: expected MEAN within {_MOST_STD:g}, got {mean:g}"
            )
        least = max(_LEAST_STD, _LEAST_SHARE * abs(mean))
        if not least <= std <= _MOST_STD:
            raise WeightError(
                f"weight normal:MEAN,STD: expected STD from {least:g} to {_MOST_STD:g} for MEAN {mean:g}, got {std:g}"
            )
        self.mean, self.std = float(mean), float(std)

    def density(self, x):
        z = (x - self.mean) / self.std
        return np.exp(-0.5 * z * z) / (self.std * math.sqrt(2 * math.pi))

    def mesh(self, domain):
        return self.mean + self.std * np.linspace(-9, 9, 721)

    def absence(self):
        return f": the density of normal:{self.mean:g},{self.std:g} is too small for float64 there"

    def document(self):
        return {"kind": "normal", "mean": self.mean, "std": self.std}


class Scales(Weight):
    """A mixture of normal densities with mean 0, whose standard deviation s has a uniformly distributed logarithm.

    w(x) is the integral of N(x; 0, s) ds / s from s = `low` to `high`, divided by log(high / low). A WeightError says that
    these ends cannot be used.
    """

    def __init__(self, low=0.03, high=10.0):
        if not (math.isfinite(low) and math.isfinite(high) and 0 < low < high):
            raise WeightError(
                f"weight scales:LOW,HIGH: expected finite numbers with 0 < LOW < HIGH, got {low:g},{high:g}"
            )
        if not (_LEAST_STD <= low and high <= _MOST_STD):
            raise WeightError(
                f"weight scales:LOW,HIGH: expected numbers from {_LEAST_STD:g} to {_MOST_STD:g}, got {low:g},{high:g}"
            )
        self.low, self.high = float(low), float(high)

    def density(self, x):
        """Return (P(x / low) - P(x / high)) / (x log(high / low)), with P the normal distribution function."""
        x = np.abs(x)
        near = x < self.low
        result = np.empty(np.shape(x))
        # P(u) - P(0) is precise for small u, and 1 - P(u) for large u.
        for part, value in ((near, self._near), (~near, self._far)):
            result[part] = value(x[part])
        return result / math.log(self.high / self.low)

    def _near(self, x):
        return _half(x / self.low) / self.low - _half(x / self.high) / self.high

    def _far(self, x):
        high, low = (normal_tail(-np.minimum(x / s, GAUSS_END)) for s in (self.high, self.low))
        return (high - low) / x

    def mesh(self, domain):
        steps = math.ceil(_POINTS_PER_E * math.log(9e3 * self.high / self.low))
        points = np.geomspace(1e-3 * self.low, 9 * self.high, steps)
        return np.concatenate([-points[::-1], points])

    def absence(self):
        return f": the density of scales:{self.low:g},{self.high:g} is too small for float64 there"

    def document(self):
        return {"kind": "scales", "low": self.low, "high": self.high}


def _split_atoms(values):
    distinct, counts = np.unique(values, return_counts=True)
    heavy = (counts > 1) & (counts * _bin_count(values.size) > values.size)
    if heavy.any() and counts[~heavy].sum() <= _SAMPLES_PER_BIN:
        heavy[:] = True  # the others are too few for a density
    rest = np.repeat(distinct[~heavy], counts[~heavy])
    return distinct[heavy], counts[heavy], rest


def _bin_count(samples):
    return int(np.clip(samples // _SAMPLES_PER_BIN, 4, _MOST_BINS))


def _quantile_edges(values):
    """Return the edges of bins with about equally many of the sorted values, fewer towards both ends."""
    if not values.size:
        return values
    low, high, bins = values[0], values[-1], _bin_count(values.size)
    # Towards both ends every bin has half as many samples as its neighbor, so that an outlier gets its own bin.
    tail = 0.5 ** np.arange(np.log2(bins), np.log2(values.size))
    shares = np.concatenate([np.linspace(0, 1, bins + 1), tail, 1 - tail])
    edges = np.quantile(values, np.sort(shares))
    # If many samples have nearly the same value, a bin could be infinitely narrow, so narrow bins are merged.
    core = np.quantile(values, [0.05, 0.95])
    narrow = 1e-4 * (core[1] - core[0] or high - low)
    kept = [low]
    for edge in edges[1:-1]:
        if edge - kept[-1] >= narrow and high - edge >= narrow:
            kept.append(edge)
    return np.array([*kept, high])


def _half(u):
    """Return (P(u) - 1/2) / u for u >= 0, where P is the normal distribution function."""
    square = u * u
    series, term = np.ones_like(u), np.ones_like(u)
    for n in range(1, 6):
        term = term * square / (-2 * n)
        series = series + term / (2 * n + 1)
    far = np.where(u < _SERIES_END, 1.0, u)
    return np.where(u < _SERIES_END, INV_SQRT_2PI * series, (0.5 - normal_tail(-far)) / far)


class Histogram(Weight):
    """A piecewise constant density whose integral is 1.

    Args:
        edges: (n+1,), the ends of the bins, ascending.
        density: (n,), the heights of the bins, not negative and not all 0. They are divided by their integral.

    Raises:
        WeightError: The edges or heights are not as described.
    """

    def __init__(self, edges, density):
        edges, density = _floats("histogram edges", edges), _floats("histogram heights", density)
        if edges.ndim != 1 or len(edges) < 2 or density.shape != (len(edges) - 1,):
            raise WeightError(
                f"histogram: expected n+1 edges and n heights, got shapes {edges.shape} and {density.shape}"
            )
        if len(density) > MOST_BINS:
            raise WeightError(
                f"histogram: expected at most {MOST_BINS} heights, got {len(density)}"
            )
        if not (np.isfinite(edges).all() and (np.diff(edges) > 0).all()):
            raise WeightError("histogram: expected finite, strictly ascending edges")
        if not (np.isfinite(density).all() and (density >= 0).all() and density.any()):
            raise WeightError("histogram: expected finite heights >= 0 that are not all 0")
        used = np.flatnonzero(density)
        self.domain = (float(edges[used[0]]), float(edges[used[-1] + 1]))
        _check_range("histogram edges", edges[0], edges[-1])
        _check_range("histogram edges", *self.domain)
        self._edges = edges
        self._density = _normalized(density, np.diff(edges))

    @classmethod
    def from_samples(cls, samples):
        """Make a histogram of finite samples, with up to 512 bins of about equally many.

        An outlier gets its own bin, and a value that more samples have than a usual bin contains an almost infinitely narrow one.

        Raises:
            WeightError: A sample is not finite, or all are equal.
        """
        values = _floats("samples", samples).ravel()
        if values.size < 2:
            raise WeightError(f"samples: expected at least 2 values, got {values.size}")
        if not np.isfinite(values).all():
            bad = values[~np.isfinite(values)][0]
            raise WeightError(f"samples: expected finite values, got {bad}")
        values = np.sort(values)
        low, high = values[0], values[-1]
        if low == high:
            raise WeightError(f"samples: expected more than one distinct value, got only {low:g}")
        _check_range("samples", low, high)
        atoms, their_counts, rest = _split_atoms(values)
        width = _ATOM_WIDTH * max(-low, high)
        ends = np.where(atoms == low, low + width, atoms)
        begins = np.where(atoms == low, low, atoms - width)  # the domain begins at the least sample
        edges = np.unique(np.concatenate([_quantile_edges(rest), begins, ends]))
        counts = np.histogram(rest, bins=edges)[0].astype(np.float64)
        np.add.at(counts, np.searchsorted(edges, ends) - 1, their_counts)
        return cls(edges, _heights(counts, edges))

    def density(self, x):
        bin_of = np.searchsorted(self._edges, x, side="right") - 1
        inside = (bin_of >= 0) & (bin_of < len(self._density))
        return np.where(inside, self._density[np.clip(bin_of, 0, len(self._density) - 1)], 0.0)

    def edges(self, domain):
        return self._edges

    def support(self, x):
        return self.density(x) > 0

    def absence(self):
        return f": all mass of the histogram is in [{self.domain[0]:g}, {self.domain[1]:g}]"

    def mesh(self, domain):
        return self._edges

    def document(self):
        return {
            "kind": "histogram",
            "edges": self._edges.tolist(),
            "density": self._density.tolist(),
        }


class Density(Weight):
    """A user's density: a callable for float64 arrays, finite and not negative on the domain."""

    def __init__(self, function, name):
        self._function, self._name = function, name
        self._meshes = {}

    def density(self, x):
        """Return the density at x. Raise WeightError if a value is negative or not finite."""
        try:
            with np.errstate(all="ignore"):  # the error below reports values that are not finite
                result = self._function(x)
        except FewbitError:
            raise
        except Exception as error:
            raise WeightError(
                f"density {self._name}: expected a function of float64 arrays, but it raised {one_line(error)}"
            ) from error
        values = _floats(f"density {self._name}", result)
        if values.shape != x.shape:
            raise WeightError(
                f"density {self._name}: expected an array of shape {x.shape}, got {values.shape}"
            )
        bad = ~(np.isfinite(values) & (values >= 0))
        if bad.any():
            raise WeightError(
                f"density {self._name}: expected finite values >= 0, got {values[bad][0]:g} at x = {x[bad][0]:g}"
            )
        return values

    def edges(self, domain):
        """Return the points at which the density jumps by more than 1/32 of its largest value, or becomes 0."""
        mesh = self.mesh(domain)
        value = self.density(mesh)
        steep = np.abs(np.diff(value)) > value.max() / _STEEP
        steps = mesh[1:][steep & (np.nextafter(mesh[:-1], np.inf) >= mesh[1:])]
        return np.union1d(steps, self._ends(mesh, value, _NEGLIGIBLE * value.max()))

    def support(self, x):
        return self.density(x) > 0

    def support_edges(self, domain):
        mesh = self.mesh(domain)
        return self._ends(mesh, self.density(mesh), 0.0)

    def _ends(self, mesh, value, least):
        zero = value == 0
        ends = np.flatnonzero((zero[1:] != zero[:-1]) & (np.maximum(value[1:], value[:-1]) > least))
        left, right, on_left = mesh[ends], mesh[ends + 1], zero[ends]
        while len(left) and (np.nextafter(left, np.inf) < right).any():
            middle = halfway(left, right)
            moves = (self.density(middle) == 0) == on_left
            left, right = np.where(moves, middle, left), np.where(moves, right, middle)
        return right

    def mesh(self, domain):
        """Return points between which the density jumps or changes by at most 1/32 of its largest value."""
        domain = tuple(domain)
        if domain not in self._meshes:
            mesh = self._refined(np.linspace(*domain, _COARSE + 1))
            fine = np.linspace(*domain, _FINE + 1)
            value, known = self.density(fine), self.density(mesh)
            limit = max(value.max(), known.max()) / (_STEEP / 2)
            missed = np.abs(value - np.interp(fine, mesh, known)) > limit
            if missed.any():
                beside = missed | np.roll(missed, 1) | np.roll(missed, -1)
                mesh = self._refined(np.union1d(mesh, fine[beside]))
            self._meshes[domain] = mesh
        return self._meshes[domain]

    def _refined(self, mesh):
        """Halve the intervals of a mesh between whose ends the density changes much."""
        value = self.density(mesh)
        for _ in range(64):
            middle = 0.5 * (mesh[:-1] + mesh[1:])
            steep = np.abs(np.diff(value)) > value.max() / _STEEP
            steep &= (mesh[:-1] < middle) & (middle < mesh[1:])
            if not steep.any():
                break
            if len(mesh) + steep.sum() > _MOST_POINTS:
                raise WeightError(
                    f"density {self._name}: expected a function that jumps at few points, got one that jumps at more than "
                    f"{int(steep.sum()):,}; does it return random numbers?"
                )
            at = np.flatnonzero(steep) + 1
            mesh = np.insert(mesh, at, middle[steep])
            value = np.insert(value, at, self.density(middle[steep]))
        return mesh

    def absence(self):
        return (
            f": density {self._name} is 0 at nearly all of {_FINE + 1} evenly spaced points; if it has a narrow peak, "
            "choose a smaller domain around the peak"
        )

    def document(self):
        return {"kind": "callable", "name": self._name}


class ScaledWeight:
    """A weight on a domain, divided by 2**exponent, a power of 4, if its integral would overflow or underflow otherwise.

    The division and its square root are exact, unless parts of w are about 2**-1000 times its integral; these count as 0, except for
    objective "minimax".

    Attributes:
        exponent: w is `density` times 2**exponent.
    """

    def __init__(self, weight, domain):
        self.weight = weight
        self.exponent = _exponent(weight, domain)

    def density(self, x):
        """Return w(x) / 2**exponent for float64 x of any shape."""
        value = self.weight.density(x)
        if self.exponent == 0:
            return value
        with np.errstate(over="ignore"):
            value = np.ldexp(value, -self.exponent)
        if np.isinf(value).any():
            raise WeightError(
                "weight: expected a density without peaks that are far narrower than the domain"
            )
        return value

    def restore(self, error, bound):
        """Return an error and a lower bound for w itself, from those for `density`.

        Raises:
            SolveError: float64 cannot represent the error accurately.
        """
        if self.exponent == 0:
            return error, bound
        with np.errstate(over="ignore"):
            true_error, true_bound = (float(np.ldexp(x, self.exponent)) for x in (error, bound))
        if error > 0 and not _LEAST_NORMAL <= true_error < math.inf:
            power = math.floor(math.log10(error) + self.exponent * math.log10(2))
            raise SolveError(
                f"weight: expected an error that float64 can represent, got about 1e{power:+d}; "
                "multiply the density by a constant"
            )
        if np.ldexp(true_bound, -self.exponent) > bound:  # rounded up
            true_bound = math.nextafter(true_bound, 0.0)
        return true_error, true_bound


def _exponent(weight, domain):
    low, high = domain
    points = [np.linspace(low, high, _COARSE + 1), weight.mesh(domain), weight.edges(domain)]
    points = np.unique(np.concatenate(points))
    points = points[(points >= low) & (points <= high)]
    value = weight.density(0.5 * (points[:-1] + points[1:]))
    highest = math.frexp(value.max())[1]
    mass = float(np.sum(np.ldexp(value, -highest) * np.diff(points)))
    exponent = highest + math.frexp(mass)[1]
    return 0 if mass == 0 or abs(exponent) <= _ORDINARY else exponent + exponent % 2


def make_weight(spec):
    """Make a weight from a specification.

    Args:
        spec: "uniform" (or None), "normal", "normal:MEAN,STD", "scales" or "scales:LOW,HIGH"; an array of samples; (edges, density) of a
            histogram; a callable density; the path of a .npy file with samples, or of a .npz file with one array of samples or with
            the arrays `edges` and `counts` or `density`; a dict that `Weight.document` returned, except of kind "callable"; a `Weight`.

    Raises:
        WeightError: The specification or the file cannot be used.
    """
    if spec is None:
        return Uniform()
    if hasattr(spec, "density") and hasattr(spec, "document"):
        return spec
    if isinstance(spec, dict):
        return _from_document(spec)
    if callable(spec):
        from fewbit.functions.callables import qualified_name

        return Density(spec, qualified_name(spec))
    if isinstance(spec, str | os.PathLike):
        return _from_text(os.fspath(spec))
    if isinstance(spec, tuple) and len(spec) == 2:
        return Histogram(*spec)
    return Histogram.from_samples(spec)


def _from_text(text):
    kind, _, rest = text.partition(":")
    if text == "uniform":
        return Uniform()
    if kind in _WITH_NUMBERS and not os.path.exists(text):
        weight, form = _WITH_NUMBERS[kind]
        if text == kind:
            return weight()
        try:
            first, second = (float(part) for part in rest.split(","))
        except ValueError:
            raise WeightError(f"weight: expected {form}, got {text!r}") from None
        return weight(first, second)
    if Path(text).suffix in {".npy", ".npz"}:
        return _from_file(Path(text))
    raise WeightError(
        "weight: expected uniform, normal, normal:MEAN,STD, scales, scales:LOW,HIGH or a .npy or .npz file, "
        f"got {text!r}"
    )


_WITH_NUMBERS = {"normal": (Normal, "normal:MEAN,STD"), "scales": (Scales, "scales:LOW,HIGH")}


def _from_file(path):
    try:
        with open_regular(path) as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return Histogram.from_samples(loaded)
            size = sum(entry.file_size for entry in loaded.zip.infolist())
            if size > _MOST_BYTES:
                raise WeightError(f"expected at most {_MOST_BYTES >> 30} GiB, got {size} bytes")
            return _from_arrays({name: loaded[name] for name in loaded.files})
    except FewbitError as error:
        raise WeightError(f"{path}: {error}") from None
    except MemoryError:
        raise WeightError(f"{path}: cannot be read as a weight: not enough memory") from None
    except Exception as error:  # NumPy raises exceptions of many types for damaged files
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        elif "pickle" in reason:  # NumPy's message for a file in another format
            reason = "expected NumPy's format, numbers only"
        raise WeightError(f"{path}: cannot be read as a weight: {reason}") from None


def _from_arrays(arrays):
    if "edges" in arrays and "counts" in arrays:
        edges, counts = _floats("edges", arrays["edges"]), _floats("counts", arrays["counts"])
        if counts.shape != (len(edges) - 1,):
            raise WeightError(f"expected {len(edges) - 1} counts, got shape {counts.shape}")
        return Histogram(edges, _heights(counts, edges))
    if "edges" in arrays and "density" in arrays:
        return Histogram(arrays["edges"], arrays["density"])
    if len(arrays) == 1:
        return Histogram.from_samples(*arrays.values())
    names = ", ".join(arrays) or "none"
    raise WeightError(
        f"expected arrays 'edges' with 'counts' or 'density', or one array of samples, got {names}"
    )


def _from_document(document):
    kind = document.get("kind")
    try:
        if kind == "uniform":
            return Uniform()
        if kind == "normal":
            return Normal(float(document.get("mean", 0.0)), float(document.get("std", 1.0)))
        if kind == "scales":
            return Scales(float(document["low"]), float(document["high"]))
        if kind == "histogram":
            return Histogram(document["edges"], document["density"])
        if kind == "callable":
            # The document may be untrusted, so a name in the document is never imported.
            raise WeightError(
                f"weight: expected the callable {document['name']} itself, got a document that names it"
            )
    except KeyError as missing:
        raise WeightError(f"weight {kind}: expected a field {missing}, got none") from None
    except FewbitError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise WeightError(f"weight {kind}: {error}") from None
    raise WeightError(
        f"weight: expected kind uniform, normal, scales, histogram or callable, got {kind!r}"
    )


def _check_range(what, low, high):
    problem = check_extent(low, high)
    if problem:
        raise WeightError(f"{what}: {problem}")


def _unit(values):
    """Divide values by a power of two such that the largest is about 1."""
    largest = np.max(values, initial=0.0)
    return np.ldexp(values, -math.frexp(largest)[1]) if 0 < largest < math.inf else values


def _heights(counts, edges):
    with np.errstate(all="ignore"):  # `Histogram` reports edges and counts that are wrong
        return _unit(counts) / np.diff(edges)


def _normalized(density, widths):
    """Divide heights by their integral, unless that is 1, so that documents round-trip."""
    scaled = _unit(density)
    total = math.fsum(scaled * widths)
    with np.errstate(over="ignore"):
        integral = total * np.max(density) / np.max(scaled)
        if abs(integral - 1) < 1e-12:
            return density
        normalized = scaled / total
    bad = np.flatnonzero((density > 0) & ~((normalized > 0) & np.isfinite(normalized)))
    if bad.size:
        raise WeightError(
            f"histogram: expected heights that float64 can divide by their integral, got {density[bad[0]]:g} "
            f"with a largest height of {density.max():g}"
        )
    return normalized


def _floats(what, values):
    try:
        if hasattr(values, "detach"):  # a torch tensor, on any device, of any dtype
            values = values.detach().cpu().resolve_conj().resolve_neg()
            is_real = values.is_floating_point()
            array = (values.double() if is_real else values).numpy()
        else:
            array = np.asarray(values)
        # NumPy would drop imaginary parts, and convert True to 1.
        if array.dtype.kind in "cb":
            raise TypeError
        return np.asarray(array, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise WeightError(f"{what}: expected numbers, got {shorten(values)}") from None
