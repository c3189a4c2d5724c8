"""What cutting the keys into parts costs beside the parts: partial sums in fp32, and a second launch that merges them.

It is modelled on our kernel (:mod:`fa3_kernels.gluon.combine`), where a CTA of four warps merges four rows, and copies
8 or 16 parts of them to shared memory at a time. FlashAttention-3's kernel, which copies ahead as well, is assumed to
cost the same.
"""

from __future__ import annotations

from math import prod

from fa3_kernels.plan.config import Config
from fa3_kernels.plan.packed_order import CHUNK, MAX_SORTED
from fa3_kernels.plan.plan import COMBINE_ROWS, COMBINED_AT_ONCE, combined_at_once
from fa3_reference.problem import AttentionProblem
from fa3_simulator.machine import Machine

PARTIAL_BYTES = 4  # bytes of a partial sum, and of its lse
# How many latencies of L2 the parts that are copied together take, their lse included: estimated from merging launches
# of 2 to 64 parts (reports/h200/speed/merge/merge.csv, 32 rows), 0.5 and 1.4 us.
LATENCIES: dict[int, int] = dict(zip(COMBINED_AT_ONCE, (2, 5), strict=True))

# What the kernel in front of packed sequences takes beside its launch and its reads, and how many latencies of L2 a
# read takes with the ranking behind it: estimated from 16 sequences of 1024 and 128 of 128, timed with that kernel and
# without it (reports/h200/speed/packed/packed.csv, 16 rows), 1.9 and 8.2 us.
SCHEDULE_NS = 1000.0
SCHEDULE_LATENCIES = 2


def merge_cycles(problem: AttentionProblem, config: Config, machine: Machine, clock_mhz: float) -> float:
    """Return the SM cycles from the end of the parts to the end of the merged output; 0 for keys in one piece.

    They are those of a launch; of the latencies of one of its CTAs, as all are resident together; of reading the
    partial sums from L2; and of storing them beyond O in 16 bits, of which they have twice the bytes.
    """
    if config.num_splits == 1:
        return 0.0
    sms = min(-(-prod(problem.q_shape[:-1]) // COMBINE_ROWS), machine["sms"])
    at_once = combined_at_once(config.num_splits)
    latencies = -(-config.num_splits // at_once) * LATENCIES[at_once]
    waited = latencies * machine["l2_latency_ns"] * clock_mhz / 1000
    size = prod(problem.q_shape[:-1]) * config.num_splits * (config.head_dim_v + 1) * PARTIAL_BYTES
    read = size / (machine["l2_bytes_per_cycle"] * sms)
    stored = size / 2 / (machine["store_bytes_per_cycle"] * machine["sms"])
    return machine["launch_cycles"] + waited + read + stored


def schedule_cycles(problem: AttentionProblem, machine: Machine, clock_mhz: float) -> float:
    """Return the SM cycles of the kernel that makes the schedule of packed sequences; 0 for others.

    Each of its CTAs reads the lengths of all sequences, :data:`fa3_kernels.plan.packed_order.CHUNK` of them at a time,
    once for all, and again for its own list, each time beside those of all others, by whose keys they are ranked. Over
    a cache the main kernel is launched meanwhile, otherwise behind it.
    """
    if not problem.is_varlen or not problem.seqlen_k:  # without a key nothing is launched
        return 0.0
    chunks = -(-problem.batch // CHUNK)
    reads = chunks * (2 + (chunks if problem.batch <= MAX_SORTED else 0))
    waited = SCHEDULE_NS + reads * SCHEDULE_LATENCIES * machine["l2_latency_ns"]
    return waited * clock_mhz / 1000 + (0 if problem.cache else machine["launch_cycles"])
