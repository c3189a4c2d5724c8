"""FlashAttention-3's O in V's memory: where it lies, what that allows, and the barrier in front of it."""

from __future__ import annotations

import pytest

from fa3_kernels.plan.config import Config
from fa3_reports.mutation.schedule_faults import unmet
from fa3_simulator.hazards import Checker, check
from fa3_simulator.program import Builder, Mbarrier, Program
from fa3_simulator.resources import Resources
from fa3_simulator.schedule import Cta
from fa3_simulator.schedules import TileBlocks
from fa3_simulator.shared_memory import regions
from fa3_simulator.unbounded import prove
from tests.simulator.explore import explore
from tests.simulator.programs import forward

IN_ONE_STAGE = Config(tile_n=176, family="flash3")
IN_TWO_STAGES = Config("e4m3", tile_n=224, family="flash3")
# Panels of 64 channels, of 96 of 32, hold 64 rows of each consumer one below the other; those of 16 bits take 8192 or
# 4096 bytes a consumer. A stage of V has 45056, 27648, 10240 and 28672 bytes.
PLACES = (
    (IN_ONE_STAGE, {"v[0] out.0": 2 * 8192, "v[0] out.1": 2 * 8192, "v[0]": 12288, "v[1]": 45056}),
    (
        Config(head_dim=96, tile_m=192, tile_n=144, pv_from_registers=False, family="flash3"),
        {
            "v[0] out.0": 2 * 4096 + 3072,
            "v[0] out.1": 2 * 4096,
            "v[0] out.2": 2 * 4096,
            "v[1] out.0": 1024,
            "v[1] out.1": 4096,
            "v[1] out.2": 4096,
            "v[1]": 27648 - 9216,
        },
    ),
    (  # O is larger than V and ends where V does
        Config("e4m3", 64, tile_m=192, tile_n=160, pingpong=False, family="flash3"),
        {
            "out.0": 4096,
            "v[0] out.0": 4096,
            "v[0] out.1": 10240 - 4096,
            "v[1] out.1": 2048,
            "v[1] out.2": 8192,
        },
    ),
    (
        IN_TWO_STAGES,
        {"v[0] out.0": 2 * 8192, "v[0] out.1": 8192 + 4096, "v[1] out.1": 4096, "v[1]": 28672 - 4096},
    ),
)


@pytest.mark.parametrize(("config", "expected"), PLACES, ids=lambda value: getattr(value, "head_dim", ""))
def test_output_lies_where_upstreams_layouts_put_it(config: Config, expected: dict[str, int]) -> None:
    shared = Resources(Cta("small"), config)
    slots = (*shared.v.parts["v"], *shared.out)
    found = {" ".join(slots[i].name for i in holders): size for holders, size in regions(slots).items()}
    assert found == expected


def test_output_that_is_larger_than_v_takes_more_shared_memory() -> None:
    config = PLACES[2][0]
    shared = Resources(Cta("small"), config)
    program = forward(config, [TileBlocks(1)])
    rings = (shared.q, shared.k, shared.v_raw)
    others = sum(slot.bytes for ring in rings if ring for slots in ring.parts.values() for slot in slots)
    assert program.smem_bytes == others + 192 * 64 * 2 + 8 * len(program.mbarriers)


def _loaded_beside_a_store(config: Config) -> Program:
    """A warp stores O of the last consumer, another loads the second stage of V meanwhile."""
    shared = Resources(Cta("all of it"), config)
    second = shared.v.parts["v"][1]._replace(readers=1)
    builder, full = Builder("small"), Mbarrier("full", 1)
    a, b = builder.actor("A", 32, 24), builder.actor("B", 32, 24)
    a.tma_store(shared.out[-1], shared.out[-1].bytes)
    a.store_wait()
    b.load(full, [second])
    b.wait(full, 0)
    b.read(second)
    return builder.build()


def test_a_stage_is_loaded_while_output_leaves_from_the_other() -> None:
    assert check(_loaded_beside_a_store(IN_ONE_STAGE), orders=20) == []


def test_a_stage_is_not_loaded_while_output_leaves_from_a_part_of_it() -> None:
    found = Checker(_loaded_beside_a_store(IN_TWO_STAGES)).run()
    text = "slot v[1] (shares bytes with out.1): B (load full, row 1) is not ordered after A (store, row 0)"
    assert [x.text for x in found] == [text]


def test_without_the_barrier_in_front_of_it_output_is_written_over_what_another_consumer_reads() -> None:
    program = unmet(forward(Config(family="flash3"), [TileBlocks(1)]))
    text = "consumer 1 (issue P V, row 17) is not ordered after consumer 0 (write out.0, row 23)"
    assert f"slot v[0] (shares bytes with out.0, out.1): {text}" in [x.text for x in Checker(program).run()]
    conflict = "slot v[0]: consumer 1 (issue P V, row 17) reads other contents in another order"
    assert conflict in [x.text for x in explore(program).findings]


def test_that_barrier_is_what_the_proof_for_any_tiles_rests_on() -> None:
    proof = prove(lambda tiles: unmet(forward(IN_ONE_STAGE, tiles)))
    assert any("consumer 0 (write out.0" in x.text for x in proof.findings)
    assert prove(lambda tiles: forward(IN_ONE_STAGE, tiles), most=5).findings == []
