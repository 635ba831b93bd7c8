"""Groups of numbers for tests of the mean error of copies."""

import math

import numpy as np
import torch


def one_group(data, n=256):
    """Return the n elements of a group, float32."""
    rng = np.random.default_rng(n)
    x = rng.normal(size=n)
    if data == "relu":
        x = np.maximum(x, 0)
    elif data == "outlier":
        x[5] *= 30
    elif data == "one-hot":
        x = np.eye(n)[3]
    elif data == "two-sparse":
        x = np.eye(n)[3] - np.eye(n)[n - 2]
    elif data == "half of the energy in one":
        x[7] = math.sqrt((x * x).sum() - x[7] ** 2)
    elif data == "constant":
        x = np.full(n, 0.7)
    elif data.startswith("offset"):
        x += float(data.split()[1])
    return torch.from_numpy(x).float()


GROUPS = (
    "normal",
    "relu",
    "outlier",
    "one-hot",
    "two-sparse",
    "half of the energy in one",
    "constant",
    "offset 10",
    "offset 1000",
    "offset 1002",  # 2 from the nearest bfloat16
)
