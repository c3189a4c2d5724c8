"""Which kernel sources a measurement belongs to: evidence older than the kernel is stale, and says so."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

# What the forward kernels are made of, host side included: evidence of their bits and speed is of these files.
FORWARD_SOURCES = (
    "barriers.py", "config.py", "gluon/choose.py", "gluon/combine.py", "gluon/descale.py", "gluon/descriptors.py",
    "gluon/forward_fp16.py", "gluon/forward_fp8.py", "gluon/forward_lockstep.py", "gluon/geometry.py",
    "gluon/launch.py", "gluon/launch_descale.py", "gluon/operand_fp8.py", "gluon/pipeline.py",
    "gluon/produce_fp8.py", "gluon/schedule.py", "gluon/softmax.py", "gluon/stamps.py", "gluon/v_transpose.py",
    "gluon/variant.py", "tiles.py", "timeline.py",
)  # fmt: skip


def files_sha256(names: Sequence[str]) -> str:
    """Hash of some modules, paths from this package's folder: evidence of one kernel outlives changes of another."""
    digest = hashlib.sha256()
    for name in sorted(names):
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()
