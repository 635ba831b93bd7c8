"""The grid of a group of a uniform copy in NumPy, as docs/concepts/quantizer.md defines it."""

import numpy as np


def grid(x, bits):
    """Return (lower value, step, fraction of a step above the lower value) of each element of one group, in float64."""
    x = np.asarray(x, np.float32)
    minimum = _bfloat16(x.min(), up=False)
    extent = _bfloat16(np.float32(x.max() - minimum), up=True)
    step = float(extent) / (2**bits - 1)
    steps = (x.astype(np.float64) - float(minimum)) / step
    below = np.minimum(np.floor(steps), 2**bits - 2)
    return float(minimum) + below * step, step, steps - below


def _bfloat16(x, up):
    """Return the nearest bfloat16 that is not below x (up) or not above x, as float32. It is found by walking."""
    x = np.float32(x)
    if not np.isfinite(x):
        return x
    near = int(x.view(np.uint32)) & 0xFFFF0000
    candidates = [np.array(bits, np.uint32).view(np.float32)[()] for bits in (near, near + 0x10000)]
    good = [c for c in candidates if (c >= x if up else c <= x)]
    return min(good, key=lambda c: abs(float(c) - float(x)))
