"""The peers' folder from wheels: which library is found in which layout, and what is refused."""

from __future__ import annotations

import lzma
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from fa3verify.cli.main import main
from fa3verify.known import wheels
from fa3verify.known.peers import PEERS

VLLM = {"vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": b"three", "vllm/_C.abi3.so": b"not this one"}


@pytest.fixture(autouse=True)
def folder_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test leave the variable that --peers sets to those after it."""
    monkeypatch.setenv("FA3VERIFY_PEERS", "")


def wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    path = folder / f"{name}-cp39-abi3-manylinux_2_24_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
    return path


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["bench", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("name", "member", "peer"),
    [
        ("vllm-0.33.0", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "vllm"),
        ("vllm-0.33.0", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "flash2.vllm"),
        ("fa3_fwd-0.0.3", "fa3_fwd/_C.abi3.so", "flash3"),
        ("dew_flash_attn_cu13-0.3.6", "dew_flash_attn/libdew_flash_attn3.so", "flash3.dew"),
        ("sglang_kernel-0.4.5", "sgl_kernel/flash_ops.abi3.so", "sglang"),
        ("sgl_kernel-0.3.21", "sgl_kernel/flash_ops.abi3.so", "sglang"),
    ],
)
def test_each_layout_gives_the_binary_that_its_peer_looks_for(
    name: str, member: str, peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytes(range(256)) * 1000
    path = wheel(tmp_path, name, {member: content, "other/_ops.so": b"x"})
    (line,) = wheels.unpack(path, tmp_path)
    version = name.replace("_", "-").replace("-0", " 0")
    assert line.startswith(f"{peer}: {version}, {member}, as {tmp_path / PEERS[peer].binary}.xz, ")
    assert line.endswith("; the table knows sglang-kernel 0.4.5") == (name == "sgl_kernel-0.3.21")
    assert lzma.decompress((tmp_path / f"{PEERS[peer].binary}.xz").read_bytes()) == content
    assert sorted(x.suffix for x in tmp_path.iterdir()) == [".whl", ".xz"]
    monkeypatch.setenv("FA3VERIFY_PEERS", str(tmp_path))
    assert PEERS[peer].missing() in (None, "package torch is not installed")


def test_several_wheels_fill_a_folder_and_another_version_is_said(tmp_path: Path) -> None:
    given = (wheel(tmp_path, "vllm-0.34.1", VLLM), wheel(tmp_path, "fa3_fwd-0.0.3", {"fa3_fwd/_C.abi3.so": b"f"}))
    code, out, err = run("--peers", tmp_path / "peers", "--peers-from", *given)
    assert (code, err) == (0, "")
    first, second = out.splitlines()
    assert first.startswith("vllm: vllm 0.34.1, vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so, as ")
    assert first.endswith("0.0 MB; the table knows vllm 0.33.0")
    assert second.endswith("0.0 MB")
    assert sorted(x.name for x in (tmp_path / "peers").iterdir()) == ["fa3_fwd_C.so.xz", "vllm.so.xz"]


@pytest.mark.parametrize(
    ("name", "files", "said"),
    [
        ("numpy-2.0.0", {"numpy/_core.so": b""}, "is no wheel of vllm, fa3-fwd"),
        ("flash_attn_3-3.0.0", {"flash_attn_3/_C.abi3.so": b""}, "is no wheel of vllm, fa3-fwd"),
        ("vllm-0.33.0", {"vllm/_C.abi3.so": b""}, "has no _vllm_fa3_C.abi3.so and no _vllm_fa2_C.abi3.so"),
    ],
)
def test_other_wheels_are_refused_in_a_line(name: str, files: dict[str, bytes], said: str, tmp_path: Path) -> None:
    path = wheel(tmp_path, name, files)
    good = wheel(tmp_path, "fa3_fwd-0.0.3", {"fa3_fwd/_C.abi3.so": b"f"})
    code, out, err = run("--peers", tmp_path, "--peers-from", path, good)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"refused: {path} {said}")
    assert out.startswith("flash3: fa3-fwd 0.0.3, ")  # the others are taken


def test_what_is_no_archive_and_wheels_for_nothing_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "vllm-0.33.0-py3-none-any.whl"
    path.write_text("not a zip")
    assert "is no wheel of" in run("--peers", tmp_path, "--peers-from", path)[2]
    assert "--peers-from needs wheels" in run(path)[2]
    assert "--peers-from needs wheels" in run("--peers-from")[2]
