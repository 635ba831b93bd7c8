"""Python code in a process of its own, for tests of what is imported."""

import subprocess
import sys


def run(code: str) -> str:
    """Return what the code prints. It must succeed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
