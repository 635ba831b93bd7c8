"""The Python functions of fewbit that run in one call of a layer, which cost the host's time for each small tensor."""

import sys
from pathlib import Path

import pytest
import torch
from quantized import compiled
from samples import normal

import fewbit

FOLDER = str(Path(fewbit.__file__).parent)
IS_COMPILING = torch.compiler.is_compiling.__code__
MOST = 20


def calls_of(run):
    """Return the names of fewbit's Python functions that `run` calls, and of the checks for a compiler that these make."""
    names = []

    def profile(frame, event, _):
        is_ours = frame.f_code.co_filename.startswith(FOLDER)
        if event == "call" and (is_ours or frame.f_code is IS_COMPILING):
            names.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return names


@compiled
@pytest.mark.parametrize("function", [fewbit.functional.silu, fewbit.functional.gelu])
def test_an_activation(function):
    x = normal((16, 64)).requires_grad_()
    grad = torch.ones_like(x)
    for _ in range(2):  # the first call makes what later calls find
        calls = calls_of(lambda: function(x, bits=3).backward(grad))
    assert "backward" in calls
    assert len(calls) <= MOST, calls
