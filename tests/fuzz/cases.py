"""How many cases each fuzz test tries."""

import os

CASES = int(os.environ.get("FEWBIT_FUZZ_CASES", 10_000))
