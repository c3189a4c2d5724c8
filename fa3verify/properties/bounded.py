"""Laws that hold within the operation's a-priori bound of rounding errors.

Two calls with the same exact result may differ by the sum of their bounds. No constant here is a tolerance.
"""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from fa3_kernels.plan.config import Setting
from fa3verify.cases.case import Case
from fa3verify.kernels.record import Kernel
from fa3verify.operations import Outputs
from fa3verify.properties.compare import Found, against_truth, near_truth, summed, within
from fa3verify.properties.law import Drawn, Refused, Setup, Trial
from fa3verify.properties.trials import LONG, Wanted, drawn, law

# log2 of Q and of K in the shifted channel. The pair (8, 12) moves 16-bit scores by 1e5: a kernel that masks with a
# finite number in place of minus infinity fails there.
SHIFTS = ((0, 0), (8, 12), (8, 3))
# Changes that may move bits but not beyond the bound of the changed kernel.
NUMERIC_CHANGES: dict[str, dict[str, Setting]] = {
    "two_splits": {"num_splits": 2},
    "seven_splits": {"num_splits": 7},
    "narrow_tiles": {"tile_n": 64, "promotion_interval": 0},
    "chained": {"promotion_interval": 0},
    "promoted_every_64": {"promotion_interval": 64},
    "promoted_every_32": {"promotion_interval": 32},
}


def _numeric(setup: Setup, trial: Trial) -> Found:
    change = trial.choice("change", tuple(NUMERIC_CHANGES))
    try:
        changed = setup.configured(**NUMERIC_CHANGES[change])
        changed.run()
    except Refused:
        return
    yield against_truth(changed, f"{change} against float64")


def _shifts(draw: st.DrawFn, kernel: Kernel, case: Case) -> Drawn:
    query_log2, key_log2 = draw(st.sampled_from(SHIFTS))
    return {
        "channel": draw(st.integers(0, case.problem.head_dim - 1)),
        "query_log2": query_log2,
        "key_log2": min(key_log2, 8) if kernel.dtype == "e4m3" else key_log2,
        "sign": draw(st.sampled_from((-1, 1))),
    }


def _shift(setup: Setup, trial: Trial) -> Found:
    """Set Q to a constant in one channel, and compare calls whose K is 0 and ``u`` there: lse moves by the product."""
    problem = setup.problem
    channel = trial.integer("channel", 0, problem.head_dim - 1)
    level = 2.0 ** trial.integer("query_log2", 0, 8)
    u = trial.integer("sign", -1, 1) * 2.0 ** trial.integer("key_log2", -3, 12)
    q, *ks = (x.copy() for x in (setup.operands.q, setup.operands.k, setup.operands.k))
    q[..., channel] = level
    for k, constant in zip(ks, (0, u), strict=True):
        k[..., channel] = constant
    plain, shifted = (setup.fed(q=q, k=k) for k in ks)
    exact_q, exact_k, _ = shifted.operands.dequantized(problem)
    shift = np.zeros(problem.lse_shape)
    for seq in problem.sequences():
        rows = problem.rows_q(exact_q, seq)[..., channel]  # (seqlen_q, nheads)
        if seq.seqlen_k:
            keys = np.repeat(problem.rows_k(exact_k, seq)[0, :, channel], problem.group)
            problem.rows_lse(shift, seq)[:] = (problem.softmax_scale * rows * keys).T
    a = plain.run()
    b = shifted.run()
    expected = {"out": a["out"]} | ({"lse": a["lse"] + shift} if "lse" in a else {})
    yield within(f"K plus {u:g} in channel {channel}, where Q is {level:g}", b, expected, _sum(plain, shifted))


def _sum(a: Setup, b: Setup) -> Outputs:
    """Return how far two calls with equal exact results may differ, with room for the float64 error of a shift."""
    bound = summed(a.bound(), b.bound())
    return {name: x * (1.0 if name == "out" else 1 + 2.0**-40) for name, x in bound.items()}


def _permuted(setup: Setup, trial: Trial) -> Found:
    problem = setup.problem
    rng = np.random.Generator(np.random.PCG64(trial.integer("seed", 0, 2**16)))
    k = setup.operands.k.copy()
    v = setup.operands.v.copy()
    for seq in problem.sequences():
        order = rng.permutation(seq.seqlen_k)
        for x in (k, v):
            problem.rows_k(x, seq)[:] = problem.rows_k(x, seq)[order]
    permuted = setup.fed(k=k, v=v)
    yield within("keys in another order", permuted.run(), setup.run(), _sum(setup, permuted))


BOUNDED_LAWS = (
    law(
        "error_within_bound",
        "every out and lse lies within the rounding-error bound of float64 attention on the operands the kernel saw",
        "bounded",
        near_truth,
        wanted=Wanted(absorbed=True),
        of=("forward", "merge"),
    ),
    law(
        "error_within_bound_on_long_rows",
        f"every out and lse of few queries over up to {LONG[-1]} keys lies within its rounding-error bound, where "
        "accumulators drift and small weights add up",
        "bounded",
        near_truth,
        wanted=Wanted(
            masks="none",
            softcap=False,
            single=True,
            absorbed=True,
            longest_q=2,
            seqlens_k=LONG,
            families=("all_ties", "positive", "offset_v", "saturated_sink", "sink", "normal"),
            max_edits=0,
        ),
    ),
    law(
        "numeric_switches_stay_within_bound",
        "num_splits, tile_n and promotion_interval may move bits, within the bound of the changed kernel",
        "bounded",
        _numeric,
        wanted=Wanted(),
        parameters=drawn(change=st.sampled_from(tuple(NUMERIC_CHANGES))),
    ),
    law(
        "softmax_shift_invariance",
        "adding u to one channel of all keys, where Q is constant, keeps out and shifts lse by softmax_scale q u, "
        "within both bounds; no softcap",
        "bounded",
        _shift,
        wanted=Wanted(softcap=False, descales="uniform"),
        parameters=_shifts,
    ),
    law(
        "key_order_is_irrelevant",
        "permuting keys and values together moves out and lse by at most the sum of both bounds; dense, one descale "
        "per head",
        "bounded",
        _permuted,
        wanted=Wanted(masks="none", descales="uniform"),
        parameters=drawn(seed=st.integers(0, 2**16)),
    ),
)
