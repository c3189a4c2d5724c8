"""All legal tiles and schedules for a problem, simulated and ranked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, product

from fa3_kernels.plan.choose import MAX_SPLITS, can_pack, is_launchable
from fa3_kernels.plan.config import K_STEP, Config
from fa3_kernels.plan.traits import FAMILIES, OURS
from fa3_reference.problem import AttentionProblem
from fa3_simulator import backward_choice
from fa3_simulator.backward_choice import shipped_schedule
from fa3_simulator.backward_schedule import BackwardSchedule
from fa3_simulator.cta import AnyConfig, program_of
from fa3_simulator.footprint import footprint
from fa3_simulator.machine import Machine
from fa3_simulator.resources import resources_of
from fa3_simulator.roofline import lower_bound
from fa3_simulator.run import Estimate, as_program, estimate
from fa3_simulator.schedules import TileBlocks, registers_needed
from fa3_simulator.tile_queue import tile_heads

PEER = "flash3"  # whose choice is marked among the schedules


@dataclass(frozen=True, slots=True)
class Ranked:
    """One configuration with its simulated time and its distance to what no configuration can beat."""

    config: AnyConfig
    estimate: Estimate
    gap: float  # cycles over those of roofline.lower_bound, minus 1
    is_gluon_buildable: bool  # by the size of its tile
    is_flash3_choice: bool

    @property
    def is_launchable(self) -> bool:
        """Whether our kernels take it as launch options; they refuse a few more tiles themselves, by name."""
        return isinstance(self.config, Config) and is_launchable(self.config)


def candidates(
    problem: AttentionProblem, *, family: str = PEER, pack_gqa: bool | None = False, sms: int = 0
) -> Iterator[Config]:
    """Configurations whose fields are legal; most do not fit and are dropped by :func:`misfit`.

    Where a family promotes, it is every 128 keys, or every tile of fewer, as ours ships. ``pack_gqa`` None: packed and
    not. ``sms``: keys are cut into parts too, where tiles are fewer.
    """
    is_fp8 = problem.dtype == "e4m3"
    promotes = is_fp8 and FAMILIES[family].promotes
    packs = (pack_gqa,) if pack_gqa is not None else (False, True) if can_pack(problem) else (False,)
    for tile_m, tile_n, stages, pingpong, (overlap, softmax_stages), registers, packed in product(
        (64, 128, 192),
        range(32, 257, K_STEP[problem.dtype]),
        (2, 3, 4),
        (True, False),
        ((True, 2), (True, 3), (False, 2)),
        (True, False),
        packs,
    ):
        if tile_m == 64 and pingpong:
            continue
        config = Config(
            problem.dtype, problem.head_dim, tile_m, tile_n, pack_gqa=packed, num_stages=stages, pingpong=pingpong,
            intra_wg_overlap=overlap, pv_from_registers=registers, softmax_stages=softmax_stages, family=family,
            promotion_interval=next(n for n in (128, 96, 64, 32) if tile_n % n == 0) if promotes else 0,
        )  # fmt: skip
        for num_splits in part_counts(problem, config, sms):
            yield replace(config, num_splits=num_splits)


def part_counts(problem: AttentionProblem, config: Config, sms: int) -> list[int]:
    """Parts of the keys that are worth a look: one, what the family itself takes, and what fills the SMs once or twice.

    >>> part_counts(AttentionProblem(1, 32, 8, 1, 65536, 128), Config(pack_gqa=True), 132)
    [1, 16, 33]
    """
    rows = problem.seqlen_q * (problem.group if config.pack_gqa else 1)
    tiles = tile_heads(problem, config) * -(-rows // config.tile_m)
    if tiles >= sms:
        return [1]
    most = min(-(-problem.seqlen_k // config.tile_n), MAX_SPLITS)
    wanted = (config.traits.splits(problem, config.tile_m, config.tile_n), sms // tiles, 2 * sms // tiles)
    return sorted({1, *(max(1, min(count, most)) for count in wanted)})


def misfit(config: AnyConfig, machine: Machine) -> str | None:
    """Why a configuration does not fit an SM, or None."""
    needed = registers_needed(config) if isinstance(config, Config) else config.registers_needed
    if needed > config.registers[1]:
        return f"about {needed} registers, a consumer thread has {config.registers[1]}"
    found = [f.text for f in footprint(program_of(config, [TileBlocks(1)]), machine)]
    return found[0] if found else None


def _rings_fit(config: AnyConfig, machine: Machine) -> bool:
    """Whether Q, K and V fit shared memory: said without a program, of which most have no other fault."""
    if not isinstance(config, Config):
        return True
    shared = resources_of(config)
    rings = (*shared.q, *shared.k, *shared.v, *shared.v_raw)
    return sum(slot.bytes for slot in rings) <= machine["smem_bytes"]


def largest_fitting(config: AnyConfig, machine: Machine) -> int | None:
    """Most keys of a smaller tile, of those that the family can build, with which the rest of a forward fits."""
    if not isinstance(config, Config):
        return None
    sizes = range(K_STEP[config.dtype], config.tile_n, K_STEP[config.dtype])
    fitting = (
        size
        for size in reversed(sizes)
        if config.traits.takes_keys(size)
        and size % (config.promotion_interval or size) == 0
        and not misfit(replace(config, tile_n=size), machine)
    )
    return next(fitting, None)


def tune(
    problem: AttentionProblem,
    machine: Machine,
    clock_mhz: float | None = None,
    *,
    family: str = PEER,
    pack_gqa: bool | None = None,
    backward: bool = False,
) -> list[Ranked]:
    """Simulate every configuration of a family that fits, forward or backward, and rank by time.

    ``pack_gqa`` True and False are forward configurations with the heads of a group packed, and without; by default
    both.

    Returns
    -------
    list of Ranked
        Fastest first; where HBM binds all alike, the one whose CTAs would be done first.
    """
    found = (
        backward_choice.candidates(problem, family, machine["smem_bytes"])
        if backward
        else candidates(problem, family=family, pack_gqa=pack_gqa, sms=int(machine["sms"]))
    )
    ranked, fits = [], {}
    for config in found:
        program = as_program(config)
        if program not in fits:
            fits[program] = _rings_fit(program, machine) and not misfit(program, machine)
        if not fits[program]:
            continue
        simulated = estimate(problem, config, machine, clock_mhz)
        bound = lower_bound(problem, config, machine, clock_mhz).cycles
        gap = simulated.cycles / bound - 1
        ranked.append(Ranked(config, simulated, gap, _is_gluon_buildable(config), _is_peers_choice(problem, config)))
    return sorted(ranked, key=lambda r: (r.estimate.cycles, r.estimate.cta_cycles))


def _is_gluon_buildable(config: AnyConfig) -> bool:
    sizes = (config.tile_n,) if isinstance(config, Config) else (config.tile_m, config.tile_n)
    return all(FAMILIES[OURS].takes_keys(size) for size in sizes)


def _is_peers_choice(problem: AttentionProblem, config: AnyConfig) -> bool:
    """Whether FlashAttention-3 launches it when asked to choose; forward whatever its other switches are."""
    if isinstance(config, BackwardSchedule):
        return config == shipped_schedule(problem, PEER)
    peer, tile = FAMILIES[PEER], (config.tile_m, config.tile_n)
    chosen = peer.shipped(problem)
    if chosen is None or tile != chosen[:2]:
        return False
    splits = peer.splits(problem, *tile)
    launched = (splits, peer.packs(problem, config.tile_m, splits), 2, True, 2)
    found = (config.num_splits, config.pack_gqa, config.num_stages, config.intra_wg_overlap, config.softmax_stages)
    return found == launched


def regret(ranked: list[Ranked], among: list[Ranked]) -> float | None:
    """How much slower the best of ``among`` is than the best of all; None where there is none."""
    return among[0].estimate.cycles / ranked[0].estimate.cycles - 1 if among else None


def without_duplicates(ranked: list[Ranked]) -> list[list[Ranked]]:
    """The fastest variant of every tile shape; in one list those that take the same time, as HBM binds them alike."""
    seen: dict[tuple[int, int], Ranked] = {}
    for entry in ranked:
        seen.setdefault((entry.config.tile_m, entry.config.tile_n), entry)
    return [list(alike) for _, alike in groupby(seen.values(), lambda entry: entry.estimate.cycles)]
