"""Estimate how much faster an H100 would be if two passes over a tensor were one, and print the table of docs/gpu.md.

    python benchmarks/fused_passes.py

An estimate is the greater of two times: that in which the bytes are moved at 90 % of the memory bandwidth, and that in
which the instructions are issued in 72 % of the cycles. Bytes and instructions of fewbit's kernels are those of
`results/cuda_kernels.json`. A fused kernel executes the instructions of both kernels, except for those that load, address
and convert an element which the first kernel has in registers. It moves the bytes of both, except for that element.
"""

from __future__ import annotations

import json

import harness

ELEMENTS = 2**27
BYTES_PER_S = 0.9 * 3.35e12
INSTRUCTIONS_PER_S = (
    0.72 * 132 * 1.98e9 * 4 * 32
)  # 132 multiprocessors, 4 schedulers each, 32 lanes
FLOP_PER_S = 0.7 * 989e12  # of matrix products in bfloat16: 70 % of the data sheet's number
LOADED = 2
"""Instructions that load, address and convert an element. This is an assumption, as the next two are."""
NORM = 10, 20, 30
"""Instructions of a layer norm for each element, without loading: sums, normalization, weight and bias."""
TILE = 256
"""The number of the product's columns for which a block of threads loads, and so dequantizes, the operand once."""
SIZES = {"float32": 4, "bfloat16": 2}


def costs() -> dict:
    """Return {(kernel, dtype): (bytes, instructions) for an element}."""
    rows = json.loads((harness.RESULTS / "cuda_kernels.json").read_text())["rows"]
    return {
        (row["kernel"], row["dtype"]): (row["bytes_an_element"], row["counted"]["instructions"])
        for row in rows
    }


def time_of(moved: float, instructions: float) -> float:
    """Return the seconds that a pass takes for an element."""
    return max(moved / BYTES_PER_S, instructions / INSTRUCTIONS_PER_S)


def activation(dtype: str, cost: dict) -> tuple[float, float]:
    """Return the seconds, separate and fused, of GELU's forward and the copy of its result."""
    moved, instructions = zip(
        cost["forward GELU, 3 bits", dtype], cost["rotated quantize, 2 bits", dtype], strict=True
    )
    separate = sum(map(time_of, moved, instructions))
    return separate, time_of(sum(moved) - SIZES[dtype], sum(instructions) - LOADED)


def norm(dtype: str, cost: dict, own: int) -> tuple[float, float]:
    """Return the seconds, separate and fused, of a layer norm and the copy of its normalized input.

    Args:
        dtype: the dtype.
        cost: the result of `costs`.
        own: the instructions of the norm.
    """
    size = SIZES[dtype]
    separate = time_of(2 * size, own + LOADED)
    separate += time_of(*cost["rotated quantize normalized rows, 2 bits", dtype])
    # The fused kernel normalizes once, so it quantizes as if there were nothing to normalize.
    moved, instructions = cost["rotated quantize, 2 bits", dtype]
    return separate, time_of(size + moved, own + instructions)


def batch_norm(dtype: str, cost: dict) -> tuple[float, float]:
    """Return the seconds, separate and fused, of a batch norm of channels-last images and the copy of its normalized input.

    torch reads the input twice: for sums, and for the result.
    """
    size, own = SIZES[dtype], NORM[0]
    sums = time_of(size, own + LOADED)
    moved, instructions = cost["rotated quantize normalized features, 2 bits", dtype]
    separate = sums + time_of(2 * size, own + LOADED) + time_of(moved, instructions)
    return separate, sums + time_of(size + moved, own + instructions)


def product(cost: dict, columns: int) -> tuple[float, float]:
    """Return the seconds, separate and fused, of dequantizing a linear layer's input and of the weight's gradient.

    Args:
        cost: the result of `costs`.
        columns: the layer's output features. Each element of the input takes part in so many products.
    """
    moved, instructions = cost["rotated dequantize, 2 bits", "bfloat16"]
    multiply = 2 * columns / FLOP_PER_S
    separate = time_of(moved, instructions) + max(multiply, SIZES["bfloat16"] / BYTES_PER_S)
    return separate, max(multiply, -(-columns // TILE) * time_of(0, instructions))


def rows():
    """Yield (passes, dtype, (seconds of separate passes, seconds of the fused pass))."""
    cost = costs()
    for dtype in SIZES:
        yield "GELU, and copy of its result", dtype, activation(dtype, cost)
    for dtype in SIZES:
        yield "batch norm, and copy of its normalized input", dtype, batch_norm(dtype, cost)
    for own in NORM:
        for dtype in SIZES:
            name = f"layer norm of {own} instructions, and copy of its normalized input"
            yield name, dtype, norm(dtype, cost, own)
    for columns in (256, 768, 3072):
        name = f"dequantized input, and its product with {columns} outputs"
        yield name, "bfloat16", product(cost, columns)


def main():
    """Print the table."""
    print("| passes | dtype | µs, separate | µs, fused | gain |")
    print("|---|---|---|---|---|")
    for name, dtype, (separate, fused) in rows():
        times = " | ".join(f"{1e6 * ELEMENTS * seconds:.0f}" for seconds in (separate, fused))
        print(f"| {name} | {dtype} | {times} | {1 - fused / separate:.0%} |")


if __name__ == "__main__":
    main()
