"""The CUDA kernels need no more instructions and registers than csrc/cuda/budgets.json allows."""

import json
from collections import Counter
from importlib import import_module

import pytest

MORE = 1.1
"""The most instructions of a kernel, divided by its budget. Versions of nvcc differ by a few percent."""
MORE_REGISTERS = 8
CODE = """
.text._Zkernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/              @!P1 LDG.E.U16 R6, desc[UR6][R6.64] ;
        /*0020*/                   LDG.E.128.CONSTANT R8, desc[UR6][R6.64+0x10] ;
        /*0030*/              @UP0 STG.E desc[UR6][R6.64], R8 ;
        /*0040*/                   BRA `(.L_x_1) ;
        /*0050*/                   NOP ;
.text._Zother:
        /*0000*/                   EXIT ;
"""


@pytest.fixture
def counting():
    return import_module("cuda_instructions")


@pytest.fixture
def paths():
    return import_module("studies.cuda_paths")


def test_instructions_are_counted_by_kernel(counting):
    found = counting._instructions(CODE)
    ops = found["_Zkernel"]
    assert sum(ops.values()) == 5 and found["_Zother"] == Counter({"EXIT": 1})
    assert counting._accesses(ops, "LDG") == "1x16 1x2"
    assert counting._accesses(ops, "STG") == "1x4"


def test_accesses_outside_of_the_stack_are_found(counting):
    spills = """
.text._Zspills:
        /*0000*/                   STL.64 [R1+0x8], R4 ;
        /*0010*/                   LDL.LU.64 R4, [R1] ;
.text._Zstray:
        /*0000*/                   LDL.64 R4, [R12] ;
        /*0010*/                   LDL R4, [R16+0x8] ;
"""
    assert counting._stray_accesses(spills) == {"_Zspills": 0, "_Zstray": 2}


def test_names_are_readable(counting):
    mangled = "_ZN6fewbit4cuda12_GLOBAL__N_111pack_kernelINS0_8Bfloat16EEEvPKjl"
    assert counting._readable(mangled) == "pack_kernel<Bfloat16>"


LOOP = """
.text._Z6kernelv:
	//## File "/csrc/cuda/a.cu", line 1
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
	//## File "/csrc/common/b.h", line 7 inlined at "/csrc/cuda/a.cu", line 2
	//## File "/csrc/cuda/a.cu", line 2
        /*0010*/                   LDG.E R6, desc[UR6][R6.64] ;
        /*0020*/              @!P1 BRA `(.L_x_2) ;
	//## File "/csrc/cuda/a.cu", line 3
        /*0030*/                   IADD3 R6, R6, R6, RZ ;
        /*0040*/                   IADD3 R6, R6, R6, RZ ;
.L_x_2:
	//## File "/csrc/cuda/a.cu", line 4
        /*0050*/                   STG.E desc[UR6][R6.64], R6 ;
        /*0060*/               @P0 BRA `(.L_x_1) ;
        /*0070*/                   EXIT ;
"""


@pytest.mark.parametrize("lines, instructions", [((), 4), ((("a.cu", 3),), 6)])
def test_the_shortest_path_runs_the_given_lines(paths, lines, instructions):
    blocks, following = paths.blocks_of(LOOP, "kernel")
    marks = [[{("b.h", 7)}, {("a.cu", 2)}], [{("a.cu", 4)}], *([{line}] for line in lines)]
    path = paths.shortest(blocks, following, marks)
    assert sum(len(blocks[block]) for block in path) == instructions


def test_a_line_must_be_inlined_where_the_mark_says(paths):
    blocks, following = paths.blocks_of(LOOP, "kernel")
    with pytest.raises(SystemExit, match="expected a cycle"):
        paths.shortest(blocks, following, [[{("b.h", 7)}, {("a.cu", 4)}]])


@pytest.mark.slow
def test_kernels_are_within_their_budgets(counting):
    tools = counting.find_tools()
    if tools is None:
        pytest.skip("nvcc or nvdisasm is not installed")
    budgets = json.loads(counting.BUDGETS.read_text())
    if counting.digest() == budgets["sources"]:
        pytest.skip("the budgets are the numbers of these very sources")
    if counting.version(tools[0]).split(".")[0] != budgets["nvcc"].split(".")[0]:
        pytest.skip(f"the budgets are for nvcc {budgets['nvcc']}")
    rows = {row["kernel"]: row for row in counting.count(90, tools)}
    assert rows.keys() == budgets["kernels"].keys()
    for kernel, budget in budgets["kernels"].items():
        row = rows[kernel]
        assert row["instructions"] <= MORE * budget["instructions"], kernel
        assert row["registers"] <= budget["registers"] + MORE_REGISTERS, kernel
        assert row["local_accesses"] <= budget["local_accesses"], kernel
        assert not row["stray_accesses"], kernel
