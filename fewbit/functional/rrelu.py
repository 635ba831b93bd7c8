"""RReLU in training, with the signs of its input kept and its random slopes drawn again."""

from __future__ import annotations

import torch
from torch.autograd import Function

from fewbit.runtime.interop.random_replay import replayed, state_of
from fewbit.runtime.quantizers import integers
from fewbit.runtime.saved.single_backward import once_differentiable

_rrelu = torch.ops.aten.rrelu_with_noise
_rrelu_ = torch.ops.aten.rrelu_with_noise_


class RandomSlopes(Function):
    """torch's own in training, to the bit; kept: ``4 * ceil(n / 32)`` bytes and the generator's state."""

    @staticmethod
    def forward(ctx, x, lower, upper, inplace):
        # By torch's own test, which draws a slope for 0 and none for NaN.
        saved = integers.pack(~(x <= 0), 2)
        ctx.positive, ctx.bounds = saved.spec, (lower, upper)
        ctx.like = {"size": x.shape, "dtype": x.dtype, "device": x.device}
        ctx.save_for_backward(*saved.tensors, state_of(x))
        if inplace:
            ctx.mark_dirty(x)
        slopes = torch.empty(**ctx.like)
        return (_rrelu_ if inplace else _rrelu)(x, slopes, *ctx.bounds, True)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        positive, state = ctx.saved_tensors
        # Contiguous, as torch draws slopes in logical order and takes them to lie in that.
        sign, slopes = torch.empty(**ctx.like), torch.empty(**ctx.like)
        sign.copy_(ctx.positive.dequantize((positive,))).mul_(2).sub_(1)
        with replayed(sign, state):
            _rrelu_(sign, slopes, *ctx.bounds, True)
        return grad * slopes, None, None, None
