"""Binaries in the peers' folder are unpacked beside themselves, on first use."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from fa3verify.known.libraries import FOLDER_VARIABLE, Unsupported, library


@pytest.mark.parametrize("name", ["one.so", "kernels/one.so"])
def test_a_packed_library_is_unpacked_once_wherever_it_lies(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    packed = tmp_path / f"{name}.xz"
    packed.parent.mkdir(exist_ok=True)
    packed.write_bytes(lzma.compress(b"code"))
    assert library(name) == tmp_path / name
    assert (tmp_path / name).read_bytes() == b"code"
    packed.unlink()
    assert library(name).read_bytes() == b"code"
    assert [file.name for file in packed.parent.iterdir()] == [packed.stem]
    with pytest.raises(Unsupported, match=r"neither two\.so nor"):
        library("two.so")
    monkeypatch.delenv(FOLDER_VARIABLE)
    with pytest.raises(Unsupported, match="--peers or FA3VERIFY_PEERS names"):
        library(name)
