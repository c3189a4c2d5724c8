"""Laws about parts of the keys: the results of parts, merged by their lse, agree with one call within all bounds.

If part i has the output o_i and the lse l_i, the whole has lse = log sum exp(l_i) and out = sum w_i o_i with
w_i = exp(l_i - lse). That is how keys are split over warps or GPUs (ring attention), and how a decode step adds a key.
"""

from __future__ import annotations

import math
from itertools import combinations, pairwise
from typing import Any

import numpy as np
from hypothesis import assume, strategies as st

from fa3_reference.merging import NOISE, by_rows, merge
from fa3_reference.problem import Descale, Sequence
from fa3verify.cases.case import Case
from fa3verify.kernels.record import Kernel
from fa3verify.operations import Outputs
from fa3verify.properties.compare import CallResult, Found, agree, called, summed, unsigned_zeros, within
from fa3verify.properties.law import Drawn, Setup, Trial, Violation
from fa3verify.properties.transforms import filled, key_unit, masked_part, part, visible
from fa3verify.properties.trials import Wanted, law, needs

RANKS = (2, 3, 4)  # numbers of ranks of a ring
# A key whose score is so many nats below the lse has a weight of 2^-300: 0 in binary32 whatever V it multiplies.
NOTHING = 208.0


def _longest(case: Case, unit: int = 1) -> int:
    """Return the most keys of a sequence with queries; a case in which they are at most ``unit`` is not drawn."""
    longest = max((seq.seqlen_k for seq in filled(case.problem)), default=0)
    assume(longest > unit)
    return longest


def _cut(draw: st.DrawFn, kernel: Kernel, case: Case) -> Drawn:
    """Draw where the keys are cut: at whole blocks of descales, where there are such."""
    unit = 1
    if case.scheme is not None and case.scheme.granularity == "block":
        unit = math.lcm(case.scheme.block_rows_k, case.scheme.block_rows_v)
    return {"cut": unit * draw(st.integers(1, (_longest(case, unit) - 1) // unit))}


def _merge(setup: Setup, trial: Trial) -> Found:
    cut = trial.integer("cut", 1, 2**20)
    if cut % key_unit(setup):
        raise ValueError(f"{trial.law}: cut must be whole blocks of {key_unit(setup)} keys, got {cut}")
    for seq in filled(setup.problem):
        if cut < seq.seqlen_k:
            yield _shards_merge(setup, seq, slice(0, seq.seqlen_q), [0, cut, seq.seqlen_k])


def _shards_merge(setup: Setup, seq: Sequence, rows: slice, edges: list[int]) -> Violation | None:
    """Compare a call of some rows with the merge of calls of the same rows, each with the keys between two edges.

    None if the kernel returns no lse, by which parts are merged.
    """
    whole = called(masked_part(setup, seq, rows=rows, keys=slice(0, edges[-1])))
    if "lse" not in whole.outputs:
        return None
    parts = [called(masked_part(setup, seq, rows=rows, keys=slice(a, b))) for a, b in pairwise(edges)]
    starts = ", ".join(map(str, edges[1:-1]))
    names = f"rows [{rows.start}, {rows.stop}) of sequence {seq.index} against keys split at {starts} and merged"
    return _against_merged(names, whole, [x.outputs for x in parts], [x.bound for x in parts])


def _against_merged(what: str, whole: CallResult, parts: list[Outputs], bounds: list[Outputs]) -> Violation | None:
    expected, limit = merged(parts, bounds)
    return within(what, whole.outputs, expected, summed(limit, whole.bound))


@np.errstate(invalid="ignore", over="ignore")
def merged(parts: list[Outputs], bounds: list[Outputs]) -> tuple[Outputs, Outputs]:
    """Merge results of parts of the keys by their lse in float64, and bound the error of the merged one.

    With lse errors d_i of at most b_i, the exact weights are w_i e^(-d_i) / S with S = sum w_j e^(-d_j), so that the
    merged out is off by sum_(i<j) w_i w_j (e^(-d_i) - e^(-d_j)) (o_i - o_j) / S beside its parts' own errors. The
    factor of each pair is at most e^(d_max - d_min) - 1, and d_max - d_min at most the sum of the two largest b_i.
    """
    lse = np.stack([p["lse"].astype(np.float64) for p in parts])  # (parts, 1, nheads, seqlen_q)
    out = np.stack([p["out"].astype(np.float64) for p in parts])  # (parts, 1, seqlen_q, nheads, head_dim_v)
    off = np.sort([b["lse"] for b in bounds], axis=0)
    each = [b["out"] for b in bounds]
    whole, total = merge(out, lse)
    w = by_rows(np.exp(lse - total))
    slack = by_rows(np.expm1(off[-1] + off[-2]))
    error = sum(w[i] * b for i, b in enumerate(each)) + NOISE * np.abs(out).max(0)
    for i, j in combinations(range(len(parts)), 2):
        error = error + w[i] * w[j] * slack * (np.abs(out[i] - out[j]) + each[i] + each[j])
    return {"out": whole, "lse": total}, {"out": _or_inf(error), "lse": _or_inf(off[-1] + NOISE * (1 + np.abs(total)))}


def _or_inf(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), np.inf, x)


def _rank(draw: st.DrawFn, kernel: Kernel, case: Case) -> Drawn:
    ranks = draw(st.sampled_from(RANKS))
    return {"ranks": ranks, "rank": draw(st.integers(0, ranks - 1))}


def _ring(setup: Setup, trial: Trial) -> Found:
    """Compare the rows of one rank with the merge over the shards of keys; fewer than two shards say nothing."""
    ranks = trial.integer("ranks", RANKS[0], RANKS[-1])
    rank = trial.integer("rank", 0, ranks - 1)
    for seq in setup.problem.sequences():
        size = -(-seq.seqlen_q // ranks)
        rows = slice(rank * size, min((rank + 1) * size, seq.seqlen_q))
        if rows.stop <= rows.start:
            continue
        stops = visible(setup.problem, seq)[1][rows]
        unit = key_unit(setup)
        size_k = max(1, -(-seq.seqlen_k // (ranks * unit))) * unit
        starts = range(0, int(stops[0]), size_k)  # the first row sees a key of every shard
        if len(starts) >= 2:
            yield _shards_merge(setup, seq, rows, [*starts, int(stops[-1])])


def _appended(draw: st.DrawFn, kernel: Kernel, case: Case) -> Drawn:
    longest = _longest(case)
    config: Any = kernel.code.configure(case.problem)
    tiles = range(config.tile_n, longest, config.tile_n)  # a key appended after whole tiles is alone in its own
    anywhere = st.integers(1, longest - 1)
    before = draw(st.one_of(anywhere, st.sampled_from(tiles)) if tiles else anywhere)
    return {"before": before, "score": draw(st.sampled_from(("drawn", "lowest")))}


def _with_lowest_key(setup: Setup, seq: Sequence, key: int) -> Setup:
    """Return the call in which one key of a sequence has a score far below those of all others.

    Q has the same large number in channel 0 everywhere, where K is 0 but for this key; descales of Q and K are 1.
    """
    problem = setup.problem
    operands = setup.operands
    low = 448.0 if problem.dtype == "e4m3" else 4096.0
    q = operands.q.copy()
    k = operands.k.copy()
    q[..., 0] = 448.0 if problem.dtype == "e4m3" else 16.0
    k[..., 0] = 0
    problem.rows_k(k, seq)[key] = 0
    problem.rows_k(k, seq)[key, :, 0] = -low
    ones = {
        name: Descale(np.ones_like(descale.values), descale.block_rows)
        for name in ("q_descale", "k_descale")
        if (descale := getattr(operands, name)) is not None
    }
    return setup.fed(q=q, k=k, **ones)


def _one_more_key(setup: Setup, trial: Trial) -> Found:
    is_lowest = trial.choice("score", ("drawn", "lowest")) == "lowest"
    key = trial.integer("before", 1, 2**20)  # the appended key, counted from 0
    for seq in filled(setup.problem):
        if key >= seq.seqlen_k:
            continue
        fed = _with_lowest_key(setup, seq, key) if is_lowest else setup
        longer, shorter = (part(fed, seq, keys=slice(0, stop)) for stop in (key + 1, key))
        after = called(longer)
        before = called(shorter)
        what = f"sequence {seq.index} with key {key} appended"
        one, own = _of_last_key(longer)
        gap = before.setup.truth()["lse"] - one["lse"]
        if is_lowest and (gap > NOTHING).all():
            plain = [CallResult(call.setup, unsigned_zeros(call.outputs)) for call in (after, before)]
            yield agree(trial, f"{what}, of no weight", got=plain[0], expected=plain[1])
        if "lse" in after.outputs:
            merge = f"{what}, against the call without it merged with its score and value"
            yield _against_merged(merge, after, [before.outputs, one], [before.bound, own])


def _of_last_key(setup: Setup) -> tuple[Outputs, Outputs]:
    """Return exact out and lse of attention to the last key alone, and float64's error in them."""
    problem = setup.problem
    q, k, v = setup.operands.dequantized(problem)
    last_k, last_v = (np.repeat(x[:, -1:], problem.group, axis=2) for x in (k, v))
    score, size = ((a * b).sum(-1) * problem.softmax_scale for a, b in ((q, last_k), (np.abs(q), np.abs(last_k))))
    if problem.softcap:
        score = problem.softcap * np.tanh(score / problem.softcap)
    lse = score.transpose(0, 2, 1)
    out = np.broadcast_to(last_v, problem.out_shape)
    return {"out": out, "lse": lse}, {"out": np.zeros(problem.out_shape), "lse": NOISE * size.transpose(0, 2, 1)}


MERGING_LAWS = (
    law(
        "split_keys_merge_by_lse",
        "two calls with the keys cut in two, merged by (out, lse) in float64, agree with one call within all three "
        "bounds; dense",
        "bounded",
        _merge,
        wanted=Wanted(masks="none", empty=False),
        parameters=_cut,
    ),
    law(
        "ring_of_shards_equals_one_call",
        "the causal rows of one rank of a ring, with the keys of each rank in a call of its own and merged by (out, "
        "lse) in float64, agree with one call within the bounds of all",
        "bounded",
        _ring,
        wanted=Wanted(masks="causal", empty=False),
        parameters=_rank,
        applies=needs("causal"),
    ),
    law(
        "appended_key_acts_by_its_score",
        "one key more gives the merge of the call without it and the exact score and value of that key, within the "
        "bounds; a key of no weight changes no bit where claimed; dense",
        "agreement",
        _one_more_key,
        wanted=Wanted(masks="none", empty=False),
        parameters=_appended,
    ),
)
