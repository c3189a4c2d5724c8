"""The plugin in somebody else's repository: one line in its conftest, and nothing at all without it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fa3verify import pytest_plugin

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "tests" / "foreign_project"
PYTHONPATH = os.pathsep.join(str(ROOT / room) for room in ("", "kernels", "simulator", "reference"))


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k == "PYTEST_CURRENT_TEST" or not k.startswith("PYTEST")}
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=kept | {"PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        check=False,
    )


def pytest_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest there, with the plugin whether or not it is installed."""
    return run(folder, "pytest", "-p", "fa3verify.pytest_plugin", "-rA", "-q", *arguments)


def outcomes(text: str) -> dict[str, str]:
    """Outcome by test, of the short summary."""
    return {name: word for word, name in re.findall(r"^(PASSED|FAILED|XFAIL|ERROR) (\S+)", text, re.MULTILINE)}


@pytest.fixture
def project(tmp_path) -> Path:
    return copied(tmp_path)


def copied(folder: Path) -> Path:
    (folder / "pytest.ini").write_text("[pytest]\n")
    return Path(shutil.copytree(PROJECT, folder, dirs_exist_ok=True))


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, str]:
    """Some of the project's tests on two processes: folder and output."""
    folder = copied(tmp_path_factory.mktemp("project"))
    chosen = "family and (normal or tiny) or constant_values or long_rows or shapes"
    return folder, pytest_in(folder, "-n", "2", "-k", chosen).stdout


def test_one_line_in_a_conftest_judges_kernels_and_tells_right_from_wrong(ran):
    found = {name: word for name, word in outcomes(ran[1]).items() if name.startswith("conftest.py")}
    assert found == {
        "conftest.py::kernels:right::property[constant_values_come_back]": "PASSED",
        "conftest.py::kernels:right::family[normal]": "PASSED",
        "conftest.py::kernels:right::family[subnormals]": "PASSED",
        "conftest.py::kernels:right::family[tiny]": "PASSED",
        "conftest.py::kernels:wrong::property[constant_values_come_back]": "PASSED",
        "conftest.py::kernels:wrong::family[normal]": "XFAIL",
        "conftest.py::kernels:wrong::family[subnormals]": "FAILED",
        "conftest.py::kernels:wrong::family[tiny]": "FAILED",
    }


def test_the_fixtures_judge_tests_of_the_repositorys_own_with_every_kernel(ran):
    found = {name: word for name, word in outcomes(ran[1]).items() if name.startswith("test_shapes.py")}
    assert found == {
        "test_shapes.py::test_one_query_over_a_cache[kernels:right]": "PASSED",
        "test_shapes.py::test_one_query_over_a_cache[kernels:wrong]": "FAILED",
    }


def test_files_skip_and_expect_failures_with_their_reasons(ran):
    assert "keys beyond 128 are left out" in ran[1]
    assert "our rows have at most 4096 keys" in ran[1]


def test_a_failing_test_shows_case_bound_and_a_replay_that_fails_again(ran):
    folder, text = ran
    shown = text[text.index("kernels:wrong bound, error / bound: family tiny") :]
    observed = r"observed \S+, limit 1; assumed: any order, sums in binary32 \(device: CPU\), the row sum adds .*\n"
    assert re.search(observed + r" +case: kernels:wrong b1 h4/4 129x321 d64 \| tiny\(octaves=0\)", shown)
    file = re.search(r"replay: fa3verify replay (\S+)", shown)
    assert file is not None
    assert Path(file[1]).is_relative_to(folder / ".pytest_cache")
    assert run(folder, "fa3verify", "replay", file[1]).returncode == 1


def test_the_command_line_names_other_kernels_and_a_test_is_run_by_its_name(project):
    name = "conftest.py::twin.fp16+wrong_softmax_scale::family[peaky]"
    done = pytest_in(project, "--fa3-kernel", "twin.fp16+wrong_softmax_scale", "--fa3-seed", "7", "-x", name)
    assert outcomes(done.stdout) == {name: "FAILED"}
    assert "seed 7" in done.stdout
    assert done.returncode == 1


def test_what_cannot_be_collected_is_an_error_that_says_why(project):
    (project / "conftest.py").write_text('fa3_kernels = ["kernels:absent", "broken:kernel", "kernels:right"]\n')
    (project / "broken.py").write_text("raise RuntimeError('no device')\n")
    (project / "fa3_skips.txt").write_text("family[normal]\n")
    done = pytest_in(project, "conftest.py")
    assert done.returncode == 2
    for words in (
        "'kernels:absent' could not be loaded",
        "RuntimeError: no device",
        "fa3_skips.txt:1 must be PATTERN #",
    ):
        assert words in done.stdout
    assert "Traceback" not in done.stdout


def test_a_line_of_a_file_that_hides_nothing_any_more_is_told(project):
    (project / "fa3_xfails.txt").write_text("family[normal]  # was wrong\nfamily[no_such]  # typo\n")
    name = "conftest.py::kernels:right::family[normal]"
    done = pytest_in(project, "--fa3-kernel", "kernels:right", name)
    assert outcomes(done.stdout) == {name: "FAILED"}
    assert "XPASS(strict)" in done.stdout
    assert "fa3_xfails.txt:2 names no test of kernels:right" in done.stdout


def test_without_a_kernel_the_plugin_imports_nothing_of_weight_and_collects_nothing(tmp_path):
    (tmp_path / "conftest.py").write_text("")
    (tmp_path / "test_one.py").write_text(
        "import sys\n\n"
        "def test_loaded():\n    assert 'fa3verify.pytest_plugin' in sys.modules\n"
        "    heavy = {'numpy', 'numba', 'xarray', 'fa3verify.conformance', 'fa3_reference.problem'}\n"
        "    assert not heavy & set(sys.modules)\n\n"
        "def test_kernel(fa3_kernel):\n    assert False\n"
    )
    done = pytest_in(tmp_path)
    assert outcomes(done.stdout) == {"test_one.py::test_loaded": "PASSED"}
    assert "no kernel is named: --fa3-kernel NAME" in done.stdout


def test_the_installed_plugin_has_its_modules_name_so_that_it_is_loaded_once():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["project"]["entry-points"]["pytest11"] == {pytest_plugin.__name__: pytest_plugin.__name__}
