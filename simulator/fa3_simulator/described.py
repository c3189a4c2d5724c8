"""What a described kernel takes, whether it is safe, which of its parameters are best, and how two kernels differ.

The CTA that ends last is simulated (:mod:`fa3_simulator.cta`) as one of those that share an SM, all with the same
tiles. What :class:`fa3_simulator.run.Estimate` means for the kernels that ship it means for a described one too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, NamedTuple

from fa3_simulator import run, unbounded
from fa3_simulator.cta import SimulatedKernel, TimedCta
from fa3_simulator.description import Schedule, Values
from fa3_simulator.footprint import Hazard, footprint
from fa3_simulator.launch import Launch
from fa3_simulator.machine import Machine
from fa3_simulator.program import Program
from fa3_simulator.run import Estimate
from fa3_simulator.schedules import TileBlocks
from fa3_simulator.unbounded import Proof

SM_SMEM_BYTES = 233472  # shared memory of an SM, of which every CTA takes RESERVED_BYTES for itself
RESERVED_BYTES = 1024
SM_THREADS = 2048
MOST_CTAS = 32  # on an SM


@dataclass(frozen=True, slots=True)
class Resident(SimulatedKernel):
    """CTAs of a schedule that share an SM, each with the same tiles; a kernel of :mod:`fa3_simulator.cta`."""

    schedule: Schedule
    together: int
    is_affine: ClassVar[bool] = True

    @property
    def is_persistent(self) -> bool:
        return True  # CTAs one behind another are in one program

    def program(self, tiles: Sequence[TileBlocks]) -> Program:
        return self.schedule.resident(tiles, self.together)


def occupancy(schedule: Schedule, launch: Launch, machine: Machine) -> int:
    """Return the CTAs on an SM: those that the launch states, or as many as there is room for."""
    if launch.occupancy:
        return launch.occupancy
    program = schedule.program(launch.tiles[:1])
    threads = sum(actor.threads for actor in program.actors)
    registers = sum(actor.threads * actor.registers for actor in program.actors)
    room = (
        SM_SMEM_BYTES // (program.smem_bytes + RESERVED_BYTES),
        int(machine["registers"]) // max(1, registers),
        SM_THREADS // threads,
        MOST_CTAS,
    )
    return max(1, min(room))


class TimedLaunch(NamedTuple):
    """The estimate of a schedule's launch, the launch itself, the longest CTA, and how many CTAs share its SM."""

    estimate: Estimate
    launch: Launch
    cta: TimedCta
    together: int

    @property
    def tflops(self) -> float:
        return self.launch.flops / self.estimate.seconds / 1e12


def timed(schedule: Schedule, machine: Machine, clock_mhz: float | None = None) -> TimedLaunch:
    """Simulate the launch of a schedule.

    Raises
    ------
    ValueError
        For a launch without tiles, or a description that does not say what a launch is.
    DeadlockError
        If the kernel cannot go on.
    """
    clock = clock_mhz or machine["max_clock_mhz"]
    launch = schedule.launch()
    if not launch.tiles:
        raise ValueError(f"a launch of {schedule.name} has no tile")
    sms = int(machine["sms"])
    together = occupancy(schedule, launch, machine)
    places = (launch.persistent and launch.ctas) or sms * together
    ctas = places // launch.cluster * launch.cluster
    used = min(ctas, len(launch.tiles))
    together = min(together, -(-used // sms))
    cta = TimedCta(Resident(schedule, together), machine, clock)
    return TimedLaunch(run.timed(launch, cta, ctas), launch, cta, together)


def misfits(schedule: Schedule, machine: Machine) -> list[str]:
    """Return in words why a schedule does not fit an SM."""
    cta = schedule.cta([1])
    found = footprint(cta.build(), machine)
    return [*cta.short_of_registers(machine.more_registers), *(hazard.text for hazard in found)]


def hazards(schedule: Schedule, machine: Machine) -> Proof:
    """Prove that a schedule is safe whatever its tiles and in every order; misfits of the machine are findings too."""
    is_persistent = schedule.launch().persistent
    proof = unbounded.prove(schedule.program, is_persistent=is_persistent)
    fits = [Hazard("footprint", text) for text in misfits(schedule, machine)]
    return proof._replace(findings=list(dict.fromkeys([*proof.findings, *fits])))


class Choice(NamedTuple):
    """A schedule of a ranking: what was found, or why it does not fit."""

    values: Values
    timed: TimedLaunch | None
    misfit: str = ""


def tune(
    schedule: Schedule,
    machine: Machine,
    over: Mapping[str, Sequence[Any]],
    clock_mhz: float | None = None,
) -> list[Choice]:
    """Return every choice of the values ``over`` some parameters, fastest first; those that do not fit come last."""
    ranked = []
    for chosen in product(*over.values()):
        values = dict(zip(over, chosen, strict=True))
        try:
            other = schedule.description(**dict(schedule.values) | values)
            reasons = misfits(other, machine)
            ranked.append(Choice(values, None if reasons else timed(other, machine, clock_mhz), *reasons[:1]))
        except ValueError as error:  # sizes that the description, or wgmma, refuses
            ranked.append(Choice(values, None, str(error)))
    return sorted(ranked, key=lambda choice: choice.timed.estimate.cycles if choice.timed else float("inf"))
