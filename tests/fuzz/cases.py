"""The number of cases that each fuzz test runs: FEWBIT_FUZZ_CASES, by default 10,000."""

import os

CASES = int(os.environ.get("FEWBIT_FUZZ_CASES", 10_000))
