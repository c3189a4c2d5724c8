"""Where the verdict is written: files, devices, FIFOs, links and closed pipes; none of them hides or changes it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from fa3_reference.problem import AttentionProblem
from fa3verify import files
from fa3verify.campaign.run import parse
from fa3verify.cases.case import Case
from fa3verify.cli.main import main
from fa3verify.commands import verify as jobs
from fa3verify.files import why_unwritable, write_output
from fa3verify.inputs.recipe import Recipe
from tests.harness.report import fake_summary

FAILURE = {"kernel": "k", "what": "loading", "message": "SystemExit: 0", "replay": None}
SUMMARY = fake_summary.summary(verdict="fail") | {"kernels": [], "gate": [], "cases": [], "failures": [FAILURE]}


@pytest.fixture(params=["fail", "pass", "inconclusive"])
def ended(request, monkeypatch):
    """A campaign that ends at once with a verdict, and the code of that."""
    code = {"fail": 1, "pass": 0, "inconclusive": 5}[request.param]
    summary = SUMMARY | {"verdict": request.param, "exit_code": code}
    if not code:
        summary["failures"] = []

    def run(settings, progress):
        settings.out.mkdir(parents=True, exist_ok=True)
        (settings.out / "summary.json").write_text(json.dumps(summary))
        (settings.out / "report.md").write_text("# report\n")
        return parse(summary, "summary")

    monkeypatch.setattr(jobs, "run", run)
    return code


def verify(*arguments):
    return CliRunner().invoke(main, ["verify", "--quick", *map(str, arguments)])


def test_every_verdict_has_its_code_and_its_files(ended, tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step.md"))
    result = verify("--out", tmp_path / "out", "--json", tmp_path / "a.json", "--junit", tmp_path / "new" / "a.xml")
    assert result.exit_code == ended
    assert json.loads((tmp_path / "a.json").read_text())["exit_code"] == ended
    assert ElementTree.parse(tmp_path / "new" / "a.xml").getroot().tag == "testsuites"
    assert (tmp_path / "step.md").read_text() == "# report\n"


@pytest.mark.parametrize("option", ["--json", "--junit", "--update-baseline", "GITHUB_STEP_SUMMARY"])
def test_what_cannot_be_written_is_found_before_the_run(option, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "run", lambda *given: pytest.fail("the campaign was run"))
    blocked = tmp_path / "file" / "below"
    (tmp_path / "file").write_text("")
    if option == "GITHUB_STEP_SUMMARY":
        monkeypatch.setenv(option, str(blocked))
    result = verify("--out", tmp_path / "out", *([option, blocked] if option.startswith("--") else []))
    assert result.exit_code == 2
    assert "below cannot be written: Not a directory" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("verb", [("verify", "--quick"), ("merge", ".")], ids=["verify", "merge"])
def test_junit_without_its_package_is_refused_before_the_run(verb, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "junitparser", None)
    for name in ("run", "merge"):
        monkeypatch.setattr(jobs, name, lambda *given: pytest.fail("the campaign was run"))
    result = CliRunner().invoke(main, [*verb, "--out", str(tmp_path / "out"), "--junit", str(tmp_path / "a.xml")])
    assert result.exit_code == 3
    assert "--junit needs the package junitparser (extra 'junit')" in result.stderr
    assert "pip install 'junitparser" in result.stderr


def test_a_file_that_fails_after_the_run_hides_no_verdict(ended, tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(files, "write_output", full)
    result = verify("--out", tmp_path / "out", "--junit", tmp_path / "a.xml")
    assert result.exit_code == (ended or 3)
    assert "VERIFY" in result.stdout
    assert "a.xml cannot be written: No space left on device" in result.stderr


def test_a_link_keeps_its_place_and_its_target_gets_the_text(tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    write_output(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"
    (tmp_path / "dangling").symlink_to("nowhere")
    write_output(tmp_path / "dangling", "new")
    assert (tmp_path / "nowhere").read_text() == "new"


def test_a_fifo_is_written_and_stays_one(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "fifo").read_text()))
    reader.start()
    assert why_unwritable(tmp_path / "fifo") is None
    write_output(tmp_path / "fifo", "text")
    reader.join(timeout=10)
    assert read == ["text"]
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)


def test_devices_and_open_files_are_written_and_never_replaced(tmp_path):
    # Only asked, not written: a mistake here would replace the device of the machine that runs the test.
    assert all(files._is_stream(Path(name)) for name in ("/dev/null", "/dev/stdout", "/proc/self/fd/1"))
    with (tmp_path / "open").open("w+") as file:
        write_output(Path(f"/dev/fd/{file.fileno()}"), "text")
        assert os.fstat(file.fileno()).st_ino == (tmp_path / "open").stat().st_ino
    assert (tmp_path / "open").read_text() == "text"
    assert [p.name for p in tmp_path.iterdir()] == ["open"]
    assert why_unwritable(tmp_path) == "it is a directory"


@pytest.mark.parametrize(
    ("verdict", "code", "options"),
    [
        ("fail", 1, []),
        pytest.param("pass", 0, ["--json", "-"], marks=pytest.mark.nightly),
        pytest.param("inconclusive", 5, ["--junit", "-"], marks=pytest.mark.nightly),
    ],
)
def test_a_reader_who_closes_the_pipe_changes_no_code(verdict, code, options, tmp_path):
    program = f"""
import sys
sys.path[:0] = {[p for p in sys.path if p]!r}
from dataclasses import replace
from fa3verify.campaign.run import parse
from fa3verify.commands import verify
from fa3verify.cli.main import main
summary = {SUMMARY!r} | {{"verdict": {verdict!r}, "exit_code": {code}}}
found = parse(summary, "summary")
found = replace(found, failures=found.failures * 500)
def run(settings, progress):
    settings.out.mkdir()
    (settings.out / "summary.json").write_text("short")
    return found
verify.run = run
main(["verify", "--quick", "--out", {str(tmp_path / "out")!r}, *{options!r}])
"""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", program], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.returncode == code, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "code", "streams"),
    [
        (["simulate", "--seqlen", "512", "--json", "/dev/stdout"], 0, "stdout"),
        pytest.param(["kernels"], 0, "stdout", marks=pytest.mark.nightly),
        (["hazards", "nothing"], 2, "both"),
    ],
)
def test_every_verb_comes_to_its_own_code_when_its_reader_has_gone(arguments, code, streams):
    program = f"""
import sys
sys.path[:0] = {[p for p in sys.path if p]!r}
from fa3verify.cli.main import main
main({arguments!r})
"""
    reading, writing = os.pipe()
    os.close(reading)
    told = writing if streams == "both" else subprocess.PIPE
    done = subprocess.run([sys.executable, "-c", program], stdout=writing, stderr=told, text=True)
    os.close(writing)
    assert done.returncode == code, done.stderr
    assert done.stderr == {"stdout": "", "both": None}[streams]


def test_a_finding_stays_one_when_its_reader_has_gone(tmp_path):
    """A replay that fails prints before it leaves with its code."""
    case = {"schema": "fa3verify.replay/1", "kernel": "twin.fp16+truncated_output", "what": "family normal"}
    case["content"] = Case(case["kernel"], AttentionProblem(1, 1, 1, 8, 40, 64), Recipe("normal")).to_json()
    (tmp_path / "broken.json").write_text(json.dumps(case))
    reading, writing = os.pipe()
    os.close(reading)
    call = [sys.executable, "-m", "fa3verify", "replay", str(tmp_path / "broken.json")]
    done = subprocess.run(call, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
