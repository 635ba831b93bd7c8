"""Functions that several files of the reference backend use: bit-planes, random numbers, vectors over a tensor."""

from __future__ import annotations

import torch

from fewbit.config import BLOCK
from fewbit.runtime.format.buffers import Entry, check_bits
from fewbit.runtime.format.layout import check_vectors
from fewbit.table import philox

_MASK32 = 0xFFFFFFFF


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the bit-planes of codes, zero-padded: (bits * ceil(n / 32),) int32. codes: (n,) uint8 below 2**bits."""
    check_bits(bits)
    Entry("pack", codes).check("codes", codes, codes.numel(), torch.uint8)
    blocks = -(-codes.numel() // BLOCK)
    padded = torch.zeros(blocks * BLOCK, dtype=torch.int64, device=codes.device)
    padded[: codes.numel()] = codes
    lanes = torch.arange(BLOCK, device=codes.device)
    planes = torch.arange(bits, device=codes.device)
    bit = (padded.view(blocks, 1, BLOCK) >> planes.view(1, bits, 1)) & 1  # (blocks, bits, 32)
    words = (bit << lanes).sum(-1)  # (blocks, bits), in [0, 2**32)
    return _to_int32(words.reshape(-1))


def unpack(packed: torch.Tensor, bits: int, n: int) -> torch.Tensor:
    """Return the n codes, uint8, that `pack` packed into (bits * ceil(n / 32),) int32."""
    Entry("unpack", packed).check_packed(packed, n, bits)
    lanes = torch.arange(BLOCK, device=packed.device)
    planes = torch.arange(bits, device=packed.device)
    words = packed.view(-1, bits, 1).to(torch.int64) & _MASK32
    bit = (words >> lanes) & 1  # (blocks, bits, 32)
    codes = (bit << planes.view(1, bits, 1)).sum(1)
    return codes.reshape(-1)[:n].to(torch.uint8)


def philox_words(seed: torch.Tensor, counter: torch.Tensor):
    """Return the four words (int64, below 2**32) of each counter: fewbit.table.philox.philox4x32."""
    c0, c1 = counter & _MASK32, counter >> 32
    c2 = c3 = torch.zeros_like(counter)
    k0, k1 = seed & _MASK32, (seed >> 32) & _MASK32
    m0, m2, w0, w1 = map(int, (*philox.MULTIPLIERS, *philox.WEYL))
    for _ in range(philox.ROUNDS):
        # The 64-bit products wrap in int64; their halves are the same bits.
        p0, p2 = m0 * c0, m2 * c2
        c0, c1, c2, c3 = (
            ((p2 >> 32) & _MASK32) ^ c1 ^ k0,
            p2 & _MASK32,
            ((p0 >> 32) & _MASK32) ^ c3 ^ k1,
            p0 & _MASK32,
        )
        k0, k1 = (k0 + w0) & _MASK32, (k1 + w1) & _MASK32
    return c0, c1, c2, c3


def entries_of(values: torch.Tensor, vectors, inner: int) -> list[torch.Tensor | None]:
    """Return, for each vector, the entry that belongs to each element of `values`, in the shape of values.

    Args:
        values: a tensor in storage order.
        vectors: vectors whose entries belong to runs of elements, see `layout.check_vectors`. A vector may be None; its
            result is None.
        inner: the length of a run, see `layout.check_vectors`.
    """
    n = values.numel()
    entries = check_vectors(vectors, inner, n)
    index = torch.arange(n, device=values.device).view(values.shape) // inner % max(entries, 1)
    return [None if vector is None else vector[index] for vector in vectors]


def _to_int32(words: torch.Tensor) -> torch.Tensor:
    """Return the int32 with the same bits as unsigned 32-bit numbers in int64."""
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
