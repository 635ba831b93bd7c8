"""What all tests of the compiler mode need."""

import pytest
import torch


@pytest.fixture(autouse=True)
def reset():
    """Let each test compile anew."""
    torch._dynamo.reset()
