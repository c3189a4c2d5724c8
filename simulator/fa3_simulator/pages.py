"""What pages cost a launch of our forward, whose keys and values then lie in a cache.

Every page is a copy by TMA of its own. That costs the producer time, for its instruction and its entry of the page
table; the bytes are the same.
"""

from __future__ import annotations

from fa3_kernels.plan.call import Pages
from fa3_kernels.plan.variant import SWIZZLED_BYTES
from fa3_reference.problem import AttentionProblem
from fa3_simulator.cta import AnyConfig
from fa3_simulator.machine import Machine

# Cycles of the producer for a page of K or V, reading its entry of the page table included, and for each copy of it: a
# page is copied in panels of the channels of one swizzled row. Fitted to decoding in one part over pages of 16 keys at
# counted clocks (reports/h200/speed/unlisted, 32 heads on 8, 1 x 65000 and 8 x 41000): 71 and 79 cycles a copy in 16
# bits, of which a page takes two, and 101 and 112 in e4m3, where it takes one.
PAGE_CYCLES = 64.0
COPY_CYCLES = 43.0
# Of a row of K or V that four warps gather: fitted to one launch in e4m3 over pages of one key (64 x 2600 keys, 32
# heads on 8, 116 us on an H200), simulated as boxes of eight rows.
ROW_CYCLES = 10.0
GATHERED_ROWS = 8


def over_pages(problem: AttentionProblem, config: AnyConfig, machine: Machine) -> Machine:
    """Return the machine with which to simulate a launch: one whose TMA copies at most a page at a time.

    It is the same machine where keys lie in no pages, and where a page holds a tile or more that TMA copies. Rows that
    are gathered are simulated as copies of a few rows each.
    """
    page_size = problem.cache.page_size if problem.cache else 0
    is_gathered = page_size > 0 and not Pages(page_size, 0, (), ()).are_boxes(config.tile_n, config.bits)
    if not (0 < page_size < config.tile_n or is_gathered):
        return machine
    row = config.head_dim * config.bits // 8
    if is_gathered:
        return machine.with_values(
            {"tma_box_bytes": float(row * GATHERED_ROWS), "tma_issue_cycles": ROW_CYCLES * GATHERED_ROWS}
        )
    panel = min(row, SWIZZLED_BYTES)
    return machine.with_values(
        {"tma_box_bytes": float(panel * page_size), "tma_issue_cycles": COPY_CYCLES + PAGE_CYCLES * panel / row}
    )
