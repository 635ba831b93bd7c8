"""The counter-based random numbers: known answers, and the operations written out in Python."""

import numpy as np
import pytest

from fewbit.table import philox

# Random123's kat_vectors for philox4x32-10: counter, key, result.
KNOWN = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text):
    return [int(word, 16) for word in text.split()]


def test_known_answers():
    counters, keys, expected = (np.array([words(row[i]) for row in KNOWN]) for i in range(3))
    result = np.stack(philox.philox4x32(counters.T, keys.T), axis=1)
    assert result.tolist() == expected.tolist() and result.dtype == np.uint32
    single = philox.philox4x32(words(KNOWN[2][0]), words(KNOWN[2][1]))
    assert [int(word) for word in single] == words(KNOWN[2][2])


def scalar_philox(counter, key):
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 >> 32 ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, p0 >> 32 ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [k[0] + 0x9E3779B9 & 0xFFFFFFFF, k[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return c


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 5, 2**64 - 1, -1, -(2**63)])
def test_uniform_against_scalar_python(seed):
    index = np.array([[0, 1, 2], [2**32 - 1, 2**32, 2**40 + 3]])
    key = [seed % 2**32, seed % 2**64 // 2**32]
    draws = [scalar_philox([i % 2**32, i // 2**32, 0, 0], key)[0] for i in index.ravel().tolist()]
    expected = np.array([(draw >> 8) * 2.0**-24 for draw in draws]).reshape(2, 3).tolist()
    result = philox.uniform(seed, index)
    assert result.dtype == np.float32 and result.tolist() == expected
    assert philox.uniform(seed, np.arange(0)).shape == (0,)
    assert np.ndim(philox.uniform(seed, 1)) == 0 and philox.uniform(seed, 1) == result[0, 1]


@pytest.mark.parametrize(
    ("seed", "error"), [(2**64, OverflowError), (-(2**63) - 1, OverflowError), (1.5, TypeError)]
)
def test_a_seed_is_an_integer_of_64_bits(seed, error):
    words = (
        r"seed: expected an integer in \[-2\*\*63, 2\*\*64\)" if error is OverflowError else None
    )
    with pytest.raises(error, match=words):
        philox.uniform(seed, 1)
