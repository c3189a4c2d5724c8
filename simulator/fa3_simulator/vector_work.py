"""The vector work of a key block and of a tile of a forward, in warp instructions by class, as compiled.

Consumers add it to their programs by name; the work of a backward is in :mod:`fa3_simulator.backward_consumer`.

Addresses, descriptors of wgmma, moves, predicates and branches are no arithmetic. For our own kernels they are counted
in the accepted code (``fa3_kernels/audit/audit.json``): the instructions of an unmasked loop, less the arithmetic that
is charged here by itself. The rows of a tile do not matter, as a warpgroup has 64 of them. A tile that nobody compiled
is taken to have as many as the most similar tile that was compiled.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import cache, lru_cache

from fa3_kernels.audit.evidence import accepted_rows
from fa3_kernels.plan.barriers import WARPGROUP_THREADS
from fa3_kernels.plan.config import WARPGROUP_ROWS, Config
from fa3_kernels.plan.families import OURS, traits_of
from fa3_kernels.plan.variant import in_boxes, staged_channels
from fa3_simulator.program import Work
from fa3_simulator.rings import ELEMENTS_PER_CHUNK, work_on
from fa3_simulator.schedules import early_exponentials, late_rescaling, late_turn

# Per key block and warp: the instructions for the running maximum and the rescaling factor of each lane's two rows.
STATISTICS_ALU = 6
STATISTICS_MUFU = 2
STATISTICS_SHUFFLES = 4
_PLAIN = re.compile(r"(fp16|e4m3)_d(\d+)(?:_v(\d+))?_dense(_chained)?(?:_128_rows)?/forward_fp\d+")
_CLASSES = ("HGMMA", "QGMMA", "MUFU.EX2", "FFMA", "FMUL", "FADD", "BAR")
_Step = tuple[bool, bool, int, int, int]  # is e4m3, sums are promoted, channels of Q and of V, keys of a tile


@cache
def _counted() -> dict[_Step, int]:
    """Return the count of every tile that was compiled; where two have equally many keys, that of the taller one.

    Where maxima are taken by integers, the loop holds code for both ways to take them, with the shuffles of each. The
    other way is not run, except two comparisons that lead there.
    """
    counts: dict[_Step, int] = {}
    for name, figures in accepted_rows().items():
        if kernel := _PLAIN.fullmatch(name):
            dtype, d, v, chained = kernel.groups()
            is_fp8 = dtype == "e4m3"
            promotes = is_fp8 and not chained
            words = figures["loops"][0].split()
            loop = Counter(dict(zip(words[::2], map(int, words[1::2]), strict=True)))
            keys = 2 * (loop["MUFU.EX2"] - STATISTICS_MUFU)
            is_integer = traits_of(OURS).sizes[is_fp8, int(d)].integer_max[promotes][False]
            maxima = keys // 4 + STATISTICS_ALU + loop["FMNMX"] + 2 if is_integer else loop["FMNMX"]
            modelled = sum(loop[each] for each in _CLASSES) + maxima + STATISTICS_SHUFFLES + keys // 4  # conversions
            counts.setdefault((is_fp8, promotes, int(d), int(v or d), keys), loop["instructions"] - modelled)
    return counts


def _step(config: Config) -> _Step:
    d, v = (config.traits.compiled_head_dim(n, config.is_fp8) for n in (config.head_dim, config.head_dim_v))
    return config.is_fp8, config.promotion_interval > 0, d, v, config.tile_n


def estimated(config: Config) -> list[str]:
    """Return in words what is estimated of a schedule because nobody compiled such a tile; empty if it was compiled."""
    is_counted = config.traits.is_built_here and _step(config) in _counted()
    return [] if is_counted else ["instructions of a step beside its arithmetic"]


def other_instructions(config: Config) -> int:
    """Return how many instructions of a key block are no arithmetic, per warp, counted or estimated.

    For a kernel that is not built here it is the number of its family's table.
    """
    if not config.traits.is_built_here:
        return config.size.other_instructions[config.promotion_interval > 0]
    *size, v, keys = _step(config)
    alike = {step[3:]: count for step, count in _counted().items() if [*step[:3]] == size}
    # the tile with the same channels of V and the same keys, if there is one, else the next best
    return alike[min(alike, key=lambda tile: (tile[0] != v, tile[1] != keys, -tile[0]))]


STATISTICS_FMA = 6  # multiply-adds for row statistics, per key block
OTHER_INSTRUCTIONS_LOCKSTEP = 114  # counted in fp16_d128_lockstep, whose consumers load as well
# Cycles that a warp waits in the code that a tile executes once, by the stall counts of ptxas: 550 to 860 in 16 bits,
# and 835 to 1220 in FP8.
TILE_STALL = 690
TILE_STALL_FP8 = 940
TRIP_KEYS = 32  # keys of V that one trip transposes


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
    rescaled = 0 if s.adds_in_place or s.size.scales_late else outputs
    apart = round(rescaled * late_rescaling(s))  # those that are not among the exponentials
    behind, serial = s.traits.step_stalls
    stall = behind + (0 if s.intra_wg_overlap or s.is_fp8 else serial)  # cycles that a warp waits at the end of a block
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
        "drain": Work("last sums", min(1, stall), stall=stall),
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
    packed = {"convert" if config.bits == 16 else "convert_e4m3": config.tile_n // 4 * is_last}
    return Work(
        name,
        -(-scores // ELEMENTS_PER_CHUNK),
        fma=2 * scores + rescaled + STATISTICS_FMA * is_last,
        mufu=scores + STATISTICS_MUFU * is_last,
        **packed,
    )


def transpose_trips(config: Config) -> int:
    """Return the number of trips through shared memory in which V of one key block is transposed."""
    return max(1, config.tile_n // TRIP_KEYS)


def transpose_trip(config: Config) -> Work:
    """Return the work of one trip, in which four warps transpose V of 32 keys.

    For 8 KiB each warp executes 16 LDSM and STSM; there are two PRMT per eight bytes.
    """
    size = min(config.tile_n, TRIP_KEYS) * in_boxes(config)[1]
    words = size // (4 * WARPGROUP_THREADS)  # 32-bit registers per lane
    return Work("transpose V", 1, alu=words, other=words // 2, smem_bytes=2 * size, trips=1)
