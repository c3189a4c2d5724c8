"""The vector work of a key block and of a tile, in warp instructions by class, as the kernels are compiled."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from fa3_kernels.plan.barriers import WARPGROUP_THREADS
from fa3_kernels.plan.config import WARPGROUP_ROWS, Config
from fa3_kernels.plan.variant import staged_channels
from fa3_simulator.compiled import STATISTICS_ALU, STATISTICS_MUFU, STATISTICS_SHUFFLES, other_instructions
from fa3_simulator.program import Work
from fa3_simulator.schedules import early_exponentials, late_rescaling, late_turn

ELEMENTS_PER_CHUNK = 4  # of a lane: granularity at which two warpgroups share a pipe
STATISTICS_FMA = 6  # as :mod:`fa3_simulator.compiled` has the others
OTHER_INSTRUCTIONS_LOCKSTEP = 114  # of fp16_d128_lockstep, whose consumers load as well
# Cycles in which ptxas has a warp wait, by the stall counts in its code, of what a tile executes once.
# 550 to 860, 835 to 1220
TILE_STALL = 690
TILE_STALL_FP8 = 940
TRIP_KEYS = 32


def work_on(name: str, per_lane: int, *, smem_bytes: int = 0, **pipes: float) -> Work:
    """Return work on ``per_lane`` elements; ``pipes`` in warp instructions per element."""
    counts = {pipe: round(count * per_lane) for pipe, count in pipes.items()}
    return Work(name, -(-per_lane // ELEMENTS_PER_CHUNK), **counts, smem_bytes=smem_bytes)


def _row_max(config: Config, by_integers: bool) -> Work:
    """One comparison per score, of integers half as many (VIMNMX3 takes two); the quad's and the running maximum."""
    scores = config.tile_n // 2
    return Work(
        "row max", -(-scores // ELEMENTS_PER_CHUNK), alu=(scores // 2 if by_integers else scores - 2) + STATISTICS_ALU
    )


def other_work(config: Config) -> Work:
    """Return what a step executes beside the classes of Work, one dispatch cycle each."""
    count = other_instructions(config) if config.warp_specialized else OTHER_INSTRUCTIONS_LOCKSTEP
    return Work("addresses", 1, other=count)


@lru_cache(maxsize=64)
def softmax_work(config: Config) -> Mapping[str, Work]:
    """Vector work of one key block and one warp of a consumer (16 rows).

    ptxas mixes exponentials, sums, conversion and rescaling, so that the special-function unit binds: "rest" is all of
    that but the exponentials of "early", "first" that of a tile's first block, whose O is not rescaled, and "last" what
    adds the last P V.
    """
    s = config
    # per lane
    scores = s.tile_n // 2
    outputs = s.head_dim_v // 2
    early = round(scores * (max(early_exponentials(s), 0.0) if s.intra_wg_overlap else late_turn(s)))
    rescaled = 0 if s.adds_in_place else outputs
    apart = round(rescaled * late_rescaling(s))
    width = s.head_dim_v if s.traits.output_in_v else staged_channels(s)  # of O at a time
    return {
        "mask": work_on("mask", scores, alu=2),
        "first max": _row_max(s, False),  # no sign is known before a tile's first block
        "max": _row_max(s, s.takes_integer_max(False)),
        "quad": Work("row reduction", 1, shuffle=STATISTICS_SHUFFLES),  # two rows, two exchanges in the quad
        "early": _exponentials("exp2", s, early, 0),
        "rest": _exponentials("exp2 and rescale O", s, scores - early, rescaled - apart, is_last=True),
        "rescale": work_on("rescale O", apart, fma=1),
        "first": _exponentials("exp2", s, scores, 0, is_last=True),
        "last": work_on("rescale O", outputs, fma=1),
        "other": other_work(s),
        "drain": Work("last sums", 1, stall=_step_stall(s)),
        "tile": Work("tile change", 1, stall=(TILE_STALL if s.bits == 16 else TILE_STALL_FP8) // 2),
        "hold": work_on("Q to registers", s.head_dim // 4, alu=1, smem_bytes=WARPGROUP_ROWS * s.head_dim * s.bits // 8),
        "epilogue": work_on("normalise O", outputs, fma=1, convert=0.5),
        "store": Work(
            "O to shared memory", max(1, width // 16), alu=width // 16, smem_bytes=WARPGROUP_ROWS * width * 2
        ),
    }


def _exponentials(name: str, config: Config, scores: int, rescaled: int, is_last: bool = False) -> Work:
    """Exponentials and row sums of a lane's ``scores``; with a block's last, statistics, conversion, rescaling."""
    fma = 2 * scores + rescaled
    mufu = scores
    total = config.tile_n // 2
    packed = {}
    if is_last:
        fma = fma + STATISTICS_FMA
        mufu = mufu + STATISTICS_MUFU
        packed = {"convert" if config.bits == 16 else "convert_e4m3": total // 2}
    return Work(name, -(-scores // ELEMENTS_PER_CHUNK), fma=fma, mufu=mufu, **packed)


def _step_stall(config: Config) -> int:
    behind, serial = config.traits.step_stalls
    return behind + (0 if config.intra_wg_overlap or config.is_fp8 else serial)


def transpose_trips(config: Config) -> int:
    """Trips through shared memory in which V of one key block is transposed."""
    return max(1, config.tile_n // TRIP_KEYS)


def transpose_trip(config: Config) -> Work:
    """V transpose of 32 keys by four warps: 8 KiB per 16 LDSM / STSM of each warp, two PRMT per eight bytes."""
    size = min(config.tile_n, TRIP_KEYS) * config.head_dim_v
    words = size // (4 * WARPGROUP_THREADS)  # 32-bit registers per lane
    return Work("transpose V", 1, alu=words, other=words // 2, smem_bytes=2 * size, trips=1)
