"""Shards: every task once, the same campaign when merged, and nothing else is taken for a part of it."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import xarray as xr
from click.testing import CliRunner, Result

from fa3verify.campaign import plan, shards, tasks
from fa3verify.campaign.introduction import introduce
from fa3verify.campaign.profiles import PROFILES
from fa3verify.campaign.results import JudgedCases
from fa3verify.campaign.shards import Number, dealt
from fa3verify.campaign.tasks import CallTask
from fa3verify.cli.main import main
from fa3verify.commands import verify as jobs
from fa3verify.report import dataset
from tests.conftest import InThisProcess

SOUND, WRONG = "twin.quantize", "twin.quantize+neighbour_descale"
TAKEN = ("normal", "tiny", "repeated_run_is_identical")
PLAN = plan.plan([introduce("twin.fp16", "quick")], "quick", 0)


@pytest.fixture(autouse=True, scope="module")
def small_plan():
    """Some families and one property of each kernel, here: what is under test is what becomes of their outcomes."""
    whole = plan.plan

    def few(*args):
        return [t for t in whole(*args) if t.subject in TAKEN]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "plan", few)
        patch.setattr(jobs, "make_executor", lambda settings: InThisProcess())
        yield


def run(*arguments: object):
    return CliRunner().invoke(main, [str(a) for a in arguments])


def verify(out: Path, *arguments: object, kernels: tuple[str, ...] = (SOUND, WRONG)):
    return run("verify", *kernels, "--quick", "--out", out, *arguments)


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> dict[Path, Result]:
    """What the three shards of a campaign said, by their folders."""
    folders = [tmp_path_factory.mktemp("shard") for _ in range(3)]
    return {folder: verify(folder, "--shard", f"{k}/3") for k, folder in enumerate(folders, 1)}


@pytest.fixture
def three(ran, tmp_path) -> list[Path]:
    """Copies of those folders."""
    return [Path(shutil.copytree(folder, tmp_path / str(k))) for k, folder in enumerate(ran, 1)]


def data_of(out: Path) -> tuple[xr.DataTree, dict]:
    tree = dataset.load(out / "run.nc")
    summary = dataset.summary_of(tree)
    return tree, {key: value for key, value in summary.items() if key not in dataset.CIRCUMSTANCES}


def files_below(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_merged_campaign_has_the_data_of_one_process_bit_for_bit(three, tmp_path):
    whole, merged = tmp_path / "whole", tmp_path / "merged"
    assert verify(whole).exit_code == run("merge", *three, "--out", merged).exit_code == 1
    (one, summary), (many, again) = data_of(whole), data_of(merged)
    assert summary == again
    assert len(summary["failures"]) > 1
    assert one.attrs["content_sha256"] == many.attrs["content_sha256"]
    for name in ("cases", "laws", "gate"):
        xr.testing.assert_identical(one[name].to_dataset(), many[name].to_dataset())
    assert files_below(whole / "worst") == files_below(merged / "worst")
    assert {path.name for path in merged.iterdir()} == {path.name for path in whole.iterdir()}


def test_shards_of_one_folder_are_merged_from_there(tmp_path):
    for k in (1, 2):
        assert verify(tmp_path, "--shard", f"{k}/2", kernels=(SOUND,)).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard-1-of-2.json", "shard-2-of-2.json"]
    result = run("merge", tmp_path, "--out", tmp_path / "merged", "--junit", tmp_path / "all.xml")
    assert result.exit_code == 5  # of so few families no verdict is given, as of a whole campaign
    assert (tmp_path / "all.xml").read_text().count("<testcase") > 4


def test_a_shard_tells_its_failures_and_never_a_verdict_of_the_whole(ran):
    for result in ran.values():
        assert ("FAIL" in result.stdout) == (result.exit_code == 1)
        assert "VERIFY" not in result.stdout
        assert "the verdict is that of fa3verify merge" in result.stdout
    assert {result.exit_code for result in ran.values()} == {0, 1}


def test_a_shard_without_a_failure_has_code_0(tmp_path):
    assert verify(tmp_path, "--shard", "3/3", kernels=(SOUND,)).exit_code == 0


def test_a_lost_task_of_a_covering_array_is_one_failure_of_a_shard(tmp_path, monkeypatch):
    class Lost(plan.JudgeCover):
        def run(self) -> JudgedCases:
            raise RuntimeError("lost")

    monkeypatch.setattr(plan, "plan", lambda *given: [Lost(kernel=SOUND, profile="quick", seed=0)])
    result = verify(tmp_path, "--shard", "1/1", kernels=(SOUND,))
    assert "SHARD 1 OF 1 1 findings in 1 tasks" in result.stdout
    assert result.stdout.count("FAIL") == 1


@pytest.mark.parametrize("option", [("--baseline", "b.json"), ("--junit", "-"), ("--json", "-")])
def test_what_only_the_whole_campaign_has_is_refused_of_a_shard(tmp_path, option):
    result = verify(tmp_path, "--shard", "1/2", *option)
    assert result.exit_code == 2
    assert f"{option[0]} is of the whole campaign" in result.stderr


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "1/0", "a/b", "-1/2", "1/2/3"])
def test_a_shard_that_does_not_exist_is_refused(tmp_path, text):
    with pytest.raises(ValueError, match="1 <= K <= N"):
        Number.parse(text)
    assert verify(tmp_path, f"--shard={text}").exit_code == 2


def refused(*folders: Path) -> str:
    result = run("merge", *folders, "--out", folders[0] / "merged")
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    assert not (folders[0] / "merged").exists()
    return result.stderr


def test_a_missing_shard_is_named(three):
    assert "of 3 shards are missing: 2" in refused(three[0], three[2])
    assert "of 3 shards are missing: 1, 3" in refused(three[1])


def test_two_shards_of_one_number_are_refused(three):
    assert "shard 2 of 3 is there twice" in refused(*three, three[1])


def test_a_folder_without_a_shard_is_named(three, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "empty holds no shard" in refused(*three, tmp_path / "empty")


FOREIGN = {
    "count of shards": ("--shard", "2/4"),
    "seed": ("--shard", "2/3", "--seed", 1),
    "profile": ("--shard", "2/3", "--profile", "release"),
    "kernels": ("--shard", "2/3", "twin.fp16"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_shard_of_another_campaign_is_refused_with_what_differs(three, tmp_path, monkeypatch, name):
    monkeypatch.setattr(tasks, "execute", lambda *_, **__: [])
    out = tmp_path / "foreign"
    words = ["verify", SOUND, WRONG, "--quick", "--out", out, *FOREIGN[name]]
    assert run(*(word for word in words if name != "profile" or word != "--quick")).exit_code == 0
    message = refused(three[0], out, three[2])
    assert "belongs to another campaign" in message
    assert f": {name} is " in message


def edited(folder: Path, change) -> None:
    (path,) = folder.glob(shards.FILES)
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))


EDITS = {
    "source of twin.quantize is": lambda body: body["kernels"][0].update(source="ab"),
    "identity of twin.quantize is": lambda body: body["kernels"][0]["identity"].update(device="NVIDIA H200"),
    "packages is": lambda body: body["provenance"]["packages"].update(numpy="1.0"),
    "sources is": lambda body: body["asked"].update(sources="00"),
    "does not hold its part of the plan": lambda body: body["outcomes"].popitem(),
    "is a damaged shard": lambda body: body.pop("wall_s"),
    "is not a shard of schema": lambda body: body.update(schema="other/1"),
}


@pytest.mark.parametrize("words", EDITS)
def test_a_damaged_or_foreign_shard_is_refused(three, words):
    edited(three[1], EDITS[words])
    assert words in refused(*three)


def test_shards_of_other_sources_than_these_are_not_merged(three):
    for folder in three:
        edited(folder, lambda body: body["asked"].update(sources="00"))
    assert "these sources of fa3verify did not run the shards" in refused(*three)


def test_another_version_of_a_kernels_module_is_another_kernel(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "versioned_kernel.py"
    module.write_text("from fa3verify.kernels.twins import twin\ndef kernel(): return twin('fp16')\n")
    first = introduce("versioned_kernel:kernel", "quick").source
    module.write_text(module.read_text() + "# changed\n")
    assert first
    assert introduce("versioned_kernel:kernel", "quick").source not in (None, first)
    assert introduce("twin.fp16", "quick").source is None


@pytest.mark.parametrize("count", [1, 2, 3, 7, 500])
def test_every_task_is_dealt_once_and_in_order(count):
    parts = [dealt(PLAN, Number(k, count)) for k in range(1, count + 1)]
    assert Counter(t.label for part in parts for t in part) == Counter(t.label for t in PLAN)
    for part in parts:
        assert [PLAN.index(task) for task in part] == sorted(PLAN.index(task) for task in part)


def test_no_shard_has_more_to_do_than_the_others_by_more_than_a_task():
    loads = [sum(task.estimated_s for task in dealt(PLAN, Number(k, 4))) for k in (1, 2, 3, 4)]
    assert max(loads) - min(loads) <= max(task.estimated_s for task in PLAN)


def test_dealing_does_not_depend_on_who_deals():
    again = [replace(task) for task in PLAN]
    stamps = [[t.identity("s") for t in dealt(tasks, Number(2, 3))] for tasks in (PLAN, again)]
    assert stamps[0] == stamps[1]


def test_the_longest_tasks_are_dealt_first():
    """Of 1, 1 and 2 one shard has the 2, which it would share with a 1 were the shortest dealt first."""
    tasks = [plan.SearchLaw(kernel="k", law=x, max_examples=n, seed=0) for x, n in (("a", 20), ("b", 20), ("c", 40))]
    assert [[t.law for t in dealt(tasks, Number(k, 2))] for k in (1, 2)] == [["c"], ["a", "b"]]


def test_the_estimate_of_a_task_grows_with_what_it_runs():
    law = plan.SearchLaw(kernel="k", law="x", max_examples=40, seed=0)
    family = plan.JudgeFamily(kernel="k", family="x", profile="quick", seed=0)
    scores = sum(p.batch * p.nheads * p.seqlen_q * p.seqlen_k for p in PROFILES["quick"].shapes)
    found = [task.estimated_s for task in (law, family, CallTask("x", len, {}))]
    assert found == pytest.approx([2.0, 1.5e-6 * PROFILES["quick"].seeds * scores, 0.05])
