"""The code that uses private or undocumented interfaces of torch, or replaces interfaces that torch lacks.

For each interface there is one file, which gives the reason, and a test.

If a new version of torch needs changes in fewbit, the changes should be in this folder alone. The folder may import
`fewbit.errors`. The code here knows nothing of tables, quantizers or layers.
"""

import torch

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
"""The version of torch, such as (2, 13)."""
if VERSION < (2, 11):
    raise ImportError(
        f"fewbit needs torch 2.11 or newer, got torch {torch.__version__}: pip install --upgrade torch"
    )
