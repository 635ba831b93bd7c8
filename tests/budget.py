"""The budget of the fast tier: a test that takes more than half a second of processor time fails.

``pytest --budget``, and so ``make test``, keeps to it. A test over the budget is run again, because its first run may have paid
for what later tests find done, such as imports and compiled Numba functions, or may have been disturbed. It fails if no run
keeps to the budget. Put such a test into another tier (tests/tiers.py), make it cheaper, or give it a line in ALLOWED.
"""

import resource
import time

import pytest
import tiers
from _pytest.runner import runtestprotocol

SECONDS = 0.5
"""The budget of a test, its own fixtures included, on a processor that counts to COUNT in COUNTING seconds."""
COUNT, COUNTING = 1_000_000, 0.02
TOLERANCE = 1.5
"""A test fails above this multiple of its budget: the same work takes longer while other processes fill the caches."""
RUNS = 3
"""The number of runs of a test that does not keep to the budget."""
FIXTURE_SECONDS = 5.0
"""The budget of a fixture that several tests share. It may be the first to import or compile something."""
ALLOWED = {
    "tests/functions/test_callables.py::test_refusals_name_the_point_in_one_line": (
        3.0,
        "a search for poles",
    ),
    "tests/functions/test_derivatives.py::test_what_cannot_be_promised_is_refused_with_the_place": (
        3.0,
        "a search for poles",
    ),
    "tests/functions/test_functions.py::test_far_tails_keep_their_digits": (
        2.5,
        "50-digit arithmetic",
    ),
    "tests/functions/test_functions.py::test_value_and_derivative_match_high_precision": (
        2.5,
        "50-digit arithmetic",
    ),
    "tests/runtime/test_quantizer.py::test_every_small_size": (2.0, "the oracle is plain Python"),
    "tests/runtime/test_quantizer.py::test_group_sizes": (2.0, "the oracle is plain Python"),
    "tests/runtime/test_quantizer.py::test_every_width": (2.0, "the oracle is plain Python"),
    "tests/runtime/test_quantizer.py::test_groups_that_run_across_samples": (
        2.0,
        "the oracle is plain Python",
    ),
    "tests/runtime/test_quantizer_vectors.py::test_normalized_on_load": (
        2.0,
        "the oracle is plain Python",
    ),
    "tests/runtime/test_quantizer_vectors.py::test_mapped_on_store": (
        2.0,
        "the oracle is plain Python",
    ),
    "tests/backends/test_kernels.py::test_results_past_the_caches": (1.5, "more than caches hold"),
    "tests/solver/test_partition.py::test_pruning_changes_nothing": (
        1.0,
        "an exhaustive solver as the oracle",
    ),
    "tests/solver/test_solve.py::test_the_error_on_any_domain_by_adaptive_quadrature": (
        1.5,
        "adaptive quadrature",
    ),
    "tests/solver/test_weight.py::test_a_table_for_samples_serves_the_density_they_came_from": (
        1.5,
        "adaptive quadrature",
    ),
}
"""{the name of a test, such as "tests/table/test_table.py::test_html": (its budget in seconds, the reason)}."""


def processor_seconds():
    """Return the processor time that this process and its finished children have used."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def slowness():
    """Return how many times longer than the budget assumes this processor takes for the same work, at least 1."""
    started = time.process_time()
    for _ in range(COUNT):
        pass
    return max(1.0, (time.process_time() - started) / COUNTING)


class Budget:
    """The plugin that measures and limits the processor time of every test of the fast tier."""

    def __init__(self):
        self.shared = 0.0  # seconds spent in shared fixtures since the start of the test

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        """Run a test, again if it is over its budget, and report the last run."""
        if not tiers.is_fast(item):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        limit, _ = ALLOWED.get(item.nodeid.partition("[")[0], (SECONDS, "the usual budget"))
        for _ in range(RUNS):
            reports, seconds = self._run(item, nextitem)
            if seconds <= limit or not all(report.passed for report in reports):
                break
            if seconds <= (slow_limit := limit * slowness() * TOLERANCE):
                break
            item._initrequest()
        else:
            _fail(reports, f"{item.nodeid} {_over(seconds, slow_limit)}")
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run(self, item, nextitem):
        """Return the reports of a run, and its processor time without that of shared fixtures."""
        self.shared, started = 0.0, processor_seconds()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        return reports, processor_seconds() - started - self.shared

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        """Leave shared fixtures out of the tests' time, and limit them by themselves."""
        if fixturedef.scope == "function":
            return (yield)
        before, started = self.shared, processor_seconds()
        result = yield
        seconds = processor_seconds() - started
        self.shared = (
            before + seconds
        )  # shared fixtures that this one uses have been added meanwhile
        limit = FIXTURE_SECONDS * TOLERANCE
        if seconds > limit and seconds > (limit := limit * slowness()):
            message = f"the fixture {fixturedef.argname} {_over(seconds, limit)}"
            pytest.fail(message, pytrace=False)
        return result


def _over(seconds, limit):
    return f"took {seconds:.2f} s of processor time, expected at most {limit:.2f} (tests/budget.py)"


def _fail(reports, message):
    """Make the report of a test's call say that it failed."""
    report = next(report for report in reports if report.when == "call")
    report.outcome, report.longrepr = "failed", message
