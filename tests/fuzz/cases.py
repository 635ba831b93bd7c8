"""How many cases the fuzz tests draw."""

import os

CASES = int(os.environ.get("FEWBIT_FUZZ_CASES", 10_000))
