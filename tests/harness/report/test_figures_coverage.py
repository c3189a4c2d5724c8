"""The heat map of pairs: a square for every two dimensions, with the number of pairs that did not meet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fa3verify.cases.coverage import Coverage, PairsOfTwo, PairsTried, judged
from fa3verify.report import figures_coverage


def _covered(tried: int, feasible: int) -> Coverage:
    pairs = PairsTried(feasible, tried, (PairsOfTwo(("keys", "mask"), feasible, tried),))
    return replace(judged([], [], None), pairs=pairs)


def test_pairs_that_did_not_meet_are_counted_over_all_kernels():
    drawn = figures_coverage.pairs([_covered(10, 27), _covered(1, 15)])
    assert drawn is not None
    assert ">31<" in drawn
    assert "keys" in drawn
    assert "mask" in drawn
    assert ">31<" not in (figures_coverage.pairs([_covered(27, 27)]) or ">31<")


def test_the_number_of_a_pair_stands_within_its_square(monkeypatch):
    monkeypatch.setattr(figures_coverage.svg, "render", lambda figure, *words: figure)
    figure: Any = figures_coverage.pairs([_covered(10, 27)])
    (axes,) = figure.axes
    (square,), (number,) = axes.patches, axes.texts
    place = np.array(number.get_position())
    low = np.array(square.get_xy())
    assert place - low == pytest.approx([0.46, 0.46], abs=0.05)


def test_runs_without_covering_arrays_have_no_heat_map():
    assert figures_coverage.pairs([judged([], [], None), None]) is None
