"""Draws, planned cases, trials and options of the verbs are those that are stored (``tests/harness/pinned.py``)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.harness import pinned

STORED = json.loads(pinned.FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("make", pinned.TABLES, ids=lambda make: make.__name__)
def test_what_stored_results_rest_on_is_what_it_was(make: Callable[[], dict[str, Any]]) -> None:
    """A family draws what its baselines were measured on, a profile plans the same cases, a verb takes the same."""
    found = make()
    stored = STORED[make.__name__]
    moved = sorted(name for name in found.keys() | stored.keys() if found.get(name) != stored.get(name))
    assert not moved, f"{make.__name__} of {', '.join(moved)}: meant? then python -m tests.bless plans writes them"
