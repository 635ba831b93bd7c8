"""The fixed-point code of a norm's normalized input x~, which contains the exact sign of the norm's result y = gamma x~ + beta.

The values of z = sign(gamma) x~, with sign(0) = +1, from -3 to 3 are divided into 2^K cells. A code of K bits is the
number of the nearest cell and stands for its middle. If y is 0 at a z0 = -beta / |gamma| with |z0| <= 3, z0 is an edge
(BLPA, Chakrabarti and Moseley, 2019, eq. 9 to 11); else one code is reserved for values beyond z0
(docs/decisions/0012).
"""

from __future__ import annotations

import torch

from fewbit.runtime import backends
from fewbit.runtime.format.encoding import packed_words
from fewbit.runtime.interop.tensor_kinds import is_abstract


def grid_of(weight, bias, bits: int, device) -> torch.Tensor:
    """Return the grid, which says which values the codes of each channel stand for, from the norm's gamma and beta or None.

    Returns:
        (7, channels) float32, contiguous; (7, 1) if weight and bias are None: (0) the lower edge of the first cell, in
        z; (1) the first code that means y > 0; (2) a lower bound of the values that are dequantized from codes with y >
        0; (3) an upper bound of the values from the other codes; (4) the sign of gamma; (5) |gamma|; (6) beta. The
        bounds are infinite unless z0 is finite and |z0| > 3.
    """
    gamma, beta = _vectors(weight, bias, device)
    if is_abstract(gamma):
        return gamma.new_empty((7, len(gamma)), dtype=torch.float32)
    return backends.on[gamma.device].grid_fixed(gamma, beta, bits)


def encode(x, y, grid, bits: int, inner: int, normalize=None) -> torch.Tensor:
    """See `encode_fixed`. A fake or meta tensor gets codes without data."""
    if is_abstract(x):
        return x.new_empty(packed_words(x.numel(), bits), dtype=torch.int32)
    return backends.on[x.device].encode_fixed(x, y, grid, bits, inner, normalize)


def decode(packed, grid, bits: int, inner: int, size, stride, dtype, slope=None, scale=None):
    """See `decode_fixed`."""
    out = packed.new_empty_strided(size, stride, dtype=dtype)
    if not is_abstract(packed):
        backends.on[packed.device].decode_fixed(packed, grid, bits, inner, out, slope, scale)
    return out


def mask(grad, packed, grid, bits: int, inner: int, slope: float) -> torch.Tensor:
    """See `mask_fixed`."""
    out = torch.empty_like(grad)
    if not is_abstract(grad):
        backends.on[grad.device].mask_fixed(grad, packed, grid, bits, inner, slope, out)
    return out


def _vectors(weight, bias, device):
    """Return gamma and beta as 1-D float32, or float64 to keep small weights from becoming 0."""
    if weight is None and bias is None:
        return torch.ones(1, device=device), torch.zeros(1, device=device)
    like = weight if bias is None else bias
    dtype = torch.promote_types(like.dtype, torch.float32)
    weight = torch.ones_like(like) if weight is None else weight
    bias = torch.zeros_like(like) if bias is None else bias
    return tuple(vector.detach().reshape(-1).to(dtype).contiguous() for vector in (weight, bias))
