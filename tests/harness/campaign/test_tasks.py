"""Campaigns: any executor, resumable, a lost task is a failure and never a silence."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import fa3_kernels
from fa3_reference.problem import AttentionProblem
from fa3verify import operations
from fa3verify.campaign import plan, replay_files, tasks as campaign
from fa3verify.campaign.introduction import introduce
from fa3verify.campaign.junit import junit
from fa3verify.campaign.plan import JudgeCover, JudgeFamily, SearchLaw
from fa3verify.campaign.run import Introduction, Run, parse
from fa3verify.campaign.summary import summarize
from fa3verify.campaign.tasks import CallTask, Outcome, cpu_seconds, execute
from fa3verify.cases.case import Case
from fa3verify.files import write_text
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging.family import CaseResult, FamilyRow, pooled
from fa3verify.known import registry
from fa3verify.properties import LawOutcome
from tests.conftest import InThisProcess


def double(x: int) -> int:
    if x < 0:
        raise ValueError("negative")
    return 2 * x


TASKS = [CallTask(str(x), double, {"x": x}) for x in (3, 1, -1, 2)]


def test_results_keep_the_order_of_the_tasks_and_errors_stay_with_theirs():
    outcomes = execute(TASKS, InThisProcess())
    assert [o.value for o in outcomes] == [6, 2, None, 4]
    assert outcomes[2].error == "ValueError: negative"


def test_cpu_seconds_are_what_each_kernel_and_kind_of_task_took():
    family = JudgeFamily(kernel="a", family="f", profile="quick", seed=0)
    law = SearchLaw(kernel="a", law="l", max_examples=1, seed=0)
    spent = [(family, 3.0), (family, 5.0), (law, 2.0), (CallTask("", double, {}), 0.5)]
    outcomes = [Outcome(task, None, cpu_s) for task, cpu_s in spent]
    assert cpu_seconds(outcomes) == {"a": {"family": 8.0, "law": 2.0}, "-": {"task": 0.5}}


def test_a_resumed_campaign_runs_only_what_is_missing(tmp_path):
    first, second, changed = InThisProcess(), InThisProcess(), InThisProcess()
    execute(TASKS, first, journal=tmp_path, stamp="a")
    again = execute(TASKS, second, journal=tmp_path, stamp="a")
    execute(TASKS, changed, journal=tmp_path, stamp="b")
    assert (first.calls, second.calls, changed.calls) == (4, 1, 4)  # the failed task is tried again
    assert [o.value for o in again] == [6, 2, None, 4]


def test_a_journal_knows_the_tables_the_libraries_and_the_kernel_that_made_its_results(monkeypatch, tmp_path):
    stamps = {campaign.journal_stamp()}
    for sha256 in ("a", "b"):
        stamps.add(campaign.journal_stamp(registry.find("twin.fp16").altered(identity=lambda x=sha256: {"sha256": x})))
    monkeypatch.setattr(campaign.importlib.metadata, "version", lambda name: "of tomorrow")
    stamps.add(campaign.journal_stamp())
    shutil.copytree(Path(fa3_kernels.__path__[0]) / "twin", tmp_path / "twin")
    monkeypatch.setattr(fa3_kernels, "__path__", [str(tmp_path)])
    stamps.add(campaign.journal_stamp())
    table = tmp_path / "twin" / "mufu_tables.json"
    table.write_text(table.read_text() + " ")
    stamps.add(campaign.journal_stamp())
    table.rename(table.with_name("tables_of_mufu.json"))
    stamps.add(campaign.journal_stamp())
    assert len(stamps) == 7


def test_results_of_foreign_code_are_never_kept(tmp_path):
    foreign = [CallTask("x", double, {"x": 3}, durable=False)]
    execute(foreign, InThisProcess(), journal=tmp_path, stamp="a")
    again = InThisProcess()
    execute(foreign, again, journal=tmp_path, stamp="a")
    assert again.calls == 1
    assert not list(tmp_path.glob("*.json"))


def test_a_damaged_journal_entry_is_run_again(tmp_path):
    execute(TASKS[:1], InThisProcess(), journal=tmp_path, stamp="a")
    for entry in tmp_path.glob("*.json"):
        entry.write_text("{")
    again = InThisProcess()
    assert execute(TASKS[:1], again, journal=tmp_path, stamp="a")[0].value == 6
    assert again.calls == 1


def outcomes_of(kernel: str, family: str) -> list[Outcome]:
    return execute([JudgeFamily(kernel=kernel, family=family, profile="quick", seed=0)], InThisProcess())


CASE = Case("k", AttentionProblem(1, 1, 1, 1, 8, 64), Recipe("normal"))


def summary_of(kernel: str, outcomes: list[Outcome]) -> Run:
    return summarize([introduce(kernel, "quick")], outcomes, None, profile="quick", seed=0)


@pytest.mark.parametrize(("options", "count"), [({}, 3), ({"is_fail_fast": True}, 2)])
def test_every_case_is_judged_unless_the_first_finding_is_to_be_the_last(monkeypatch, options, count):
    wrong = "twin.fp16+missing_column"
    cases = [Case(wrong, AttentionProblem(1, 1, 1, 1, keys, 64), Recipe("normal")) for keys in (0, 8, 8)]
    monkeypatch.setattr(plan, "judged_cases", lambda *_: cases)
    monkeypatch.setattr(plan, "cover", lambda *_: [({}, case) for case in cases])
    family = JudgeFamily(kernel=wrong, family="normal", profile="quick", seed=0, **options)
    cover = JudgeCover(kernel=wrong, profile="quick", seed=0, **options)
    assert [len(task.run().records) for task in (family, cover)] == [count, count]


def test_a_kernel_without_a_judged_case_is_not_said_to_leave_an_output_out():
    summary = summary_of("twin.fp16", [])
    assert "output lse" not in summary.kernels[0].coverage.not_claimed


def test_a_lost_task_fails_the_verdict():
    task = JudgeFamily(kernel="twin.fp16", family="normal", profile="quick", seed=0)
    summary = summarize(
        [introduce("twin.fp16", "quick")], [Outcome(task, error="its process died")], None, profile="quick", seed=0
    )
    assert summary.verdict == "fail"
    assert summary.failures[0].message == "its process died"


def test_a_lost_law_fails_the_verdict():
    task = SearchLaw(kernel="twin.fp16", law="repeat", max_examples=1, seed=0)
    summary = summarize(
        [introduce("twin.fp16", "quick")], [Outcome(task, error="no answer within 4 s")], None, profile="quick", seed=0
    )
    assert summary.layers["laws"] == "fail"
    assert summary.exit_code == 1


def test_a_summary_is_json_and_names_the_missing_comparison():
    summary = summarize(
        [introduce("twin.bf16", "quick")], outcomes_of("twin.bf16", "normal"), None, profile="quick", seed=0
    )
    body = json.loads(json.dumps(summary.to_json()))
    assert json.loads(json.dumps(parse(body, "summary").to_json())) == body
    assert summary.layers == {
        "L0": "not run: no GPU kernel",
        "L1": "pass",
        "L2": "not compared",
        "laws": "not compared",
    }
    kernel = summary.kernels[0]
    assert kernel.cases == 3
    assert kernel.outputs == sum(c.measures["outputs"] for c in summary.cases)
    assert kernel.worst_ratio == max(c.measures["ratio_max"] for c in summary.cases)


def test_pooling_weights_by_outputs():
    measures = (
        dict.fromkeys(campaign_measures(), 0.0) | {"outputs": 30, "rmse_seen": 3.0, "ulp_max": 7.0},
        dict.fromkeys(campaign_measures(), 0.0) | {"outputs": 10, "rmse_seen": 1.0, "ulp_max": 9.0},
    )
    records = [CaseResult("normal", CASE, each) for each in measures]
    figures = pooled(records, operations.find("forward"))
    assert figures["rmse_seen"] == pytest.approx(((30 * 9 + 10 * 1) / 40) ** 0.5)
    assert figures["ulp_max"] == 9.0
    assert figures["outputs"] == 40


def campaign_measures() -> list[str]:
    from fa3verify.judging.metrics import MEASURES

    return list(MEASURES)


def test_junit_lists_every_gate_row_and_escapes_names():
    summary = summary_of("twin.bf16", outcomes_of("twin.bf16", "ties"))
    gate = (replace(summary.gate[0], kernel='a<b>"', status="fail"), *summary.gate[1:])
    named = replace(summary.kernels[0], introduction=Introduction('a<b>"'))
    text = junit(replace(summary, kernels=(named,), gate=gate))
    from xml.etree import ElementTree

    (suite,) = ElementTree.fromstring(text)
    assert suite.get("failures") == "1"
    assert suite.get("errors") == "1"  # of one family no verdict is given
    assert len(suite) == len(summary.gate) + 1


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    target = tmp_path / "file.txt"
    write_text(target, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(target, "\ud800")
    (tmp_path / "directory").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_text(tmp_path / "directory", "text")
    assert target.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["directory", "file.txt"]


def test_any_executor_will_do_a_dask_cluster_for_instance(tmp_path):
    from distributed import Client

    with Client(processes=False, n_workers=1, dashboard_address=None, local_directory=str(tmp_path)) as client:
        outcomes = execute(TASKS, client.get_executor())
    assert [o.value for o in outcomes] == [6, 2, None, 4]
    assert "negative" in (outcomes[2].error or "")


def test_the_resolved_test_extra_holds_no_torch():
    """The README's commands must not pull gigabytes: torch and triton are extras of their own."""
    import importlib.metadata

    from packaging.requirements import Requirement

    seen: set[str] = set()
    waiting = [("fa3verify", "test")]
    while waiting:
        name, extra = waiting.pop()
        for text in importlib.metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            key = requirement.name.lower()
            if key not in seen:
                seen.add(key)
                waiting += [(key, e) for e in (*requirement.extras, "")]
    assert {"numpy", "hypothesis", "distributed", "python-flint"} <= seen
    assert not seen & {"torch", "triton"}


def test_the_summary_schema_is_documented_key_by_key():
    page = Path(__file__).parents[3] / "docs" / "summary.md"
    documented = re.findall(r"^\| `([^`]+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    summary = summarize(
        [introduce("twin.bf16", "quick")], outcomes_of("twin.bf16", "faint"), None, profile="quick", seed=0
    )
    body = summary.to_json()
    assert {*body, "questions"} == {key for key in documented if "[]" not in key}  # a twin is asked none
    unstated = {"kernels[].assumed"}  # of a kernel that states no order
    assert {f"kernels[].{key}" for key in body["kernels"][0]} | unstated == {k for k in documented if "[]" in k}


def test_quantisation_is_reported_and_its_own_bound_is_part_of_the_gate():
    summary = summarize(
        [introduce("twin.e4m3", "quick")], outcomes_of("twin.e4m3", "fa3_outliers"), None, profile="quick", seed=0
    )
    family = summary.kernels[0].families[0].figures
    assert 0.5 < family["quantisation_ratio"] < 1.5
    assert 0 < family["quantisation_bound_ratio"] <= 1
    rows = [row for row in summary.gate if "quantis" in row.rule]
    assert [(row.layer, row.observed, row.status) for row in rows] == [
        ("L1", family["quantisation_bound_ratio"], "pass")
    ]


def test_pooled_figures_are_those_of_all_outputs_together():
    """Outputs without a bound and non-finite ones have no error, so that they weigh nothing: here 30, 10 and none."""
    names = dict.fromkeys(campaign_measures(), 0.0)
    base = names | {"unbounded": 0, "nonfinite": 0, "bits_differing": 0, "outside": 0}
    cases = (
        {"outputs": 40, "unbounded": 8, "nonfinite": 2, "bits_differing": 1, "rms": 3.0, "bias": 1.0, "outside": 1},
        {"outputs": 10, "rms": 1.0, "bias": -1.0, "bits_differing": 4, "max_error": 5.0, "enclosed_median": 0.4},
        {"outputs": 5, "unbounded": 4, "nonfinite": 3, "rms": 100.0, "bias": 9.0, "ratio_max": 0.9},
    )
    sides = ({"ratio_lse_max": 0.1, "lse_rms_error": 2.0, "lse_max_error": 3.0}, {}, {})
    cost = (
        {"measured": 9.0, "predicted": 1.0, "bound_ratio": 0.1},
        {"measured": 7.0, "predicted": 3.0, "bound_ratio": 0.2},
    )
    records = []
    for case, side, pair in zip(cases, sides, (*cost, None), strict=True):
        measures = {key: x for key, x in base.items() if "lse" not in key}
        records.append(CaseResult("normal", CASE, measures | case | side, pair))
    found = pooled(records, operations.find("forward"))
    assert (found["cases"], found["outputs"], found["unbounded"], found["nonfinite"]) == (3, 55, 12, 5)
    assert found["rms"] == pytest.approx(((30 * 9 + 10 * 1) / 40) ** 0.5)
    assert found["bias"] == pytest.approx((30 - 10) / 40)
    assert (found["max_error"], found["ratio_max"], found["bits_differing"]) == (5.0, 0.9, 5)
    assert (found["outside"], found["enclosed_median"]) == (1, pytest.approx(10 * 0.4 / 40))
    assert (found["ratio_lse_max"], found["lse_max_error"], found["lse_rms_error"]) == (0.1, 3.0, pytest.approx(2.0))
    assert found["quantisation_ratio"] == pytest.approx((16 / 4) ** 0.5)
    assert found["quantisation_bound_ratio"] == 0.2
    plain = {key: x for key, x in base.items() if key not in ("bits_differing", "outside")}
    silent = pooled([CaseResult("normal", CASE, plain)], operations.find("forward"))
    assert (silent["bits_differing"], silent["quantisation_ratio"], silent["quantisation_bound_ratio"]) == (None,) * 3
    assert "outside" not in silent


def test_files_of_names_that_look_alike_do_not_overwrite_each_other(tmp_path):
    """Names differ in a character that no file name may have, or behind the hundredth one."""
    long = "x" * 120
    names = ("a b", "a_b", "a/b", long, long + "y")
    summary = summary_of("twin.bf16", [])
    families = tuple(FamilyRow(name, {}) for name in names)
    kernel = replace(summary.kernels[0], introduction=Introduction("k"), families=families)
    each = [replace(CASE, recipe=Recipe("normal", seed=i)) for i in range(len(names))]
    cases = [CaseResult(name, case, {"ratio_max": 0.5}, kernel="k") for name, case in zip(names, each, strict=True)]
    written = replay_files.write_all(replace(summary, kernels=(kernel,), cases=tuple(cases)), tmp_path)
    paths = [family.replay for family in written.kernels[0].families]
    assert len(set(paths)) == len(names)
    for name, path, case in zip(names, paths, each, strict=True):
        stored = replay_files.read(tmp_path / path)
        assert (stored.kernel, str(stored.what)) == ("k", f"family {name}")
        assert stored.content["cases"] == [case.to_json()]
    assert sorted(tmp_path.glob("worst/*")) == sorted(tmp_path / path for path in paths)


def test_classes_of_a_propertys_trials_count_as_tried():
    """Of a property that nothing was compared with, no class counts but those of its trials."""
    kernel = replace(introduce("twin.fp16", "quick"), claims=("feature softcap", "group 1", "property p"))
    law = "sign_symmetry"
    kernel = replace(kernel, claims=(*kernel.claims[:2], f"property {law}"))
    covered = []
    for status in ("pass", "not_tried"):
        ran = LawOutcome(law, status, examples=2, outputs=9, classes=frozenset(["feature softcap"]))
        outcome = Outcome(SearchLaw(kernel="twin.fp16", law=law, max_examples=2, seed=0), ran)
        found = summarize([kernel], [outcome], None, profile="quick", seed=0).kernels[0]
        covered.append(found.coverage.not_tried)
    assert covered == [("group 1",), ("group 1", f"property {law}")]
