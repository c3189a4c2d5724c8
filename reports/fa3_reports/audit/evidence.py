"""Which launches have changed since a measurement: evidence is of what was launched, stale once that no longer is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from fa3_kernels.audit.evidence import evidence_sha256, launch_keys

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
    if sha256 == evidence_sha256(of):
        return frozenset()
    now = launch_keys(of)
    known = _measured().get(sha256, {}) | dict(then or {})
    return frozenset(probe for probe in {*now, *known} if now.get(probe) != known.get(probe))


@cache
def _measured() -> dict[str, dict[str, str]]:
    return json.loads(MEASURED.read_text(encoding="utf-8"))
