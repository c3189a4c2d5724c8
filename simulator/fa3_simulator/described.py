"""What a described kernel takes, whether it is safe, which of its parameters are best, and how two kernels differ.

The CTA that ends last is simulated (:mod:`fa3_simulator.cta`) as one of those that share an SM, all with the same
tiles. What :class:`fa3_simulator.run.Estimate` means for the kernels that ship it means for a described one too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar, NamedTuple

from fa3_reference.rules import require
from fa3_simulator import engine, run, unbounded
from fa3_simulator.cta import SimulatedKernel, TimedCta
from fa3_simulator.description import Schedule, Values
from fa3_simulator.footprint import Hazard, footprint, misfits
from fa3_simulator.held_out import DESCRIBED, is_measured
from fa3_simulator.launch import Launch, tiles_of
from fa3_simulator.machine import Machine
from fa3_simulator.program import FAR, Op
from fa3_simulator.run import Estimate
from fa3_simulator.schedule import Cta
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
    far_bytes_per_cycle: float = 0.0  # from HBM, 0: as one SM that has it for itself
    is_affine: ClassVar[bool] = True

    @property
    def is_persistent(self) -> bool:
        return True  # CTAs one behind another are in one program

    def cta(self, tiles: Sequence[TileBlocks]) -> Cta:
        return self.schedule.resident(tiles, self.together)

    def on(self, machine: Machine, clock_mhz: float) -> Machine:
        lone = machine["hbm_lone_bytes_per_cycle"]
        return machine.with_values({"hbm_lone_bytes_per_cycle": min(lone, self.far_bytes_per_cycle or lone)})


def occupancy(schedule: Schedule, launch: Launch, machine: Machine) -> int:
    """Return the CTAs on an SM: those that the launch states, or as many as there is room for.

    ValueError where the launch states more; a CTA that does not fit by itself is a finding of its description instead.
    """
    program = schedule.program(launch.tiles[:1])
    threads = sum(actor.threads for actor in program.actors)
    registers = sum(actor.threads * actor.registers for actor in program.actors)
    room = (
        SM_SMEM_BYTES // (program.smem_bytes + RESERVED_BYTES),
        int(machine["registers"]) // max(1, registers),
        SM_THREADS // threads,
        MOST_CTAS,
    )
    most = max(1, min(room))
    require(
        launch.occupancy <= most,
        f"an SM has room for {most} CTAs of {schedule.name}, its launch says {launch.occupancy}",
    )
    return launch.occupancy or most


def far_bytes(schedule: Schedule, tiles: Sequence[TileBlocks]) -> int:
    """Return the bytes that CTAs load from HBM for some tiles."""
    programs = ((count, schedule.program([tile])) for tile, count in Counter(tiles).items())
    rows = ((count, actor.ops) for count, program in programs for actor in program.actors)
    return sum(count * int(ops[(ops[:, 0] == Op.LOAD) & (ops[:, 4] & FAR > 0), 2].sum()) for count, ops in rows)


class TimedLaunch(NamedTuple):
    """The estimate of a schedule's launch, the launch itself, the longest CTA, and how many CTAs share its SM."""

    estimate: Estimate
    launch: Launch
    cta: TimedCta
    together: int

    @property
    def tflops(self) -> float:
        return self.launch.flops / self.estimate.seconds / 1e12

    @property
    def is_bound_by_hbm(self) -> bool:
        return isinstance(self.cta.kernel, Resident) and self.cta.kernel.far_bytes_per_cycle > 0

    def figures(self) -> dict[str, float | str | None]:
        """Return cycles, their interval and TFLOP/s as they stand in JSON."""
        return {"cycles": round(self.estimate.cycles), **self.estimate.interval_figures(), "tflops": self.tflops}


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
    require(launch.tiles, f"a launch of {schedule.name} has no tile")
    sms = int(machine["sms"])
    together = occupancy(schedule, launch, machine)
    places = (launch.persistent and launch.ctas) or sms * together
    ctas = places // launch.cluster * launch.cluster
    used = min(ctas, len(launch.tiles))
    together = min(together, -(-used // sms))
    cta = TimedCta(Resident(schedule, together), machine, clock)
    estimate = run.timed(launch, cta, ctas)
    if estimate.hbm_cycles > estimate.cta_cycles:  # HBM binds, so that no SM has it for itself
        rate = far_bytes(schedule, tiles_of(launch.tiles)) / estimate.hbm_cycles / sms
        cta = TimedCta(Resident(schedule, together, rate), machine, clock)
        estimate = run.timed(launch, cta, ctas)
    estimate = replace(estimate, held_out=DESCRIBED if is_measured(machine) else None)
    return TimedLaunch(estimate, launch, cta, together)


def hazards(schedule: Schedule, machine: Machine) -> Proof:
    """Prove that a schedule is safe whatever its tiles and in every order; misfits of the machine are findings too."""
    proof = unbounded.prove(schedule.program, is_persistent=schedule.launch().persistent)
    cta = schedule.cta([1])
    fragments = [Hazard("footprint", text) for text in cta.short_of_registers(machine.more_registers)]
    return proof._replace(findings=list(dict.fromkeys([*proof.findings, *fragments, *footprint(cta.build(), machine)])))


class Choice(NamedTuple):
    """A schedule of a ranking: what was found, or why it does not fit."""

    values: Values
    timed: TimedLaunch | None
    misfit: str = ""

    def to_json(self) -> Mapping[str, object]:
        """Return the values, why they do not fit, or what they take."""
        return {**self.values, "misfit": self.misfit} | (self.timed.figures() if self.timed else {})


def tune(
    schedule: Schedule,
    machine: Machine,
    over: Mapping[str, Sequence[Any]],
    clock_mhz: float | None = None,
) -> list[Choice]:
    """Return every choice of the values ``over`` some parameters, fastest first; last those that do not fit or end."""
    ranked = []
    for chosen in product(*over.values()):
        values = dict(zip(over, chosen, strict=True))
        try:
            other = schedule.description(**dict(schedule.values) | values)
            reasons = list(misfits(other.cta([1]), machine))
            ranked.append(Choice(values, None if reasons else timed(other, machine, clock_mhz), *reasons[:1]))
        except (ValueError, engine.DeadlockError) as error:  # as with sizes that nothing computes, or too few stages
            ranked.append(Choice(values, None, str(error)))
    return sorted(ranked, key=lambda choice: choice.timed.estimate.cycles if choice.timed else float("inf"))
