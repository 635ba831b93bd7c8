"""The table of torch's versions: the results, the page that has them, and how they are counted."""

import json

import pytest
import torch_versions as versions

RESULTS = json.loads(versions.RESULTS.read_text())
REPORT = """<testsuites><testsuite>
<testcase classname="tests.layers.test_gated" name="test_a[1]" time="0.1" />
<testcase classname="tests.layers.test_checkpointing" name="test_b"><failure message="no" /></testcase>
<testcase classname="tests.layers.test_checkpointing" name="test_b"><error message="teardown" /></testcase>
<testcase classname="tests.policies.test_budget" name="test_c"><skipped message="no GPU" /></testcase>
<testcase classname="tests.policies.test_budget" name="test_d"><error message="no" /></testcase>
<testcase classname="tests.compiler.test_sizes" name="test_e" />
</testsuite></testsuites>"""


def test_tests_are_counted(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert versions.counted(versions.outcomes(report)) == {
        "passed": 2,
        "skipped": 1,
        "failed": [
            "tests/layers/test_checkpointing.py::test_b",
            "tests/policies/test_budget.py::test_d",
        ],
    }


def test_the_page_has_the_results():
    page = versions.PAGE.read_text()
    assert page == versions.with_table(page, RESULTS)
    for name, row in RESULTS.items():
        assert f"torch {name} |" in page
        for mode in row["modes"].values():
            assert f"{mode['passed']:,} passed" in page


@pytest.mark.parametrize("name", RESULTS)
def test_every_mode_was_tested(name):
    found = RESULTS[name]["modes"]
    assert {mode: row["tests"] for mode, row in found.items()} == versions.MODES
    for row in found.values():
        assert row["passed"] > 0 and not row["failed"]
        assert (versions.ROOT / row["tests"][-1]).exists()
