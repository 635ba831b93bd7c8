"""Autograd Functions of flash-linear-attention, mamba_ssm and causal_conv1d whose saved tensors fewbit knows.

Gradients are linear in each of these inputs if the others are exact. Gates, step sizes and, for delta rules, keys stay
exact.

Functions of whole layers of mamba_ssm run parts of the layer again in the backward pass. Mamba's saves the layer's
input, which enters a SiLU, and tensors of the scan, in which gradients are linear. Mamba2's saves the inputs of the
layer and of a norm, which stay exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from fewbit.config import name_of_class


class _Known(NamedTuple):
    count: int
    linear: tuple[int, ...]
    holds: Callable = lambda node: True


_QKV, _QUERY_AND_VALUE = (0, 1, 2), (0, 4)
_KNOWN = {
    "fla.ops.simple_gla.chunk.ChunkSimpleGLAFunction": [_Known(7, _QKV)],
    "fla.ops.gla.chunk.ChunkGLAFunction": [_Known(8, _QKV)],
    "fla.ops.common.fused_chunk.FusedChunkFunction": [_Known(6, _QKV)],
    "fla.ops.common.fused_recurrent.FusedRecurrentFunction": [_Known(9, _QKV)],
    "fla.ops.delta_rule.chunk.ChunkDeltaRuleFunction": [_Known(10, _QUERY_AND_VALUE)],
    "fla.ops.gated_delta_rule.chunk.ChunkGatedDeltaRuleFunction": [_Known(15, _QUERY_AND_VALUE)],
    "fla.ops.kda.chunk.ChunkKDAFunction": [_Known(23, _QUERY_AND_VALUE)],
    # u, B and C, and with a gate also the result before the gate. The newer versions also save `cu_seqlens`.
    "mamba_ssm.ops.selective_scan_interface.SelectiveScanFn": [
        _Known(8, (0, 3, 4)),
        _Known(9, (0, 3, 4)),
        _Known(10, (0, 3, 4, 9)),
        _Known(11, (0, 3, 4, 9)),
    ],
    # The scan's input, B, C and its result. The version with norms of B and C saves both before the norms, so they stay exact.
    "mamba_ssm.ops.selective_scan_interface.MambaInnerFn": [
        _Known(16, (7, 10, 11, 15)),
        _Known(18, (7, 10, 11, 15)),
        _Known(19, (7, 18)),
    ],
    # The result before the gate, x, B and C.
    "mamba_ssm.ops.triton.ssd_combined.MambaChunkScanCombinedFn": [_Known(12, (0, 1, 5, 6))],
    "causal_conv1d.causal_conv1d_interface.CausalConv1dFn": [
        _Known(5, (0,), lambda node: not node.activation)
    ],
}
"""{name of an autograd Function: what its versions save}."""


def linear_positions(function: type, node, count: int | None) -> Iterable[int]:
    """Return the positions of saved tensors in which the gradients of a known autograd Function are linear.

    `count` is `count_of_saved(node)`.
    """
    for known in _KNOWN.get(name_of_class(function), ()):
        if known.count == count and known.holds(node):
            return known.linear
    return ()
