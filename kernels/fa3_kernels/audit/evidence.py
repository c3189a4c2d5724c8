"""Which kernels a measurement belongs to: evidence is of what was launched, stale as soon as that no longer is."""

from __future__ import annotations

import hashlib
from typing import Literal, get_args

from fa3_kernels.audit.golden import read_rows

Evidence = Literal[
    "forward", "packed", "quantize", "timeline", "backward", "forward+packed", "forward+packed+quantize+backward"
]


def evidence_sha256(of: Evidence) -> str:
    """Hash of all launches of :func:`fa3_kernels.audit.probes.probes` that a measurement is evidence of, as accepted.

    Of each what the GPU gets (:func:`fa3_kernels.audit.launched.launch_sha256`), and the PTX where the audit compiles
    it; that both are those of the code in this tree is what ``fa3verify audit`` says, and of the launches a test.

    Parameters
    ----------
    of : {"forward", "packed", "quantize", "timeline", "backward"} or several of them, as ``Evidence`` lists
        The forward of batched sequences, of packed ones; the quantiser; kernels that keep timelines; those of the
        gradients.

    Raises
    ------
    ValueError
        For a word that no launch is evidence of.
    """
    if of not in get_args(Evidence):
        raise ValueError(f"evidence must be of {', '.join(get_args(Evidence))} launches, got {of!r}")
    rows = [row for row in read_rows().values() if row["launch"]["of"] in of.split("+")]
    launches = sorted(f"{row['launch']['sha256']} {row.get('ptx_sha256', '')}" for row in rows)
    return hashlib.sha256("\n".join(launches).encode()).hexdigest()


def evidence_facts(of: Evidence) -> dict[str, str]:
    """What provenance says of the kernels."""
    return {"evidence_of": of, "launches_sha256": evidence_sha256(of)}
