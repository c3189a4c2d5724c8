"""The vector work of a key block and of a tile of a forward, in warp instructions by class, as compiled.

Consumers add it to their programs by name. Instructions that are no arithmetic are counted in
:mod:`fa3_simulator.compiled`; the work of a backward is in :mod:`fa3_simulator.backward_work`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from fa3_kernels.plan.barriers import WARPGROUP_THREADS
from fa3_kernels.plan.config import WARPGROUP_ROWS, Config
from fa3_kernels.plan.variant import staged_channels
from fa3_simulator.compiled import STATISTICS_ALU, STATISTICS_MUFU, STATISTICS_SHUFFLES, other_instructions
from fa3_simulator.program import Work
from fa3_simulator.schedules import early_exponentials, late_rescaling, late_turn

ELEMENTS_PER_CHUNK = 4  # elements of a lane in a chunk: the granularity at which two warpgroups share a pipe
STATISTICS_FMA = 6  # multiply-adds for row statistics, per key block; the others are in :mod:`fa3_simulator.compiled`
OTHER_INSTRUCTIONS_LOCKSTEP = 114  # counted in fp16_d128_lockstep, whose consumers load as well
# Cycles that a warp waits in the code that a tile executes once, by the stall counts of ptxas: 550 to 860 in 16 bits,
# and 835 to 1220 in FP8.
TILE_STALL = 690
TILE_STALL_FP8 = 940
TRIP_KEYS = 32  # keys of V that one trip transposes


def work_on(name: str, per_lane: int, *, smem_bytes: int = 0, **pipes: float) -> Work:
    """Return work on ``per_lane`` elements of a lane; ``pipes`` are warp instructions per element, by field of Work."""
    counts = {pipe: round(count * per_lane) for pipe, count in pipes.items()}
    return Work(name, -(-per_lane // ELEMENTS_PER_CHUNK), **counts, smem_bytes=smem_bytes)


def _row_max(config: Config, by_integers: bool) -> Work:
    """Return the work on row maxima: one comparison per score, or half as many by integers, where VIMNMX3 takes two at
    once; and those of the quad's and the running maximum."""
    scores = config.tile_n // 2
    return Work(
        "row max", -(-scores // ELEMENTS_PER_CHUNK), alu=(scores // 2 if by_integers else scores - 2) + STATISTICS_ALU
    )


def other_work(config: Config) -> Work:
    """Return the instructions of a key block that are in no other class of Work, at one dispatch cycle each."""
    count = other_instructions(config) if config.warp_specialized else OTHER_INSTRUCTIONS_LOCKSTEP
    return Work("addresses", 1, other=count)


@lru_cache(maxsize=64)
def softmax_work(config: Config) -> Mapping[str, Work]:
    """Return the vector work of one warp of a consumer (16 rows), by the names that consumers use.

    ptxas mixes exponentials, sums, conversion and rescaling, so that the special-function unit limits them. "rest" is
    all of that without the exponentials of "early"; "first" is the same for a tile's first block, whose O is not
    rescaled; "last" adds the last P V to O.
    """
    s = config
    # elements per lane
    scores = s.tile_n // 2
    outputs = s.head_dim_v // 2
    early = round(scores * (max(early_exponentials(s), 0.0) if s.intra_wg_overlap else late_turn(s)))
    rescaled = 0 if s.adds_in_place else outputs
    apart = round(rescaled * late_rescaling(s))  # those that are not among the exponentials
    width = s.head_dim_v if s.traits.output_in_v else staged_channels(s)  # channels of O that are stored at a time
    return {
        "mask": work_on("mask", scores, alu=2),
        "first max": _row_max(s, False),  # integers need a running maximum of known sign, which the first block lacks
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
    """Return the work on exponentials and row sums of ``scores`` elements of a lane, and on ``rescaled`` ones of O.

    With ``is_last``, the end of a block, the row statistics and the conversion of all its scores are added.
    """
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
    # cycles that a warp waits at the end of each block; more where nothing overlaps in 16 bits
    behind, serial = config.traits.step_stalls
    return behind + (0 if config.intra_wg_overlap or config.is_fp8 else serial)


def transpose_trips(config: Config) -> int:
    """Return the number of trips through shared memory in which V of one key block is transposed."""
    return max(1, config.tile_n // TRIP_KEYS)


def transpose_trip(config: Config) -> Work:
    """Return the work of one trip, in which four warps transpose V of 32 keys.

    For 8 KiB each warp executes 16 LDSM and STSM; there are two PRMT per eight bytes.
    """
    size = min(config.tile_n, TRIP_KEYS) * config.head_dim_v
    words = size // (4 * WARPGROUP_THREADS)  # 32-bit registers per lane
    return Work("transpose V", 1, alu=words, other=words // 2, smem_bytes=2 * size, trips=1)
