"""How large a launch may be to be simulated: our kernels must be able to count it, and its tiles must not be so many
that handing them out takes too long."""

from __future__ import annotations

from fa3_kernels.plan.choose import check_sizes
from fa3_kernels.plan.config import WARPGROUP_ROWS
from fa3_reference.problem import AttentionProblem

MOST_TILES = 1 << 18  # tiles of 64 rows: handing out this many takes some seconds, and a ranking two minutes


def check_forward(problem: AttentionProblem, num_splits: int = 1) -> None:
    """Raise ValueError for a forward launch that our kernels could not count, or of too many tiles."""
    problem.check_plain("the simulator")
    check_sizes(problem, num_splits)
    _check_tiles(problem.batch * problem.nheads * -(-problem.seqlen_q // WARPGROUP_ROWS) * num_splits, "row")


def check_backward(problem: AttentionProblem) -> None:
    """Raise ValueError for a backward launch that our kernels could not count, or of too many tiles."""
    problem.check_plain("the simulator")
    check_sizes(problem)
    _check_tiles(problem.batch * problem.nheads * -(-problem.seqlen_k // WARPGROUP_ROWS), "key")


def _check_tiles(tiles: int, of: str) -> None:
    if tiles > MOST_TILES:
        raise ValueError(f"launches of at most {MOST_TILES} {of} tiles of {WARPGROUP_ROWS} are simulated, got {tiles}")
