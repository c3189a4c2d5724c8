"""Stored judgements: whole or refused, the same after writing and reading, and every figure from its replay file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fa3_reference.bounds import KernelModel
from fa3verify.campaign import atlas, replay_files, tasks
from fa3verify.campaign.introduction import introduce
from fa3verify.campaign.plan import SearchLaw, plan
from fa3verify.campaign.run import Introduction, KernelRun, Loss, Run, parse
from fa3verify.campaign.summary import summarize
from fa3verify.commands import replay
from fa3verify.files import json_text
from fa3verify.kernels import record
from fa3verify.kernels.policy import Policy
from fa3verify.known import registry
from fa3verify.report import moved
from tests.conftest import InThisProcess

KERNELS = ("twin.fp16", "twin.fp16+causal_top_left", "twin.quantize", "stranger")
TRIED = ("normal", "repeated_run_is_identical", "causal_row_equals_truncated_problem", "error_within_bound")
SAID = {"version": "lib 3", "file": "lib.so", "sha256": "a" * 64, "device": "NVIDIA H100"}


def stranger() -> record.Kernel:
    """Return a kernel that states no order, and says who it is and what it does by design."""
    policy = Policy(empty_lse="undefined", causal="top_left")
    return replace(
        registry.find("twin.bf16").altered(identity=lambda: SAID), name="stranger", order=None, policy=policy
    )


def small_run(kernels: Sequence[str], tried: Sequence[str], out: Path) -> Run:
    """Return a run of some families and properties with few trials, in this process; its replay files are written."""
    known = [introduce(name, "quick") for name in kernels]
    planned = [task for task in plan(known, "quick", 0) if task.subject in tried]
    few = [replace(t, max_examples=3) if isinstance(t, SearchLaw) else t for t in planned]
    summary = summarize(known, tasks.execute(few, InThisProcess()), None, profile="quick", seed=0)
    return replace(replay_files.write_all(summary, out), started="2026-01-01T00:00:00+00:00")


@pytest.fixture(scope="module")
def campaign(tmp_path_factory) -> Iterator[tuple[Run, Path]]:
    """The run of a small campaign, and the folder with its atlas and replay files."""
    out = tmp_path_factory.mktemp("atlas")
    find = registry.find
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "find", lambda name: stranger() if name == "stranger" else find(name))
        summary = small_run(KERNELS, TRIED, out)
        atlas.write(out / atlas.FILE, atlas.of(summary))
        yield summary, out


def entry(campaign, name: str) -> KernelRun:
    (found,) = (kernel for kernel in atlas.read(campaign[1] / atlas.FILE).kernels if kernel.name == name)
    return found


def test_an_atlas_survives_its_file(campaign):
    summary, out = campaign
    assert atlas.text(atlas.read(out / atlas.FILE)) == atlas.text(atlas.of(summary))
    assert [kernel.name for kernel in atlas.of(summary).kernels] == list(KERNELS)


def test_a_stored_run_with_an_infinite_error_has_the_atlas_of_the_run(campaign):
    """In the summary that a run.nc holds, numbers that are not finite are texts."""
    summary = campaign[0]
    kernel = summary.kernels[0]
    endless = {"ratio_max": math.inf, "rel_rmse_seen": math.nan}
    families = tuple(
        replace(row, figures=row.figures | endless) if row.family == "normal" else row for row in kernel.families
    )
    cases = [case for case in summary.cases if case.kernel == kernel.name and case.family == "normal"]
    assert len(cases) > 1
    worst = replace(cases[-1], measures=cases[-1].measures | endless)
    others = tuple(worst if case is cases[-1] else case for case in summary.cases)
    summary = replace(summary, kernels=(replace(kernel, families=families), *summary.kernels[1:]), cases=others)
    stored = atlas.of(parse(json.loads(json_text(summary.to_json())), "summary"))
    assert atlas.text(stored) == atlas.text(atlas.of(summary))
    assert stored.kernels[0].families[0].largest == worst.describe
    assert not moved.moved(atlas.of(summary), stored, [(name, name) for name in KERNELS]).rows


def test_every_figure_of_a_family_is_given_again_by_its_replay_file(campaign):
    for name in KERNELS:
        found = entry(campaign, name)
        assert [row.family for row in found.families] == ["normal"]
        for row in found.families:
            holds, words, again = replay.run(replay_files.read(campaign[1] / row.replay))
            assert again == row.figures
            assert words.endswith(row.largest)
            assert holds is (found.verdict != "fail")


def test_every_finding_and_every_broken_property_is_found_again_by_its_replay_file(campaign):
    found = entry(campaign, "twin.fp16+causal_top_left")
    assert found.verdict == "fail"
    broken = [law for law in found.laws if law.status == "fail"]
    assert broken
    findings = atlas.findings(atlas.read(campaign[1] / atlas.FILE), found.name)
    assert len(findings) > len(broken)
    for each in (*findings, *broken):
        assert not replay.run(replay_files.read(campaign[1] / each.replay))[0]


def test_the_largest_error_of_a_family_comes_first_in_its_replay_file(campaign):
    summary, out = campaign
    (row,) = entry(campaign, "stranger").families
    cases = replay_files.read(out / row.replay).content["cases"]
    ratios = {json.dumps(case.case.to_json()): case.measures["ratio_max"] for case in summary.cases}
    ordered = [ratios[json.dumps(case)] for case in cases]
    assert ordered == sorted(ordered, reverse=True)
    assert ordered[0] == row.figures["ratio_max"]


def test_effort_coverage_and_verdict_are_those_of_the_summary(campaign):
    for kernel in campaign[0].kernels:
        found = entry(campaign, kernel.name)
        assert (found.cases, found.outputs) == (kernel.cases, kernel.outputs)
        assert [row.seeds for row in found.families] == [(0,)]
        assert (found.verdict, found.coverage) == (kernel.verdict, kernel.coverage)
        assert found.coverage.not_tried  # families, of which one ran


def test_the_order_that_judged_is_stored_and_whether_the_kernel_stated_it(campaign):
    ours, other, quantiser = (entry(campaign, name) for name in ("twin.fp16", "stranger", "twin.quantize"))
    assert ours.introduction.states_order
    assert {order["num_splits"] for order in ours.orders} == {1, 3}
    assert all(order["order"]["keys"] == "right_to_left" for order in ours.orders)
    assert not other.introduction.states_order
    assert other.orders == (asdict(KernelModel.any_order("bf16", "bf16", weights="running")),)
    assert quantiser.orders == ()


def test_identity_and_policy_are_what_a_kernel_says_of_itself(campaign):
    other, twin = entry(campaign, "stranger"), entry(campaign, "twin.fp16")
    assert asdict(other.introduction.identity) == SAID
    assert other.introduction.policy == ("empty_lse undefined", "causal top_left")
    assert twin.introduction.identity.device == "CPU"
    assert len(str(twin.introduction.identity.sha256)) == 32
    assert twin.introduction.policy == ()


def test_a_kernel_that_says_nothing_has_no_identity_and_one_that_misspells_it_fails(monkeypatch):
    silent = stranger().altered(identity=dict)
    monkeypatch.setattr(registry, "find", lambda name: silent)
    assert introduce("stranger", "quick").identity == record.Identity()
    silent = silent.altered(identity=lambda: {"sha": "0"})
    assert "'sha'" in str(introduce("stranger", "quick").failed)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": "fa3verify.summary/1"}', '{"schema": "fa3verify.atlas/1"}', "\u0000"]
)
def test_a_foreign_file_is_refused_by_name(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is not an atlas"):
        atlas.read(path)
    with pytest.raises(ValueError, match=r"absent\.json cannot be read"):
        atlas.read(tmp_path / "absent.json")


def test_a_figure_that_is_not_finite_survives(campaign):
    known = atlas.of(campaign[0])
    first = known.kernels[0]
    (row,) = first.families
    endless = replace(row, figures=row.figures | {"rel_rmse_unrounded": float("inf"), "ulp_max": None})
    changed = replace(known, kernels=(replace(first, families=(endless,)),))
    assert atlas.parse(atlas.text(changed), "x").kernels[0].families == (endless,)


def test_what_was_lost_over_long_rows_and_kernels_that_were_not_run_survive(campaign):
    known = atlas.of(campaign[0])
    losses = (Loss(8192, 128, 0.5, -0.25, None), Loss(1 << 20, 16, None, None, "it ran out of memory"))
    introduction = Introduction("flash9.fp16", dtype="fp16")
    absent = KernelRun(introduction=introduction, verdict="not run", inconclusive="no such package", loss=losses)
    changed = replace(known, kernels=(*known.kernels, absent))
    assert atlas.parse(atlas.text(changed), "x").kernels[-1] == absent


def test_what_only_processes_tell_each_other_and_where_a_user_has_files_is_in_no_atlas(campaign):
    text = (campaign[1] / atlas.FILE).read_text()
    body = json.loads(text)
    assert body["cases"] == body["gate"] == []
    assert body["command"] == ""
    assert {found["traceback"] for found in body["failures"]} == {None}
    for private in ("claims", "head_dims", "narrowed", "trial", "violation", "classes"):
        assert f'"{private}":' not in text


def test_a_family_replay_without_cases_is_refused(campaign):
    content = {"schema": replay_files.FAMILY_SCHEMA, "cases": []}
    body = replay_files.ReplayFile("twin.fp16", "family normal", content)
    with pytest.raises(ValueError, match="names no case"):
        replay.run(body)
