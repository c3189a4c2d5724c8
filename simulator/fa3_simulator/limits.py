"""How large a launch may be to be simulated: our kernels must be able to count it, and its tiles must not be so many
that handing them out takes too long."""

from __future__ import annotations

from typing import Literal

from fa3_kernels.plan.choose import check_sizes
from fa3_kernels.plan.config import WARPGROUP_ROWS
from fa3_reference.problem import AttentionProblem

MOST_TILES = 1 << 18  # tiles of 64 rows: handing out this many takes some seconds, and a ranking two minutes


def check_launch(problem: AttentionProblem, tiles_of: Literal["row", "key"], num_splits: int = 1) -> None:
    """Raise ValueError for a launch that our kernels could not count, or of too many tiles: row tiles are those of a
    forward, key tiles those of a backward.
    """
    problem.check_plain("the simulator")
    check_sizes(problem, num_splits)
    length = problem.seqlen_q if tiles_of == "row" else problem.seqlen_k
    tiles = problem.batch * problem.nheads * -(-length // WARPGROUP_ROWS) * num_splits
    if tiles > MOST_TILES:
        raise ValueError(
            f"launches of at most {MOST_TILES} {tiles_of} tiles of {WARPGROUP_ROWS} are simulated, got {tiles}"
        )
