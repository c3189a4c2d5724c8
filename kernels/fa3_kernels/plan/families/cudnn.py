"""cuDNN's attention as torch calls it: closed kernels, whose order was found from outputs.

Their schedule is not known. The kernel for one query is another one, whose twin is among the reports.
"""

from __future__ import annotations

from fa3_kernels.plan.families.record import Shipped, Size, Traits, broken
from fa3_kernels.plan.order import Order
from fa3_reference.problem import AttentionProblem

_TILE = Shipped(64, 128)


def refused_by_torch(problem: AttentionProblem) -> str:
    """Return the rules that a problem breaks, in words: what neither cuDNN nor FlashAttention-2 takes through torch."""
    return broken(
        (problem.window != (-1, -1), "it takes no window"),
        (problem.softcap > 0, "it takes no softcap"),
        (problem.head_dim_v != problem.head_dim, "head_dim_v must be head_dim"),
    )


def _refuses(problem: AttentionProblem) -> str:
    """Return the rule that a problem breaks, in words; empty if there is none.

    torch does not hand packed sequences to cuDNN, and one query runs another kernel.
    """
    if problem.is_varlen:
        return "it takes no packed sequences"
    return refused_by_torch(problem) or ("one query runs another kernel" if problem.seqlen_q == 1 else "")


FAMILIES = {
    "cudnn": Traits(
        "cuDNN",
        "cuDNN 9.19 by torch 2.11.0",
        {(False, d): Size(_TILE, _TILE, rows=(64,)) for d in (64, 128, 256)},
        dtypes=("fp16", "bf16"),
        order=Order(
            keys="left_to_right",
            diagonal="top_left",
            factor="float32",
            contracts_exponent=False,
            row_sum="block_serial",
            quad="near_first",
            lse="natural",
            keeps_subnormals=False,
        ),
        pads_head_dim=True,
        is_reproduced=True,
        features=frozenset({"causal", "gqa"}),
        refuses=_refuses,
    ),
}
