"""Instructions, registers and memory accesses of the CUDA kernels, counted in the machine code. No GPU is needed.

    python benchmarks/cuda_instructions.py                # sm_80, sm_90 and sm_100: about 2 minutes on 2 cores
    python benchmarks/cuda_instructions.py --update       # make these numbers the budgets of the test

nvcc compiles each source with the flags of setup.py, and nvdisasm disassembles the result. Both come with the CUDA toolkit;
PyPI has nvdisasm too (nvidia-cuda-nvdisasm). The counts cover all branches of a kernel. A thread runs only some of them and
repeats loops, so the counts are not times. They show what a change of a kernel costs, and that no kernel spills registers.

tests/project/test_cuda_instructions.py compares the counts for sm_90 with csrc/cuda/budgets.json.

Writes results/cuda_instructions.json, a row for each kernel, element type and architecture.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import harness

CSRC = Path(__file__).parent.parent / "csrc"
BUDGETS = CSRC / "cuda" / "budgets.json"
ARCHITECTURES = 80, 90, 100
FLAGS = "-std=c++17", "-O3", "--fmad=false"
"""The flags of setup.py that change the machine code."""
_USED = re.compile(
    r"Compiling entry function '(\w+)' for.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers(?:, used \d+ barriers)?(?:, \d+ bytes cumulative stack size)?(?:, (\d+) bytes smem)?",
    re.DOTALL,
)
LOCAL = "LDL", "STL"
_OF_STACK = re.compile(r"\[R1[]+]")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][A-Z0-9_.]*)")
_WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


def find_tools() -> tuple[str, str] | None:
    """Return the paths of nvcc and nvdisasm; None if one of them is missing."""
    packages = Path(sysconfig.get_paths()["purelib"], "nvidia")
    of_pypi = next(map(str, packages.glob("cu*/bin/nvdisasm")), None)
    found = shutil.which("nvcc"), shutil.which("nvdisasm") or of_pypi
    return found if all(found) else None


def version(nvcc: str) -> str:
    """Return the release of nvcc, such as "13.0"."""
    return re.search(r"release ([\d.]+)", _run(nvcc, "--version").stdout)[1]


def digest() -> str:
    """Return a hash of the sources of the CUDA kernels."""
    files = [path for folder in ("common", "cuda") for path in sorted((CSRC / folder).glob("*.*"))]
    sources = [path.read_bytes() for path in files if path != BUDGETS]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()


def count(architecture: int, tools: tuple[str, str]) -> list[dict]:
    """Compile all CUDA sources for an architecture. Return a row for each kernel and element type."""
    sources = sorted((CSRC / "cuda").glob("*.cu"))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        parts = pool.map(lambda source: _count_in(source, architecture, tools, folder), sources)
        return sorted((row for part in parts for row in part), key=lambda row: row["kernel"])


def _count_in(source: Path, architecture: int, tools, folder) -> list[dict]:
    nvcc, nvdisasm = tools
    binary = Path(folder, f"{source.stem}.cubin")
    arguments = *FLAGS, f"-I{CSRC}", f"-arch=sm_{architecture}", "-cubin", "-Xptxas=-v"
    compiled = _run(nvcc, *arguments, str(source), "-o", str(binary))
    text = _run(nvdisasm, "-c", str(binary)).stdout
    code, strays = _instructions(text), _stray_accesses(text)
    rows = []
    for name, stack, stores, loads, registers, shared in _USED.findall(compiled.stderr):
        ops = code[name]
        rows.append(
            {
                "kernel": f"{source.stem}: {_readable(name)}",
                "architecture": f"sm_{architecture}",
                "instructions": sum(ops.values()),
                "registers": int(registers),
                "shared_bytes": int(shared or 0),
                "stack_bytes": int(stack),
                "spilled_bytes": int(stores) + int(loads),
                "global_loads": _accesses(ops, "LDG"),
                "global_stores": _accesses(ops, "STG"),
                "local_accesses": sum(ops[op] for op in ops if op.startswith(LOCAL)),
                "stray_accesses": strays[name],
            }
        )
    return rows


def _run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done


def _by_kernel(text: str) -> dict[str, list[tuple[str, str]]]:
    """Return {name of a kernel: [(instruction with its modifiers, its line)]} from nvdisasm's output."""
    found: dict[str, list] = {}
    lines = None
    for line in text.splitlines():
        if line.startswith(".text."):
            lines = found.setdefault(line.removeprefix(".text.").rstrip(":"), [])
        elif lines is not None and (match := _INSTRUCTION.match(line)):
            lines.append((match[1], line))
    return found


def _instructions(text: str) -> dict[str, Counter]:
    """Return {name of a kernel: {instruction with its modifiers: how often it occurs}} from nvdisasm's output."""
    return {
        kernel: Counter(op for op, _ in lines if op != "NOP")  # which only aligns the code
        for kernel, lines in _by_kernel(text).items()
    }


def _stray_accesses(text: str) -> dict[str, int]:
    """Return how often each kernel accesses local memory outside of its stack, to which register R1 points.

    That is a mistake: nvcc 13.0 once read from local memory what a pointer to global memory points to.
    """
    return {
        kernel: sum(op.startswith(LOCAL) and not _OF_STACK.search(line) for op, line in lines)
        for kernel, lines in _by_kernel(text).items()
    }


def _accesses(ops: Counter, start: str) -> str:
    """Return the accesses by width, such as "3x16 2x4": 3 accesses of 16 bytes a thread and 2 of 4 bytes."""
    widths: Counter = Counter()
    for op, number in ops.items():
        if op.startswith(f"{start}."):
            parts = op.split(".")
            widths[next((_WIDTHS[part] for part in parts if part in _WIDTHS), 4)] += number
    return " ".join(f"{number}x{width}" for width, number in sorted(widths.items(), reverse=True))


def _readable(mangled: str) -> str:
    """Return the name and the template arguments of a kernel, such as "decode_mul_kernel<Bfloat16>"."""
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.restype = ctypes.c_char_p
    full = demangle(mangled.encode(), None, None, ctypes.byref(ctypes.c_int())).decode()
    full = full.replace("(anonymous namespace)::", "")
    full = full.removeprefix("void ")
    full = re.sub(r"\((?:\w+::)*(\w+)\)(\d)", r"\1 \2", full)  # the number of an enumerator
    return re.sub(r"(?:\w+::)+", "", full.split("(")[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write csrc/cuda/budgets.json")
    arguments = parser.parse_args()
    tools = find_tools()
    if tools is None:
        sys.exit("expected nvcc and nvdisasm; see the top of benchmarks/cuda_instructions.py")
    rows = []
    for architecture in ARCHITECTURES:
        for row in count(architecture, tools):
            rows.append(row)
            print(
                f"{row['architecture']:7}{row['kernel']:62}{row['instructions']:6}{row['registers']:5}"
                f"{row['spilled_bytes']:6}  loads {row['global_loads']:24} stores {row['global_stores']}"
            )
    harness.save("cuda_instructions", {"nvcc": version(tools[0]), "flags": " ".join(FLAGS)}, rows)
    if arguments.update:
        budgets = {
            row["kernel"]: {
                name: row[name] for name in ("instructions", "registers", "local_accesses")
            }
            for row in rows
            if row["architecture"] == "sm_90"
        }
        document = {"nvcc": version(tools[0]), "sources": digest(), "kernels": budgets}
        BUDGETS.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
