"""Sweeps of which the README's test command runs a chosen part, and ``.ci/nightly`` the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return the values for parametrize, with those that are not in ``quick`` marked nightly."""
    found = [*values]
    if missing := [value for value in quick if value not in found]:
        raise ValueError(f"what is chosen must be of the sweep, got {missing}")
    return [value if value in quick else _nightly(value) for value in found]


def _nightly(value: Any) -> Any:
    """Return the value, or the values of several arguments, with the mark."""
    return pytest.param(*(value if type(value) is tuple else (value,)), marks=pytest.mark.nightly)
