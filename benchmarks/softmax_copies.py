"""Compare uniform and rotated copies of softmax results, for attention that is spread out and for attention that is peaked.

    python benchmarks/softmax_copies.py            # about a minute on one core

The logits are normal. The larger their standard deviation, the more of a row's weight is on one element. If causal, row
i has only the first i + 1 columns. The error is that of the gradient of the logits for a normal gradient of the
result: the sum of its squares, divided by the sum of the squares of the exact gradient.

Writes results/softmax_copies.json.
"""

from __future__ import annotations

import argparse

import harness
import torch

import fewbit

BITS = (2, 3, 4)
LENGTHS = (64, 256, 1024)
SCALES = (0.5, 1, 2, 4, 8, 16)
ROWS = 4096


def logits(length, scale, is_causal):
    """Return normal logits, (ROWS, length)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, length, generator=generator) * scale
    if is_causal:
        row = torch.arange(ROWS)[:, None] % length
        x = x.masked_fill(torch.arange(length) > row, float("-inf"))
    return x


def gradient(function, x, upstream):
    x = x.clone().requires_grad_()
    function(x).backward(upstream)
    return x.grad.double()


def measure(length, scale, is_causal):
    """Yield a row for each number of bits."""
    x = logits(length, scale, is_causal)
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    exact = gradient(lambda x: x.softmax(-1), x, upstream)
    largest = float(x.softmax(-1).amax(-1).mean())

    def error(bits, kind):
        torch.manual_seed(2)
        found = gradient(
            lambda x: fewbit.functional.softmax(x, -1, bits=bits, quantizer=kind), x, upstream
        )
        return float((found - exact).square().sum() / exact.square().sum())

    assert max(error(8, "uniform"), error(8, "rotated")) < 0.01
    for bits in BITS:
        yield {
            "length": length,
            "scale": scale,
            "causal": is_causal,
            "largest": largest,
            "bits": bits,
            "uniform": error(bits, "uniform"),
            "rotated": error(bits, "rotated"),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    rows = []
    form = "{:>6} {:>6} {:>7} {:>8} {:>5} {:>9} {:>9} {:>16}"
    print(
        form.format(
            "length", "scale", "causal", "largest", "bits", "uniform", "rotated", "uniform/rotated"
        )
    )
    for length in LENGTHS:
        for scale in SCALES:
            for is_causal in (False, True):
                for row in measure(length, scale, is_causal):
                    rows.append(row)
                    print(
                        form.format(
                            length,
                            scale,
                            "yes" if is_causal else "",
                            f"{row['largest']:.3g}",
                            row["bits"],
                            f"{row['uniform']:.3g}",
                            f"{row['rotated']:.3g}",
                            f"{row['uniform'] / row['rotated']:.2f}",
                        )
                    )
    harness.save("softmax_copies", harness.machine("torch") | {"fewbit": fewbit.__version__}, rows)


if __name__ == "__main__":
    main()
