"""Run tests of each mode of fewbit with the torch of this environment, and store how many passed.

`make versions` runs this file in environments with the oldest, the default and the newest torch. Arguments go to pytest. The
results are in benchmarks/results/torch_versions.json, from which the last call makes the table of docs/get-started/install.md.
The exit status is 1 if a test failed.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "torch_versions.json"
PAGE = ROOT / "docs" / "get-started" / "install.md"
BEGIN, END = "<!-- the table of tests/torch_versions.py -->\n", "<!-- end of the table -->\n"

MODES = {  # the arguments for pytest; the last one is the file of the tests
    "eager": ["tests/layers/test_layer_properties.py"],
    "`fewbit.compile`": [
        "-m",
        "inductor and not slow",
        "tests/compiler/test_compiled_against_eager.py",
    ],
    "checkpoints": ["tests/layers/test_checkpointing.py"],
    "policies": ["tests/policies/test_any_policy.py"],
}


def outcomes(report: Path) -> dict[str, str]:
    """Return "passed", "failed" or "skipped" for each test in a report of pytest in XML."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}"
        children = {child.tag for child in case}
        failed = children & {"failure", "error"} or found.get(name) == "failed"
        found[name] = "failed" if failed else "skipped" if "skipped" in children else "passed"
    return found


def counted(found: dict[str, str]) -> dict:
    """Return how many tests passed and were skipped, and which failed."""
    ended = [*found.values()]
    return {
        "passed": ended.count("passed"),
        "skipped": ended.count("skipped"),
        "failed": sorted(name for name, outcome in found.items() if outcome == "failed"),
    }


def run(mode: str, arguments: list[str]) -> dict:
    """Run the tests of a mode, and return their arguments and counts."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    print(f"torch {version('torch')}: {' '.join(MODES[mode])}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += [f"--junit-xml={report}", *arguments, *MODES[mode]]
        subprocess.run(command, cwd=ROOT, env=environment)
        return {"tests": MODES[mode], **counted(outcomes(report))}


def table(results: dict) -> str:
    """Return the results as a table in Markdown."""

    def cell(row):
        failed = f", {len(row['failed'])} failed" if row["failed"] else ""
        return f"{row['passed']:,} passed{failed}"

    versions = sorted(results, key=lambda name: [int(part) for part in name.split(".")])
    lines = [
        f"| mode | tests | {' | '.join(f'torch {name}' for name in versions)} |",
        f"|---|---|{'---|' * len(versions)}",
    ]
    for mode, (*_, tests) in MODES.items():
        cells = " | ".join(cell(results[name]["modes"][mode]) for name in versions)
        lines.append(f"| {mode} | `{tests}` | {cells} |")
    return "\n".join(lines) + "\n"


def with_table(page: str, results: dict) -> str:
    """Return the text of the page with the table of these results."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(results)}\n{END}{after}"


def main():
    from fewbit.files import write_atomic

    name = version("torch").partition("+")[0]
    rows = {mode: run(mode, sys.argv[1:]) for mode in MODES}
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    about = {"python": platform.python_version(), "processor": platform.machine()}
    results[name] = {**about, "build": version("torch"), "modes": rows}
    write_atomic(RESULTS, json.dumps(results, indent=1) + "\n", force=True)
    write_atomic(PAGE, with_table(PAGE.read_text(), results), force=True)
    failed = [test for row in rows.values() for test in row["failed"]]
    print(table({name: results[name]}), *dict.fromkeys(failed), sep="\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
