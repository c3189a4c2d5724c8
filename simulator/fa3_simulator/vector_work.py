"""The vector work of a key block and of a tile, in warp instructions by class, as the kernels are compiled."""

from __future__ import annotations

from fa3_kernels.plan.config import WARPGROUP_ROWS, kernel_head_dim
from fa3_simulator.program import Work
from fa3_simulator.schedules import WARPGROUP, Schedule, adds_in_place

ELEMENTS_PER_CHUNK = 4  # of a lane: granularity at which two warpgroups share a pipe
# Per key block and warp, of what each lane keeps of its two rows: the running maximum and the factor that rescales the sums.
STATISTICS_FMA, STATISTICS_ALU, STATISTICS_MUFU, STATISTICS_SHUFFLES = 6, 6, 2, 4
# Instructions of a step that are in no class of Work, by (is e4m3, head_dim, promotes): addresses and descriptors of wgmma
# (uniform datapath), moves, predicates, branches. "instructions" of the first loop of each dense kernel in
# fa3_kernels/audit/audit.json less the classes, the wgmma, the barriers and the branch that takes maxima the other way.
OTHER_INSTRUCTIONS: dict[tuple[bool, int, bool], int] = {
    (False, 64, False): 71, (False, 128, False): 69, (False, 256, False): 119,
    (True, 64, True): 73, (True, 128, True): 84, (True, 256, True): 77,
    (True, 64, False): 61, (True, 128, False): 80, (True, 256, False): 100,
}  # fmt: skip
OTHER_INSTRUCTIONS_LOCKSTEP = 114  # of fp16_d128_lockstep, whose consumers load as well
# Cycles in which ptxas has a warp wait and which are of no class of Work, by the stall counts in its code: at the end of a step
# for the last sums (49 to 119, of FlashAttention-3 21), in front of a step without overlap, and of what a tile executes once.
STEP_STALL, SERIAL_STALL = 50, 60
TILE_STALL, TILE_STALL_FP8 = 690, 940  # 550 to 860, 835 to 1220
TRIP_KEYS = 32


def _work(name: str, per_lane: int, **pipes: float) -> Work:
    """Work on ``per_lane`` elements; ``pipes`` in warp instructions per element."""
    return Work(
        name, -(-per_lane // ELEMENTS_PER_CHUNK), **{pipe: round(count * per_lane) for pipe, count in pipes.items()}
    )


def _row_max(schedule: Schedule, by_integers: bool) -> Work:
    """One comparison per score, of integers half as many (VIMNMX3 takes two); the quad's and the running maximum."""
    scores = schedule.tile_n // 2
    return Work(
        "row max", -(-scores // ELEMENTS_PER_CHUNK), alu=(scores // 2 if by_integers else scores - 2) + STATISTICS_ALU
    )


def other_work(schedule: Schedule) -> Work:
    """What a step executes beside the classes of Work, one dispatch cycle each; of flash3 it is assumed to be as much."""
    s = schedule
    key = (s.dtype == "e4m3", kernel_head_dim(s.head_dim), s.promotion_interval > 0)
    count = OTHER_INSTRUCTIONS[key] if s.warp_specialized else OTHER_INSTRUCTIONS_LOCKSTEP
    return Work("addresses", 1, other=count)


def softmax_work(schedule: Schedule) -> dict[str, Work]:
    """Vector work of one key block and one warp of a consumer (16 rows).

    ptxas mixes exponentials, sums, conversion and rescaling, so that the special-function unit binds: "rest" is all of that but
    the exponentials of "early", "first" that of a tile's first block, whose O is not rescaled, and "last" what adds the last P V.
    """
    s = schedule
    scores, outputs = s.tile_n // 2, s.head_dim // 2  # per lane
    early = round(scores * (max(s.early_exponentials, 0.0) if s.intra_wg_overlap else s.late_turn))
    rescaled = 0 if adds_in_place(s) else outputs
    width = s.head_dim // (16 // s.bits if s.stages_output_in_q else 1)  # of O at a time
    return {
        "mask": _work("mask", scores, alu=2),
        "first max": _row_max(s, False),  # no sign is known before a tile's first block
        "max": _row_max(s, s.max_by_integers),
        "quad": Work("row reduction", 1, shuffle=STATISTICS_SHUFFLES),  # two rows, two exchanges in the quad
        "early": _exponentials("exp2", s, early, 0),
        "rest": _exponentials("exp2 and rescale O", s, scores - early, rescaled, is_last=True),
        "first": _exponentials("exp2", s, scores, 0, is_last=True),
        "last": _work("rescale O", outputs, fma=1),
        "other": other_work(s),
        "drain": Work("last sums", 1, stall=_step_stall(s)),
        "tile": Work("tile change", 1, stall=(TILE_STALL if s.bits == 16 else TILE_STALL_FP8) // 2),
        "epilogue": _work("normalise O", outputs, fma=1, convert=0.5),
        "store": Work(
            "O to shared memory", max(1, width // 16), alu=width // 16, smem_bytes=WARPGROUP_ROWS * width * 2
        ),
    }


def _exponentials(name: str, schedule: Schedule, scores: int, rescaled: int, is_last: bool = False) -> Work:
    """Exponentials and row sums of ``scores`` of a lane; with the last of a block its statistics, conversion and rescaling."""
    fma, mufu, total = 2 * scores + rescaled, scores, schedule.tile_n // 2
    packed = {}
    if is_last:
        fma, mufu = fma + STATISTICS_FMA, mufu + STATISTICS_MUFU
        packed = {"convert" if schedule.bits == 16 else "convert_e4m3": total // 2}
    return Work(name, -(-scores // ELEMENTS_PER_CHUNK), fma=fma, mufu=mufu, **packed)


def _step_stall(schedule: Schedule) -> int:
    if schedule.kernel != "gluon":
        return 0
    return STEP_STALL + (0 if schedule.intra_wg_overlap or schedule.dtype == "e4m3" else SERIAL_STALL)


def transpose_trips(schedule: Schedule) -> int:
    """Trips through shared memory in which V of one key block is transposed."""
    return max(1, schedule.tile_n // TRIP_KEYS)


def transpose_trip(schedule: Schedule) -> Work:
    """V transpose of 32 keys by four warps: 8 KiB per 16 LDSM / STSM of each warp, two PRMT per eight bytes."""
    size = min(schedule.tile_n, TRIP_KEYS) * schedule.head_dim
    words = size // (4 * WARPGROUP)  # 32-bit registers per lane
    return Work("transpose V", 1, alu=words, other=words // 2, smem_bytes=2 * size, trips=1)
