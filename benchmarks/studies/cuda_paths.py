"""Instructions for each element on the path that a kernel's loop takes for full and aligned groups. No GPU is needed.

    python benchmarks/study.py cuda_paths                        # sm_90: about a minute
    python benchmarks/study.py cuda_paths --lines rotated        # also by source line, for kernels whose name has this word

nvcc compiles each source with line numbers, and nvdisasm disassembles the result. The path is the shortest cycle of the control
flow that runs the lines of `Path.through`. Slow paths, for other groups or special numbers, are longer or leave these lines out.
An instruction counts even if its predicate is false, because it is issued.

Writes results/cuda_paths.json, a row for each kernel.
"""

from __future__ import annotations

import argparse
import heapq
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import cuda_instructions
import harness

ARCHITECTURE = 90
TYPES = "float", "Bfloat16"
PER_LANE = 16
"""Elements of a lane in a loop."""
CALL = 10_000
"""The cost of a call in the search: calls are slow paths of divisions and roots."""


@dataclass(frozen=True)
class Loop:
    """A loop of a kernel.

    Args:
        name: what the loop does.
        source: the file in csrc/cuda.
        kernel: the readable name of the kernel, with {} for the element type.
        through: marks. The path must run an instruction of each mark. A mark is (file, text), which stands for the lines of the
            file that have the text. The mark (file, text, other file, other text) also requires that the instruction was
            inlined at a line of the other file.
        seldom: marks that the loop runs once in `period` turns.
    """

    name: str
    source: str
    kernel: str
    through: tuple[tuple[str, ...], ...]
    seldom: tuple[tuple[str, ...], ...] = ()
    period: int = 1


@dataclass(frozen=True)
class Instruction:
    operation: str
    lines: tuple[tuple[str, int], ...]
    """The file and the line, followed by those that the line is inlined at."""


def _dequantize_loop(name: str, kind: int) -> Loop:
    """Return the loop of plain pairs. kind: the number of an enumerator of MapKind in csrc/cuda/rotated_dequantize.cu."""
    return Loop(
        name,
        "rotated_dequantize",
        f"dequantize_kernel<{{}}, true, MapKind {kind}>",
        (
            ("hadamard.h", "four = *reinterpret_cast<const uint4*>(first);"),
            ("rotated_neighbors.h", "to[i * kApart] = {words"),
            ("rotated_dequantize.cu", "bits == 2 ? dequantize(once, 2) : dequantize(once, bits);"),
        ),
        (("rotation.h", "reinterpret_cast<uint4*>(own.random)[lane_of_group()] = vector;"),),
        8,
    )


def _batch_norm_loop(name: str, kernel: str) -> Loop:
    codes = "hadamard.h", "four = *reinterpret_cast<const uint4*>(first);"
    return Loop(
        name,
        "batch_norm",
        f"{kernel}<{{}}>",
        (
            (*codes, "batch_norm.cu", "visit_group(0, bits);"),
            (*codes, "batch_norm.cu", "visit_group(1, bits);"),
            ("batch_norm.cu", "ptx::copy_async(codes_.words[turn_]"),
        ),
        (("rotation.h", "reinterpret_cast<uint4*>(own.random)[lane_of_group()] = vector;"),),
        8,
    )


AS_IS, NORMALIZED, RELU = range(3)
"""The numbers of the enumerators of Source in csrc/cuda/rotated_quantize.cu."""


def _quantize_loop(
    name: str, *through: tuple[str, str], source: int = AS_IS, is_masked: bool = False
) -> Loop:
    return Loop(
        name,
        "rotated_quantize",
        f"quantize_kernel<{{}}, true, Source {source}>",
        (
            *through,
            (
                "rotated_groups.h",
                "count += values[j] != 0.0f;"
                if is_masked
                else "for (int j = 0; j < kSide; ++j) values[j] -= found.mean;",
            ),
            ("rotated_quantize.cu", "read_neighbors(values, elements"),
            ("rotated_groups.h", "values[j] = as_float(from[j * kSide + lane_of_group()]);"),
            (
                "rotated_quantize.cu",
                "rotate(values, own, own.random + 4 * kCountersAhead * turn);",
            ),
            ("rotated_quantize.cu", "store_full<2>(encode_few(y, bits, rms), words, bits);"),
            ("rotated_quantize.cu", "return sum_of_group(y);"),
            (
                "rotated_quantize.cu",
                "pending[1] = found.mean, pending[2] = inner;",
            ),
        ),
        (
            ("rotated_quantize.cu", "by.store_kept(turn, pair);"),
            ("rotate.h", "const float exact = energy / inner"),
            ("rotation.h", "reinterpret_cast<uint4*>(own.random)[lane_of_group()] = vector;"),
        ),
        5,
    )


LOOPS = (
    Loop(
        "uniform: dequantize",
        "dequantize",
        "dequantize_kernel<{}, false>",
        (
            ("dequantize.cu", "uint32_t byte = plane < bits"),
            ("dequantize.cu", "const Octet codes = has_high"),
            ("dequantize.cu", "store_run<T>(values, out, true, kLength);"),
        ),
    ),
    Loop(
        "uniform: quantize",
        "quantize",
        "quantize_kernel<{}, false>",
        (
            ("quantize.cu", "const uint32_t low = exchange_bytes<1>(planes.low, lane);"),
            ("quantize.cu", "words[counter + counter / 8] = vector;"),
        ),
    ),
    _dequantize_loop("rotated: dequantize", 0),
    _dequantize_loop("masked: dequantize", 3),
    _quantize_loop("rotated: quantize"),
    _quantize_loop("masked: quantize", is_masked=True),
    _quantize_loop(
        "masked: ReLU and quantize",
        ("rotated_quantize.cu", "set_pair<T>(words, k, relu(low), relu(high));"),
        source=RELU,
        is_masked=True,
    ),
    _quantize_loop(
        "rotated: normalize rows and quantize",
        ("rotated_quantize.cu", "values[j] = (values[j] - mean) * rstd;"),
        source=NORMALIZED,
    ),
    _quantize_loop(
        "rotated: normalize columns and quantize",
        ("rotated_quantize.cu", "if (entry >= end) entry -= end;"),
        source=NORMALIZED,
    ),
    _batch_norm_loop("batch norm: sums", "sums_kernel"),
    _batch_norm_loop("batch norm: gradient of the input", "input_kernel"),
)
_LINE = re.compile(r'//## File "([^"]+)", line (\d+)')
_CODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+ )?\s*([A-Z][A-Z0-9_.]*)([^;]*);")


def disassemble(source: str, tools: tuple[str, str]) -> str:
    nvcc, nvdisasm = tools
    path = cuda_instructions.CSRC / "cuda" / f"{source}.cu"
    with tempfile.TemporaryDirectory() as folder:
        binary = str(Path(folder, f"{source}.cubin"))
        flags = *cuda_instructions.FLAGS, f"-I{cuda_instructions.CSRC}", f"-arch=sm_{ARCHITECTURE}"
        cuda_instructions._run(nvcc, *flags, "-lineinfo", "-cubin", str(path), "-o", binary)
        return cuda_instructions._run(nvdisasm, "-gi", "-c", binary).stdout


def blocks_of(text: str, kernel: str) -> tuple[list[list[Instruction]], list[list[int]]]:
    """Return the basic blocks of a kernel, and for each block the numbers of those that may follow."""
    blocks, targets, labels = [[]], [None], {}
    lines, complete, inside = [], False, False
    for line in text.splitlines():
        if line.startswith(".text."):
            inside = cuda_instructions._readable(line.removeprefix(".text.").rstrip(":")) == kernel
        elif not inside:
            continue
        elif found := _LINE.search(line):
            if complete:
                lines, complete = [], False
            lines.append((Path(found[1]).name, int(found[2])))
        elif line.endswith(":") and not line[0].isspace():
            if blocks[-1]:
                blocks.append([]), targets.append(None)
            labels[line[:-1]] = len(blocks) - 1
        elif found := _CODE.match(line):
            predicate, operation, operands = found.groups()
            complete = True
            if operation == "NOP":
                continue
            blocks[-1].append(Instruction(operation, tuple(lines)))
            if operation in ("BRA", "EXIT", "BREAK") or operation.startswith(("RET", "BRX")):
                label = re.search(r"`\((\S+)\)", operands)
                conditional = (
                    predicate is not None or re.match(r"\s*U?!?U?P\d", operands) is not None
                )
                targets[-1] = (label[1] if label and operation == "BRA" else None, conditional)
                blocks.append([]), targets.append(None)
    following = []
    for i, target in enumerate(targets):
        after = [] if target is not None and not target[1] else [i + 1]
        if target is not None and target[0] in labels:
            after.append(labels[target[0]])
        following.append([block for block in after if block < len(blocks)])
    return blocks, following


def shortest(blocks, following, marks: list[list[set[tuple[str, int]]]]) -> list[int]:
    """Return the blocks of the shortest cycle that runs an instruction of each mark."""

    def has(block: list[Instruction], mark: list[set[tuple[str, int]]]) -> bool:
        return any(all(part & set(one.lines) for part in mark) for one in block)

    of_block = [sum(1 << i for i, mark in enumerate(marks) if has(block, mark)) for block in blocks]
    cost = [
        len(block) + CALL * sum(one.operation.startswith("CALL") for one in block)
        for block in blocks
    ]
    everything = (1 << len(marks)) - 1
    best = None
    for start in (i for i, mark in enumerate(of_block) if mark & 1):
        queue, seen, number = [(0, 0, start, 0, None)], set(), 0
        while queue:
            length, _, block, mask, path = heapq.heappop(queue)
            if best and length >= best[0]:
                break
            if path and block == start and mask == everything:
                best = length, path
                break
            if (block, mask) in seen:
                continue
            seen.add((block, mask))
            for after in following[block]:
                number += 1
                state = length + cost[block], number, after, mask | of_block[block], (block, path)
                heapq.heappush(queue, state)
    if best is None or best[0] >= CALL:
        raise SystemExit("expected a cycle through all lines without a call")
    found, path = [], best[1]
    while path:
        found.append(path[0])
        path = path[1]
    return found[::-1]


def lines_with(mark: tuple[str, ...]) -> list[set[tuple[str, int]]]:
    """Return, for each (file, text) of a mark, the lines of the file that have the text."""
    found = []
    for name, part in zip(mark[::2], mark[1::2], strict=True):
        text = next(cuda_instructions.CSRC.glob(f"c*/{name}")).read_text().splitlines()
        found.append({(name, number) for number, line in enumerate(text, 1) if part in line})
        if not found[-1]:
            raise SystemExit(
                f"expected a line with {part!r} in {name}, got none: a mark in LOOPS is out of date"
            )
    return found


def count(loop: Loop, text: str, dtype: str) -> tuple[float, list[Instruction]]:
    """Return the instructions of a lane in a turn of the loop, and those of a turn without the seldom lines."""
    blocks, following = blocks_of(text, loop.kernel.format(dtype))
    marks = [lines_with(mark) for mark in loop.through]
    path = [one for block in shortest(blocks, following, marks) for one in blocks[block]]
    long = shortest(blocks, following, [*marks, *map(lines_with, loop.seldom)])
    more = sum(len(blocks[block]) for block in long) - len(path)
    return len(path) + more / loop.period, path


def print_lines(path: list[Instruction]):
    """Print the instructions of a path by line of the outermost two functions."""
    counts = Counter(tuple(one.lines[::-1][:3]) for one in path)
    for lines, number in sorted(counts.items()):
        print(
            f"{number:6} {number / PER_LANE:6.2f}  ",
            " > ".join(f"{name}:{line}" for name, line in lines),
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", metavar="WORD", help="print the counts of these kernels by line")
    arguments = parser.parse_args()
    tools = cuda_instructions.find_tools()
    if tools is None:
        sys.exit("expected nvcc and nvdisasm; see the top of benchmarks/cuda_instructions.py")
    rows = []
    for loop in LOOPS:
        if arguments.lines and arguments.lines not in loop.name:
            continue
        text = disassemble(loop.source, tools)
        for dtype in TYPES:
            instructions, path = count(loop, text, dtype)
            each = instructions / PER_LANE
            rows.append(
                {"kernel": loop.name, "dtype": dtype.lower(), "instructions": round(each, 2)}
            )
            print(f"{loop.name:40}{dtype:10}{instructions:8.1f} a lane {each:8.2f} an element")
            if arguments.lines:
                print_lines(path)
                print(Counter(one.operation for one in path).most_common(60))
    if not arguments.lines:
        harness.save("cuda_paths", {"nvcc": cuda_instructions.version(tools[0])}, rows)
