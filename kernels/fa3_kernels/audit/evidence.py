"""Hashes of what our kernels launch; measurements and verdicts name by them what they are evidence of.

They are read from the accepted file ``audit.json``, which ``python -m fa3_reports audit --accept`` writes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal, get_args

Evidence = Literal[
    "forward",
    "packed",
    "paged",
    "quantize",
    "timeline",
    "backward",
    "forward+packed",
    "forward+backward",
    "forward+packed+paged+quantize+backward",
]
ACCEPTED = Path(__file__).parent / "audit.json"


def accepted_rows() -> dict[str, dict[str, Any]]:
    """Return what was accepted, by kernel: the figures of every compiled kernel, and what every probe launches."""
    body = json.loads(ACCEPTED.read_text(encoding="utf-8"))
    return body["kernels"] | body["launches"]


def launch_keys(of: str) -> dict[str, str]:
    """Return a key of every accepted launch that a measurement may be evidence of, by the name of its probe.

    The key is a hash of what the GPU gets for each kernel of the launch, and of the kernel's PTX if the audit compiles
    it. ``python -m fa3_reports audit`` checks that both are those of the code in this tree; a test checks the launches.

    Parameters
    ----------
    of : {"forward", "packed", "paged", "quantize", "timeline", "backward"} or several of them, as ``Evidence`` lists
        In this order: the forward of batched sequences, of packed ones, of caches and sinks; the quantiser; kernels
        that keep timelines; kernels of the gradients.

    Raises
    ------
    ValueError
        For a word that ``Evidence`` does not list.
    """
    if of not in get_args(Evidence):
        raise ValueError(f"evidence must be of {', '.join(get_args(Evidence))} launches, got {of!r}")
    kernels: dict[str, list[str]] = {}
    for label, row in accepted_rows().items():
        if row["launch"]["of"] in of.split("+"):
            text = f"{row['launch']['sha256']} {row.get('ptx_sha256', '')}"
            kernels.setdefault(label.partition("/")[0], []).append(text)
    return {probe: hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16] for probe, texts in kernels.items()}


def evidence_sha256(of: str) -> str:
    """Return one hash of all :func:`launch_keys`, by which a measurement names the launches that it is evidence of."""
    return hashlib.sha256("\n".join(sorted(launch_keys(of).values())).encode()).hexdigest()


def evidence_facts(of: Evidence) -> dict[str, object]:
    """Return what a measurement records of the kernels: which launches it is evidence of, their hash and their keys."""
    return {"evidence_of": of, "launches_sha256": evidence_sha256(of), "launches": launch_keys(of)}
