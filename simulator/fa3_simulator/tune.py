"""All legal tiles and schedules for a problem, simulated and ranked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from fa3_kernels.plan.choose import is_launchable
from fa3_kernels.plan.config import K_STEP, Config
from fa3_kernels.plan.traits import FAMILIES, OURS
from fa3_reference.problem import AttentionProblem
from fa3_simulator import backward_choice
from fa3_simulator.backward_choice import shipped_schedule
from fa3_simulator.backward_schedule import BackwardSchedule
from fa3_simulator.cta import AnyConfig, program_of
from fa3_simulator.footprint import footprint
from fa3_simulator.machine import Machine
from fa3_simulator.roofline import roofline
from fa3_simulator.run import Estimate, estimate
from fa3_simulator.schedules import TileBlocks, registers_needed

PEER = "flash3"  # whose choice is marked among the schedules


@dataclass(frozen=True, slots=True)
class Ranked:
    """One configuration with its simulated time and the gap to the lower bound of its tile."""

    config: AnyConfig
    estimate: Estimate
    gap: float  # cycles over the roofline's, minus 1
    is_gluon_buildable: bool  # by the size of its tile
    is_flash3_choice: bool

    @property
    def is_launchable(self) -> bool:
        """Whether our kernels take it as launch options; they refuse a few more tiles themselves, by name."""
        return isinstance(self.config, Config) and is_launchable(self.config)


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
    """Why a configuration does not fit an SM, or None."""
    needed = registers_needed(config) if isinstance(config, Config) else config.registers_needed
    if needed > config.registers[1]:
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
    backward: bool = False,
) -> list[Ranked]:
    """Simulate every configuration of a family that fits, forward or backward, and rank by time.

    Returns
    -------
    list of Ranked
        Fastest first; where HBM binds all alike, the one whose CTAs would be done first.
    """
    found = (
        backward_choice.candidates(problem, family, machine["smem_bytes"])
        if backward
        else candidates(problem, family=family, pack_gqa=pack_gqa)
    )
    ranked = []
    for config in found:
        if misfit(config, machine):
            continue
        simulated = estimate(problem, config, machine, clock_mhz)
        bound = roofline(problem, config, machine, clock_mhz).cycles
        gap = (simulated.main_cycles - machine["launch_cycles"]) / bound - 1
        ranked.append(Ranked(config, simulated, gap, _is_gluon_buildable(config), _is_peers_choice(problem, config)))
    return sorted(ranked, key=lambda r: (r.estimate.cycles, r.estimate.cta_cycles))


def _is_gluon_buildable(config: AnyConfig) -> bool:
    sizes = (config.tile_n,) if isinstance(config, Config) else (config.tile_m, config.tile_n)
    return all(FAMILIES[OURS].takes_keys(size) for size in sizes)


def _is_peers_choice(problem: AttentionProblem, config: AnyConfig) -> bool:
    """Whether FlashAttention-3 launches it; forward whatever its other switches are."""
    if isinstance(config, BackwardSchedule):
        return config == shipped_schedule(problem, PEER)
    chosen = FAMILIES[PEER].shipped(problem)
    stages = (config.num_stages, config.intra_wg_overlap, config.softmax_stages)
    return chosen is not None and (config.tile_m, config.tile_n) == chosen[:2] and stages == (2, True, 2)


def regret(ranked: list[Ranked], among: list[Ranked]) -> float:
    """How much slower the best of ``among`` is than the best of all."""
    return among[0].estimate.cycles / ranked[0].estimate.cycles - 1 if among else float("nan")


def without_duplicates(ranked: list[Ranked]) -> list[Ranked]:
    """The fastest variant of every tile shape."""
    seen: dict[tuple[int, int], Ranked] = {}
    for entry in ranked:
        seen.setdefault((entry.config.tile_m, entry.config.tile_n), entry)
    return list(seen.values())
