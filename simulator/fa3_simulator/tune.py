"""All legal tiles and schedules for a problem, simulated and ranked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from fa3_simulator.footprint import footprint
from fa3_simulator.machine import Machine
from fa3_simulator.roofline import roofline
from fa3_simulator.run import AnySchedule, Estimate, Shape, estimate, program_of
from fa3_simulator.schedules import Kernel, Schedule, Tile, registers_needed

# FlashAttention-3's own tiles on SM90 (upstream hopper/tile_size.h): (dtype bits, head_dim, causal) -> (tile_m, tile_n).
FLASH3_TILES = {
    (16, 64, False): (192, 192), (16, 64, True): (192, 128), (16, 128, False): (128, 176), (16, 128, True): (128, 128),
    (16, 256, False): (128, 80), (16, 256, True): (128, 80),
    (8, 64, False): (192, 160), (8, 64, True): (192, 160), (8, 128, False): (128, 224), (8, 128, True): (128, 224),
    (8, 256, False): (128, 128), (8, 256, True): (128, 128),
}  # fmt: skip

FLASH4_TILES = {64: (192, 128), 128: (128, 128), 256: (128, 80)}  # flash_attn/cute/interface.py, by head_dim


@dataclass(frozen=True, slots=True)
class Ranked:
    """One schedule with its simulated time and the gap to the lower bound of its tile."""

    schedule: Schedule
    estimate: Estimate
    gap: float  # cycles over the roofline's, minus 1
    is_gluon_buildable: bool  # Gluon tiles have powers of two
    is_flash3_choice: bool


def is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def candidates(dtype: str, head_dim: int, *, kernel: Kernel = "flash3") -> Iterator[Schedule]:
    """Schedules whose fields are legal; most do not fit and are dropped by :func:`misfit`.

    Those of our FP8 kernel promote every 128 keys, or every tile of fewer, as it ships.
    """
    step = 32 if dtype == "e4m3" else 16
    promotes = dtype == "e4m3" and kernel == "gluon"
    for tile_m, tile_n, stages, pingpong, (overlap, softmax_stages), registers in product(
        (64, 128, 192),
        range(32, 257, step),
        (2, 3, 4),
        (True, False),
        ((True, 2), (True, 3), (False, 2)),
        (True, False),
    ):
        if tile_m == 64 and pingpong:
            continue
        yield Schedule(
            dtype=dtype, head_dim=head_dim, tile_m=tile_m, tile_n=tile_n, num_stages=stages, pingpong=pingpong,
            intra_wg_overlap=overlap, pv_from_registers=registers, v_transpose=dtype == "e4m3", kernel=kernel,
            softmax_stages=softmax_stages, promotion_interval=next(n for n in (128, 96, 64, 32) if tile_n % n == 0) if promotes else 0,
        )  # fmt: skip


def flash3_schedule(dtype: str, head_dim: int, causal: bool) -> Schedule | None:
    """What FlashAttention-3 runs (upstream hopper/tile_size.h), or None where its tile is not in the table."""
    fp8 = dtype == "e4m3"
    if (tile := FLASH3_TILES.get((8 if fp8 else 16, head_dim, causal))) is None:
        return None
    p_in_smem = not fp8 and (head_dim, causal) == (64, False)
    pingpong = head_dim > 64 if fp8 else head_dim < 256  # upstream's UseSchedulerBarrier
    return Schedule(
        dtype, head_dim, *tile, pingpong=pingpong, pv_from_registers=not p_in_smem, v_transpose=fp8, kernel="flash3"
    )


def flash4_schedule(dtype: str, head_dim: int) -> Schedule | None:
    """What FlashAttention-4 (4.0.0b36) runs on Hopper, fp16 and bf16, or None.

    Its step is FlashAttention-3's; tiles are its own and have a CTA each. What ptxas made of it was not read: exponentials
    stand where they do in FlashAttention-3.
    """
    if dtype == "e4m3" or head_dim not in FLASH4_TILES:
        return None
    return Schedule(
        dtype, head_dim, *FLASH4_TILES[head_dim], pingpong=head_dim <= 128, kernel="flash3", persistent=False
    )


def misfit(schedule: AnySchedule, machine: Machine) -> str | None:
    """Why a schedule does not fit an SM, or None. Registers of the backward are not counted."""
    if isinstance(schedule, Schedule) and (needed := registers_needed(schedule)) > schedule.registers[1]:
        return f"about {needed} registers, a consumer thread has {schedule.registers[1]}"
    found = [f.text for f in footprint(program_of(schedule, [Tile(1)]), machine)]
    return found[0] if found else None


def is_launchable(schedule: Schedule) -> bool:
    """Whether our kernels take a schedule as launch options; they refuse a few more tiles themselves, by name."""
    s = schedule
    rows = (128,) if s.dtype == "e4m3" and s.head_dim > 64 else (128, 192)
    fixed = (s.kernel, s.num_stages, s.softmax_stages, s.pv_from_registers, s.warp_specialized)
    return fixed == ("gluon", 2, 2, True, True) and s.tile_m in rows and s.tile_n >= 32 and is_power_of_two(s.tile_n)


def tune(
    shape: Shape,
    dtype: str,
    head_dim: int,
    machine: Machine,
    clock_mhz: float | None = None,
    *,
    kernel: Kernel = "flash3",
) -> list[Ranked]:
    """Simulate every schedule that fits and rank by time.

    Returns
    -------
    list of Ranked
        Fastest first; where HBM binds all alike, the one whose CTAs would be done first.
    """
    chosen = FLASH3_TILES.get((16 if dtype != "e4m3" else 8, head_dim, shape.causal))
    ranked = []
    for schedule in candidates(dtype, head_dim, kernel=kernel):
        if misfit(schedule, machine):
            continue
        found = estimate(shape, schedule, machine, clock_mhz)
        ranked.append(
            Ranked(
                schedule,
                found,
                (found.cycles - machine["launch_cycles"]) / roofline(shape, schedule, machine, clock_mhz).cycles - 1,
                is_power_of_two(schedule.tile_n),
                (schedule.tile_m, schedule.tile_n) == chosen
                and schedule.num_stages == 2
                and schedule.intra_wg_overlap
                and schedule.softmax_stages == 2,
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
        seen.setdefault((entry.schedule.tile_m, entry.schedule.tile_n), entry)
    return list(seen.values())
