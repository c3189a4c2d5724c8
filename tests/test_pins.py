"""What published evidence was made from has not moved."""

from __future__ import annotations

import json

import pytest

from tests.pins import FILE, TABLES, digests


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_what_published_evidence_was_made_from_is_as_it_was(table):
    pinned = json.loads(FILE.read_text())[table.__name__]
    now = digests(table)
    changed = {label for label in {*pinned, *now} if pinned.get(label) != now.get(label)}
    assert not changed, f"{table.__doc__} changed: {sorted(changed)}; if that is meant, run python -m tests.bless pins"
