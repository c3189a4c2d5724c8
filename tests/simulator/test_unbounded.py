"""Hazards for any number of tiles: proofs end, agree with long programs, and find what few tiles do not show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fa3_kernels.plan.config import Config
from fa3_reference.problem import AttentionProblem
from fa3_simulator.backward_choice import shipped_schedule
from fa3_simulator.cta import AnyConfig, kernel_of
from fa3_simulator.description import kernel
from fa3_simulator.hazards import Checker, check
from fa3_simulator.program import Actor, Builder, Mbarrier, Op, Program, Slot
from fa3_simulator.schedules import TileBlocks
from fa3_simulator.unbounded import _Family, _following, _next, _state, prove
from tests.sampling import sampled


def gradients(head_dim: int, family: str) -> AnyConfig:
    return shipped_schedule(AttentionProblem(1, 1, 1, 128, 128, head_dim), family)


# Fast ones of every kind; `fa3verify hazards` goes through all that ship.
KERNELS: dict[str, AnyConfig] = {
    "lockstep": Config(pingpong=False, warp_specialized=False),
    "our backward": gradients(128, "gluon"),
    "our wide backward": gradients(256, "gluon"),
    "upstream's backward": gradients(256, "flash3"),
}
QUICK = [name for name in KERNELS if name != "our wide backward"]
each_kernel = pytest.mark.parametrize("name", sampled(KERNELS, QUICK))


# That of our backward is also the one by which tests/harness/cli/test_hazards.py asks the command.
@pytest.mark.parametrize("name", sampled(KERNELS, [name for name in QUICK if name != "our backward"]))
def test_no_list_of_tiles_has_a_hazard(name: str) -> None:
    config = KERNELS[name]
    proof = prove(kernel_of(config).program, is_persistent=kernel_of(config).is_persistent)
    assert (proof.findings, proof.is_complete) == ([], True)
    assert 5 < proof.words < 200
    assert proof.longest < 20


@each_kernel
def test_what_a_block_adds_repeats_with_the_rings(name: str) -> None:
    """The step that a proof takes on trust: behind many blocks the next ones are as behind four fewer."""
    config = KERNELS[name]
    persistent = kernel_of(config).is_persistent
    family = _Family(kernel_of(config).program)
    words = [(2, n) if persistent else (n,) for n in (4, 5, 6, 7, 14)]

    def added(word: tuple[int, ...]) -> tuple:
        following = _following(word, is_persistent=persistent)
        streams = [family.streams(x) for x in (word, *following)]
        fixed = [min(len(s[a]) for s in streams) for a in range(len(streams[0]))]
        for a in range(len(fixed)):
            first = streams[0][a][: fixed[a]]
            fixed[a] = next((i for i in range(fixed[a]) if any(s[a][i] != first[i] for s in streams)), fixed[a])
        return tuple(_next(family, x, fixed, persistent) for x in following)

    for word in words:
        longer = (*word[:-1], word[-1] + 4)
        assert added(word) == added(longer), word


@each_kernel
def test_states_that_a_proof_takes_for_equal_have_equal_findings_after_many_more_blocks(name: str) -> None:
    config = KERNELS[name]
    tiles = [TileBlocks(31), TileBlocks(1), TileBlocks(18)][: 3 if kernel_of(config).is_persistent else 1]
    assert check(kernel_of(config).program(tiles)) == []


def changed(program: Program, change: Callable[[str, int, list[int]], list[int]]) -> Program:
    """A program whose rows are changed by actor and by how often it has waited at the row's barrier."""
    actors = []
    for actor in program.actors:
        waits: dict[int, int] = {}
        rows = []
        for row in actor.ops.tolist():
            if row[0] == Op.WAIT:
                waits[row[1]] = waits.get(row[1], -1) + 1
            rows.append(change(actor.name, waits.get(row[1], -1), row))
        actors.append(Actor(actor.name, actor.threads, actor.registers, np.array(rows, np.int64).reshape(-1, 5)))
    return replace(program, actors=tuple(actors))


def test_a_parity_that_is_wrong_from_the_third_tile_on_is_found() -> None:
    config = KERNELS["our backward"]

    def make(tiles: list[TileBlocks]) -> Program:
        program = kernel_of(config).program(tiles)
        kv_full = next(i for i, m in enumerate(program.mbarriers) if m.name == "kv_full")

        def change(actor: str, nth: int, row: list[int]) -> list[int]:
            is_hit = actor == "consumer 1" and row[0] == Op.WAIT and row[1] == kv_full and nth >= 2
            return [*row[:2], 0, *row[3:]] if is_hit else row

        return changed(program, change)

    assert check(make([TileBlocks(9), TileBlocks(9)])) == []
    proof = prove(make, most=40)
    assert any("kv_full" in x.text for x in proof.findings)


def test_which_registers_a_load_takes_may_depend_on_the_blocks_before_it() -> None:
    """So that a short list of tiles uses slots that no longer one does."""

    @kernel
    def epilogue(cta, tiles):
        warps = cta.warpgroup("warps")
        for tile in tiles:
            for _ in range(tile.blocks):
                warps.cp_async([])
                warps.cp_async_wait(0)
            warps.global_load(1024)

    proof = prove(epilogue().program, is_persistent=False)
    assert (proof.findings, proof.is_complete) == ([], True)


def test_a_limit_leaves_a_proof_incomplete() -> None:
    proof = prove(kernel_of(KERNELS["our backward"]).program, most=3)
    assert (proof.words, proof.is_complete) == (3, False)


def test_a_proof_of_a_kernel_whose_states_never_repeat_ends_at_its_limit() -> None:
    def make(tiles: list[TileBlocks]) -> Program:
        blocks = sum(tile.blocks for tile in tiles)
        assert blocks < 400, "the proof goes beyond its limit"
        builder = Builder("counting")
        builder.actor("warpgroup", 128, 240).rows.append((Op.WGMMA_WAIT, blocks, 0, 0, 0))
        return builder.build()

    proof = prove(make, is_persistent=False, most=300)
    assert (proof.words, proof.is_complete) == (300, False)


def ring(slots: int, waits: int) -> Callable[[list[TileBlocks]], Program]:
    """A producer and a consumer of a ring; the producer waits for a slot from the ``waits``-th load on."""

    def make(tiles: list[TileBlocks]) -> Program:
        builder = Builder("ring")
        of_slot = [(Slot(f"s{i}", 64), Mbarrier(f"full{i}", 1), Mbarrier(f"empty{i}", 1)) for i in range(slots)]
        producer, consumer = builder.actor("producer", 32, 24), builder.actor("consumer", 128, 240)
        for step in range(sum(tile.blocks for tile in tiles)):
            slot, full, empty = of_slot[step % slots]
            if step >= waits:
                producer.wait(empty, step // slots - 1)
            producer.load(full, [slot])
            consumer.wait(full, step // slots)
            consumer.read(slot)
            consumer.arrive(empty)
        return builder.build()

    return make


def test_a_ring_has_as_many_states_as_its_slots_and_phases() -> None:
    """Two slots of two phases are four places; the first round, in which slots are free, four words more."""
    proof = prove(ring(2, waits=2), is_persistent=False)
    assert (proof.findings, proof.is_complete) == ([], True)
    assert proof.words <= 8


def test_a_producer_that_waits_a_load_too_late_is_found() -> None:
    assert any(x.kind == "race" for x in prove(ring(2, waits=3), is_persistent=False).findings)


def test_equal_words_of_two_kernels_leave_different_states() -> None:
    states: list[Any] = []
    for make in (ring(2, waits=2), ring(3, waits=3)):
        family = _Family(make)
        family.program((27,))
        states.append(_state(Checker(family.program((5,))), family, (5,), is_persistent=False))
    assert states[0] != states[1]
