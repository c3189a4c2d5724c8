"""The atlas of many kernels: its own replay files, one that fails costs its own entry, and a run that goes on."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fa3_reports.atlas.page import read, render
from fa3_reports.atlas_rows import mistakes
from fa3verify.campaign import accumulator_loss, atlas, pool, replay_files
from fa3verify.campaign.run import KernelRun, Loss, Run
from fa3verify.commands import publish, replay, verify
from fa3verify.kernels import twins
from fa3verify.records import plain
from tests.harness.campaign.test_atlas import small_run

TRIED = ("normal", "peaky", "repeated_run_is_identical", "error_within_bound")
LOSS = (Loss(8192, 128, 0.573, -0.57, None),)
NAMES = ("twin.fp16", "twin.fp16+stale_v", "broken.fp16", "twin.quantize")


def small_campaign(settings: verify.Settings, progress: Any, executor: Any) -> Run:
    """A campaign of two families and two properties, in this process; nothing else of verify is left out."""
    if settings.kernels[0].startswith("broken"):
        raise RuntimeError("two\nlines")
    return small_run(settings.kernels, TRIED, settings.out)


@pytest.fixture(scope="module", autouse=True)
def short_rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publish, "LOSS_ROWS", {64: 2})
        yield


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> tuple[Run, Path, list[str]]:
    """An atlas of a right kernel, a faulty one, one that fails, and one that is not there."""
    out, told = tmp_path_factory.mktemp("published"), []
    known = {"absent.fp16": replace(twins.twin("fp16", name="absent.fp16"), unavailable="no such package")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "run", small_campaign)
        patch.setattr(publish, "_loss", lambda seqlen_k, future: LOSS[0])
        settings = verify.Settings((*NAMES, "absent.fp16"), "quick", 0, out, workers=1)
        made = publish.run(settings, known, told.append)
    return made, out, told


def entry(made: Run, name: str) -> KernelRun:
    (found,) = (each for each in made.kernels if each.name == name)
    return found


def test_a_kernel_that_fails_costs_its_own_entry(published):
    made, out, told = published
    assert atlas.text(atlas.read(out / atlas.FILE)) == atlas.text(made)
    assert {each.name for each in made.kernels} == {*NAMES, "absent.fp16"}
    assert told == [
        "twin.fp16 inconclusive, over long rows 5.73e-01",
        "twin.fp16+stale_v fail, over long rows 5.73e-01",
        "broken.fp16 not run",
        "twin.quantize inconclusive",
    ]
    assert [each.name for each in made.kernels if each.loss == LOSS] == ["twin.fp16", "twin.fp16+stale_v"]
    assert entry(made, "broken.fp16").inconclusive == "RuntimeError: two lines"
    assert entry(made, "absent.fp16").inconclusive == "no such package"
    for text in pages(out):
        assert "RuntimeError: two lines" in text
        assert "no such package" in text


def pages(out: Path) -> tuple[str, str]:
    """The pages of an atlas, HTML and Markdown."""
    made = render(read(out, [out / atlas.FILE]))
    return made["atlas.html"], made["atlas.md"]


def test_every_family_has_its_largest_case_in_the_replay_file_of_its_kernel(published):
    made, out, _ = published
    for name in ("twin.fp16", "twin.quantize"):
        found = entry(made, name)
        assert [row.family for row in found.families] == ["normal", "peaky"]
        for row in found.families:
            holds, words, again = replay.run(replay_files.read(out / row.replay), family=row.family)
            assert holds
            assert again is not None
            assert again["ratio_max"] == row.figures["ratio_max"]
            assert words.endswith(row.largest)
        _, _, both = replay.run(replay_files.read(out / found.families[0].replay))
        assert both is not None
        assert both["cases"] == 2


def test_a_family_that_a_replay_file_does_not_have_is_refused_by_name(published):
    made, out, _ = published
    body = replay_files.read(out / entry(made, "twin.fp16").families[0].replay)
    with pytest.raises(ValueError, match=r"no family 'nrmal'; it has .*normal"):
        replay.run(body, family="nrmal")
    finding = atlas.findings(made, "twin.fp16+stale_v")[0]
    with pytest.raises(ValueError, match="not one of the largest case of every family"):
        replay.run(replay_files.read(out / str(finding.replay)), family="normal")


def test_the_first_finding_of_every_cause_has_a_replay_file_that_finds_it_again(published):
    made, out, _ = published
    found = atlas.findings(made, "twin.fp16+stale_v")
    assert found
    causes = {finding.cause for finding in found}
    stored = [finding for finding in found if finding.replay]
    assert {finding.cause for finding in stored} == causes
    for finding in stored:
        assert not replay.run(replay_files.read(out / str(finding.replay)))[0]
    rows = [row for each in made.kernels for row in (*each.families, *each.laws, each.worst) if row]
    named = {row.replay for row in (*rows, *made.failures) if row.replay}
    assert named == {path.relative_to(out).as_posix() for path in (out / "worst").iterdir()}


def test_a_planted_fault_is_seen_on_the_page(published):
    _, out, _ = published
    html, _ = pages(out)
    assert '<b class="s fail">✗</b>' in html
    assert "no page explains it" in html
    assert ' wrong"' in html  # a cell of the chart beyond its bound


def test_what_was_published_may_be_sent(published):
    _, out, _ = published
    assert mistakes(out / atlas.FILE) == []


def test_a_run_that_is_resumed_keeps_what_was_judged(published, monkeypatch):
    made, out, _ = published
    ran: list[str] = []

    def nothing(settings, progress, executor):
        ran.extend(settings.kernels)
        raise RuntimeError("again")

    monkeypatch.setattr(verify, "run", nothing)
    again = publish.run(verify.Settings(NAMES, "quick", 0, out), {}, lambda text: None, resume=True)
    assert ran == ["broken.fp16"]
    assert plain(entry(again, "twin.fp16")) == plain(entry(made, "twin.fp16"))
    with pytest.raises(ValueError, match="has seed 0, not 1"):
        publish.run(verify.Settings(NAMES, "quick", 1, out), {}, lambda text: None, resume=True)


@pytest.mark.parametrize("name", ["twin.flash3.e4m3", "twin.cudnn.fp16"])
def test_accumulator_loss_is_measured_in_the_kernels_own_format(name):
    found = accumulator_loss.measure(name, 1.0, 4096, 2, 0)
    assert found is not None
    assert (found.bias < -0.02) == name.endswith("e4m3")  # FP8 sums keep 13 bits of a fraction
    assert found.rel_rmse < 0.1


def without_loss(made: Run, name: str) -> Run:
    """A forward that was judged, as an atlas has it whose losses are still to be measured."""
    kernel = entry(made, "twin.fp16")
    known = replace(kernel.introduction, name=name)
    return replace(made, kernels=(replace(kernel, introduction=known, loss=()),))


def test_a_loss_that_was_not_measured_says_why(published, tmp_path):
    settings = verify.Settings((), "quick", 0, tmp_path, workers=1)
    (kernel,) = publish._row(settings, "twin.fp16", publish._Pools(), without_loss(published[0], "twin.fp16")).kernels
    (ours,) = kernel.loss
    assert (ours.seqlen_k, ours.rows, ours.missing) == (64, 2, None)
    assert ours.rel_rmse is not None
    assert 0 < ours.rel_rmse < 1e-3
    name = "tests.harness.campaign.test_publish:no_kernel"
    (kernel,) = publish._row(settings, name, publish._Pools(), without_loss(published[0], name)).kernels
    (none,) = kernel.loss
    assert none.rel_rmse is None
    assert "ValueError" in str(none.missing)


def test_what_is_no_forward_and_what_takes_no_long_rows_has_no_loss():
    assert accumulator_loss.measure("twin.quantize", 1.0, 64, 2, 0) is None
    assert accumulator_loss.measure("twin.backward.fp16", 1.0, 64, 2, 0) is None
    assert accumulator_loss.measure("twin.vllm.bf16", 1.0, 64, 2, 0) is None


def test_losses_are_measured_by_the_processes_of_the_campaign_before_anything_else(published, tmp_path, monkeypatch):
    """No process is started for them alone, and they have ended when the campaign has."""
    asked: list[str] = []

    def campaign(settings, progress, executor):
        before = len(asked)
        found = small_run(settings.kernels, TRIED, settings.out)
        assert (before, executor.submit(int, "64").result()) == (1, 64)
        executor.shutdown()
        return found

    class Noted(pool.IsolatingPool):
        def submit(self, fn, /, *args, **kwargs):
            asked.append(fn.__name__)
            return super().submit(fn, *args, **kwargs)

    monkeypatch.setattr(verify, "run", campaign)
    monkeypatch.setattr(publish, "make_executor", lambda settings: Noted(1, 60.0))
    made = publish._row(verify.Settings((), "quick", 0, tmp_path, workers=1), "twin.fp16", publish._Pools())
    assert asked == ["measure", "int"]
    assert [each.missing for each in made.kernels[0].loss] == [None]


@pytest.mark.parametrize(("workers", "cores"), [(2 * publish.PROCESSES, 1), (0, 6)])
def test_kernels_are_judged_side_by_side_with_the_workers_and_the_memory_of_one_machine(
    tmp_path, monkeypatch, workers, cores
):
    """Where nobody says how many there are half as many again as cores: nine, four for each of two kernels."""
    together, given = threading.Barrier(2, timeout=20), []

    def waiting(settings, progress, executor):
        given.append((settings.kernels, settings.workers, settings.memory_bytes))
        together.wait()
        raise RuntimeError("judged")

    monkeypatch.setattr(verify, "run", waiting)
    monkeypatch.setattr(publish, "default_workers", lambda: cores)
    names = ("twin.fp16", "twin.bf16")
    settings = verify.Settings(names, "quick", 0, tmp_path, workers=workers, memory_bytes=1 << 33)
    made = publish.run(settings, {}, lambda text: None)
    assert sorted(given) == [((name,), publish.PROCESSES, 1 << 33) for name in sorted(names)]
    assert {each.inconclusive for each in made.kernels} == {"RuntimeError: judged"}


def test_an_interruption_ends_every_campaign_at_once_and_keeps_what_was_judged(tmp_path, monkeypatch):
    began = threading.Event()

    def sleeping(settings, progress, executor):
        if settings.kernels == ("twin.quantize",):
            assert began.wait(60)
            return small_run(settings.kernels, TRIED, settings.out)
        future = executor.submit(time.sleep, 3600)
        while not future.running():
            time.sleep(0.01)
        began.set()
        return future.result()

    def interrupted(text):
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "run", sleeping)
    settings = verify.Settings(("twin.fp16", "twin.quantize"), "quick", 0, tmp_path, workers=2 * publish.PROCESSES)
    with pytest.raises(KeyboardInterrupt):
        publish.run(settings, {}, interrupted)
    assert [each.name for each in atlas.read(tmp_path / atlas.FILE).kernels] == ["twin.quantize"]


def test_no_process_begins_after_an_interruption(tmp_path):
    pools = publish._Pools()
    pools.end()
    with pytest.raises(KeyboardInterrupt):
        publish._row(verify.Settings((), "quick", 0, tmp_path, workers=1), "twin.fp16", pools)


def test_an_atlas_names_no_machine_path(published):
    _, out, _ = published
    text = json.dumps(json.loads((out / atlas.FILE).read_text()))
    assert '"/' not in text


def test_a_replay_file_that_is_published_names_no_machine_path_either(published, tmp_path):
    """Where a kernel raised, its campaign's own file has a traceback."""
    made, out, _ = published
    finding = next(each for each in made.failures if each.replay)
    known = replay_files.read(out / str(finding.replay))
    raised = {"frame": "mine.py:1 in mine: raise", "text": 'File "/home/user/mine.py", line 1'}
    replay_files.write(tmp_path / "raised.json", replace(known, traceback=raised))
    copied, _ = publish._findings([replace(finding, replay="raised.json")], tmp_path, tmp_path / "beside.json")
    assert replay_files.read(tmp_path / Path(copied["raised.json"]).name) == known
