"""The wheel and the source distribution: built here, installed into fresh environments, used from an empty folder."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from fa3verify.version import __version__

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13")  # as the README says
CHECK = (
    "import numpy, fa3verify; x = numpy.ones((1, 1, 1, 16), 'f2'); print(fa3verify.check(x, x, x, x, layout='bhsd'))"
)


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """Build both, the wheel from the source distribution."""
    if not importlib.util.find_spec("build"):
        pytest.skip("needs build (extra 'dev')")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True, capture_output=True)
    return folder


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["whl", "tar.gz"])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_package_works_from_an_empty_folder(packages, version, kind, tmp_path):
    python = shutil.which(f"python{version}")
    if not python or subprocess.run([python, "--version"], capture_output=True, check=False).returncode:
        pytest.skip(f"needs Python {version}")
    (package,) = packages.glob(f"*.{kind}")
    environment, empty = tmp_path / "environment", tmp_path / "empty"
    empty.mkdir()
    subprocess.run([python, "-m", "venv", environment], check=True)
    subprocess.run([environment / "bin/pip", "install", "-q", "--no-compile", package], check=True)

    def said(program: str, *arguments: str) -> str:
        call = [environment / "bin" / program, *arguments]
        return subprocess.run(call, cwd=empty, check=True, capture_output=True, text=True).stdout

    assert __version__ in said("fa3verify", "--version")
    assert said("python", "-c", CHECK).startswith("PASS")
    assert "cycles" in said("fa3verify", "simulate", "--seqlen", "1024")
    assert "VERIFY PASS" in said("fa3verify", "verify", "twin.quantize", "--quick", "--quiet", "--out", "out")


@pytest.mark.nightly
def test_the_source_distribution_holds_what_git_holds(packages):
    """What else lies in a checkout, such as an environment or libraries to be compared with, may be anybody's."""
    (archive,) = packages.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        held = {name.partition("/")[2] for name in packed.getnames()} - {"PKG-INFO"}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert held == set(listed.splitlines())
