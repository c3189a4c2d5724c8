"""Have kernels assembled by the ptxas that Triton ships, whatever else the process has chosen.

The audit, the bits and the times are of its machine code. Once a process has used ``torch.compile``, Inductor has set
TRITON_PTXAS_PATH to torch's own ptxas, by which Triton then assembles every kernel. That of CUDA 13.0 gives the same
bits, and code that takes up to 15 % longer (``reports/notes/assembler.md``).
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
    """Assemble by Triton's own ptxas inside the block, if it ships one that runs; the choice outside comes back."""
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
    """Have a kernel that Triton compiles at its first launch assembled so; its other launches cost nothing for it."""
    compiled = kernel._do_compile

    def by_own_ptxas(*given: Any, **named: Any) -> Any:
        with own_ptxas():
            return compiled(*given, **named)

    kernel._do_compile = by_own_ptxas
    return kernel
