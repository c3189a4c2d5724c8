"""Which kernels a measurement belongs to: evidence is of what was launched, and stale as soon as that is launched no more."""

from __future__ import annotations

import hashlib
from typing import Literal

from fa3_kernels.audit.golden import read_rows

Evidence = Literal["forward", "quantize", "timeline"]


def evidence_sha256(of: Evidence) -> str:
    """Hash of all launches of :func:`fa3_kernels.audit.probes.probes` that a measurement is evidence of, as accepted.

    Of each what the GPU gets (:func:`fa3_kernels.audit.launched.launch_sha256`), and the PTX where the audit compiles it; that both are those of
    the code in this tree is what ``fa3verify audit`` says, and of the launches a test.

    Parameters
    ----------
    of : {"forward", "quantize", "timeline"}

    Raises
    ------
    ValueError
        For a word that no launch is evidence of.
    """
    rows = [row for row in read_rows().values() if row["launch"]["of"] == of]
    if not rows:
        raise ValueError(f"evidence must be of the forward, quantize or timeline launches, got {of!r}")
    launches = sorted(f"{row['launch']['sha256']} {row.get('ptx_sha256', '')}" for row in rows)
    return hashlib.sha256("\n".join(launches).encode()).hexdigest()


def evidence_facts(of: Evidence) -> dict[str, str]:
    """What provenance says of the kernels."""
    return {"evidence_of": of, "launches_sha256": evidence_sha256(of)}
