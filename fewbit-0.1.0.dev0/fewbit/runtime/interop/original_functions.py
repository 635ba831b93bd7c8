"""The functions of torch.nn.functional as they were when fewbit was imported.

A user may replace a function of torch by a wrapper that calls the original. In a converted model, fewbit intercepts
that call of the original and runs its own function instead. If fewbit's function then called the wrapper, the wrapper
would call fewbit's function again, without end. fewbit's functions therefore call those in `functional`.
"""

from __future__ import annotations

from types import ModuleType

import torch

functional = ModuleType(torch.nn.functional.__name__, torch.nn.functional.__doc__)
vars(functional).update(vars(torch.nn.functional))
