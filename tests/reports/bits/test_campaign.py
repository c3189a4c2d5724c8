"""The campaign of bits as far as it goes without a GPU: committed tables, planted faults, work, budgets, going on."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from concurrent.futures import Executor, Future
from pathlib import Path

import pytest

pytest.importorskip("triton")

from fa3_kernels.audit.evidence import launch_keys
from fa3_kernels.faults.table import Fault
from fa3_kernels.plan.choose import config_of
from fa3_kernels.plan.families import OURS, traits_of
from fa3_reports.bits import campaign, forward, paged_cases
from fa3_reports.bits.campaign import PARTS, Settings
from fa3_reports.bits.forward import E4M3_FAULTS, FAULTS, batches, control_case, differing, twin_bits
from fa3_reports.bits.forward_cases import cases, operands
from fa3_reports.bits.table import CaseTable, Wrong, read, write
from fa3verify.campaign.pool import TaskError, WorkerLost
from fa3verify.files import PACKED, read_bytes

pytestmark = pytest.mark.optional
REPORTS = Path(__file__).parents[3] / "reports"
TABLES = {table.file: table for part in PARTS.values() for table in part.tables}
COMMITTED = sorted(
    path.with_name(file) for file in TABLES for name in (file, f"{file}{PACKED}") for path in REPORTS.rglob(name)
)


def is_newest(case: paged_cases.Case) -> bool:
    problem = case.problem
    head_dim, _ = traits_of(OURS).compiled_head_dims(problem)
    return head_dim == 160 or (problem.dtype == "e4m3" and head_dim == 96)


def test_every_table_is_committed_with_every_case() -> None:
    """Of one GPU or the other; a GPU that was not lent since keeps the rows of launches that are what they were.

    What came since, and what time on a GPU ran out for, are launches over caches at head_dim 160, and of e4m3 at 96.
    """
    for file, table in TABLES.items():
        wanted = {table.key_of(case) for case in table.cases()}
        newest = {table.key_of(case) for case in table.cases() if file == "gluon_paged_bits.csv" and is_newest(case)}
        found = [set(read(path, table)) for path in COMMITTED if path.name == file]
        assert all(rows <= wanted for rows in found), file
        assert any(rows >= wanted - newest for rows in found), file


@pytest.mark.parametrize("committed", COMMITTED, ids=lambda path: "/".join(path.parts[-3:]))
def test_committed_tables_have_no_other_case_and_break_no_rule(committed: Path, tmp_path: Path) -> None:
    table = TABLES[committed.name]
    found, wanted = read(committed, table), {table.key_of(case) for case in table.cases()}
    assert len(wanted) == len(table.cases())
    assert set(found) <= wanted
    assert not any(table.is_broken(row) for rows in found.values() for row in rows)
    write(tmp_path / table.file, table, found)
    assert sorted((tmp_path / table.file).read_bytes().splitlines()) == sorted(read_bytes(committed).splitlines())


def test_every_case_is_run_once():
    pieces = batches(cases(), 16)  # groups by what config_of returns
    assert Counter(map(id, cases())) == Counter(id(case) for piece in pieces for case in piece)


@pytest.mark.parametrize("feature", ["varlen", "splits", "activation", "padded"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "e4m3"])
def test_the_twin_computes_every_kind_of_case(dtype: str, feature: str) -> None:
    case = next(case for case in cases() if (case.feature, case.problem.dtype) == (feature, dtype))
    out, lse = twin_bits(case, operands(case))
    assert (out.shape, lse.shape) == (case.problem.out_shape, case.problem.lse_shape)


@pytest.mark.parametrize("dtype", ["fp16", "e4m3"])
def test_planted_faults_of_the_controls_change_bits(dtype):
    case = control_case(dtype)
    given = operands(case)
    sound = twin_bits(case, given)
    for fault in E4M3_FAULTS if dtype == "e4m3" else FAULTS:
        assert differing(twin_bits(case, given, Fault(fault)), sound)[0] > 0, fault
    assert config_of(case.problem, **case.choices).promotion_interval == (128 if dtype == "e4m3" else 0)


NUMBERS = CaseTable(
    "numbers.csv", ("dtype", "number", "n", "n_differing"), lambda: range(6), lambda x: ("fp16", x), print
)


def make(number: int) -> list[list]:
    """Rows of a made-up table, in a worker; these names are told to it by the case itself."""
    if number < 0:
        raise OSError("a broken kernel")
    return [["fp16", number, 10, 0]]


def lose(future: Future) -> None:
    """End a call as its worker ends, unless nobody waits for it."""
    if future.set_running_or_notify_cancel():
        future.set_exception(WorkerLost("no answer"))


class Pool(Executor):
    """Runs in this process; after the first ``done`` pieces of work a worker is lost, as one that hangs is."""

    def __init__(self, done: int) -> None:
        self.left = done

    def submit(self, fn, /, *args, **kwargs) -> Future:
        future: Future = Future()
        self.left -= 1
        try:
            if self.left >= 0:
                future.set_result(fn(*args, **kwargs))
            else:
                threading.Timer(0.2, lose, [future]).start()
        except Wrong as error:
            future.set_exception(TaskError(str(error)))
        return future


def fill(monkeypatch: pytest.MonkeyPatch, out: Path, cases: object, done: int, deadline: float = math.inf):
    """Fill the made-up table, as far as its workers come."""
    monkeypatch.setattr(campaign, "processes", lambda workers, limit_s: Pool(done))
    table = CaseTable("n.csv", NUMBERS.columns, lambda: cases, NUMBERS.key, make)
    return campaign.fill(table, Settings(out, ("fp16",)), deadline, lambda _: None)


def test_rows_are_kept_and_the_same_command_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(Wrong, match="a kernel hangs"):
        fill(monkeypatch, tmp_path, range(6), 2)
    assert (tmp_path / "n.csv").read_text().count("\n") == 3
    found = fill(monkeypatch, tmp_path, range(6), 4)  # the four others
    assert (found.left, found.totals()) == (0, {"n": 60, "n_differing": 0})
    assert [row[1] for row in found.rows] == list("012345")


def test_a_spent_budget_leaves_the_rest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = fill(monkeypatch, tmp_path, range(6), 0, deadline=0.0)
    assert (found.left, found.rows) == (6, [])


def test_a_kernel_that_raises_is_named_with_its_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(Wrong, match="-1: OSError: a broken kernel"):
        fill(monkeypatch, tmp_path, [-1], 1)


def test_a_control_that_differs_in_no_bit_and_a_case_that_does_are_findings() -> None:
    assert not forward.CONTROLS.is_broken(["fp16", "truncated_p", "10", "3", "10", "0"])
    assert forward.CONTROLS.is_broken(["fp16", "truncated_p", "10", "0", "10", "3"])
    assert TABLES["quantize_bits.csv"].is_broken(["x"] * 8 + ["10", "0", "10", "1"])


@pytest.mark.parametrize("name", ["forward", "paged", "backward"])
def test_rows_of_launches_that_changed_are_made_again(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``changed`` are the launches of one head_dim: rows of that head_dim are left, and no others."""
    monkeypatch.setattr(campaign, "query", lambda _: "an H200")
    part, source = PARTS[name], REPORTS / "h200" / "bits"
    of = json.loads((source / part.provenance).read_text())["evidence_of"]
    changed = frozenset(x for x in launch_keys(of) if "_d128_" in x)
    monkeypatch.setattr(campaign, "changed_since", lambda *_: changed)
    campaign.keep(part, source, tmp_path)
    table = part.tables[0]
    widths = [table.columns.index(x) for x in ("head_dim", "head_dim_v")]
    before, after = (
        Counter(max(int(row[i]) for i in widths) for rows in read(folder / table.file, table).values() for row in rows)
        for folder in (source, tmp_path)
    )
    assert before[128] > after[128] + 100
    assert all(before[width] == after[width] for width in (64, 192, 256))


def test_tables_of_other_kernels_are_not_gone_on_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    part = PARTS["forward"]._replace(evidence=lambda: {"launches": ("a", "b")})
    campaign.check_evidence(part, tmp_path)
    for launches, is_alike in ((["a", "b"], True), (["a"], False)):
        (tmp_path / part.provenance).write_text(json.dumps({"launches": launches, "gpu": "other"}))
        if is_alike:
            campaign.check_evidence(part, tmp_path)
            continue
        with pytest.raises(ValueError, match="of other kernels than these"):
            campaign.check_evidence(part, tmp_path)
