"""The K-bit fixed-point code of a normalized tensor, from which the sign of what follows is read exactly.

Of y = gamma x~ + beta, with x~ of mean 0 and deviation 1, BLPA (Chakrabarti and Moseley, 2019, eq. 9 and 10) keeps
L = 2^K levels between beta - 3 |gamma| and beta + 3 |gamma|. In z = sign(gamma) x~, sign(0) being +1, so that
y = |gamma| z + beta, the levels lie in the middle of cells (edge, edge + D] with D = 6 / L, and y = 0 at
z0 = -beta / |gamma|, a multiple of D away from the first edge. That is the paper's code but for four things
(docs/decisions/0012-sign-of-a-clipped-pre-activation.md):

- cells are open below, so that y = 0 is on the side that is not positive, as in ReLU's derivative;
- where z0 is outside of the window, the first code that says y > 0 is 1 or L - 1, and a value on the
  wrong side of that moves there: without it clipping loses the sign;
- gamma = 0, or so small that z0 is not finite, has a code of z = x~ alone: all values have beta's sign;
- gamma < 0 has the cells of -gamma.

The side is that of the y that the forward made, so code >= first is y > 0 whatever rounding did. Where
|z0| <= 3 a value in the window is restored within D / 2: |y - y^| <= 3 |gamma| / 2^K (eq. 11).
"""

from __future__ import annotations

import torch

from fewbit.runtime import backends
from fewbit.runtime.format.encoding import packed_words
from fewbit.runtime.interop.tensor_kinds import is_abstract


def grid_of(weight, bias, bits: int, device) -> torch.Tensor:
    """What codes mean, by channel: (7, channels) float32, contiguous; (7, 1) of a norm without weight and bias.

    weight, bias: (*,), either of which may be None. Rows: the first edge in z; the first code that says y > 0; the
    least z that such a code stands for; the greatest of the others; the sign of gamma; |gamma|; beta.
    """
    gamma, beta = _vectors(weight, bias, device)
    if is_abstract(gamma):
        return gamma.new_empty((7, len(gamma)), dtype=torch.float32)
    return backends.of(gamma).grid_fixed(gamma, beta, bits)


def encode(x, y, grid, bits: int, inner: int, normalize=None) -> torch.Tensor:
    """The packed codes of x, as `reference_fixed_point.encode_fixed`."""
    if is_abstract(x):
        return x.new_empty(packed_words(x.numel(), bits), dtype=torch.int32)
    return backends.of(x).encode_fixed(x, y, grid, bits, inner, normalize)


def decode(packed, grid, bits: int, inner: int, size, stride, dtype, slope=None, scale=None):
    """Restored values with those sizes and strides, as `reference_fixed_point.decode_fixed`."""
    out = packed.new_empty_strided(size, stride, dtype=dtype)
    if not is_abstract(packed):
        backends.of(packed).decode_fixed(packed, grid, bits, inner, out, slope, scale)
    return out


def mask(grad, packed, grid, bits: int, inner: int, slope: float) -> torch.Tensor:
    """The gradient of ReLU (slope 0) or LeakyReLU, as `reference_fixed_point.mask_fixed`; grad: dense."""
    out = torch.empty_like(grad)
    if not is_abstract(grad):
        backends.of(grad).mask_fixed(grad, packed, grid, bits, inner, slope, out)
    return out


def _vectors(weight, bias, device):
    """gamma and beta, 1-D, in float32 or better: a small weight is not to become 0."""
    if weight is None and bias is None:
        return torch.ones(1, device=device), torch.zeros(1, device=device)
    like = weight if bias is None else bias
    dtype = torch.promote_types(like.dtype, torch.float32)
    weight = torch.ones_like(like) if weight is None else weight
    bias = torch.zeros_like(like) if bias is None else bias
    return tuple(each.detach().reshape(-1).to(dtype).contiguous() for each in (weight, bias))
