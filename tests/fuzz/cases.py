"""How many cases every fuzz test runs."""

import os

CASES = int(os.environ.get("FEWBIT_FUZZ_CASES", 10_000))
