"""Figures of a judged case, from numbers made up."""

from __future__ import annotations

import numpy as np

from fa3verify.judging.metrics import share_of


def test_no_error_is_all_that_is_allowed_only_where_nothing_is():
    error = np.array([0.0, 0.0, 1.0, 1.0, 0.5])
    allowed = np.array([0.0, 1.0, 1.0, 0.0, 1.0])
    assert share_of(error, allowed).tolist() == [1.0, 0.0, 1.0, np.inf, 0.5]
