"""torch.nn.functional as it was when fewbit was imported.

Somebody may put a function of their own in the place of one of torch's, that calls torch's. Where a model's functions are
compressed, torch's then becomes ours, which must not call theirs once more.
"""

from __future__ import annotations

from types import ModuleType

import torch

functional = ModuleType(torch.nn.functional.__name__, torch.nn.functional.__doc__)
vars(functional).update(vars(torch.nn.functional))
