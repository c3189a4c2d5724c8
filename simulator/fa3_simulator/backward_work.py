"""The vector work of a row block and of a key tile of the backward, in warp instructions by class.

That of the forward is in :mod:`fa3_simulator.vector_work`.
"""

from __future__ import annotations

from fa3_kernels.plan.barriers import WARPGROUP_THREADS
from fa3_simulator.backward_schedule import BackwardSchedule
from fa3_simulator.program import Work
from fa3_simulator.vector_work import work_on

WAVEFRONT_BYTES = 128  # bytes of the shared memory port that a warp's instruction takes at least

# For a row block of our kernel as compiled (SASS of dense fp16, mean of both warpgroups), by head_dim: the instructions
# that a warp executes beside the other classes of Work, and the cycles that it waits between them because nothing else
# can be issued. There are four places: beside the exponentials, beside dS, in front of the wgmma of dQ and dK, and in
# front of the wgmma of the next scores.
OTHERS = {
    64: ((44, 0), (40, 0), (34, 93), (34, 54)),
    96: ((48, 0), (35, 0), (44, 85), (48, 63)),
    128: ((44, 0), (31, 0), (27, 70), (45, 75)),
}
OTHERS_SPLIT = {192: ((34, 0), (0, 0), (12, 45), (62, 93)), 256: ((30, 0), (0, 0), (11, 60), (70, 52))}
_PLACES = ("beside exp2", "beside dS", "descriptors of dQ", "descriptors of S")


def backward_work(schedule: BackwardSchedule, consumer: int = 0) -> dict[str, Work]:
    """Return the vector work of one warp of a consumer, by the names that consumers use.

    A score takes a multiply-add, an exponential, a subtraction, a multiplication and two halves of a conversion. Where
    the keys are the rows of S, a lane reads lse and D of a quarter of its columns, two with every instruction;
    otherwise it reads those of its two rows.
    """
    s = schedule
    threads = WARPGROUP_THREADS * s.consumers
    lane = s.tile_m * s.tile_n // (WARPGROUP_THREADS if s.splits_roles else threads)
    outputs = s.staged(consumer) // WARPGROUP_THREADS
    columns = s.tile_m // 8 if s.scores_transposed else 2
    statistics = 4 * columns * WAVEFRONT_BYTES  # bytes that the four warps of a consumer read
    shared = 2 * lane * WARPGROUP_THREADS  # bytes of P or dS of a consumer in 16 bits
    staged = 4 * outputs * WARPGROUP_THREADS
    gradients = s.tile_n * s.head_dim // threads
    counted: tuple[tuple[int, int], ...] = ()
    if s.is_ours:
        known, largest = (OTHERS_SPLIT, 256) if s.splits_roles else (OTHERS, 128)
        counted = known.get(s.head_dim, known[largest])
    others = {name: Work(name, 1, other=n, stall=wait) for name, (n, wait) in zip(_PLACES, counted, strict=False)}
    return others | {
        "mask": work_on("mask", lane, alu=2),
        "exp2": work_on("exp2", lane, fma=1, mufu=1, convert=0.5, smem_bytes=statistics),
        "P to shared memory": work_on("P to shared memory", lane, other=0.25, smem_bytes=shared),
        "dS": work_on("dS", lane, fma=2, convert=0.5, other=0.25, smem_bytes=shared + statistics),
        "dQ to shared memory": work_on("dQ to shared memory", outputs, other=0.5, smem_bytes=staged),
        "dQ to memory": work_on("dQ to memory", outputs // s.dq_slices, other=0.25),
        "S to shared memory": work_on("S to shared memory", lane, other=0.5, smem_bytes=4 * lane * WARPGROUP_THREADS),
        "S from shared memory": work_on(
            "S from shared memory", lane, other=0.5, smem_bytes=4 * lane * WARPGROUP_THREADS
        ),
        "load V": work_on("load V", gradients // 2, other=0.25, smem_bytes=2 * s.tile_n * s.head_dim // s.consumers),
        "dK and dV to shared memory": work_on(
            "dK and dV to shared memory",
            2 * gradients,
            convert=0.5,
            other=0.25,
            smem_bytes=4 * s.tile_n * s.head_dim // s.consumers,
        ),
    }
