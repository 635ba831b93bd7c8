"""The functions of torch.nn.functional as they were when fewbit was imported.

A user may replace a function of torch by a wrapper that calls the original. If fewbit compresses the functions that a
model calls, fewbit's function runs in place of the original within the wrapper. fewbit's function must then call the
original, and not the wrapper again.
"""

from __future__ import annotations

from types import ModuleType

import torch

functional = ModuleType(torch.nn.functional.__name__, torch.nn.functional.__doc__)
vars(functional).update(vars(torch.nn.functional))
