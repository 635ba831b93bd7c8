"""The code that uses private or undocumented interfaces of torch, one file for each."""

import torch

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
"""The version of torch, such as (2, 13)."""
if VERSION < (2, 11):
    raise ImportError(
        f"fewbit needs torch 2.11 or newer, got torch {torch.__version__}: pip install --upgrade torch"
    )
