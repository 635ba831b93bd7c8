"""Philox4x32-10, the counter-based generator of Salmon et al. (SC 2011), in NumPy: a random number depends on seed and element alone."""

from __future__ import annotations

import operator

import numpy as np

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))  # added to the key after each round

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter, key) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Compute four random uint32 words for every counter, in the broadcast shape.

    A counter is four integers or integer arrays, the least significant word first, and the key is two. Only the low 32 bits of each are used.
    """
    # Computed in uint64, which has room for the product of two 32-bit words; sums of keys are masked to 32 bits.
    c0, c1, c2, c3 = np.broadcast_arrays(
        *(np.asarray(word).astype(np.uint64) & _LOW for word in counter)
    )
    k0, k1 = (np.asarray(word).astype(np.uint64) & _LOW for word in key)
    for _ in range(ROUNDS):
        product0, product2 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product2 >> _HALF) ^ c1 ^ k0,
            product2 & _LOW,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + WEYL[0]) & _LOW, (k1 + WEYL[1]) & _LOW
    return tuple(word.astype(np.uint32) for word in (c0, c1, c2, c3))


def split64(value) -> tuple[np.ndarray, np.ndarray]:
    """Return the low and high 32 bits of 64-bit integers, as uint64."""
    value = np.asarray(value).astype(np.uint64)
    return value & _LOW, value >> _HALF


def seed_key(seed) -> tuple[np.ndarray, np.ndarray]:
    """Return the Philox key of a seed, an integer in [-2**63, 2**64), modulo 2**64.

    Raises:
        TypeError: The seed is not an integer.
        OverflowError: The seed is out of range.
    """
    seed = operator.index(seed)
    if not -(1 << 63) <= seed < 1 << 64:
        raise OverflowError(f"seed: expected an integer in [-2**63, 2**64), got {seed}")
    return split64(np.uint64(seed % (1 << 64)))


def uniform(seed, index) -> np.ndarray:
    """Draw float32 numbers in [0, 1): the top 24 bits of the first word of `philox4x32`, times 2**-24.

    The counter of element e is (e mod 2**32, e div 2**32, 0, 0), and the key is (seed mod 2**32, seed div 2**32).
    """
    low, high = split64(index)
    word, *_ = philox4x32((low, high, 0, 0), seed_key(seed))
    return (word >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)
