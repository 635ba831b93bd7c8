"""Pack codes, draw random numbers and expand vectors, for several files of the reference backend."""

from __future__ import annotations

import torch

from fewbit.config import BLOCK
from fewbit.runtime.format.layout import check_vectors
from fewbit.runtime.format.tensor_checks import ArgumentChecks, check_bits
from fewbit.table import philox

_MASK32 = 0xFFFFFFFF


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes, (n,) uint8, as bit-planes: a block of 32 codes takes `bits` words, and word k holds bit k of each code.

    Returns:
        (bits * ceil(n / 32),) int32. The last block is padded with zeros.
    """
    check_bits(bits)
    ArgumentChecks("pack", codes).check("codes", codes, codes.numel(), torch.uint8)
    blocks = -(-codes.numel() // BLOCK)
    padded = torch.zeros(blocks * BLOCK, dtype=torch.int64, device=codes.device)
    padded[: codes.numel()] = codes
    lanes = torch.arange(BLOCK, device=codes.device)
    planes = torch.arange(bits, device=codes.device)
    bit = (padded.view(blocks, 1, BLOCK) >> planes.view(1, bits, 1)) & 1  # (blocks, bits, 32)
    words = (bit << lanes).sum(-1)  # (blocks, bits), in [0, 2**32)
    return _to_int32(words.reshape(-1))


def unpack(packed: torch.Tensor, bits: int, n: int) -> torch.Tensor:
    """Return the n codes that `pack` packed, (n,) uint8."""
    ArgumentChecks("unpack", packed).check_packed(packed, n, bits)
    lanes = torch.arange(BLOCK, device=packed.device)
    planes = torch.arange(bits, device=packed.device)
    words = packed.view(-1, bits, 1).to(torch.int64) & _MASK32
    bit = (words >> lanes) & 1  # (blocks, bits, 32)
    codes = (bit << planes.view(1, bits, 1)).sum(1)
    return codes.reshape(-1)[:n].to(torch.uint8)


def philox_words(seed: torch.Tensor, counter: torch.Tensor):
    """Return four random numbers, int64 below 2**32, for each counter, as `table.philox.philox4x32`."""
    c0, c1 = counter & _MASK32, (counter >> 32) & _MASK32
    c2 = c3 = torch.zeros_like(counter)
    k0, k1 = seed & _MASK32, (seed >> 32) & _MASK32
    m0, m2, w0, w1 = map(int, (*philox.MULTIPLIERS, *philox.WEYL))
    for _ in range(philox.ROUNDS):
        # The products wrap around in int64, but have the bits of the unsigned 64-bit products.
        p0, p2 = m0 * c0, m2 * c2
        c0, c1, c2, c3 = (
            ((p2 >> 32) & _MASK32) ^ c1 ^ k0,
            p2 & _MASK32,
            ((p0 >> 32) & _MASK32) ^ c3 ^ k1,
            p0 & _MASK32,
        )
        k0, k1 = (k0 + w0) & _MASK32, (k1 + w1) & _MASK32
    return c0, c1, c2, c3


def sixteen_bit_draws(seed: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """Return 256 random 16-bit numbers, (n, 256) int64, for each of n runs of 32 Philox counters, which begin at `counter`.

    Each 32-bit word is cut into two, the lower half first. Number i is number i div 32 of the run's counter i mod 32.
    """
    counters = counter[:, None] + torch.arange(32, device=counter.device)
    words = torch.stack(philox_words(seed, counters), -1)  # (n, 32, 4)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1).flatten(-2)  # (n, 32, 8)
    return halves.transpose(1, 2).flatten(1)


def entries_of(values: torch.Tensor, vectors, inner: int) -> list[torch.Tensor | None]:
    """Expand vectors of one length, or None, to the shape of `values`, whose dimensions are in storage order.

    `inner` is as in `channels.Normalization`.
    """
    n = values.numel()
    entries = check_vectors(vectors, inner, n)
    index = torch.arange(n, device=values.device).view(values.shape) // inner % max(entries, 1)
    return [None if vector is None else vector[index] for vector in vectors]


def _to_int32(words: torch.Tensor) -> torch.Tensor:
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
