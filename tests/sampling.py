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
    return [value if value in quick else pytest.param(value, marks=pytest.mark.nightly) for value in found]
