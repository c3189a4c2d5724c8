"""Command line: every bad input ends in one line and the documented code, and leaves nothing half-written."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from fa3_reference.problem import AttentionProblem
from fa3verify.campaign import replay_files
from fa3verify.campaign.pool import DEVICES_VARIABLE
from fa3verify.cases.case import Case
from fa3verify.cli.main import main
from fa3verify.commands import publish, verify as jobs
from fa3verify.inputs.recipe import Recipe
from fa3verify.report import build

CASE = Case("twin.fp16", AttentionProblem(1, 1, 1, 8, 40, 64), Recipe("normal"))


def run(*arguments: str):
    return CliRunner().invoke(main, [str(a) for a in arguments])


def one_line(result) -> str:
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.fixture
def replay_file(tmp_path):
    path = tmp_path / "case.json"
    replay_files.write(path, replay_files.ReplayFile("twin.fp16", replay_files.LARGEST, CASE.to_json()))
    return path


def test_help_needs_no_heavy_import():
    code = "import sys; from fa3verify.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([m for m in ('numpy', 'numba', 'xarray', 'hypothesis', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert done.stdout.rstrip().endswith("[]")


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        ("nonsense", "unknown kernel 'nonsense'"),
        ("twin.fp16+nonsense", "'nonsense'"),
        ("a:b:c", "a:b:c"),
        ("os:getcwd", "os:getcwd"),
    ],
)
def test_an_unknown_kernel_is_a_usage_error_that_names_it(kernel, words, tmp_path):
    result = run("verify", kernel, "--quick", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert words in one_line(result)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        *((text, "base.json") for text in ("", "{", "[]", '{"schema": "x/1"}', '{"schema": "fa3verify.baseline/1"}')),
        (jobs.gate.Baseline("release", 0, {}).text(), "profile release"),
    ],
)
def test_a_bad_baseline_is_refused_before_anything_runs(tmp_path, content, words):
    path = tmp_path / "base.json"
    path.write_text(content)
    result = run("verify", "twin.fp16", "--quick", "--baseline", path, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert words in one_line(result)
    assert not (tmp_path / "out" / "summary.json").exists()


@pytest.mark.parametrize("nobody_may_write", [False, True])
def test_an_output_path_that_cannot_be_written_is_refused(tmp_path, nobody_may_write):
    blocked = tmp_path / "file"
    blocked.write_text("")
    result = run("verify", "twin.fp16", "--quick", "--out", "/proc/self" if nobody_may_write else blocked / "out")
    assert result.exit_code == 2
    assert "cannot be written" in one_line(result)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (OSError(28, "No space left on device", "out/run.nc"), 3, "No space left on device"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 3, "pip install 'torch>=2.9'"),
        (RuntimeError("two\nlines"), 4, "RuntimeError: two lines"),
    ],
    ids=["full disk", "missing package", "internal error"],
)
def test_what_is_raised_is_one_line_and_an_exit_code(tmp_path, monkeypatch, error, code, words):
    def raising(*_):
        raise error

    monkeypatch.setattr(jobs, "run", raising)
    result = run("verify", "twin.fp16", "--quick", "--out", tmp_path)
    assert result.exit_code == code
    assert words in one_line(result)


def test_an_interruption_promises_nothing_that_is_not_kept(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "run", stop)
    result = run("verify", "twin.fp16", "--quick", "--out", tmp_path)
    assert result.exit_code == 130
    assert "interrupted by SIGINT; only what is in files is kept" in one_line(result)


def test_a_sound_case_replays_with_code_0(replay_file):
    result = run("replay", replay_file)
    assert result.exit_code == 0
    assert "holds" in result.stdout


def test_a_finding_that_its_call_alone_does_not_show_is_told_and_is_no_success(replay_file):
    """Of a kernel whose state between calls is wrong replay said "holds", with code 0 and without a word."""
    stored = json.loads(replay_file.read_text()) | {"is_finding": True}
    replay_file.write_text(json.dumps(stored))
    result = run("replay", replay_file)
    assert result.exit_code == 5
    assert "not reproduced by this call alone: the kernel was mended since, or what was found depends" in result.stdout
    other = run("replay", replay_file, "--kernel", "twin.flash3.fp16")
    assert other.exit_code == 0
    assert "not reproduced" not in other.stdout


def test_a_broken_kernel_replays_with_code_1(replay_file):
    result = run("replay", replay_file, "--kernel", "twin.fp16+wrong_softmax_scale", "--json", "-")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["measures"]["ratio_max"] > 1


def damage(text: str, kind: str) -> str:
    body = json.loads(text)
    if kind == "empty":
        return ""
    if kind == "cut":
        return text[: len(text) // 2]
    if kind == "foreign":
        return json.dumps({"schema": "other/1"})
    if kind == "list":
        return "[1, 2]"
    if kind == "kernel":
        body["kernel"] = "nonsense"
    if kind == "heads":
        body["content"]["problem"]["nheads"] = 3
        body["content"]["problem"]["nheads_kv"] = 2
    if kind == "head_dim":
        body["content"]["problem"]["head_dim"] = 300
    if kind == "dtype":
        body["content"]["problem"]["dtype"] = "fp64"
    if kind == "distribution":
        body["content"]["recipe"]["distribution"] = "cauchy"
    if kind == "missing":
        del body["content"]["recipe"]
    if kind == "change":
        body["content"]["changes"] = {"tile_n": 33}
    return json.dumps(body)


@pytest.mark.parametrize(
    "kind",
    ["empty", "cut", "foreign", "list", "kernel", "heads", "head_dim", "dtype", "distribution", "missing", "change"],
)
def test_a_damaged_replay_file_is_refused_in_one_line(replay_file, kind):
    replay_file.write_text(damage(replay_file.read_text(), kind))
    result = run("replay", replay_file)
    assert result.exit_code == 2, result.output
    assert one_line(result).startswith("fa3verify: ")


def test_a_missing_or_binary_replay_file_is_refused(tmp_path):
    assert run("replay", tmp_path / "none.json").exit_code == 2
    (tmp_path / "binary.json").write_bytes(b"\x80\x81\xff")
    assert "not a replay file" in one_line(run("replay", tmp_path / "binary.json"))


@pytest.mark.parametrize("content", [b"", b"not netcdf", b"\x89HDF\r\n\x1a\n" + b"\0" * 64])
def test_a_foreign_run_file_is_refused(tmp_path, content):
    path = tmp_path / "run.nc"
    path.write_bytes(content)
    result = run("report", path, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "run.nc" in one_line(result)
    assert not (tmp_path / "out" / "report.html").exists()


def test_kernels_say_what_can_be_judged_and_what_here_is():
    listed = json.loads(run("kernels", "--json", "-").stdout)
    assert {"twin.fp16", "twin.bf16", "twin.e4m3", "twin.e4m3_chained"} <= {k["name"] for k in listed["kernels"]}
    facts = listed["environment"]
    assert {"version", "twin_hash", "packages", "cache", "variables"} <= set(facts)
    _, footer = run("kernels").stdout.split("\n\n")
    for name in ("version", *facts["packages"], "cache", *facts["variables"]):
        assert re.search(rf"^{name} ", footer, re.MULTILINE), name


@pytest.mark.nightly  # test_hostile_processes has a quick one, of SIGTERM
def test_ctrl_c_stops_at_once_and_keeps_finished_work(tmp_path):
    command = [
        sys.executable,
        "-m",
        "fa3verify",
        "verify",
        "twin.fp16",
        "--quick",
        "--workers",
        "1",
        "--out",
        tmp_path / "out",
    ]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs inherit it ignored
    )
    journal = tmp_path / "out" / ".partial"
    for _ in range(600):
        if journal.exists() and any(journal.glob("*.json")):
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    kept = len(list(journal.glob("*.json")))
    assert kept
    assert f"goes on from {kept} finished task" in " ".join(stderr.split())
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["verdict"], summary["exit_code"]) == ("inconclusive", 130)


@pytest.mark.parametrize(("verdicts", "code"), [(("pass", "pass"), 0), (("pass", "fail"), 1), (("inconclusive",), 1)])
def test_an_atlas_ends_with_a_finding_unless_every_kernel_that_runs_here_passes(tmp_path, monkeypatch, verdicts, code):
    kernels = [SimpleNamespace(name=f"twin.{number}", verdict=verdict) for number, verdict in enumerate(verdicts)]
    monkeypatch.setattr(publish, "run", lambda *given, **options: SimpleNamespace(kernels=kernels))
    done = CliRunner().invoke(main, ["atlas", "twin.fp16", "--out", str(tmp_path)])
    assert done.exit_code == code, done.output
    assert done.stdout.splitlines() == [str(tmp_path / "atlas.json")]


@pytest.mark.parametrize(("names", "code"), [(("run.nc",), 0), (("atlas.json",), 2), (("run.nc", "atlas.json"), 2)])
def test_a_page_is_of_one_run(tmp_path, monkeypatch, names, code):
    monkeypatch.setattr(build, "rebuild", lambda run, out: out / "report.html")
    for name in names:
        (tmp_path / name).touch()
    done = CliRunner().invoke(main, ["report", *(str(tmp_path / name) for name in names), "--out", str(tmp_path / "x")])
    assert done.exit_code == code, done.output


def test_devices_are_remembered_for_the_workers(monkeypatch):
    monkeypatch.setenv(DEVICES_VARIABLE, "")  # set back after the test
    assert run("verify", "no.such.kernel", "--devices", "2,GPU-7").exit_code == 2
    assert os.environ[DEVICES_VARIABLE] == "2,GPU-7"


def test_all_devices_of_a_machine_without_a_gpu_are_an_error_of_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(DEVICES_VARIABLE, "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    done = run("verify", "twin.fp16", "--devices", "all", "--out", tmp_path / "out")
    assert done.exit_code == 3
    assert "nvidia-smi" in done.output
