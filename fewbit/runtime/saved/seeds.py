"""The seeds from which tensors are rounded (docs/decisions/0010)."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch

from fewbit.runtime.interop.checkpoint import outside_dispatch_modes

MASK = 2**64 - 1
STEP = 0x9E3779B97F4A7C15
"""An odd number: its multiples are all different in 64 bits."""
DISTINCT = 64
"""The bytes of the CPU generator's state that are hashed: its seed, its position, and the first of its 624 words."""


with torch.inference_mode(False), outside_dispatch_modes():
    _NUMBER = torch.zeros((), dtype=torch.int64, device="cpu")


@lru_cache(maxsize=2**14)
def purpose(*values) -> int:
    """Return a 64-bit hash of the repr of values that say what a seed is for."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest())


def generator_hash(salt: bytes = b"", ranks: tuple[int, ...] = ()) -> int:
    """Return a 64-bit hash of torch's CPU generator, up to 16 bytes of salt, and ranks."""
    if torch._C._functorch.maybe_current_level() is not None or torch._C._is_tracing():
        state = b""  # transforms and tracers cannot read it, and save nothing that is rounded
    elif torch._C._len_torch_dispatch_stack():
        with outside_dispatch_modes():
            state = torch.default_generator.get_state().numpy()
    else:
        state = torch.default_generator.get_state().numpy()
    state = state[:DISTINCT]
    key = repr(ranks).encode() if ranks else b""
    return int.from_bytes(hashlib.blake2b(state, digest_size=8, salt=salt, key=key).digest())


def advance_generator() -> None:
    """Draw a number from torch's CPU generator."""
    if torch._C._len_torch_dispatch_stack():
        torch.randint(2**63 - 1, (), device="cpu")
    else:
        _NUMBER.random_()  # advances the generator alike in less than half of the time


def mixed(start: int, purpose: int, count: int) -> int:
    """Return an int64 seed from two hashes and a counter (SplitMix64, Steele, Lea and Flood, OOPSLA 2014)."""
    z = start + purpose + count * STEP & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return (z ^ z >> 31) - 2**63
