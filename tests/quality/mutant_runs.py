"""Edits of a checkout and the tests that find them, each edit in a copy of its own, several copies at once."""

from __future__ import annotations

import ast
import contextlib
import difflib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue

from tests.quality import reached_lines
from tests.quality.reached_lines import Reached

START_SECONDS = 60  # what importing and collecting may take on a busy machine
TABLES = ("tests/test_pins.py", "tests/harness/test_pinned.py", "tests/test_records.py")  # read what imports make
PATIENCE = 8  # an edit whose tests take so many times as long as they should runs forever


@dataclass(frozen=True, slots=True)
class Edit:
    """Lines of a file and what stands in their place; lines count from 1."""

    path: str
    line: int
    before: str
    after: str
    first: int
    last: int

    @property
    def key(self) -> str:
        """A name that stays while the edited lines stay, wherever they move to."""
        return hashlib.sha256(f"{Path(self.path).name}\n{self.before}\n{self.after}".encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether the tests found an edit, by which one, and how long that took."""

    edit: Edit
    found: bool
    by: str
    seconds: float


def edit(path: str, source: str, mutated: str) -> Edit:
    """Return what tells two texts of a file apart, and the span of the function around it."""
    before = source.split("\n")
    after = mutated.split("\n")
    changes = [code for code in difflib.SequenceMatcher(None, before, after, False).get_opcodes() if code[0] != "equal"]
    start = changes[0][1]
    stop = max(change[2] for change in changes)
    stop_after = max(change[4] for change in changes)
    first, last = _function(source, start + 1, max(stop, start + 1))
    return Edit(path, start + 1, "\n".join(before[start:stop]), "\n".join(after[start:stop_after]), first, last)


def _function(source: str, line: int, end: int) -> tuple[int, int]:
    """Return the lines of the innermost function around some lines, without its first; else the lines themselves."""
    around = [
        (node.body[0].lineno, node.end_lineno or 0)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.lineno <= line and end <= (node.end_lineno or 0)
    ]
    return max(around) if around else (line, end)


def apply(change: Edit, root: Path) -> str:
    """Make an edit in a checkout and return the text that stood in the file."""
    file = root / change.path
    source = file.read_text()
    lines = source.split("\n")
    height = change.before.count("\n") + 1 if change.before else 0
    if "\n".join(lines[change.line - 1 : change.line - 1 + height]) != change.before:
        raise ValueError(f"line {change.line} of {change.path} is not {change.before!r}")
    lines[change.line - 1 : change.line - 1 + height] = change.after.split("\n") if change.after else []
    file.write_text("\n".join(lines))
    return source


def rounds(change: Edit, reached: Reached) -> list[list[str]]:
    """Return the tests of an edit in the order in which they are tried: first those that reach it, file by file.

    The files that are named as the edited one come first, then the quickest ones. The second round has the other tests
    of these files, because a fixture or a memory of the first tests may hide from coverage that they use the function.
    What is worked out by an import belongs to no test: then the tests that reach the module are tried, and those that
    read tables of many modules.
    """
    direct = reached.of(change.path, change.first, change.last)
    if not direct:
        tables = {test for test in reached.seconds if test.startswith(TABLES)}
        direct = reached.of(change.path, 1, 10**9) | tables
    files: dict[str, list[str]] = defaultdict(list)
    for test in reached.seconds:
        files[test.partition("::")[0]].append(test)
    mine = [name for name in files if any(test in direct for test in files[name])]
    cost = {name: sum(reached.seconds[test] for test in files[name] if test in direct) for name in mine}
    mine.sort(key=lambda name: (-_kinship(name, change.path), cost[name]))
    first = [test for name in mine for test in files[name] if test in direct]
    second = [test for name in mine for test in files[name] if test not in direct]
    return [tests for tests in (first, second) if tests]


def _kinship(test: str, path: str) -> int:
    """Count the words that the path of a test shares with that of a module."""
    words = set(Path(path).with_suffix("").parts) - {"fa3verify", "fa3_simulator", "__init__"}
    return len(words & set(Path(test.replace("test_", "")).with_suffix("").parts))


def judge(root: Path, edits: list[Edit], work: Path, workers: int, folders: list[str]) -> list[Outcome]:
    """Return the outcome of every edit, in the order given; what a folder of an earlier run knows is not run again.

    A test that found an edit is run once more without one, and counts for nothing if it fails there too.
    """
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "times.json").exists():
        reached_lines.measure(root, folders, work, workers, ["-m", "not optional and not gpu and not nightly"])
    reached = reached_lines.read(root, work)
    copies = [_copy(root, work / f"copy{number}") for number in range(workers)]
    outcomes = _outcomes(edits, work, copies, reached)
    blamed = sorted({outcome.by.partition(" ")[2] for outcome in outcomes} & set(reached.seconds))
    void = fail_without_an_edit(blamed, copies[0])
    if not void:
        return outcomes
    sound = {test: seconds for test, seconds in reached.seconds.items() if test not in void}
    again = [outcome.edit for outcome in outcomes if outcome.by.partition(" ")[2] in void]
    _forget({edit.key for edit in again}, work)
    _outcomes(again, work, copies, replace(reached, seconds=sound))
    return _outcomes(edits, work, copies, reached)


def _forget(keys: set[str], work: Path) -> None:
    """Take edits out of the log of a folder."""
    log = work / "outcomes.jsonl"
    kept = [line for line in log.read_text().splitlines() if json.loads(line)["key"] not in keys]
    log.write_text("".join(line + "\n" for line in kept))


def _outcomes(edits: list[Edit], work: Path, copies: list[Path], reached: Reached) -> list[Outcome]:
    """Return the outcomes of edits; each is written to the log of a folder as soon as it is known."""
    free: SimpleQueue[Path] = SimpleQueue()
    for copy in copies:
        free.put(copy)
    log = work / "outcomes.jsonl"
    log.touch()
    known = {line["key"]: line["outcome"] for line in map(json.loads, log.read_text().splitlines())}

    def one(change: Edit) -> Outcome:
        if change.key in known:
            return Outcome(change, **known[change.key])
        copy = free.get()
        try:
            outcome = run(change, copy, reached)
        finally:
            free.put(copy)
        stored = {name: value for name, value in asdict(outcome).items() if name != "edit"}
        with log.open("a") as file:
            file.write(json.dumps({"key": change.key, "outcome": stored}) + "\n")
        return outcome

    with ThreadPoolExecutor(len(copies)) as pool:
        return list(pool.map(one, edits))


def fail_without_an_edit(tests: list[str], copy: Path) -> set[str]:
    """Return those of some tests that fail in a copy of the code as it stands: what they find is no finding."""
    lines = _printed(tests, copy, 3600, {}, ["--maxfail=1000000"])[1]
    return {line.split(" - ")[0].partition(" ")[2] for line in lines}


def _copy(root: Path, copy: Path) -> Path:
    """Copy what a checkout tracks, with the compiled functions beside it."""
    shutil.rmtree(copy, ignore_errors=True)
    ignored = shutil.ignore_patterns(".git", ".venv", "out", "carry", "peers", ".whl", ".pytest_cache", ".ruff_cache")
    shutil.copytree(root, copy, ignore=ignored)
    return copy


def run(change: Edit, copy: Path, reached: Reached) -> Outcome:
    """Make an edit in a copy, run its tests until one fails, and undo it."""
    started = time.monotonic()
    source = apply(change, copy)
    compiled = copy.parent / f"{copy.name}.compiled"
    shutil.rmtree(compiled, ignore_errors=True)
    environment = {"NUMBA_CACHE_DIR": str(compiled)} if "njit" in source else {}  # numba's cache sees one file only
    by = ""
    try:
        for tests in rounds(change, reached):
            by = by or _failure(tests, copy, sum(reached.seconds[test] for test in tests), environment)
    finally:
        (copy / change.path).write_text(source)
    return Outcome(change, bool(by), by, round(time.monotonic() - started, 1))


def _failure(tests: list[str], copy: Path, seconds: float, extra: dict[str, str]) -> str:
    """Return the first test that fails, or why none could be run; nothing where all pass."""
    code, lines = _printed(tests, copy, START_SECONDS + PATIENCE * seconds, extra, ["-x"])
    if code is None:
        return "runs forever"
    return "" if code == 0 else lines[0].split(" - ")[0] if lines else f"pytest ends with {code}"


def _printed(
    tests: list[str], copy: Path, limit: float, extra: dict[str, str], options: list[str]
) -> tuple[int | None, list[str]]:
    """Run tests in a copy; return pytest's exit code, none beyond a limit in s, and its lines about failures."""
    listed = copy.parent / f"{copy.name}.tests"
    listed.write_text("\n".join(tests) + "\n")
    printed = copy.parent / f"{copy.name}.printed"
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=no", *options]
    command += ["-p", "no:cacheprovider", "--timeout=0"]
    command += ["-o", "addopts=--import-mode=importlib --doctest-modules --benchmark-disable -rfE", f"@{listed}"]
    paths = [str(copy), *(str(copy / folder) for folder in ("kernels", "simulator", "reference", "reports"))]
    search = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **extra, "PYTHONPATH": search, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    with printed.open("w") as output:
        tested = subprocess.Popen(
            command, cwd=copy, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = tested.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(tested.pid, signal.SIGKILL)
            tested.wait()
    return code, [line for line in printed.read_text().splitlines() if line.startswith(("FAILED ", "ERROR "))]
