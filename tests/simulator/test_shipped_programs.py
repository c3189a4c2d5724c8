"""The shipped programs are descriptions: a page in docs says the same, and what repeats itself is written once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from fa3_kernels.plan.config import Config
from fa3_simulator import engine, forward as module
from fa3_simulator.costs import costs
from fa3_simulator.cta import kernel_of
from fa3_simulator.description import described
from fa3_simulator.machine import load
from fa3_simulator.program import Mbarrier, NamedBarrier, Op, Program, Slot
from fa3_simulator.schedules import TileBlocks
from tests.house import ROOT
from tests.simulator.programs import forward, spelled_out
from tests.simulator.test_schedules import SHIPPED

H200 = load("h200")
PAGE = described(ROOT / "docs" / "schedules" / "attention.py")["flash3"]
lists_of_tiles = st.lists(
    st.integers(1, 9).flatmap(lambda blocks: st.builds(TileBlocks, st.just(blocks), st.integers(0, min(2, blocks)))),
    min_size=1,
    max_size=4,
)


def without_names(program: Program) -> list[tuple]:
    """Threads and registers of each actor with its operations, of which operands are what they stand for but for names.

    Labels are left out, and the last wait for stores of a consumer, where upstream has waited already; and the latency
    of a fence, which the work of a shipped kernel has.
    """

    def strip(item: Any) -> Any:
        sized = isinstance(item, Slot)
        return item.bytes if sized else item[-1] if isinstance(item, Mbarrier | NamedBarrier) else item[1:]

    found = []
    for actor, operations in zip(program.actors, spelled_out(program, strip), strict=True):
        rows = [row for row in operations if row[0] != Op.MARK and row[:2] != (Op.DELAY, strip("proxy_fence_cycles"))]
        ends = rows[-1][0] == Op.STORE_WAIT
        found.append((actor.threads, actor.registers, rows[:-1] if ends else rows))
    return found


@pytest.mark.parametrize("config", SHIPPED, ids=lambda config: kernel_of(config).program([TileBlocks(1)]).name)
def test_a_program_does_not_depend_on_those_made_before(config: Config) -> None:
    """What repeats itself is written once; ticks and operations are those of a program made alone."""
    lists = (
        [(1, 0)],
        [(24, 2)],
        [(24, 2)] * 3,
        [(2, 2), (1, 1), (9, 0), (2, 0), (3, 1), (24, 1)],
        [(5, 4)] * 5,
        [(1, 0)],
    )
    tiles = [[TileBlocks(*each) for each in blocks] for blocks in lists]
    together = [forward(config, some) for some in tiles]
    for some, program in zip(tiles, together, strict=True):
        module._warps.cache_clear()
        alone = forward(config, some)
        assert spelled_out(program) == spelled_out(alone)
        timings = [engine.simulate(p, costs(p, H200)) for p in (program, alone)]
        assert timings[0] == timings[1]
        assert program.smem_bytes == alone.smem_bytes == together[0].smem_bytes


@pytest.mark.parametrize("tile_n", [176, 128])
@given(tiles=lists_of_tiles)
@settings(max_examples=12)
def test_the_page_of_flash_attention_3_says_what_the_shipped_program_says(tile_n: int, tiles: list[TileBlocks]) -> None:
    """Operation by operation, with the same barriers and sizes, and so to the latencies of the fences in front of O."""
    page = PAGE(bn=tile_n).program(tiles)
    shipped = forward(Config(family="flash3", tile_n=tile_n), tiles)
    assert without_names(page) == without_names(shipped)
    assert page.smem_bytes == shipped.smem_bytes
    later = engine.simulate(page, costs(page, H200)).cycles - engine.simulate(shipped, costs(shipped, H200)).cycles
    assert abs(later) <= 2 * H200["proxy_fence_cycles"] * len(tiles)
