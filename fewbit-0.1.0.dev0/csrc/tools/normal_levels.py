"""Prints csrc/common/normal_levels.h from `fewbit.catalog.normal_levels`.

    python csrc/tools/normal_levels.py > csrc/common/normal_levels.h

The shipped tables of the function `value` are the quantizers with the least squared error for a standard normal number
(Lloyd, 1982; Max, 1960). They are symmetric, so the header has their positive halves only: the breaks, and the levels of
rotated copies. A CUDA kernel can read the numbers from `__constant__ NormalLevels levels = kNormalLevels;` in its own
file.
"""

import numpy as np

from fewbit.catalog.normal_levels import normal_levels, rotated_levels

_PER_LINE = 6

_HEAD = """\
// The positive breaks and levels of the best quantizers of a standard normal number, which rotated copies use
// (docs/concepts/quantizer.md). Levels are multiples of a power of two, and proportional to the best ones except for rounding. The
// breaks are for numbers whose mean square is 1. csrc/tools/normal_levels.py wrote this file.
#pragma once

#include "host_device.h"

namespace fewbit {

// The positive halves for 1 to 8 bits, ascending, rounded to the nearest float32. The halves of all bits follow one another:
// the 2^(bits-1) - 1 breaks begin at breaks_begin(bits), the 2^(bits-1) levels at levels_begin(bits).
struct NormalLevels {"""

_TAIL = """\
};

inline namespace FEWBIT_NAMESPACE {

FEWBIT_HD constexpr int breaks_begin(int bits) { return (1 << (bits - 1)) - bits; }
FEWBIT_HD constexpr int levels_begin(int bits) { return (1 << (bits - 1)) - 1; }

}  // namespace FEWBIT_NAMESPACE
}  // namespace fewbit"""


def halves() -> tuple[list[float], list[float]]:
    """Return the positive breaks and the positive levels for 1 to 8 bits, one after the other."""
    breaks, levels = [], []
    for bits in range(1, 9):
        breaks += normal_levels(bits)[0]
        levels += rotated_levels(bits)
    return breaks, levels


def literals(values: list[float]) -> str:
    """Return C++ literals, from which a compiler reads the float32 numbers nearest to the values."""
    texts = [f"{np.float32(value):.9g}" for value in values]
    texts = [(text if "." in text or "e" in text else text + ".0") + "f" for text in texts]
    lines = [texts[i : i + _PER_LINE] for i in range(0, len(texts), _PER_LINE)]
    return ",\n".join("    " + ", ".join(line) for line in lines)


def render() -> str:
    """Return the text of the header."""
    breaks, levels = halves()
    return "\n".join(
        [
            _HEAD,
            f"  float breaks[{len(breaks)}], levels[{len(levels)}];",
            "};",
            "",
            "constexpr NormalLevels kNormalLevels = {",
            "  {",
            literals(breaks),
            "  },",
            "  {",
            literals(levels),
            "  }",
            _TAIL,
        ]
    )


if __name__ == "__main__":
    print(render())
