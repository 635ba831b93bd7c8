"""The code that uses private or undocumented interfaces of torch, or replaces interfaces that torch lacks.

For each interface there is one file, which gives the reason, and a test.

If a new version of torch needs changes in fewbit, the changes should be in this folder alone. The folder may import
`fewbit.errors`. The code here knows nothing of tables, quantizers or layers.
"""

import torch

LEAST_VERSION = "2.11"

if torch.__version__ < LEAST_VERSION:
    raise ImportError(
        f"fewbit needs torch {LEAST_VERSION} or newer, got torch {torch.__version__}: pip install --upgrade torch"
    )
