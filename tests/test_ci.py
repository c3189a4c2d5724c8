"""The script that CI runs: what it does to the checkout it stands in."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Makes environments in which nothing is installed and every test passes, but for one that it does not make.
PYTHON = """#!/bin/sh
echo "$@" >> {called}
case "$3" in */{fails}) exit 7 ;; esac
mkdir -p "$3/bin"
for name in pip python; do echo '#!/bin/sh' > "$3/bin/$name"; chmod +x "$3/bin/$name"; done
"""


@pytest.mark.parametrize("fails", ["tests", "all"])
def test_ci_runs_the_readme_command_in_an_environment_of_its_own(tmp_path, fails):
    checkout, programs = tmp_path / "checkout", tmp_path / "programs"
    (checkout / ".ci").mkdir(parents=True)
    (checkout / ".venv").mkdir()
    programs.mkdir()
    shutil.copy(ROOT / ".ci/run", checkout / ".ci/run")
    shutil.copy(ROOT / "README.md", checkout)
    (checkout / ".venv/made-by-a-user").touch()
    called = tmp_path / "called"
    (programs / "python3").write_text(PYTHON.format(called=called, fails=fails))
    (programs / "python3").chmod(0o755)

    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(["bash", ".ci/run"], cwd=checkout, env=os.environ | {"PATH": path}, capture_output=True)

    assert ended.returncode == 7, "a step that fails must fail CI"
    assert (checkout / ".venv/made-by-a-user").exists()
    for call in called.read_text().splitlines():
        module, option, environment = call.split()
        assert (module, option) == ("-m", "venv")
        assert not Path(environment).is_relative_to(checkout)
        assert not Path(environment).exists(), "the temporary environments are removed however CI ends"
