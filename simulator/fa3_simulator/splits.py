"""What cutting the keys into parts costs beside the parts: partial sums in fp32, and a second launch that merges them.

It is modelled on our kernel (:mod:`fa3_kernels.gluon.combine`), where a CTA of four warps merges four rows, and copies
8 or 16 parts of them to shared memory at a time. FlashAttention-3's kernel, which copies ahead as well, is assumed to
cost the same.
"""

from __future__ import annotations

from fa3_kernels.plan.config import Config
from fa3_kernels.plan.plan import COMBINE_ROWS, COMBINED_AT_ONCE, combined_at_once
from fa3_reference.problem import AttentionProblem
from fa3_simulator.machine import Machine

PARTIAL_BYTES = 4  # bytes of a partial sum, and of its lse
# How many latencies of L2 the parts that are copied together take, their lse included: estimated from merging launches
# of 2 to 64 parts (reports/h200/speed/merge/merge.csv, 32 rows), 0.5 and 1.4 us.
LATENCIES: dict[int, int] = dict(zip(COMBINED_AT_ONCE, (2, 5), strict=True))


def rows_of(problem: AttentionProblem) -> int:
    """Return the number of rows of the output, over all heads and sequences."""
    return problem.batch * problem.nheads * problem.seqlen_q


def partial_bytes(problem: AttentionProblem, config: Config) -> int:
    """Return the bytes that the parts write and the merging kernel reads; 0 for keys in one piece."""
    if config.num_splits == 1:
        return 0
    return rows_of(problem) * config.num_splits * (config.head_dim_v + 1) * PARTIAL_BYTES


def merge_cycles(problem: AttentionProblem, config: Config, machine: Machine, clock_mhz: float) -> float:
    """Return the SM cycles from the end of the parts to the end of the merged output; 0 for keys in one piece.

    They are those of a launch; of the latencies of one of its CTAs, as all are resident together; of reading the
    partial sums from L2; and of storing them beyond O in 16 bits, of which they have twice the bytes.
    """
    if config.num_splits == 1:
        return 0.0
    ctas = -(-rows_of(problem) // COMBINE_ROWS)
    sms = min(ctas, machine["sms"])
    at_once = combined_at_once(config.num_splits)
    latencies = -(-config.num_splits // at_once) * LATENCIES[at_once]
    waited = latencies * machine["l2_latency_ns"] * clock_mhz / 1000
    size = partial_bytes(problem, config)
    read = size / (machine["l2_bytes_per_cycle"] * sms)
    stored = size / 2 / (machine["store_bytes_per_cycle"] * machine["sms"])
    return machine["launch_cycles"] + waited + read + stored
