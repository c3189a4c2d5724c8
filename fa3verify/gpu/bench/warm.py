"""Compile our kernels before they are timed, in parallel processes, into Triton's cache."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from fa3_kernels.audit.calls import calls_of
from fa3_kernels.audit.compile import compile_call
from fa3_kernels.audit.shipped import Launch
from fa3_kernels.plan.choose import config_of
from fa3_reference.problem import AttentionProblem
from fa3verify.gpu.bench.cells import Cell
from fa3verify.gpu.bench.kernels import Kernel


def warm_up(cells: Sequence[Cell], kernels: Sequence[Kernel]) -> None:
    """Compile our kernels for all cells in parallel processes into Triton's cache, as one process would one by one."""
    launches = {}
    for cell in cells:
        for kernel in kernels:
            if kernel.options and kernel.takes(cell):
                options = kernel.options(cell)
                launches.setdefault(_kind(cell, kernel.name, options), (cell.problem, options))
    if len(launches) > 1:
        with ProcessPoolExecutor(min(len(launches), os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
            list(pool.map(_compile, launches.values()))


def _kind(cell: Cell, name: str, options: dict[str, Any]) -> tuple:
    """What of a launch changes the compiled code."""
    try:
        return (config_of(cell.problem, **options), cell.causal)
    except ValueError:  # refused when it is launched
        return (name, cell.key)


def _compile(launch: tuple[AttentionProblem, dict[str, Any]]) -> None:
    """Compile what one launch starts; what cannot be compiled is found out, and said, when it is launched."""
    with contextlib.suppress(Exception):
        for call in calls_of(Launch("bench", *launch)):
            compile_call(call)
