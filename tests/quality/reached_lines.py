"""Which tests reach which lines: one run of the tests under coverage.py, read back as a table.

As a pytest plugin (``-p tests.quality.reached_lines``) this module writes the outcome and the duration of every test to
the file that the environment names in ``TEST_TIMES``.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
from coverage.numbits import numbits_to_nums

CONFIG = """[run]
source = {folders}
data_file = {data}
parallel = true
relative_files = true
core = ctrace
patch = subprocess
context = ${{PYTEST_CURRENT_TEST-}}
disable_warnings = no-data-collected, module-not-imported, module-not-measured
"""
_times: dict[str, float] = {}
_failed: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the phases of a test; a test that fails or is skipped is of no use to a search."""
    _times[report.nodeid] = _times.get(report.nodeid, 0.0) + report.duration
    if report.outcome != "passed":
        _failed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the table, in the process that sees all reports."""
    if not hasattr(session.config, "workerinput") and "TEST_TIMES" in os.environ:
        passed = {test: round(seconds, 3) for test, seconds in _times.items() if test not in _failed}
        Path(os.environ["TEST_TIMES"]).write_text(json.dumps({"passed": passed, "failed": sorted(_failed)}))


@dataclass(frozen=True, slots=True)
class Reached:
    """Tests that passed, in the order in which they ran, and those that reach a line.

    Parameters
    ----------
    seconds
        Duration of every test that passed, by its node id, s.
    tests
        The node ids that reach a line, by file and line number.
    """

    seconds: dict[str, float]
    tests: dict[str, dict[int, frozenset[str]]]

    def of(self, path: str, first: int, last: int) -> set[str]:
        """Return the tests that reach a line of a file between two lines, both of them included."""
        lines = self.tests.get(path, {})
        return {test for line, tests in lines.items() if first <= line <= last for test in tests}


def measure(root: Path, folders: list[str], work: Path, workers: int, selection: list[str]) -> None:
    """Run the tests of a checkout under coverage and leave the tables in a folder."""
    config = work / "coverage.cfg"
    config.write_text(CONFIG.format(folders=", ".join(folders), data=work / "reached"))
    options = ["-n", str(workers), "-q", "-p", "tests.quality.reached_lines", "--cov", f"--cov-config={config}"]
    options += ["--cov-context=test", "--cov-report=", "--timeout=300", *selection]
    environment = {**os.environ, "TEST_TIMES": str(work / "times.json")}
    subprocess.run([sys.executable, "-m", "pytest", *options], cwd=root, env=environment, check=False)


def read(root: Path, work: Path) -> Reached:
    """Return what :func:`measure` left in a folder about a checkout."""
    seconds = json.loads((work / "times.json").read_text())["passed"]
    tests: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for data in sorted(work.glob("reached*")):
        with sqlite3.connect(data) as database:
            rows = database.execute(
                "select path, context, numbits from line_bits join file on file.id = file_id"
                " join context on context.id = context_id"
            )
            for file, context, numbits in rows:
                path = file.removeprefix(f"{root}/")
                test = _test(context)
                if test in seconds:
                    for line in numbits_to_nums(numbits):
                        tests[path][line].add(test)
    frozen = {path: {line: frozenset(found) for line, found in lines.items()} for path, lines in tests.items()}
    return Reached(seconds, frozen)


def _test(context: str) -> str:
    """Return the node id within a context: 'node id|phase', or 'node id (phase)' in another process."""
    test, _, phase = context.rpartition("|")
    return test if phase in {"setup", "run", "teardown"} else context.rpartition(" (")[0]
