"""The fixed-point code of a norm's normalized input x~, which contains the exact sign of the norm's result y.

Let y = gamma x~ + beta, with x~ of mean 0 and standard deviation 1. Let z = sign(gamma) x~, with sign(0) = +1, so that
y = |gamma| z + beta. The values of z from -3 to 3 are divided into L = 2^K cells (edge, edge + D] of width D = 6 / L. A
code has K bits, and is the number of the cell that contains z. It stands for the middle of the cell. Values of z below
all cells get the first code, and values above all cells the last. The result y is 0 at z = z0 = -beta / |gamma|. If
|z0| <= 3, all cells are shifted, by at most D, so that z0 is the edge between two cells. No cell then contains values
of y with both signs.

This is the method of the paper BLPA (Chakrabarti and Moseley, 2019, eq. 9 and 10), with four changes
(docs/decisions/0012-sign-of-a-clipped-pre-activation.md):

- Cells contain their upper edge. In the paper they contain their lower edge, so that y = 0 counts as positive. Here it
  counts as not positive, as in ReLU's derivative.
- If |z0| > 3, one code is reserved for the values of z beyond z0: code 0 if z0 < -3, code L - 1 if z0 > 3. All other
  values of z get other codes. In the paper, values beyond z0 are clipped to the nearest cell, which is on the other
  side of z0, and so lose the sign of y.
- If gamma is 0, or so small that z0 is not finite, all values of y have the sign of beta, and cells are not shifted.
- The paper's formula needs gamma > 0. Here z contains the sign of gamma, so gamma may be negative.

Whether an element is above z0 is decided by the sign of the y that the forward pass computed, however y was rounded. An
element therefore has a code that means y > 0 if and only if its y is positive. If |z0| <= 3 and a cell contains an
element, the element is dequantized with an error of at most D / 2 in z. The error of y is then at most 3 |gamma| / 2^K
(eq. 11).
"""

from __future__ import annotations

import torch

from fewbit.runtime import backends
from fewbit.runtime.format.encoding import packed_words
from fewbit.runtime.interop.tensor_kinds import is_abstract


def grid_of(weight, bias, bits: int, device) -> torch.Tensor:
    """Return the grid, which says which values the codes of each channel stand for.

    Args:
        weight: the norm's gamma, of any shape, or None.
        bias: the norm's beta, of any shape, or None.
        bits: the bits of a code, 1 to 8.
        device: the device of the grid if weight and bias are None.

    Returns:
        (7, channels) float32, contiguous; (7, 1) if weight and bias are None. With z = sign(gamma) x~, the rows are:
        (0) the lower edge of the first cell, in z; (1) the first code that means y > 0; (2) a lower bound of
        the values that are dequantized from codes with y > 0; (3) an upper bound of the values that are dequantized
        from the other codes; (4) the sign of gamma; (5) |gamma|; (6) beta. The bounds are infinite unless z0 is finite and |z0| > 3.
    """
    gamma, beta = _vectors(weight, bias, device)
    if is_abstract(gamma):
        return gamma.new_empty((7, len(gamma)), dtype=torch.float32)
    return backends.of(gamma).grid_fixed(gamma, beta, bits)


def encode(x, y, grid, bits: int, inner: int, normalize=None) -> torch.Tensor:
    """Return the packed fixed-point codes of a normalized input.

    For a fake or meta tensor, the result has no data. `reference_fixed_point.encode_fixed` explains the arguments.
    """
    if is_abstract(x):
        return x.new_empty(packed_words(x.numel(), bits), dtype=torch.int32)
    return backends.of(x).encode_fixed(x, y, grid, bits, inner, normalize)


def decode(packed, grid, bits: int, inner: int, size, stride, dtype, slope=None, scale=None):
    """Return the values that fixed-point codes stand for, as a tensor of the given size, strides and dtype.

    For fake or meta tensors, the result has no data. `reference_fixed_point.decode_fixed` explains the other arguments.
    """
    out = packed.new_empty_strided(size, stride, dtype=dtype)
    if not is_abstract(packed):
        backends.of(packed).decode_fixed(packed, grid, bits, inner, out, slope, scale)
    return out


def mask(grad, packed, grid, bits: int, inner: int, slope: float) -> torch.Tensor:
    """Return the gradient of y, the input of a ReLU or LeakyReLU, from the gradient `grad` of the activation's result.

    `grad` must be dense. `reference_fixed_point.mask_fixed` explains the other arguments.
    """
    out = torch.empty_like(grad)
    if not is_abstract(grad):
        backends.of(grad).mask_fixed(grad, packed, grid, bits, inner, slope, out)
    return out


def _vectors(weight, bias, device):
    """Return gamma and beta as 1-D tensors in float32 or, to keep small float64 weights from becoming 0, in float64."""
    if weight is None and bias is None:
        return torch.ones(1, device=device), torch.zeros(1, device=device)
    like = weight if bias is None else bias
    dtype = torch.promote_types(like.dtype, torch.float32)
    weight = torch.ones_like(like) if weight is None else weight
    bias = torch.zeros_like(like) if bias is None else bias
    return tuple(vector.detach().reshape(-1).to(dtype).contiguous() for vector in (weight, bias))
