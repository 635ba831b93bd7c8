"""`fewbit.runtime.interop` refuses versions of torch that are too old."""

import runpy

import pytest
import torch
from torch.torch_version import TorchVersion

from fewbit.runtime import interop


def test_older_versions_of_torch_are_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.9.1+cu128"))
    with pytest.raises(ImportError, match=r"needs torch 2\.11 or newer, got torch 2\.9\.1"):
        runpy.run_path(interop.__file__)
