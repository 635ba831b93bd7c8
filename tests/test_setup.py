"""Building: what setup.py leaves in the tree."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

SETUP = Path(__file__).parent.parent / "setup.py"


@pytest.mark.skipif(not SETUP.exists(), reason="not a checkout")
def test_kernels_of_an_earlier_build_do_not_stay(tmp_path):
    """They would be packed into a wheel, or imported, where none were asked for."""
    pytest.importorskip("setuptools")
    shutil.copy(SETUP, tmp_path)
    for package in ("fewbit", "tables"):
        (tmp_path / package).mkdir()
    built = "_kernels" + sysconfig.get_config_var("EXT_SUFFIX")
    old = [tmp_path / place / "fewbit" / built for place in ("lib", ".")]
    for each in old:
        each.parent.mkdir(parents=True, exist_ok=True)
        each.touch()
    command = [sys.executable, "setup.py", "build_ext", "--inplace", "--build-lib", "lib"]
    environment = {**os.environ, "FEWBIT_KERNELS": "0"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "installed without compiled kernels (FEWBIT_KERNELS=0)" in done.stderr
    assert not any(each.exists() for each in old)
