"""What pages cost a launch of our forward, whose keys and values then lie in a cache.

Every page is a copy by TMA of its own, which costs the producer time for its instruction and its entry of the page
table. Small pages are gathered row by row. A row of a head lies between rows of other heads, and memory reads it in
pieces of 64 bytes.
"""

from __future__ import annotations

from math import gcd

from fa3_kernels.plan.call import Pages, boxes
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
# Of a box of K or V that four warps gather, which is said to be full copies behind: fitted to 18 steps of decoding of
# reports/h200/serving/practice. Simulated as copies of eight rows.
GATHERED_CYCLES = 400.0
GATHERED_BYTES_PER_CYCLE = 45.0
GATHERED_ROWS = 8
PIECE_BYTES = 64


def over_pages(problem: AttentionProblem, config: AnyConfig, machine: Machine) -> Machine:
    """Return the machine with which to simulate a launch: one whose TMA copies at most a page at a time, or a few rows
    where these are gathered, and whose HBM reads whole pieces.

    It is the same machine where keys lie in no pages.
    """
    if not (problem.cache and problem.cache.page_size):
        return machine
    page_size = problem.cache.page_size
    read = {"hbm_bytes_per_ns": machine["hbm_bytes_per_ns"] / in_pieces(problem.head_dim * config.bits // 8)}
    row = config.head_dim * config.bits // 8
    if not Pages(page_size, 0, (), ()).are_boxes(config.tile_n, config.bits):
        cycles = GATHERED_CYCLES * boxes(config.head_dim, config.bits) / config.tile_n + row / GATHERED_BYTES_PER_CYCLE
        read |= {"tma_box_bytes": float(row * GATHERED_ROWS), "tma_issue_cycles": cycles * GATHERED_ROWS}
    elif page_size < config.tile_n:
        panel = min(row, SWIZZLED_BYTES)
        copy = COPY_CYCLES + PAGE_CYCLES * panel / row
        read |= {"tma_box_bytes": float(panel * page_size), "tma_issue_cycles": copy}
    return machine.with_values(read)


def in_pieces(row_bytes: int) -> float:
    """Return how many bytes are read for each byte of a row, of rows that begin at multiples of their length.

    >>> in_pieces(256), in_pieces(160), in_pieces(80)
    (1.0, 1.2, 1.6)
    """
    begins = range(0, PIECE_BYTES, gcd(row_bytes, PIECE_BYTES))
    pieces = sum(-(-(begin + row_bytes) // PIECE_BYTES) for begin in begins)
    return pieces * PIECE_BYTES / (len(begins) * row_bytes)
