"""Statistics of gradients that are rounded at random: errors, and biases, over independent draws."""

import math

import torch

from fewbit.runtime.quantizers.quantizer import Quantizer


def drawn(gradients, draws):
    """Return the draws of each gradient in float64, stacked; gradients: a function that returns a list of them."""
    found = [[grad.double() for grad in gradients()] for _ in range(draws)]
    return [torch.stack(grads) for grads in zip(*found, strict=True)]


def moments(samples):
    """Return (mean, standard error) of each entry over draws."""
    return samples.mean(0), samples.std(0) / math.sqrt(len(samples))


def pooled_z(samples, exact, least, independent=None, may_stay=None) -> float:
    """Return the sum of squared z over the entries that vary as a z score itself.

    Args:
        samples: draws of one gradient.
        exact: its expectation.
        least: the standard error below which differences are only float64's rounding.
        independent: the number of independent entries if not all are, because entries that share a sum are correlated. If
            all are, entries that do not vary must agree with `exact`.
        may_stay: whether entries that do not vary may differ from `exact`, by default if not all are independent. An
            entry of a product may not vary in these draws although it would in more of them.
    """
    may_stay = independent is not None if may_stay is None else may_stay
    mean, error = moments(samples)
    known = error > least
    off = (mean - exact.double()).abs()
    assert may_stay or (off[~known] <= 50 * least).all()
    z = (off[known] / error[known]).square()
    # The mean square of a t statistic is v / (v - 2); for the draws of these tests that is within 2 % of 1.
    count = min(independent or len(z), len(z))
    return float((z.mean() - 1) / math.sqrt(2 / count)) if len(z) else 0.0


def signed_z(samples, exact, least) -> list[float]:
    """Return z scores of the sum of the errors, and of their component along exact, over draws.

    Entries may be correlated, because the deviation is that of the sum. These scores show a small error that all entries
    share, which the noise of each entry hides.
    """
    off = (samples - exact.double()).flatten(1)
    if off.std(0).max() <= least:
        return [0.0, 0.0]
    along = [off.sum(1), off @ exact.double().flatten()]
    return [float(sums.mean() / sums.std() * math.sqrt(len(sums))) for sums in along]


def z_score(values):
    """Return the mean of independent numbers in standard errors; 0 if all are about 0."""
    if float(values.abs().max()) < 1e-6:
        return 0.0
    return float(values.mean() / values.std() * math.sqrt(len(values)))


def mean_square(samples, expected) -> float:
    """Return the mean squared z score of the entries that vary: about 1 if `expected` is right."""
    mean, error = moments(samples)
    return float((((mean - expected) / error)[error > 0] ** 2).mean())


def variance(x, bits, kind):
    """Return the variance that rounding adds to each element of x, whose elements are one group, float64.

    The variance of a uniform copy follows from its ranges. That of other copies is measured.
    """
    if kind != "uniform":
        return covariance(x, bits, kind).diagonal().view_as(x)
    _, ranges = Quantizer(bits, kind=kind).quantize(x[None]).tensors
    step = float(ranges[0, 1]) / (2**bits - 1)
    part = (x.double() - float(ranges[0, 0])) / step % 1
    return part * (1 - part) * step**2


def covariance(x, bits, kind, count=40000):
    """Return the covariance that rounding gives the n elements of x, which are one group, (n, n) float64.

    In a uniform copy, elements are rounded independently. In a rotated copy, they are not quite: the error is
    orthogonal to the group minus its mean. The covariance is measured from `count` independent roundings.
    """
    if kind == "uniform":
        return variance(x, bits, kind).flatten().diag()
    kept = Quantizer(bits, kind=kind).quantize(x.flatten().expand(count, -1).float().contiguous())
    return kept.spec.dequantize(kept.tensors).double().t().cov()
