"""Texts of other people's kernels: one printable line of at most 4 KiB, however long or odd they are."""

from __future__ import annotations

import pytest

from fa3verify.kernels.record import Identity
from fa3verify.text import MOST_BYTES, of_error, one_line


@pytest.mark.parametrize("letter", ["x", "é", "\U0001f600", "\x00", "\U000e0001"])
def test_no_text_of_a_kernel_has_more_than_its_share(letter):
    texts = [one_line(letter * 10**6), of_error(ValueError(letter * 10**6)), one_line(letter * 10**6, MOST_BYTES)]
    assert max(len(text.encode()) for text in texts) <= MOST_BYTES
    assert all(text.isprintable() for text in texts)


def test_a_text_that_is_cut_says_so_and_one_that_fits_is_whole():
    assert "(cut from " in one_line("\U000e0001" * 10**4, MOST_BYTES)
    assert one_line("x" * MOST_BYTES, MOST_BYTES) == "x" * MOST_BYTES
    assert one_line("x" * 9000, 10**4) == "x" * 9000
    assert [one_line("ab" * 9, most) for most in (0, 1, 2)] == ["...", "...", "a ... b"]


def test_an_identity_is_cut_whatever_its_kernel_says():
    said = Identity("x" * 10**7, file="a\nb\x1b[2J", sha256=None, device="é" * 10**4)
    assert [len((text or "").encode()) <= MOST_BYTES for text in (said.version, said.device)] == [True, True]
    assert said.file == r"a b\x1b[2J"
    assert said.sha256 is None
