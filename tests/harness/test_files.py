"""Files of text: whole or not at all, plain or packed, and tables that say what is wrong with them."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from fa3_reports import stored
from fa3verify import files


def test_a_packed_file_is_read_by_the_name_that_it_has_unpacked_and_by_its_own(tmp_path: Path):
    path = tmp_path / "table.csv"
    packed = tmp_path / "table.csv.xz"
    packed.write_bytes(lzma.compress(b"a\n1\n"))
    assert files.stored(path) == packed
    assert files.read_text(path) == files.read_text(packed) == "a\n1\n"
    assert stored.read_csv(path) == [{"a": "1"}]


def test_a_packed_file_is_replaced_by_a_packed_one_and_a_plain_one_stays_plain(tmp_path: Path):
    path = tmp_path / "a.json"
    files.write_text(path, "plain")
    assert path.read_text() == files.read_text(path) == "plain"
    path.unlink()
    files.write_text(tmp_path / "a.json.xz", "one")
    files.write_text(path, "two")
    assert not path.exists()
    assert lzma.decompress((tmp_path / "a.json.xz").read_bytes()) == b"two"


def test_unpacking_leaves_the_plain_file_alone(tmp_path: Path):
    files.write_text(tmp_path / "a.xz", "text")
    stored.unpack(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    stored.unpack(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "text"


def test_what_is_absent_or_damaged_is_refused_by_name(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        files.read_text(tmp_path / "a")
    (tmp_path / "a.xz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"a\.xz is damaged"):
        files.read_text(tmp_path / "a")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("a,b\n1\n", r"t, line 2: must have 2 fields"),
        ("a,b\n1,2,3\n", r"t, line 2: must have 2 fields"),
        ("a\n1\n", r"t, line 1: column b is missing; it has a, b"),
        ("", r"t, line 1: column a is missing"),
        ('a,b\n"1\n', r"t is no CSV file"),
    ],
)
def test_a_table_that_is_none_is_refused_by_name_and_line(text: str, rule: str):
    with pytest.raises(ValueError, match=rule):
        stored.csv_rows(text, "t", ("a", "b"))


def test_a_table_is_read_back_as_it_was_written():
    rows = [["1", "two, three"], ['"', ""]]
    text = files.csv_text(["a", "b"], rows)
    assert text == files.csv_lines([["a", "b"], *rows])
    assert [[*row.values()] for row in stored.csv_rows(text, "t")] == rows
