"""Python code in a new process, for tests of imports."""

import subprocess
import sys


def run(code: str) -> str:
    """Run code in a new process, which must succeed, and return its output."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
