"""The functions of torch.nn.functional as they were when fewbit was imported.

If a user's wrapper of one calls the original, fewbit's function, which intercepts that call, must not call the wrapper.
"""

from __future__ import annotations

from types import ModuleType

import torch

functional = ModuleType(torch.nn.functional.__name__, torch.nn.functional.__doc__)
vars(functional).update(vars(torch.nn.functional))
