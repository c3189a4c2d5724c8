"""Errors over their bounds, element by element."""

from __future__ import annotations

import numpy as np


@np.errstate(divide="ignore", invalid="ignore")
def error_ratio(error: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """Return |error| / bound with 0/0 = 0; a NaN error is infinitely wrong unless the bound is infinite."""
    ratio = np.abs(error) / bound
    ratio = np.where((error == 0) & (bound == 0), 0.0, ratio)
    ratio = np.where(np.isnan(error), np.inf, ratio)
    return np.where(np.isinf(bound), 0.0, ratio)


@np.errstate(invalid="ignore")
def difference(got: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return got - truth where an infinity equals itself; any other infinity is infinitely wrong."""
    got = got.astype(np.float64)
    return np.where(got == truth, 0.0, np.where(np.isinf(got), np.inf, got - truth))


@np.errstate(invalid="ignore", over="ignore")
def error_over_bound(got: np.ndarray, truth: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """Return |got - truth| / bound of each element, as :func:`error_ratio` has it; -inf equals -inf."""
    return error_ratio(difference(got, truth), bound)
