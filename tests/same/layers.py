"""Questions about layers, functions and activations: values, gradients and saved bytes of the rows of tests/helpers."""

from __future__ import annotations

from functools import partial

import torch
from layers import CASES, EVERY, ROWS, Called, bytes_by, first_of_each, gradients
from samples import ACTIVATIONS, normal

import fewbit
import fewbit.nn
from fewbit import functions
from fewbit.runtime.quantizers.quantizer import Quantizer

SETTINGS = {
    "2 bits": {"bits": 2},
    "8 bits": {"bits": 8},
    "bfloat16": {"bits": 4, "dtype": torch.bfloat16},
    "float64": {"bits": 3, "dtype": torch.float64},
    "offset": {"bits": 4, "offset": 1000.0},
    "2 copies": {"bits": 1, "copies": 2},
}
"""Settings of rows. Those that differ only in bits are left out for layers without bits, and 2 copies for all but norms."""
ARGUMENTS = {"Threshold": (0.1, 20.0), "Pointwise": (torch.atan,)}
"""The arguments of activation modules that need some."""


def questions():
    """Yield (key, function that returns the answer)."""
    for row in ROWS:
        for name, setting in SETTINGS.items():
            if (row.has_bits or name != "8 bits") and (row.is_norm or name != "2 copies"):
                yield f"layer/{row.id}/{name}", partial(_row, row, **setting)
    for kind in ("rotated", "uniform"):
        for bits in range(1, 9):
            yield f"quantizer/{kind}, {bits} bits", partial(_quantizer, kind, bits)
    for sample in ACTIVATIONS:
        for bits in (1, 2, 3):
            yield f"activation/{sample.id}/{bits} bits", partial(_activation, sample, bits=bits)
        for dtype in (torch.bfloat16, torch.float64):
            yield f"activation/{sample.id}/{dtype}", partial(_activation, sample, dtype)
    for name in [*functions.modules(), "Pointwise"]:
        yield f"activation module/{name}", partial(_module, name)
    known = {row.id for row in EVERY} | {sample.id for sample in ACTIVATIONS}
    for name in CASES:
        if name.removesuffix(", two copies") not in known:
            yield f"function/{name}", partial(_case, name)


def _row(row, bits, dtype=torch.float32, offset=0.0, **options):
    module, _ = row.pair(bits, dtype=dtype, **options)
    return _results(module, row.inputs(dtype=dtype, offset=offset))


def _quantizer(kind, bits):
    (row,) = (row for row in first_of_each(ROWS) if row.name == "Linear")
    found = {}
    for group_size in (32, 64, 256):
        module, _ = row.pair_with(Quantizer(bits, group_size, kind=kind))
        found[f"groups of {group_size}"] = _results(module, row.inputs())
    return found


def _activation(sample, dtype=torch.float32, **options):
    x = normal((6, 40), dtype)
    found = _results(Called(partial(sample, **options)), [x])
    if sample.inplace:
        found["in place"] = sample(x.clone(), inplace=True, **options)
    return found


def _module(name):
    module = getattr(fewbit.nn, name)(*ARGUMENTS.get(name, ()))
    return _results(module, [normal((6, 40))]) | {"text": repr(module)}


def _case(name):
    case = CASES[name]()
    return _results(case.ours, case.inputs)


def _results(module, inputs):
    torch.manual_seed(1)
    _, found = gradients(module, *inputs)
    answer = {"gradients": found, "next draw": torch.rand(1), "buffers": module.buffers()}
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    answer["bytes"] = bytes_by(module, *leaves)
    answer["results"] = module(*inputs)
    return answer | {"evaluated": module.eval()(*inputs)}
