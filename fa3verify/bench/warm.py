"""Compile our kernels before they are timed, in parallel processes, into Triton's cache."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from fa3_kernels.audit.calls import calls_of
from fa3_kernels.audit.compile import build_call
from fa3_kernels.audit.shipped import Launch
from fa3_kernels.plan.choose import config_of
from fa3_kernels.plan.tile_order import shape_of
from fa3_kernels.plan.variant import variant_of
from fa3_reference.problem import AttentionProblem
from fa3verify.bench.kernels import TimedKernel
from fa3verify.timed.cells import Cell


def warm_up(cells: Sequence[Cell], kernels: Sequence[TimedKernel], pool: Executor) -> None:
    """Compile our kernels for all cells in parallel processes into Triton's cache, as one process would one by one."""
    launches = {}
    for cell in cells:
        for kernel in kernels:
            if kernel.options and kernel.takes(cell):
                options = kernel.options(cell)
                launches.setdefault(_kind(cell, kernel.name, options), (cell.problem, options))
    if len(launches) > 1:
        list(pool.map(_compile, launches.values()))


def _kind(cell: Cell, name: str, options: dict[str, Any]) -> tuple:
    """Return what of a launch changes the compiled code."""
    problem = cell.problem
    try:
        config = config_of(problem, **options)
        shape = shape_of(problem, pack_gqa=config.pack_gqa, num_splits=config.num_splits)
        return (replace(config, num_splits=min(config.num_splits, 2)), variant_of(config, problem, shape))
    except ValueError:  # refused when it is launched
        return (name, cell.key)


def _compile(launch: tuple[AttentionProblem, dict[str, Any]]) -> None:
    """Compile what one launch starts; what cannot be compiled is found out, and said, when it is launched."""
    with contextlib.suppress(Exception):
        for call in calls_of(Launch("bench", *launch)):
            build_call(call)
