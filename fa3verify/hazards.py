"""A proof that a schedule has no hazards, whatever the tiles of its CTAs: of a family, or described by somebody.

The proof itself stands in :mod:`fa3_simulator.unbounded`.
"""

from __future__ import annotations

from typing import NamedTuple

from fa3_simulator import unbounded
from fa3_simulator.cta import AnyConfig, kernel_of
from fa3_simulator.described import hazards
from fa3_simulator.description import Schedule
from fa3_simulator.machine import Machine
from fa3_simulator.schedules import TileBlocks
from fa3_simulator.unbounded import Proof
from fa3verify.files import Json


class Checked(NamedTuple):
    """Holds the proof of one shape of schedule, the program that stands for it, and the kernels that have it."""

    kernels: tuple[str, ...]
    program: str
    proof: Proof

    def to_json(self) -> Json:
        """Return the figures of the proof beside kernels and program."""
        findings = [finding._asdict() for finding in self.proof.findings]
        return self.proof._asdict() | {"kernels": self.kernels, "program": self.program, "findings": findings}


def check(config: AnyConfig) -> Checked:
    """Return the proof of a configuration of a family."""
    kernel = kernel_of(config)
    name = kernel.program([TileBlocks(2)]).name
    return Checked((name,), name, unbounded.prove(kernel.program, is_persistent=kernel.is_persistent))


def check_schedule(kernel: str, schedule: Schedule, machine: Machine) -> Checked:
    """Return the proof of a described kernel, which is named with its file, as it was in ``kernel``."""
    name = f"description {kernel.split(':')[0].split(',')[0]}:{schedule.name}"
    return Checked((name,), name, hazards(schedule, machine))
