"""The compile cache never serves old code and lies outside the package; the bits do not need it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fa3_kernels.twin
from fa3_kernels.twin import compiled

PACKAGE = Path(fa3_kernels.twin.__file__).parent
# A loop in one file whose scalar callee lives in another, as the twin's do, and small enough to be compiled often.
SOURCES = {
    "scalar.py": "from fa3_kernels.twin.compiled import inlined\n@inlined\ndef doubled(x):\n    return 2 * x\n",
    "loop.py": """
from fa3_kernels.twin.compiled import compiled
from fa3_kernels.twin.scalar import doubled
@compiled
def total(count):
    found = 0.0
    for _ in range(count):
        found += doubled(1.0)
    return found
""",
    "tables.json": "[]",
    "__init__.py": "",
}
RUN = """
from fa3_kernels.twin import loop
print(loop.total(1))
print(sum(loop.total.stats.cache_hits.values()))
"""


def run(code: str, tree: Path, **environment: str) -> list[str]:
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small package in place of the twin, with the twin's own ``compiled.py``."""
    package = tmp_path / "source" / "fa3_kernels"
    (package / "twin").mkdir(parents=True)
    for name, text in SOURCES.items():
        (package / "twin" / name).write_text(text)
    shutil.copy(PACKAGE / "compiled.py", package / "twin")
    (package / "__init__.py").write_text("")
    return package.parent


def test_an_edited_callee_in_another_file_is_compiled_again(tree: Path, tmp_path: Path) -> None:
    cache = {"FA3VERIFY_CACHE": str(tmp_path / "cache")}
    assert run(RUN, tree, **cache) == ["2.0", "0"]
    assert run(RUN, tree, **cache) == ["2.0", "1"], "the second process must load what the first compiled"
    callee = tree / "fa3_kernels" / "twin" / "scalar.py"
    source = callee.read_text()
    edited = source.replace("2 * x", "4 * x")
    assert edited != source
    callee.write_text(edited)
    assert run(RUN, tree, **cache) == ["4.0", "0"], "stale code was run"
    callee.write_text(source)
    assert run(RUN, tree, **cache)[0] == "2.0"
    assert len(list((tmp_path / "cache" / "fa3verify").iterdir())) == 2
    assert not list(tree.rglob("*.nb[ic]")), "nothing may be written into the package"


def test_the_hash_covers_every_source_and_table(tree: Path) -> None:
    package = tree / "fa3_kernels" / "twin"
    before = compiled.source_hash(package)
    seen = {before}
    for path in sorted(package.iterdir()):
        if path.suffix in (".py", ".json"):
            content = path.read_text()
            path.write_text(content + "\n")
            seen.add(compiled.source_hash(package))
            path.write_text(content)
    assert compiled.source_hash(package) == before
    assert len(seen) == 1 + len([p for p in package.iterdir() if p.suffix in (".py", ".json")])
    (package / "tables.json").rename(package / "other.json")
    assert compiled.source_hash(package) not in seen


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Where loops are stored by a process that begins with these variables."""

    def found(**environment: Path | str) -> Path:
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(compiled.tempfile, "tempdir", None)
        return compiled.cache_directory.__wrapped__()

    return found


def test_the_cache_root_falls_back_to_the_next_writable_place(
    tree: Path, tmp_path: Path, directory: Callable[..., Path]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    home = tmp_path / "home"
    home.mkdir()
    assert directory(FA3VERIFY_CACHE="", XDG_CACHE_HOME="", HOME=home).parent == home / ".cache" / "fa3verify"
    assert directory(XDG_CACHE_HOME=tmp_path / "xdg").parent == tmp_path / "xdg" / "fa3verify"
    assert directory(FA3VERIFY_CACHE=tmp_path / "asked").parent == tmp_path / "asked" / "fa3verify"
    nowhere = {name: str(blocked) for name in ("FA3VERIFY_CACHE", "XDG_CACHE_HOME", "HOME")}
    assert home in directory(**nowhere, TMPDIR=home).parents
    assert run(RUN, tree, **nowhere, TMPDIR=str(home))[0] == "2.0"


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_a_cache_that_others_can_write_is_not_trusted(tmp_path: Path, directory: Callable[..., Path]) -> None:
    shared = tmp_path / "shared"
    (shared / "fa3verify").mkdir(parents=True)
    (shared / "fa3verify").chmod(0o777)
    home = tmp_path / "home"
    got = directory(FA3VERIFY_CACHE=shared, XDG_CACHE_HOME="", HOME=home)
    assert shared not in got.parents
    assert not stat.S_IMODE(got.stat().st_mode) & 0o022


def test_numba_is_left_as_it_was_found() -> None:
    code = "import numba; a = numba.config.CACHE_DIR; import fa3_kernels.twin.wgmma; print(a == numba.config.CACHE_DIR)"
    assert run(code, PACKAGE.parent.parent) == ["True"]


def test_a_loop_that_cannot_be_stored_runs_all_the_same(tree: Path, tmp_path: Path) -> None:
    full = """
import numba.core.caching
def full(*given):
    raise OSError(28, "No space left on device")
numba.core.caching.IndexDataCacheFile.save = full
"""
    cache = {compiled.CACHE_VARIABLE: str(tmp_path / "cache")}
    assert run(full + RUN, tree, **cache) == ["2.0", "0"]
    assert run(RUN, tree, **cache) == ["2.0", "0"]  # nothing was stored
    assert run(RUN, tree, **cache)[1] != "0"


def test_a_full_disk_is_no_place_for_the_cache(monkeypatch, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no device that is always full")
    monkeypatch.setenv(compiled.CACHE_VARIABLE, str(tmp_path / "without-room"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "roomy"))
    temporary = compiled.tempfile.TemporaryFile

    def on_disk(dir: Path, **rest):
        return open("/dev/full", "wb", buffering=0) if "without-room" in str(dir) else temporary(dir=dir, **rest)

    monkeypatch.setattr(compiled.tempfile, "TemporaryFile", on_disk)
    assert compiled.cache_directory.__wrapped__().is_relative_to(tmp_path / "roomy")
