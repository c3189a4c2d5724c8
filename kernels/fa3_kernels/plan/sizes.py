"""This module says how large a launch can be: what its indices hold."""

from __future__ import annotations

from fa3_kernels.plan.config import kernel_head_dim
from fa3_kernels.plan.tile_order import check_entries
from fa3_reference.problem import AttentionProblem

INDICES = 1 << 31  # of int32


def check_outputs(rows: int, head_dim: int, num_splits: int) -> None:
    """Raise ValueError for more elements of the output, as compiled, or more partial rows than int32 counts."""
    if rows * max(num_splits, head_dim) >= INDICES:
        raise ValueError(
            f"at most 2^31 output elements and partial rows, got {rows} rows of {head_dim} and {num_splits} splits"
        )


def check_sizes(problem: AttentionProblem, num_splits: int = 1) -> None:
    """Raise ValueError for a problem that is larger than a launch of our kernels counts.

    Rows of the output times channels, and the keys, are counted in int32, and a tile's place in an entry of the
    schedule.
    """
    rows = problem.batch * problem.seqlen_q if problem.seqlens_q is None else sum(problem.seqlens_q)
    keys = problem.seqlen_k if problem.seqlens_k is None else sum(problem.seqlens_k)
    check_entries(problem.seqlen_q, num_splits, problem.batch, problem.nheads)
    check_outputs(problem.nheads * rows, kernel_head_dim(max(problem.head_dim, problem.head_dim_v)), num_splits)
    if keys >= INDICES:
        raise ValueError(f"at most 2^31 - 1 keys fit the int32 that counts them, got {keys}")
