"""Checks whether a program fits an SM: registers, shared memory, threads, named barriers, and the sizes of copies.

Races and deadlocks are found by :mod:`fa3_simulator.hazards`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fa3_kernels.plan.barriers import NUM_BARRIERS, WARP_THREADS, WARPGROUP_THREADS
from fa3_simulator.machine import Machine
from fa3_simulator.program import Op, Program
from fa3_simulator.schedule import Cta

NOT_PROVEN = "not proven"


class Hazard(NamedTuple):
    """A defect of a program, of the kind race, deadlock, barrier or footprint, or one that it may have.

    Of the kind "not proven" is an arrival or a wait at a barrier that is not ordered after the end of the round before,
    while nothing is known to go wrong. The text names the slot, barrier or actors.
    """

    kind: str
    text: str


def is_undecided(findings: Sequence[Hazard]) -> bool:
    """Say whether something was found, all of which is not proven."""
    return bool(findings) and all(hazard.kind == NOT_PROVEN for hazard in findings)


def footprint(program: Program, machine: Machine) -> list[Hazard]:
    """Return the hazards of a program that does not fit; empty if it does.

    Checked are registers, shared memory, threads, identities and threads of named barriers, and the sizes of TMA
    copies.
    """
    groups = _warpgroups(program)
    registers = sum(threads * each for threads, each in groups)
    threads = sum(threads for threads, _ in groups)
    rules = (
        (registers <= machine["registers"], f"{registers} registers, an SM has {machine['registers']:.0f}"),
        (
            program.smem_bytes <= machine["smem_bytes"],
            f"{program.smem_bytes} bytes of shared memory, a CTA has {machine['smem_bytes']:.0f}",
        ),
        (threads <= 1024, f"{threads} threads, a CTA has at most 1024"),
    )
    hazards = [Hazard("footprint", text) for ok, text in rules if not ok]
    hazards += [
        Hazard("footprint", f"{a.name} has {a.registers} registers, setmaxnreg takes multiples of 8 from 24 to 256")
        for a in program.actors
        if len({x.registers for x in program.actors}) > 1 and (a.registers % 8 or not 24 <= a.registers <= 256)
    ]
    owners: dict[int, str] = {}
    for barrier in program.named_barriers:
        name, identity, threads = barrier.name, barrier.identity, barrier.threads
        rules = (
            (0 <= identity < NUM_BARRIERS, f"named barrier {name} has id {identity}, legal are 0 to 15"),
            (identity not in owners, f"named barriers {owners.get(identity)} and {name} share id {identity}"),
            (threads % WARP_THREADS == 0, f"named barrier {name} counts {threads} threads, not warps"),
        )
        hazards += [Hazard("barrier", text) for ok, text in rules if not ok]
        owners[identity] = name
    return hazards + _oversized(program)


def misfits(cta: Cta, machine: Machine) -> Iterator[str]:
    """Yield in words why a CTA does not fit an SM: first the registers of its fragments, for which nothing is built."""
    yield from cta.short_of_registers(machine.more_registers)
    yield from (hazard.text for hazard in footprint(cta.build(), machine))


def _warpgroups(program: Program) -> list[tuple[int, int]]:
    """Return the threads of each warpgroup and their registers per thread.

    Actors of a warpgroup or more count as they are. Single warps share warpgroups, with the registers of the largest.
    """
    wide = [(a.threads, a.registers) for a in program.actors if a.threads >= WARPGROUP_THREADS]
    narrow = [a for a in program.actors if a.threads < WARPGROUP_THREADS]
    if not narrow:
        return wide
    shared = -(-sum(a.threads for a in narrow) // WARPGROUP_THREADS) * WARPGROUP_THREADS
    return [*wide, (shared, max(a.registers for a in narrow))]


def _oversized(program: Program) -> list[Hazard]:
    """Return the copies that are larger than the slot that they write or read, each once."""
    hazards: dict[Hazard, None] = {}
    for actor in program.actors:
        for row, (kind, x, y, z, _) in enumerate(actor.ops.tolist()):
            if kind in (Op.LOAD, Op.STORE):
                size, slot = (y, program.slots[z]) if kind == Op.LOAD else (x, program.slots[y])
                if size > slot.bytes > 0:  # registers have 0
                    words = (
                        f"{size} bytes copied to or from slot {slot.name} of {slot.bytes}",
                        *actor.lines[row : row + 1],
                    )
                    hazards[Hazard("footprint", ", ".join(words))] = None
    return list(hazards)
