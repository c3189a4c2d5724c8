"""Keys and values in pages of a cache: a copy by TMA for every page, and the tiles of launches over a cache.

Pages cost the producer time, as every copy has its instruction and its entry of the page table; what is copied is the
same. The kernel that schedules a batch on the GPU, in front of the others, is not simulated.
"""

from __future__ import annotations

from dataclasses import replace

from fa3_kernels.plan.choose import check_packing, over_cache
from fa3_kernels.plan.config import Config
from fa3_kernels.plan.request import check_pages
from fa3_kernels.plan.variant import SWIZZLED_BYTES
from fa3_reference.problem import AttentionProblem
from fa3_simulator.cta import AnyConfig
from fa3_simulator.machine import Machine

# Of a copy of a page, its entry of the page table read. Launches over pages of 16 keys on an H200 fit it, at 1755 MHz,
# which was not recorded beside them (reports/h200/serving): 104 in 16 bits and 115 in e4m3.
PAGE_CYCLES = 110.0


def paged(
    problem: AttentionProblem, config: AnyConfig, machine: Machine, page_size: int, *, keeps_tile: bool = False
) -> tuple[Config, Machine]:
    """Return a launch and a machine as they are where keys and values lie in pages.

    Parameters
    ----------
    problem : AttentionProblem
        Of sequences alike.
    config : Config
        Of our own kernels.
    machine : Machine
    page_size : int
        Keys of a page, a multiple of 8 that divides the keys of a tile, or is a multiple of them.
    keeps_tile : bool
        Whether the tile stays as it is in ``config``; otherwise :func:`fa3_kernels.plan.choose.over_cache` says it.

    Raises
    ------
    ValueError
        For a backward, for kernels of others, whose copies of pages were not measured, for other page sizes, and for
        packed heads that a launch over pages refuses.
    """
    if not isinstance(config, Config) or not config.traits.is_built_here:
        raise ValueError("pages are simulated for the forward of our own kernels")
    check_pages(page_size, config.tile_n)
    queries = (problem.seqlen_q,) * problem.batch
    keys = (problem.seqlen_k,) * problem.batch
    check_packing(replace(problem, seqlens_q=queries, seqlens_k=keys), config.pack_gqa)
    if not keeps_tile:
        config = over_cache(problem, config)
    if page_size >= config.tile_n:
        return config, machine
    box = replace(machine.tma_box_bytes, value=float(SWIZZLED_BYTES * page_size))
    issue = replace(machine.tma_issue_cycles, value=PAGE_CYCLES)
    return config, replace(machine, tma_box_bytes=box, tma_issue_cycles=issue)
