"""Have kernels assembled by the ptxas that Triton ships, whatever the process has chosen elsewhere.

Audited code, bits and times belong to the machine code of that ptxas. When a process has used ``torch.compile``,
Inductor has set TRITON_PTXAS_PATH to torch's own ptxas, which Triton then uses for every kernel. The one of CUDA 13.0
gives the same bits, but code that takes up to 15 % longer (``reports/notes/assembler.md``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton import knobs

_VARIABLE = "TRITON_PTXAS_PATH"


@contextmanager
def own_ptxas() -> Iterator[None]:
    """Assemble by Triton's own ptxas inside the block, if it ships one that runs; afterwards the old choice holds
    again.
    """
    chosen: Any = vars(knobs.nvidia).get("ptxas")
    if _VARIABLE not in os.environ and chosen is None:
        yield
        return
    with knobs.nvidia.scope():
        own = vars(type(knobs.nvidia))["ptxas"].default_path
        if knobs.NvidiaTool.from_path(own) is not None:
            knobs.nvidia.ptxas = own
        yield


def assembled_by_own_ptxas(kernel: Any) -> Any:
    """Make a kernel that Triton compiles at its first launch use its own ptxas for that; return the kernel.

    Later launches cost nothing for it.
    """
    kernel._do_compile = own_ptxas()(kernel._do_compile)  # a context around each call
    return kernel
