"""Laws about shapes and schedules, bit for bit: a row depends on its query and its visible keys and on nothing else.

They hold because the order of its key blocks fixes a row's arithmetic. Blocks that are hidden from the row multiply by
exactly 0 or 1. Blocks are counted from the first key, so that they stay the same when trailing keys, other rows, heads
or sequences are cut off.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from fa3_kernels.plan.config import Setting
from fa3_reference.problem import AttentionProblem, Sequence
from fa3verify.cases.case import Case
from fa3verify.kernels.policy import empty_rows, out_rows, rows_like
from fa3verify.kernels.record import Kernel
from fa3verify.properties.compare import Found, alike, same_bits, slack, summed, within
from fa3verify.properties.law import Drawn, Refused, Setup, Trial, Untaken
from fa3verify.properties.transforms import (
    heads_of,
    part,
    part_of_result,
    query_heads,
    reordered,
    repeated_heads,
    visible,
)
from fa3verify.properties.trials import Wanted, drawn, law, needs

# Changed fields of a configuration, by name of the switch; a configuration that a kernel refuses is not judged.
SWITCHES: dict[str, dict[str, Setting]] = {
    "no_overlap": {"intra_wg_overlap": False},
    "no_pingpong": {"pingpong": False},
    "three_stages": {"num_stages": 3},
    "p_through_smem": {"pv_from_registers": False},
    "other_registers": {"producer_regs": 40, "consumer_regs": 232},
    "one_warpgroup": {"num_consumer_warpgroups": 1, "tile_m": 64},
    "two_warpgroups": {"num_consumer_warpgroups": 2, "tile_m": 128},
    "three_warpgroups": {"num_consumer_warpgroups": 3, "tile_m": 192},
    "pack_gqa": {"pack_gqa": True},
    "no_pack_gqa": {"pack_gqa": False},
}


def _keys(draw: st.DrawFn, kernel: Kernel, case: Case) -> Drawn:
    start = draw(st.integers(0, max(0, case.problem.seqlen_k - 1)))
    return {"start": start, "count": draw(st.sampled_from((1, 2, 64, 128)))}


def want_finite_values(setup: Setup) -> None:
    if not np.isfinite(setup.operands.v.astype(np.float32)).all():
        raise Untaken("V is not finite, and 0 times it is NaN in every row of a visited tile")


def _invisible(setup: Setup, trial: Trial) -> Found:
    """Change K and V of some keys, and compare the rows that see none of them."""
    problem = setup.problem
    start = trial.integer("start", 0, 2**20)
    stop = start + trial.integer("count", 1, 2**20)
    want_finite_values(setup)
    k = setup.operands.k.copy()
    v = setup.operands.v.copy()
    blind = np.zeros(problem.lse_shape, bool)
    for seq in problem.sequences():
        problem.rows_k(k, seq)[start:stop] = 7
        problem.rows_k(v, seq)[start:stop] = -5
        first, last = visible(problem, seq)
        problem.rows_lse(blind, seq)[:] = (last <= start) | (first >= stop)
    if setup.kernel.policy.free:  # rows without a key may then have anything
        blind &= ~empty_rows(problem)
    what = f"rows that see no key of [{start}, {stop}), after those keys changed"
    yield alike(what, setup.fed(k=k, v=v), setup, blind)


def _grouped(setup: Setup, trial: Trial) -> Found:
    yield same_bits("grouped heads against repeated K and V", setup.run(), repeated_heads(setup).run())


def _separate(setup: Setup, trial: Trial) -> Found:
    whole = setup.run()
    for seq in setup.problem.sequences():
        if seq.seqlen_q:
            what = f"sequence {seq.index} inside the call against a call of its own"
            yield same_bits(what, part_of_result(setup, whole, seq), part(setup, seq).run())


def _pair(draw: st.DrawFn, kernel: Kernel, case: Case) -> Drawn:
    filled = [seq.index for seq in case.problem.sequences() if seq.seqlen_q]
    return {"sequence": draw(st.sampled_from(filled)), "kv_head": draw(st.integers(0, case.problem.nheads_kv - 1))}


def _chosen(setup: Setup, trial: Trial) -> tuple[Sequence, slice]:
    sequence = trial.integer("sequence", 0, setup.problem.batch - 1)
    kv_head = trial.integer("kv_head", 0, setup.problem.nheads_kv - 1)
    return list(setup.problem.sequences())[sequence], slice(kv_head, kv_head + 1)


def _alone(setup: Setup, trial: Trial) -> Found:
    seq, kv_head = _chosen(setup, trial)
    alone = part(setup, seq, kv_heads=kv_head).run()
    within = part_of_result(setup, setup.run(), seq, kv_head)
    yield same_bits(f"sequence {seq.index}, kv head {kv_head.start} alone against the whole call", alone, within)


def _permuted(problem: AttentionProblem) -> dict[str, int]:
    """Return how many sequences, kv heads, and query heads of each group a problem has, which are reordered."""
    return {"batch": problem.batch, "kv_heads": problem.nheads_kv, "of_group": problem.group}


def _reordered(setup: Setup, trial: Trial) -> Found:
    orders = []
    for name, size in _permuted(setup.problem).items():
        order = trial.parameters.get(name, list(range(size)))  # version 0.1.0 had no order within groups
        if not isinstance(order, list) or sorted(order) != list(range(size)):
            raise ValueError(f"{trial.law}: {name} must be a permutation of {size} numbers, got {order!r}")
        orders.append(np.array(order, np.int64))
    batch, kv_heads, of_group = orders
    plain = setup.run()
    heads = query_heads(setup.problem, kv_heads, of_group)
    expected = {name: np.take(x[batch], heads, axis=x.ndim - 2) for name, x in plain.items()}  # as out or as lse
    moved = reordered(setup, batch, kv_heads, of_group).run()
    what = f"sequences in order {batch.tolist()}, kv heads {kv_heads.tolist()}, heads of a group {of_group.tolist()}"
    yield same_bits(what, moved, expected)


def _poison(draw: st.DrawFn, kernel: Kernel, case: Case) -> Drawn:
    values = ("nan",) if kernel.dtype == "e4m3" else ("nan", "inf")
    return {**_pair(draw, kernel, case), "value": draw(st.sampled_from(values))}


def _neighbours(setup: Setup, trial: Trial) -> Found:
    """Poison all operands but those of one sequence and kv head, and compare its rows."""
    seq, kv_head = _chosen(setup, trial)
    problem = setup.problem
    value = float(trial.choice("value", ("nan", "inf")))
    poisoned = {}
    for name in ("q", "k", "v"):
        view, of = (problem.rows_q, heads_of(problem, kv_head)) if name == "q" else (problem.rows_k, kv_head)
        clean = getattr(setup.operands, name)
        x = np.full(clean.shape, value).astype(clean.dtype)
        view(x, seq)[:, of] = view(clean, seq)[:, of]
        poisoned[name] = x
    other = setup.fed(**poisoned)
    clean_run, run = (part_of_result(setup, call.run(), seq, kv_head) for call in (setup, other))
    what = f"sequence {seq.index}, kv head {kv_head.start} with {value} in all others"
    if allowed := summed(setup.bound(), other.bound()) if setup.kernel.quantises.said else slack(setup):
        yield within(what, run, clean_run, part_of_result(setup, allowed, seq, kv_head))
    else:
        yield same_bits(what, run, clean_run)


def rows_without_keys(setup: Setup, trial: Trial) -> Found:
    """Compare rows without a key with what the kernel's policy declares."""
    num_splits = trial.integer("num_splits", 1, 256)
    want_finite_values(setup)
    splits = {"num_splits": num_splits} if hasattr(setup.config, "num_splits") else {}
    try:
        result = setup.configured(**splits).run()
    except Refused:
        if num_splits == 1:
            raise
        return
    problem = setup.problem
    policy = setup.kernel.policy.whole
    empty = empty_rows(problem, setup.operands.term)
    what = f"rows without a visible key, num_splits {num_splits}"
    if policy.empty_out == "mean" and problem.term is not None and problem.term.kind in ("bias", "bias_fp32"):
        # A mask that fills scores with a finite number leaves the mean where a bias of -inf leaves NaN.
        empty &= ~np.swapaxes(np.isnan(result["out"]).all(-1), -1, -2)
    expected = dict(result)
    for name, declared in (("out", policy.empty_out), ("lse", policy.empty_lse)):
        if declared in _DUE and name in result:
            due, is_shown = _DUE[declared]
            x = result[name]
            expected[name] = np.where(rows_like(x, problem, empty) & ~is_shown(x), np.array(due, x.dtype), x)
    yield same_bits(what, result, expected)
    if policy.empty_out == "mean":
        every = replace(problem, causal=False, window=(-1, -1), attention_chunk=0, top_left=False, term=None)
        alike = setup.fed(q=np.zeros_like(setup.operands.q), term=None)._replace(problem=every)
        bound = np.where(out_rows(problem, empty), alike.bound()["out"], math.inf)
        yield within(f"{what}, against the mean of V", {"out": result["out"]}, alike.truth(), {"out": bound})


_DUE: dict[str, tuple[float, Callable[[np.ndarray], np.ndarray]]] = {  # what a value of the policy demands of a row
    "zero": (0.0, lambda x: x == 0),  # +0 and -0 are both zero
    "nan": (math.nan, np.isnan),
    "-inf": (-math.inf, np.isneginf),
    "+inf": (math.inf, np.isposinf),
    "finite": (0.0, np.isfinite),
}


def _schedule(setup: Setup, trial: Trial) -> Found:
    switch = trial.choice("switch", tuple(SWITCHES))
    plain = setup.run()
    try:
        changed = setup.configured(**SWITCHES[switch]).run()
    except Refused:
        return
    yield same_bits(f"schedule switch {switch}", changed, plain)


def _is_masked(kernel: Kernel) -> bool:
    return bool({"causal", "window"} & kernel.features)


STRUCTURE_LAWS = (
    law(
        "invisible_keys_never_matter",
        "replacing K and V of keys that a row does not see changes no bit of the row but the sign of a zero; of "
        "kernels that quantise it moves the row by no more than the sum of both bounds",
        "exact",
        _invisible,
        wanted=Wanted(masks="some"),
        parameters=_keys,
        applies=_is_masked,
    ),
    law(
        "grouped_heads_equal_repeated_heads",
        "grouped-query attention equals multi-head attention with K and V repeated, bit for bit",
        "invariant",
        _grouped,
        wanted=Wanted(grouped=True),
        applies=needs("gqa"),
    ),
    law(
        "varlen_equals_separate_calls",
        "every sequence of a packed call equals a call of its own, bit for bit, zero lengths included",
        "invariant",
        _separate,
        wanted=Wanted(layout="varlen", several=True),
        applies=needs("varlen"),
    ),
    law(
        "each_head_alone_gives_the_same_bits",
        "the bits of one sequence and kv head do not depend on how many others are in the call",
        "invariant",
        _alone,
        wanted=Wanted(several=True),
        parameters=_pair,
    ),
    law(
        "order_of_sequences_and_heads",
        "permuting three sequences and kv heads or more, and the query heads of groups, permutes the result, bit for "
        "bit",
        "invariant",
        _reordered,
        wanted=Wanted(layout="batched", permuted=True),
        parameters=lambda draw, kernel, case: {
            name: draw(st.permutations(range(size)).map(list)) for name, size in _permuted(case.problem).items()
        },
    ),
    law(
        "neighbours_never_leak",
        "NaN or Inf in all other sequences and kv heads, packed or batched, changes no bit; of kernels that quantise "
        "it moves no output by more than the sum of both bounds",
        "exact",
        _neighbours,
        wanted=Wanted(several=True, absorbed=True),
        parameters=_poison,
    ),
    law(
        "empty_rows_are_zero",
        "rows without a visible key have out exactly 0 and lse -inf, or what the kernel declares, with any num_splits "
        "that it takes",
        "exact",
        rows_without_keys,
        wanted=Wanted(masks="some", unseen=True, absorbed=True),
        parameters=drawn(num_splits=st.sampled_from((2, 1, 3))),
        applies=_is_masked,
        of=("forward", "merge"),
    ),
    law(
        "schedule_switches_change_no_bit",
        "overlap, pingpong, stages, registers, warpgroups with tile_m, and PackGQA change no bit for finite inputs",
        "invariant",
        _schedule,
        wanted=Wanted(),
        parameters=drawn(switch=st.sampled_from(tuple(SWITCHES))),
    ),
)
