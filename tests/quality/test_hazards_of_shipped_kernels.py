"""A barrier that is left out, miscounted, of the wrong phase or handed back too early is found in every schedule that
ships: each such mistake at every barrier of every actor, once, in the middle of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from fa3_reports.schedules import named
from fa3_simulator import unbounded
from fa3_simulator.cta import AnyConfig, kernel_of
from fa3_simulator.footprint import footprint
from fa3_simulator.hazards import check
from fa3_simulator.machine import load
from fa3_simulator.program import Op, Program
from fa3_simulator.schedules import TileBlocks
from tests.sampling import sampled

ARRIVALS, WAITS = (Op.ARRIVE, Op.BAR_ARRIVE), (Op.WAIT, Op.BAR_SYNC)
TILES = [TileBlocks(4), TileBlocks(3), TileBlocks(4)]


NAMES = (  # one kernel of every shape
    "fp16_d64_dense",
    "fp16_d64_causal",
    "fp16_d64_no_pingpong",
    "fp16_d64_no_overlap",
    "fp16_d96_dense",
    "fp16_d96_no_pingpong",
    "fp16_d96_no_overlap",
    "fp16_d128_no_pingpong",
    "fp16_d128_no_overlap",
    "fp16_d128_lockstep",
    "fp16_d160_dense",
    "fp16_d160_no_pingpong",
    "fp16_d160_no_overlap",
    "fp16_d256_dense",
    "fp16_d256_causal",
    "fp16_d256_no_overlap",
    "fp16_d192_v128_no_overlap",
    "e4m3_d64_dense",
    "e4m3_d64_causal",
    "e4m3_d64_dense_chained",
    "e4m3_d64_causal_chained",
    "e4m3_d96_dense",
    "e4m3_d96_dense_chained",
    "e4m3_d128_dense_chained",
    "e4m3_d160_dense",
    "e4m3_d160_dense_chained",
    "e4m3_d256_dense",
    "e4m3_d256_dense_chained",
    "backward_d64_dense",
    "backward_d160_dense",
    "backward_d256_dense",
    "fp16_d64_pages16_step",
    "fp16_d96_pages16_step",
    "fp16_d128_pages16_step",
    "fp16_d160_pages16_step",
    "fp16_d256_pages16_step",
    "e4m3_d64_pages16_step",
    "e4m3_d96_pages16_step",
    "e4m3_d160_pages16_step",
    "e4m3_d256_pages16_step",
    "flash3_fp16_d64",
    "flash3_fp16_d64_causal",
    "flash3_fp16_d96",
    "flash3_fp16_d128",
    "flash3_fp16_d128_causal",
    "flash3_fp16_d160",
    "flash3_fp16_d192",
    "flash3_fp16_d256",
    "flash3_e4m3_d64",
    "flash3_e4m3_d96",
    "flash3_e4m3_d128",
    "flash3_e4m3_d160",
    "flash3_e4m3_d192",
    "flash3_e4m3_d256",
    "flash3_backward_d64",
    "flash3_backward_d96",
    "flash3_backward_d192",
    "flash3_backward_d256",
)
KERNELS = named()
SHAPES: dict[str, AnyConfig] = {name: KERNELS[name] for name in NAMES}
# A shape of every kind of program; the others differ by tiles, stages and masks.
QUICK = (
    "fp16_d64_causal",
    "fp16_d128_no_pingpong",
    "fp16_d128_lockstep",
    "fp16_d256_no_overlap",
    "e4m3_d96_dense",
    "e4m3_d64_causal_chained",
    "backward_d64_dense",
    "e4m3_d64_pages16_step",
    "flash3_fp16_d128",
    "flash3_e4m3_d64",
    "flash3_backward_d96",
)
SWEEP = sampled(NAMES, QUICK)


def test_the_kernels_that_are_tried_are_one_of_every_shape() -> None:
    found: dict[tuple, str] = {}
    for name, config in KERNELS.items():
        found.setdefault(
            unbounded.shape(kernel_of(config).program, is_persistent=kernel_of(config).is_persistent), name
        )
    assert tuple(found.values()) == NAMES


def tiles_of(config: AnyConfig) -> list[TileBlocks]:
    return TILES if kernel_of(config).is_persistent else [TileBlocks(8)]


def rows_of(program: Program) -> Iterator[tuple[int, Op, int, list[int]]]:
    """By actor, operation and barrier: the rows where it stands."""
    for a, actor in enumerate(program.actors):
        found: dict[tuple[Op, int], list[int]] = {}
        for i, (kind, x, *_) in enumerate(actor.ops.tolist()):
            if kind in (*ARRIVALS, *WAITS):
                found.setdefault((Op(kind), x), []).append(i)
        for (op, x), rows in found.items():
            yield a, op, x, rows


def with_rows(program: Program, actor: int, rows: list[list[int]]) -> Program:
    changed = replace(program.actors[actor], ops=np.array(rows, np.int64).reshape(-1, 5))
    return replace(program, actors=(*program.actors[:actor], changed, *program.actors[actor + 1 :]))


def missing_arrivals(program: Program) -> Iterator[tuple[str, Program]]:
    """One in the middle: the last of an actor may be one that nobody needs."""
    for a, op, _, rows in rows_of(program):
        if op in ARRIVALS and len(rows) > 1:
            gone = rows[len(rows) // 2 - 1]
            ops = program.actors[a].ops.tolist()
            yield (
                f"{program.actors[a].name} {program.describe(a, gone)}",
                with_rows(program, a, ops[:gone] + ops[gone + 1 :]),
            )


def wrong_phases(program: Program) -> Iterator[tuple[str, Program]]:
    for a, op, _, rows in rows_of(program):
        if op == Op.WAIT:
            ops = program.actors[a].ops.tolist()
            row = rows[len(rows) // 2]
            ops[row][2] ^= 1
            yield f"{program.actors[a].name} {program.describe(a, row)}", with_rows(program, a, ops)


def wrong_counts(program: Program) -> Iterator[tuple[str, Program]]:
    for i, m in enumerate(program.mbarriers):
        more = (*program.mbarriers[:i], m._replace(arrivals=m.arrivals + 1), *program.mbarriers[i + 1 :])
        yield f"one arrival more at {m.name}", replace(program, mbarriers=more)
    synced = {x for _, op, x, _ in rows_of(program) if op == Op.BAR_SYNC}
    for i, b in enumerate(program.named_barriers):
        if i in synced:
            more = (*program.named_barriers[:i], b._replace(threads=b.threads + 32), *program.named_barriers[i + 1 :])
            yield f"a warp more at {b.name}", replace(program, named_barriers=more)


def extra_waits(program: Program) -> Iterator[tuple[str, Program]]:
    """A wait for the phase behind the one that has ended, or for one round more."""
    for a, op, _, rows in rows_of(program):
        if op in WAITS:
            ops = program.actors[a].ops.tolist()
            row = rows[len(rows) // 2]
            more = [ops[row][0], ops[row][1], ops[row][2] ^ (op == Op.WAIT), *ops[row][3:]]
            if op == Op.BAR_SYNC and len(program.actors) > 1 and _is_alone(program, ops[row][1]):
                continue  # its own warps meet once more, which harms nobody
            yield (
                f"{program.actors[a].name} {program.describe(a, row)}",
                with_rows(program, a, [*ops[: row + 1], more, *ops[row + 1 :]]),
            )


def _is_alone(program: Program, barrier: int) -> bool:
    return sum(x == barrier and op == Op.BAR_SYNC for _, op, x, _ in rows_of(program)) == 1 and not any(
        x == barrier and op == Op.BAR_ARRIVE for _, op, x, _ in rows_of(program)
    )


def freed_too_early(program: Program) -> Iterator[tuple[str, Program]]:
    """A slot of a ring is handed back behind the issue of the last wgmma that reads it, in front of the wait for it."""
    for a, op, x, rows in rows_of(program):
        if op not in ARRIVALS:
            continue
        name = (program.mbarriers if op == Op.ARRIVE else program.named_barriers)[x].name
        slot = name.replace("_empty", "")  # k_empty[0] is of k[0], or of its parts
        if "_empty[" not in name:
            continue
        ops, row = program.actors[a].ops.tolist(), rows[len(rows) // 2 - 1]
        kinds = [Op(kind) for kind, *_ in ops[:row]]
        reads = [i for i in range(row) if kinds[i] == Op.WGMMA and _reads(program, ops[i], slot)]
        if reads and Op.WGMMA_WAIT in kinds[reads[-1] :]:
            moved = [*ops[: reads[-1] + 1], ops[row], *ops[reads[-1] + 1 : row], *ops[row + 1 :]]
            yield f"{program.actors[a].name} {program.describe(a, row)}", with_rows(program, a, moved)


def _reads(program: Program, row: list[int], slot: str) -> bool:
    return any(x >= 0 and program.slots[x].name.startswith(slot) for x in row[2:4])


KINDS = {
    "a missing arrival": missing_arrivals,
    "a wrong phase": wrong_phases,
    "a wrong count": wrong_counts,
    "an extra wait": extra_waits,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SWEEP)
def test_a_mistake_at_any_barrier_is_found(name: str, kind: str) -> None:
    program = kernel_of(SHAPES[name]).program(tiles_of(SHAPES[name]))
    planted = dict(KINDS[kind](program))
    missed = [where for where, wrong in planted.items() if not check(wrong)]
    assert not missed
    assert planted or (kind == "a missing arrival" and "lockstep" in name)


@pytest.mark.parametrize("name", sampled([name for name in NAMES if "lockstep" not in name], QUICK[:2] + QUICK[4:]))
def test_a_slot_that_is_handed_back_too_early_is_found(name: str) -> None:
    """Of some rings: where two are filled by turns, what one consumer still reads may be covered by the other's."""
    program = kernel_of(SHAPES[name]).program(tiles_of(SHAPES[name]))
    found = [where for where, wrong in freed_too_early(program) if any(x.kind == "race" for x in check(wrong))]
    assert found


@pytest.mark.parametrize("name", sampled(NAMES, ("flash3_fp16_d128",)))
def test_no_list_of_tiles_has_a_hazard(name: str) -> None:
    config = SHAPES[name]
    proof = unbounded.prove(kernel_of(config).program, is_persistent=kernel_of(config).is_persistent)
    assert (proof.findings, proof.is_complete) == ([], True)


def test_without_a_mistake_nothing_is_found() -> None:
    found = {name: check(kernel_of(config).program(tiles_of(config))) for name, config in SHAPES.items()}
    assert {name: hazards for name, hazards in found.items() if hazards} == {}


def test_every_kernel_fits_an_sm_with_barriers_of_its_own() -> None:
    machine = load("h200")
    found = {name: footprint(kernel_of(config).program(TILES[:1]), machine) for name, config in named().items()}
    assert {name: x for name, x in found.items() if x} == {}
