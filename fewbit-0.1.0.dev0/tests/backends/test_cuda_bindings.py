"""The Python code and the bindings of the CUDA kernels give each kernel the right arguments.

The kernels are emulated on the CPU. A GPU is not needed, and `test_backends.py` compares the backends if there is one.
"""

import os
import subprocess
import sys

import pytest
from cuda_emulation import extension_in, needs_compiler
from emulated_bindings import CASES
from emulated_bindings import __file__ as script

pytest.importorskip("pybind11")
pytestmark = needs_compiler


@pytest.fixture(scope="session")
def extension(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # which all workers share
    return extension_in(folder)


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_get_the_right_arguments(extension, name):
    command = [sys.executable, script, str(extension), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
