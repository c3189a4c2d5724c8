"""The files of docs/ci run as they are: every command of the workflow, the Slurm script as an array, a Dask cluster.

The shell finds a ``fa3verify`` that judges a few tasks of a twin; everything else about it is the program's own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest

from fa3verify import __version__
from fa3verify.cli.main import main

FILES = Path(__file__).parents[3] / "docs" / "ci"
SOUND, WRONG = "twin.quantize", "twin.quantize+neighbour_descale"
PROGRAM = f"""#!{sys.executable}
import sys
from concurrent.futures import Executor, Future

from fa3verify.campaign import plan
from fa3verify.commands import verify


class Inline(Executor):
    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        future.set_result(fn(*args, **kwargs))
        return future


FEW = ("normal", "repeated_run_is_identical")
whole, make = plan.plan, verify.make_executor
plan.plan = lambda *a: [t for t in whole(*a) if t.subject in FEW]
verify.make_executor = lambda settings: make(settings) if settings.scheduler else Inline()

if __name__ == "__main__":
    from fa3verify.cli.main import main

    sys.exit(main(prog_name="fa3verify"))
"""


def a_repository(folder: Path) -> Path:
    """Put the program where :func:`shell` looks for it."""
    program = folder / "bin" / "fa3verify"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    program.chmod(0o755)
    (folder / "baselines").mkdir()
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return a_repository(tmp_path)


def shell(folder: Path, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command as Actions does: bash that stops at the first failure."""
    environment = os.environ | {"PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    call = ["bash", "-eo", "pipefail", "-c", command]
    return subprocess.run(
        call, cwd=folder, env=environment | variables, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture(scope="module")
def workflow() -> dict:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML to read the workflow")
    return yaml.safe_load((FILES / "attention.yml").read_text())


def commands(workflow: dict, job: str, **matrix: int) -> list[str]:
    """The commands of a job that are not installation, with the values of its matrix.

    Installation is the checkout and a wheel that lies in it: no index has a package of that name.
    """
    lines = [step["run"] for step in workflow["jobs"][job]["steps"] if "run" in step]
    assert lines[0] == 'pip install . "$FA3VERIFY"'
    assert re.fullmatch(
        rf"\./[\w/]+/fa3verify-{re.escape(__version__)}-py3-none-any\.whl\[junit\]", workflow["env"]["FA3VERIFY"]
    )
    ours = lines[1:]
    assert all(line.startswith("fa3verify ") for line in ours), "a command that no test runs"
    for name, value in matrix.items():
        ours = [re.sub(rf"\$\{{\{{ matrix.{name} \}}\}}", str(value), line) for line in ours]
    assert "${{" not in "".join(ours)
    return ours


def run(folder: Path, workflow: dict, job: str, kernel: str, **matrix: int) -> subprocess.CompletedProcess[str]:
    (command,) = commands(workflow, job, **matrix)
    variables = workflow["env"] | {"KERNEL": kernel, "GITHUB_STEP_SUMMARY": str(folder / "summary.md")}
    return shell(folder, command, **variables)


def failures(junit: Path) -> int:
    return len(ElementTree.parse(junit).findall(".//failure"))


def words_of(text: str) -> list[list[str]]:
    """The words behind ``fa3verify`` of each such line of a script, with a value for every variable."""
    text = re.sub(r"\$\(\(.*?\)\)|\"?\$\w+\"?", "1", text)
    lines = [line for line in text.splitlines() if line.strip().removeprefix("exec ").startswith("fa3verify ")]
    return [shlex.split(line.split("fa3verify ", 1)[1], comments=True) for line in lines]


@pytest.mark.parametrize("name", ["attention.yml", "slurm.sh", "dask.sh"])
def test_every_command_is_one_that_the_program_takes(name, workflow, monkeypatch, tmp_path):
    """The options are parsed and nothing runs; the nightly tests run each command."""
    jobs = "\n".join(step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step)
    given = words_of(jobs.replace("${{ matrix.shard }}", "1") if name.endswith("yml") else (FILES / name).read_text())
    assert len(given) >= (4 if name.endswith("yml") else 1)
    for verb, *words in given:
        command = main.get_command(click.Context(main), verb)
        assert command is not None, verb
        assert command.make_context(verb, words).params, words


@pytest.fixture(scope="module")
def baseline(workflow, tmp_path_factory) -> str:
    """The file that the workflow wrote of the sound kernel."""
    folder = a_repository(tmp_path_factory.mktemp("baseline"))
    written = run(folder, workflow, "baseline", SOUND)
    assert written.returncode in (0, 5), written.stderr
    return (folder / workflow["env"]["BASELINE"]).read_text()


@pytest.mark.nightly
def test_a_baseline_is_written_and_the_next_pull_request_held_to_it(folder, workflow, baseline):
    assert json.loads(baseline)
    (folder / workflow["env"]["BASELINE"]).write_text(baseline)
    judged = run(folder, workflow, "cpu", SOUND)
    assert "baseline pass" in judged.stdout + judged.stderr
    assert failures(folder / "out" / "junit.xml") == 0
    assert "fa3verify" in (folder / "summary.md").read_text()


@pytest.mark.nightly
def test_a_wrong_kernel_stops_the_release_though_only_the_parts_saw_it(folder, workflow, baseline):
    (folder / workflow["env"]["BASELINE"]).write_text(baseline)
    parts = workflow["jobs"]["gpu"]["strategy"]["matrix"]["shard"]
    codes = [run(folder, workflow, "gpu", WRONG, shard=k).returncode for k in parts]
    assert 1 in codes
    (folder / "shards").mkdir()
    for part in (folder / "out").glob("shard-*.json"):  # what upload and download do
        shutil.copy(part, folder / "shards")
    merged = run(folder, workflow, "release", WRONG)
    assert merged.returncode == 1, merged.stderr
    assert "VERIFY FAIL" in merged.stdout
    assert failures(folder / "out" / "junit.xml") > 0


def test_jobs_run_where_and_when_they_should(workflow):
    jobs, events = workflow["jobs"], workflow[True]  # YAML 1.1 reads the key "on" as true
    assert set(events) == {"pull_request", "release", "workflow_dispatch"}
    assert "hopper" in jobs["gpu"]["runs-on"]
    assert jobs["gpu"]["strategy"]["fail-fast"] is False
    assert jobs["release"]["needs"] == "gpu"
    assert "always()" in jobs["release"]["if"]


@pytest.mark.nightly
def test_the_slurm_script_is_an_array_and_then_a_verdict(folder):
    script = FILES / "slurm.sh"
    count = re.search(r"--array=0-(\d+)", script.read_text())
    assert count
    tasks = int(count[1]) + 1
    for task in range(tasks):
        array = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_COUNT": str(tasks), "KERNEL": SOUND}
        ran = shell(folder, str(script), **array)
        assert ran.returncode == 0, ran.stderr
    merged = shell(folder, f"{script} merge")
    assert "VERIFY" in merged.stdout, merged.stderr
    assert "FAIL" not in merged.stdout
    assert (folder / "merged" / "report.html").is_file()


@pytest.mark.nightly
def test_the_dask_script_gives_the_campaign_to_its_workers(folder):
    pytest.importorskip("distributed", reason="needs the extra distributed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ran = shell(folder, str(FILES / "dask.sh"), KERNEL=SOUND, PORT=port)
    assert "VERIFY" in ran.stdout, ran.stderr[-2000:]
    assert "FAIL" not in ran.stdout
    assert (folder / "out" / "report.html").is_file()
