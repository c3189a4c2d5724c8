"""Twenty-odd kernels that deceive, die or misbehave, in one campaign: each gets its verdict, and no report breaks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from fa3verify.campaign import atlas, plan as planned
from fa3verify.cases import coverage
from fa3verify.cli.main import main
from tests.conftest import subject
from tests.harness.hostile import EXPECTED, MODULES


def is_run(task: planned.JudgeTask | planned.SearchLaw) -> bool:
    return f"{task.kind} {subject(task)}" in EXPECTED[task.kernel].tasks


# Each process that dies or hangs is made anew, which takes seconds: these are seen at night, one of each kind always.
LONG = {f"hostile:{name}" for name in ("aborts", "ends_the_process", "hangs", "leaks")} | {"hostile_abort:kernel"}
QUICK = tuple(name for name in EXPECTED if name not in LONG)


@pytest.fixture(scope="module", params=[QUICK, pytest.param(tuple(EXPECTED), marks=pytest.mark.nightly)], ids=len)
def campaign(tmp_path_factory, request):
    """Run one campaign of many kernels, on one family and one property; exit code, summary and output directory."""
    out = tmp_path_factory.mktemp("hostile")
    with pytest.MonkeyPatch.context() as patch:
        for name, text in MODULES.items():
            (out / f"{name}.py").write_text(text)
        patch.syspath_prepend(out)
        patch.chdir(Path(__file__).parent)
        plan = planned.plan
        patch.setattr(planned, "plan", lambda *given: list(filter(is_run, plan(*given))))
        patch.setattr(coverage, "REQUIRED", 0.0)  # so little is tried here that no verdict would be given
        options = ["--quick", "--workers", "2", "--task-limit", "3", "--memory-limit", "2"]
        files = ["--out", str(out / "out"), "--junit", str(out / "junit.xml"), "--json", "-"]
        result = CliRunner().invoke(main, ["verify", *request.param, *options, *files])
    summary = json.loads(result.stdout)
    assert [kernel["name"] for kernel in summary["kernels"]] == [*request.param]
    return result, summary, out


def test_every_kernel_gets_its_verdict(campaign):
    _, summary, out = campaign
    for kernel in summary["kernels"]:
        check_verdict(kernel["name"], kernel, summary, out)


def check_verdict(name, kernel, summary, out):
    expected = EXPECTED[name]
    found = [f for f in summary["failures"] if f["kernel"] == name]
    assert kernel["verdict"] == expected.verdict, (name, found)
    assert expected.words in " ".join(f"{f['what']} {f['message']}" for f in found), name
    replays = [f for f in found if f["replay"]]
    assert bool(replays) == (expected.replays and expected.verdict == "fail"), (name, found)
    for failure in replays:
        assert failure["case"]
        content = json.loads((out / "out" / failure["replay"]).read_text())["content"]
        assert content.get("case", content)["kernel"] == name
    assert expected.verdict == "fail" or (kernel["cases"] > 3 and kernel["coverage"]["kinds"]["family"]["tried"] == 1)


def test_the_campaign_fails_and_every_report_is_whole(campaign):
    result, summary, out = campaign
    assert result.exit_code == summary["exit_code"] == 1
    assert json.loads((out / "out" / "summary.json").read_text()) == summary
    kernels = [kernel["name"] for kernel in summary["kernels"]]
    cases = ElementTree.parse(out / "junit.xml").getroot().findall(".//testcase")
    failed = {case.get("classname") for case in cases if case.find("failure") is not None}
    assert failed == {name for name in kernels if EXPECTED[name].verdict == "fail"}
    for page in ("report.html", "report.md", "summary.json", "atlas.json"):
        text = (out / "out" / page).read_text(encoding="utf-8")
        assert not [c for c in text if not c.isprintable() and c not in "\n\u202f\u00a0"], page
    stored = atlas.read(out / "out" / atlas.FILE)
    assert {kernel.name: kernel.verdict for kernel in stored.kernels} == {
        k["name"]: k["verdict"] for k in summary["kernels"]
    }
    assert "<b>&]]>" not in (out / "out" / "report.html").read_text()
    assert not (out / "out" / ".partial").exists()


def test_findings_of_one_cause_stand_together(campaign):
    _, summary, _ = campaign
    causes = [(f["kernel"], f["cause"]) for f in summary["failures"]]
    assert len(set(causes)) == sum(a != b for a, b in zip(causes, [None, *causes]))


def test_nothing_that_was_forked_is_left(campaign):
    commands = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with_parent = entry.read_text().rpartition(")")[2].split() if entry.exists() else []
        if with_parent and with_parent[1] == str(os.getpid()) and with_parent[0] != "Z":
            commands.append((entry.parent / "cmdline").read_text())
    assert not [command for command in commands if "multiprocessing" in command and "spawn_main" in command]
