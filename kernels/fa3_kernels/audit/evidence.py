"""This module says which kernels a measurement belongs to: evidence is of what was launched, stale as soon as that no
longer is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from fa3_kernels.audit.golden import read_rows

Evidence = Literal[
    "forward",
    "packed",
    "paged",
    "quantize",
    "timeline",
    "backward",
    "forward+packed",
    "forward+packed+paged+quantize+backward",
]
# Keys of launches by the hash of them all: of measurements from before provenance held the keys themselves, and of
# probes from after it, whose PTX the code of that time was compiled to as well.
MEASURED = Path(__file__).parent / "measured.json"


def launch_keys(of: str) -> dict[str, str]:
    """Return a key of every launch that a measurement may be evidence of, by the name of its probe, as accepted.

    It is of what the GPU gets (:func:`fa3_kernels.audit.launched.launch_sha256`) for each kernel of the launch, and of
    the PTX where the audit compiles it; that both are those of the code in this tree is what ``fa3verify audit`` says,
    and of the launches a test.

    Parameters
    ----------
    of : {"forward", "packed", "paged", "quantize", "timeline", "backward"} or several of them, as ``Evidence`` lists
        The forward of batched sequences, of packed ones, of caches and sinks; the quantiser; kernels that keep
        timelines; those of the gradients.

    Raises
    ------
    ValueError
        For a word that no launch is evidence of.
    """
    if of not in get_args(Evidence):
        raise ValueError(f"evidence must be of {', '.join(get_args(Evidence))} launches, got {of!r}")
    kernels: dict[str, list[str]] = {}
    for label, row in read_rows().items():
        if row["launch"]["of"] in of.split("+"):
            text = f"{row['launch']['sha256']} {row.get('ptx_sha256', '')}"
            kernels.setdefault(label.partition("/")[0], []).append(text)
    return {probe: hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16] for probe, texts in kernels.items()}


def evidence_sha256(of: str) -> str:
    """Return one hash of all :func:`launch_keys`, by which a measurement names the launches that it is evidence of."""
    return hashlib.sha256("\n".join(sorted(launch_keys(of).values())).encode()).hexdigest()


def changed_since(of: str, sha256: str, then: Mapping[str, str] | None = None) -> frozenset[str]:
    """Return which launches are others now than those that were measured, by probe.

    One that was not looked at then counts as changed, as nothing says that its code is older than the measurement.

    Parameters
    ----------
    of : str
        As in :func:`launch_keys`.
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


def evidence_facts(of: Evidence) -> dict[str, object]:
    """Return what provenance says of the kernels: of which launches it is, their hash and their keys."""
    return {"evidence_of": of, "launches_sha256": evidence_sha256(of), "launches": launch_keys(of)}
