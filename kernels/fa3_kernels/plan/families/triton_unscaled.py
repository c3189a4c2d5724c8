"""A kernel written after Triton's attention tutorial, with maxima of unscaled scores.

It computes dense attention only and masks no tail, so lengths must be whole tiles.
"""

from __future__ import annotations

from fa3_kernels.plan.families.record import Shipped, Size, Traits, broken
from fa3_kernels.plan.order import Order
from fa3_reference.problem import AttentionProblem

_TILE = Shipped(64, 64)


def _refuses(problem: AttentionProblem) -> str:
    """Return the rules that a problem breaks, in words; empty if there are none."""
    return broken(
        (problem.causal or problem.window != (-1, -1) or problem.softcap > 0 or problem.is_varlen, "it is dense"),
        (problem.seqlen_q % 64 != 0 or problem.seqlen_k % 64 != 0, "lengths must be multiples of 64"),
        ((problem.head_dim, problem.head_dim_v) != (64, 64), "head_dim must be 64"),
        (problem.group != 1, "it takes no grouped heads"),
    )


FAMILIES = {
    "triton_unscaled": Traits(
        "a Triton kernel with unscaled maxima",
        "Triton 3.6.0",
        {(False, 64): Size(_TILE, _TILE, rows=(64,))},
        dtypes=("fp16", "bf16"),
        order=Order(
            keys="left_to_right",
            factor="float32",
            maxima="unscaled",
            rescale="contracted",
            row_sum="block_row",
            lse="log2_polynomial",
        ),
        is_reproduced=True,
        refuses=_refuses,
    ),
}
