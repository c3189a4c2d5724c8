"""The draw of public kernels follows its rule, and the list is one that can be drawn from."""

from __future__ import annotations

import random
import tomllib
from pathlib import Path

import pytest

from fa3_reports.measured.drawn import COUNT, DRAW, NEXT, SPARES, drawn, next_six, spares_of

LIST = Path(__file__).parents[3] / "reports" / "h200" / "schedules" / "sources.toml"
KERNELS = tomllib.loads(LIST.read_text(encoding="utf-8"))["kernel"]
NAMES = [kernel["name"] for kernel in KERNELS]
FACTS = {"name", "repository", "commit", "path", "entry", "licence", "language", "what", "given"}


def test_the_list_names_each_kernel_once_and_says_where_it_is() -> None:
    assert len(set(NAMES)) == len(NAMES) >= 24
    for kernel in KERNELS:
        assert set(kernel) - {"dropped"} == FACTS, kernel["name"]
        assert len(kernel["commit"]) == 40, kernel["name"]


def test_the_draw_is_the_stated_sample() -> None:
    assert (DRAW, SPARES, COUNT) == (20261130, 20261201, 6)
    assert drawn(NAMES) == random.Random(20261130).sample(NAMES, 6)


def test_one_that_cannot_be_built_leaves_its_place_to_the_first_spare_that_can() -> None:
    first = drawn(NAMES)
    spares = spares_of(NAMES)
    assert not set(first) & set(spares)
    assert drawn(NAMES, [first[2]]) == [*first[:2], spares[0], *first[3:]]
    assert drawn(NAMES, [first[2], spares[0]]) == [*first[:2], spares[1], *first[3:]]
    with pytest.raises(ValueError, match="no spare is left"):
        drawn(NAMES, [first[0], *spares])


def test_no_kernel_was_dropped_that_was_not_drawn() -> None:
    dropped = [kernel["name"] for kernel in KERNELS if "dropped" in kernel]
    assert set(dropped) <= {*drawn(NAMES), *spares_of(NAMES)}


def test_the_second_six_are_the_first_that_can_be_built_of_those_that_the_first_test_left() -> None:
    left = [name for name in NAMES if name not in drawn(NAMES)]
    order = random.Random(20261202).sample(left, len(left))
    assert NEXT == 20261202
    assert next_six(NAMES) == order[:6]
    fewer = [name for name in left if name != order[0]]
    assert next_six(NAMES, [order[0]]) == random.Random(20261202).sample(fewer, len(fewer))[:6]
