"""Which kernels a measurement belongs to: evidence older than its kernel is stale, and says so."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from fa3_kernels.accepted import read_golden

# Stands for the accepted PTX of every shipped forward kernel, which the audit compares with what the sources compile to.
FORWARD_PTX = "PTX of the forward kernels"
# What the forward is made of: evidence of its bits and speed is of these host modules and of the compiled kernels, so that a
# change of device code that leaves the PTX alone, such as one of stamps, leaves the evidence alone.
FORWARD_SOURCES = (
    "barriers.py", "config.py", "gluon/choose.py", "gluon/descriptors.py", "gluon/launch.py", "gluon/launch_descale.py",
    "gluon/schedule.py", "gluon/variant.py", "tiles.py", FORWARD_PTX,
)  # fmt: skip
# A timeline is of an instrumented kernel, which the audit does not compile: of the modules that stamp, too.
TIMELINE_SOURCES = (
    *FORWARD_SOURCES, "gluon/forward_fp16.py", "gluon/forward_fp8.py", "gluon/pipeline.py", "gluon/produce_fp8.py",
    "gluon/stamps.py", "timeline.py",
)  # fmt: skip


def _is_forward(name: str) -> bool:
    """Whether a kernel of the audit, ``launch/kernel``, belongs to the forward."""
    return name.partition("/")[2].startswith(("forward_", "combine"))


def _content(name: str) -> bytes:
    if name != FORWARD_PTX:
        return (Path(__file__).parent / name).read_bytes()
    accepted = {kernel: figures["ptx_sha256"] for kernel, figures in read_golden().items() if _is_forward(kernel)}
    return "".join(f"{kernel} {accepted[kernel]}\n" for kernel in sorted(accepted)).encode()


def files_sha256(names: Sequence[str]) -> str:
    """Hash of some modules, paths from this package's folder: evidence of one kernel outlives changes of another.

    :data:`FORWARD_PTX` may be among them.
    """
    digest = hashlib.sha256()
    for name in sorted(names):
        digest.update(_content(name))
    return digest.hexdigest()
