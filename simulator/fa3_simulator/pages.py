"""How a launch of our forward is simulated where keys and values lie in pages of a cache.

Every page is a copy by TMA of its own. That costs the producer time, for its instruction and its entry of the page
table; the bytes are the same. :func:`paged` changes the machine and the tile accordingly. The kernel that schedules a
batch on the GPU, in front of the others, is not simulated.
"""

from __future__ import annotations

from dataclasses import replace

from fa3_kernels.plan.choose import check_packing, over_cache
from fa3_kernels.plan.config import Config
from fa3_kernels.plan.request import check_pages
from fa3_kernels.plan.variant import SWIZZLED_BYTES
from fa3_reference.problem import AttentionProblem
from fa3_simulator.cta import AnyConfig, kernel_of
from fa3_simulator.machine import Machine

# Cycles of the producer for a copy of a page, reading its entry of the page table included. Fitted to launches over
# pages of 16 keys on an H200 at 1755 MHz, a clock that was not recorded beside them (reports/h200/serving): 104 in 16
# bits and 115 in e4m3.
PAGE_CYCLES = 110.0


def paged(
    problem: AttentionProblem, config: AnyConfig, machine: Machine, page_size: int, *, keeps_tile: bool = False
) -> tuple[Config, Machine]:
    """Return the configuration and the machine with which to simulate a launch whose keys and values lie in pages.

    Parameters
    ----------
    problem : AttentionProblem
        What is computed; all its sequences have one length.
    config : Config
        A forward of our own kernels.
    machine : Machine
        The GPU, for a launch without pages.
    page_size : int
        Keys of a page, a multiple of 8 that divides the keys of a tile, or is a multiple of them.
    keeps_tile : bool
        Whether the tile stays as it is in ``config``; otherwise :func:`fa3_kernels.plan.choose.over_cache` chooses it.

    Returns
    -------
    config : Config
        The configuration, with the tile of a launch over a cache.
    machine : Machine
        The same machine where a page holds a tile or more; otherwise one whose TMA copies at most a page at a time.

    Raises
    ------
    ValueError
        For a backward, for kernels of others, whose copies of pages were not measured, for other page sizes, and for
        packed heads that a launch over pages refuses.
    """
    ours = kernel_of(config).built_here
    if ours is None:
        raise ValueError("pages are simulated for the forward of our own kernels")
    check_pages(page_size, ours.tile_n)
    queries = (problem.seqlen_q,) * problem.batch
    keys = (problem.seqlen_k,) * problem.batch
    check_packing(replace(problem, seqlens_q=queries, seqlens_k=keys), ours.pack_gqa)
    if not keeps_tile:
        ours = over_cache(problem, ours)
    if page_size >= ours.tile_n:
        return ours, machine
    box = replace(machine.tma_box_bytes, value=float(SWIZZLED_BYTES * page_size))
    issue = replace(machine.tma_issue_cycles, value=PAGE_CYCLES)
    return ours, replace(machine, tma_box_bytes=box, tma_issue_cycles=issue)
