"""The cases of the fuzz tests: how many there are, and which seeds each part of a test takes.

FEWBIT_FUZZ_CASES sets the number of cases of each fuzz test, 10,000 if unset. FEWBIT_FUZZ_FIRST sets the first seed, 0 if
unset, so that a run with another value tries new cases.
"""

import os
import time

CASES = int(os.environ.get("FEWBIT_FUZZ_CASES", 10_000))
FIRST = int(os.environ.get("FEWBIT_FUZZ_FIRST", 0))
CHUNKS = 20
"""The number of parts that each fuzz test is split into, so that several processes can run it."""


def seeds(chunk: int, cases: int = CASES) -> range:
    """Return the seeds of one of CHUNKS parts of the cases."""
    return range(FIRST + chunk, FIRST + max(cases, CHUNKS), CHUNKS)


def run(check, seeds, seconds: float = 30.0) -> list:
    """Return check(seed) of each seed. A failure names its seed, and a case that takes longer than `seconds` is one."""
    results = []
    for seed in seeds:
        started = time.perf_counter()
        try:
            results.append(check(seed))
            assert time.perf_counter() - started < seconds
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    return results
