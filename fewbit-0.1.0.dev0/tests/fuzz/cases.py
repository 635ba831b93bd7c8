"""The cases of the fuzz tests: how many there are, and which seeds each part of a test takes.

FEWBIT_FUZZ_CASES sets the number of cases of each fuzz test, 10,000 if unset. FEWBIT_FUZZ_FIRST sets the first seed, 0 if
unset, so that a run with another value tries new cases.
"""

import os

CASES = int(os.environ.get("FEWBIT_FUZZ_CASES", 10_000))
FIRST = int(os.environ.get("FEWBIT_FUZZ_FIRST", 0))
CHUNKS = 20
"""The number of parts that each fuzz test is split into, so that several processes can run it."""


def seeds(chunk: int, cases: int = CASES) -> range:
    """Return the seeds of one of CHUNKS parts of the cases."""
    return range(FIRST + chunk, FIRST + max(cases, CHUNKS), CHUNKS)
