"""The functions of torch.nn.functional as they were when fewbit was imported.

If a user replaces one by a wrapper that calls the original, fewbit's function, which intercepts that call in a
converted model, must not call the wrapper again.
"""

from __future__ import annotations

from types import ModuleType

import torch

functional = ModuleType(torch.nn.functional.__name__, torch.nn.functional.__doc__)
vars(functional).update(vars(torch.nn.functional))
