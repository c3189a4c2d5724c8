"""Compile our kernels into Triton's cache, in parallel processes, before :mod:`fa3_reports.bench.run` times them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from fa3_kernels.plan.choose import config_of
from fa3_kernels.plan.tile_order import shape_of
from fa3_kernels.plan.variant import variant_of
from fa3_reference.problem import AttentionProblem
from fa3_reports.audit.calls import ShippedLaunch, forward_calls
from fa3_reports.audit.compile import build_call
from fa3_reports.bench.cells import Cell
from fa3_reports.bench.kernels import TimedKernel


def warm_up(cells: Sequence[Cell], kernels: Sequence[TimedKernel], pool: Executor) -> None:
    """Compile our kernels for all cells, each code once, in the processes of a pool."""
    launches = {}
    for cell in cells:
        for kernel in kernels:
            if kernel.options and kernel.takes(cell):
                options = kernel.options(cell)
                launches.setdefault(_kind(cell, kernel.name, options), (cell.problem, options))
    if len(launches) > 1:
        list(pool.map(_compile, launches.values()))


def _kind(cell: Cell, name: str, options: dict[str, Any]) -> tuple:
    """Return a key that is equal for launches with the same compiled code.

    Any number of splits above 1 compiles to the same code.
    """
    problem = cell.problem
    try:
        config = config_of(problem, **options)
        shape = shape_of(problem, pack_gqa=config.pack_gqa, num_splits=config.num_splits)
        return (replace(config, num_splits=min(config.num_splits, 2)), variant_of(config, problem, shape))
    except ValueError:  # the launch will be refused; the refusal is reported then
        return (name, cell.key)


def _compile(launch: tuple[AttentionProblem, dict[str, Any]]) -> None:
    """Compile the kernels of one launch; errors are ignored, as the launch itself will meet and report them."""
    with contextlib.suppress(Exception):
        for call in forward_calls(ShippedLaunch("bench", *launch)):
            build_call(call)
