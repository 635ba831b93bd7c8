"""torch.nn.functional as it was when fewbit was imported.

A user may monkey-patch a function of torch with a wrapper that calls the original. If the model's functions are
compressed, that inner call is replaced by fewbit's function, which must call the original and not the wrapper again.
"""

from __future__ import annotations

from types import ModuleType

import torch

functional = ModuleType(torch.nn.functional.__name__, torch.nn.functional.__doc__)
vars(functional).update(vars(torch.nn.functional))
