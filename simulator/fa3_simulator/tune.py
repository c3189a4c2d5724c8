"""All legal tiles and schedules for a problem, simulated and ranked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from fa3_kernels.plan.choose import is_launchable
from fa3_kernels.plan.config import K_STEP, Config
from fa3_kernels.plan.traits import FAMILIES, OURS
from fa3_reference.problem import AttentionProblem
from fa3_simulator.footprint import footprint
from fa3_simulator.machine import Machine
from fa3_simulator.roofline import roofline
from fa3_simulator.run import AnyConfig, Estimate, estimate, program_of
from fa3_simulator.schedules import TileBlocks, registers_needed

PEER = "flash3"  # whose choice is marked among the schedules


@dataclass(frozen=True, slots=True)
class Ranked:
    """One configuration with its simulated time and the gap to the lower bound of its tile."""

    config: Config
    estimate: Estimate
    gap: float  # cycles over the roofline's, minus 1
    is_gluon_buildable: bool  # by its number of keys
    is_flash3_choice: bool

    @property
    def is_launchable(self) -> bool:
        """Whether our kernels take it as launch options; they refuse a few more tiles themselves, by name."""
        return is_launchable(self.config)


def candidates(problem: AttentionProblem, *, family: str = PEER, pack_gqa: bool = False) -> Iterator[Config]:
    """Configurations whose fields are legal; most do not fit and are dropped by :func:`misfit`.

    Where a family promotes, it is every 128 keys, or every tile of fewer, as ours ships.
    """
    is_fp8 = problem.dtype == "e4m3"
    promotes = is_fp8 and FAMILIES[family].promotes
    for tile_m, tile_n, stages, pingpong, (overlap, softmax_stages), registers in product(
        (64, 128, 192),
        range(32, 257, K_STEP[problem.dtype]),
        (2, 3, 4),
        (True, False),
        ((True, 2), (True, 3), (False, 2)),
        (True, False),
    ):
        if tile_m == 64 and pingpong:
            continue
        yield Config(
            problem.dtype, problem.head_dim, tile_m, tile_n, pack_gqa=pack_gqa, num_stages=stages, pingpong=pingpong,
            intra_wg_overlap=overlap, pv_from_registers=registers, softmax_stages=softmax_stages, family=family,
            promotion_interval=next(n for n in (128, 96, 64, 32) if tile_n % n == 0) if promotes else 0,
        )  # fmt: skip


def misfit(config: AnyConfig, machine: Machine) -> str | None:
    """Why a configuration does not fit an SM, or None. Registers of the backward are not counted."""
    if isinstance(config, Config) and (needed := registers_needed(config)) > config.registers[1]:
        return f"about {needed} registers, a consumer thread has {config.registers[1]}"
    found = [f.text for f in footprint(program_of(config, [TileBlocks(1)]), machine)]
    return found[0] if found else None


def tune(
    problem: AttentionProblem,
    machine: Machine,
    clock_mhz: float | None = None,
    *,
    family: str = PEER,
    pack_gqa: bool = False,
) -> list[Ranked]:
    """Simulate every configuration of a family that fits and rank by time.

    Returns
    -------
    list of Ranked
        Fastest first; where HBM binds all alike, the one whose CTAs would be done first.
    """
    chosen = FAMILIES[PEER].shipped(problem)
    ranked = []
    for config in candidates(problem, family=family, pack_gqa=pack_gqa):
        if misfit(config, machine):
            continue
        found = estimate(problem, config, machine, clock_mhz)
        ranked.append(
            Ranked(
                config,
                found,
                (found.cycles - machine["launch_cycles"]) / roofline(problem, config, machine, clock_mhz).cycles - 1,
                FAMILIES[OURS].takes_keys(config.tile_n),
                chosen is not None
                and (config.tile_m, config.tile_n) == chosen[:2]
                and config.num_stages == 2
                and config.intra_wg_overlap
                and config.softmax_stages == 2,
            )
        )
    return sorted(ranked, key=lambda r: (r.estimate.cycles, r.estimate.cta_cycles))


def regret(ranked: list[Ranked], among: list[Ranked]) -> float:
    """How much slower the best of ``among`` is than the best of all."""
    return among[0].estimate.cycles / ranked[0].estimate.cycles - 1 if among else float("nan")


def without_duplicates(ranked: list[Ranked]) -> list[Ranked]:
    """The fastest variant of every tile shape."""
    seen: dict[tuple[int, int], Ranked] = {}
    for entry in ranked:
        seen.setdefault((entry.config.tile_m, entry.config.tile_n), entry)
    return list(seen.values())
