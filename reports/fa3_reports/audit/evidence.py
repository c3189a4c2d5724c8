"""Which launches have changed since a measurement: evidence is of what was launched, stale once that no longer is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from fa3_kernels.audit import evidence

# Keys of launches by the hash of them all: of measurements from before provenance held the keys themselves, and of
# probes from after it, whose PTX the code of that time was compiled to as well.
MEASURED = Path(__file__).with_name("measured.json")


def changed_since(of: str, sha256: str, then: Mapping[str, str] | None = None) -> frozenset[str]:
    """Return which launches are others now than those that were measured, by probe.

    One that was not looked at then counts as changed, as nothing says that its code is older than the measurement.

    Parameters
    ----------
    of : str
        As in :func:`fa3_kernels.audit.evidence.launch_keys`.
    sha256 : str
        Their hash then.
    then : mapping, optional
        Their keys then; by default as they were kept. Where nobody kept them, all launches have changed.
    """
    all_of_them, now = _today(of, evidence.accepted_rows)
    if sha256 == all_of_them:
        return frozenset()
    known = _measured().get(sha256, {}) | dict(then or {})
    return frozenset(probe for probe in {*now, *known} if now.get(probe) != known.get(probe))


@cache
def _today(of: str, rows: Callable[[], object]) -> tuple[str, dict[str, str]]:
    """Return the hash and the keys of today's launches, made once for what reads the accepted ``rows``."""
    return evidence.evidence_sha256(of), evidence.launch_keys(of)


@cache
def _measured() -> dict[str, dict[str, str]]:
    return json.loads(MEASURED.read_text(encoding="utf-8"))
