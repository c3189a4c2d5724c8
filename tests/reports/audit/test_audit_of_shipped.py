"""The kernels in this tree compile to what was accepted; `audit --accept` follows a change that is meant."""

from __future__ import annotations

import pytest

from fa3_kernels.gluon import unsupported
from fa3_reports.audit import figures as audit, golden as accepted

pytestmark = [
    pytest.mark.optional,
    pytest.mark.nightly,  # ptxas takes minutes; test_evidence tells in seconds that what the GPU gets has changed
    pytest.mark.skipif(unsupported() is not None, reason=f"cannot compile: {unsupported()}"),
]


@pytest.fixture(scope="module")
def figures() -> dict[str, audit.Figures]:
    return audit.compile_all()


def test_no_rule_is_broken(figures) -> None:
    assert audit.broken_rules(figures) == []


def test_nothing_moved_since_it_was_accepted(figures) -> None:
    assert audit.compare(accepted.read_rows(), figures) == []
