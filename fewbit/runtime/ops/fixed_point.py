"""The K-bit fixed-point code of a norm's normalized input x~, from which the exact sign of the norm's result y can be read.

Let y = gamma x~ + beta, with x~ of mean 0 and standard deviation 1. BLPA (Chakrabarti and Moseley, 2019, eq. 9 and 10)
has L = 2^K levels for y between beta - 3 |gamma| and beta + 3 |gamma|. Let z = sign(gamma) x~, with sign(0) = +1, so
that y = |gamma| z + beta. In terms of z, each level is the middle of a cell (edge, edge + D] with D = 6 / L. The result
y is 0 at z0 = -beta / |gamma|, which is a multiple of D away from the first edge. The code differs from the paper's in
four points (docs/decisions/0012-sign-of-a-clipped-pre-activation.md):

- Cells are open below, so that y = 0 is on the side that is not positive, as in ReLU's derivative.
- If z0 is outside of the levels' range, the first code that means y > 0 is 1 or L - 1, and a value on the wrong side of
  z0 gets the nearest code on its own side. Otherwise clipping would lose the sign.
- If gamma is 0, or so small that z0 is not finite, the code is that of z = x~ alone: all values have beta's sign.
- If gamma < 0, the cells are those of -gamma.

The side of z0 is decided by the y that the forward pass computed. However y was rounded, its code is therefore at least
the first code that means y > 0 exactly if y > 0. If |z0| <= 3, a value in the range is dequantized with an error of at
most D / 2 in z: |y - y^| <= 3 |gamma| / 2^K (eq. 11).
"""

from __future__ import annotations

import torch

from fewbit.runtime import backends
from fewbit.runtime.format.encoding import packed_words
from fewbit.runtime.interop.tensor_kinds import is_abstract


def grid_of(weight, bias, bits: int, device) -> torch.Tensor:
    """Return the grid, which says what codes mean in each channel.

    Args:
        weight: the norm's gamma, of any shape, or None.
        bias: the norm's beta, of any shape, or None.
        bits: the bits of a code.
        device: the device of the grid, if there is neither weight nor bias.

    Returns:
        (7, channels) float32, contiguous; (7, 1) without weight and bias. With z = sign(gamma) x~, the rows are: the
        first edge of a cell in z; the first code that means y > 0; the smallest z that a code with y > 0 is dequantized
        to; the largest z that any other code is dequantized to; the sign of gamma; |gamma|; beta.
    """
    gamma, beta = _vectors(weight, bias, device)
    if is_abstract(gamma):
        return gamma.new_empty((7, len(gamma)), dtype=torch.float32)
    return backends.of(gamma).grid_fixed(gamma, beta, bits)


def encode(x, y, grid, bits: int, inner: int, normalize=None) -> torch.Tensor:
    """Return the packed codes of x, see `reference_fixed_point.encode_fixed`."""
    if is_abstract(x):
        return x.new_empty(packed_words(x.numel(), bits), dtype=torch.int32)
    return backends.of(x).encode_fixed(x, y, grid, bits, inner, normalize)


def decode(packed, grid, bits: int, inner: int, size, stride, dtype, slope=None, scale=None):
    """Return dequantized values of the given size, stride and dtype, see `reference_fixed_point.decode_fixed`."""
    out = packed.new_empty_strided(size, stride, dtype=dtype)
    if not is_abstract(packed):
        backends.of(packed).decode_fixed(packed, grid, bits, inner, out, slope, scale)
    return out


def mask(grad, packed, grid, bits: int, inner: int, slope: float) -> torch.Tensor:
    """Return the input gradient of ReLU (slope 0) or LeakyReLU for a dense grad, see `reference_fixed_point.mask_fixed`."""
    out = torch.empty_like(grad)
    if not is_abstract(grad):
        backends.of(grad).mask_fixed(grad, packed, grid, bits, inner, slope, out)
    return out


def _vectors(weight, bias, device):
    """Return gamma and beta, 1-D, in float32 or better, so that a small weight does not become 0."""
    if weight is None and bias is None:
        return torch.ones(1, device=device), torch.zeros(1, device=device)
    like = weight if bias is None else bias
    dtype = torch.promote_types(like.dtype, torch.float32)
    weight = torch.ones_like(like) if weight is None else weight
    bias = torch.zeros_like(like) if bias is None else bias
    return tuple(vector.detach().reshape(-1).to(dtype).contiguous() for vector in (weight, bias))
