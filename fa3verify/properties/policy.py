"""A table of what NaN and infinities in the operands do, and the law that a kernel follows it.

The law plants one special value in an operand. A row *sees* it if the mask lets it; ``seen`` is the effect on rows that
see the planted element, and ``unseen`` that on all others. Infinite scores come from an infinite K element that meets 1
in every query; e4m3 has no infinity. A row in which a planted V has a weight too small for binary32 may also stay as it
was: kernels that merge parts of the keys may skip a part of weight 0. Where a kernel's policy calls special values
undefined, nothing is asked of the sequence that has one, and the other sequences must not notice it.

Sources: IEEE 754, and FlashAttention-3's mainloop and softmax: a row maximum that drops NaN, a guard for -inf, and
masks that select before the softmax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from hypothesis import assume, strategies as st

from fa3_reference.problem import AttentionProblem, Sequence
from fa3verify.cases.case import Case
from fa3verify.judging.verdict import Seen
from fa3verify.kernels.policy import Policy, freed
from fa3verify.kernels.record import Kernel
from fa3verify.operations import Outputs
from fa3verify.properties.compare import Found, rows_of, slack
from fa3verify.properties.law import Drawn, Setup, Trial, Untaken, Violation
from fa3verify.properties.transforms import visible
from fa3verify.properties.trials import Wanted, law

Effect = Literal["unchanged", "nan", "nan_in_channel", "nonfinite_in_channel", "maybe_nan_in_channel", "zero_or_nan"]
EFFECTS: dict[Effect, str] = {
    "unchanged": "have the bits of the call without the planted value",
    "nan": "have NaN in every channel, and an lse that is not finite",  # FA3 reports lse -inf there, the twin NaN
    "nan_in_channel": "have NaN in the planted channel, where the weight underflowed in binary32 perhaps not, and the "
    "other channels and lse unchanged",
    "nonfinite_in_channel": "have Inf in the planted channel, or NaN where the weight underflowed to 0, in binary32 "
    "perhaps neither, and the rest unchanged",
    "maybe_nan_in_channel": "are unchanged, but may have NaN in the planted channel, as 0 * NaN where the tile is "
    "visited all the same",
    "zero_or_nan": "have 0 or NaN in all channels and -inf or NaN for lse, or what is declared of rows without a key",
}


@dataclass(frozen=True, slots=True)
class Rule:
    """One special value in one operand, and its effect on rows that see it and on those that do not.

    ``alone`` is the effect on rows that see only the planted key; by default it is ``seen``.
    """

    name: str
    tensor: Literal["q", "k", "v"]
    value: float
    seen: Effect
    unseen: Effect
    reason: str
    unit_query: bool = False  # Q is set to 1 in the planted channel, so that an infinity of K is that of the score
    alone: Effect | None = None


POLICY: tuple[Rule, ...] = (
    Rule("nan_in_query", "q", math.nan, "nan", "unchanged", "all scores of the row are NaN, and so is its sum"),
    Rule(
        "nan_in_key",
        "k",
        math.nan,
        "nan",
        "unchanged",
        "one NaN weight makes the row sum NaN; hidden scores are replaced, not added to",
    ),
    Rule(
        "nan_in_value",
        "v",
        math.nan,
        "nan_in_channel",
        "maybe_nan_in_channel",
        "P V multiplies every row of a visited tile, and 0 * NaN is NaN",
    ),
    Rule(
        "inf_in_value",
        "v",
        math.inf,
        "nonfinite_in_channel",
        "maybe_nan_in_channel",
        "p * Inf is Inf for p > 0, and NaN for p = 0",
    ),
    Rule("minus_inf_in_value", "v", -math.inf, "nonfinite_in_channel", "maybe_nan_in_channel", "as for +Inf"),
    Rule(
        "plus_inf_score",
        "k",
        math.inf,
        "nan",
        "unchanged",
        "the row maximum is +Inf, and Inf - Inf is NaN",
        unit_query=True,
    ),
    Rule(
        "minus_inf_score",
        "k",
        -math.inf,
        "unchanged",
        "unchanged",
        "exp2(-Inf) = 0: the key weighs as much as one with a very low score; alone, FA3 gives NaN or 0 by the block "
        "it is in",
        unit_query=True,
        alone="zero_or_nan",
    ),
)
EVERY = "every"  # the parameter "rule" of a trial that tries them all
_MOST = 2**20  # largest number of a drawn place, which is taken modulo the size
_RULES = {rule.name: rule for rule in POLICY}
LOW_SCORE = -4096.0  # gives a key weight 0 beside most others; exact in every format that has an infinity
_VANISHES = -87.0  # a score so many nats below lse has a subnormal weight in binary32, which some kernels flush to 0


class _Place(NamedTuple):
    seq: Sequence
    head: int
    row: int
    channel: int


def _draw(draw: st.DrawFn, kernel: Kernel, case: Case) -> Drawn:
    """Draw a place, three of four times the last of the keys that a mask hides from most rows.

    Every rule is tried there, taken modulo the sizes of its tensor. Three of four masks that hide nothing, as a causal
    one from a single query, are left out; some stay, as a kernel may take no other.
    """
    filled = [seq for seq in case.problem.sequences() if seq.seqlen_q and seq.seqlen_k]
    seq = draw(st.sampled_from(filled))
    head, channel = draw(st.integers(0, _MOST)), draw(st.integers(0, _MOST))
    first, stop = visible(case.problem, seq)
    keys = np.arange(seq.seqlen_k)[::-1, None]
    seeing = ((first <= keys) & (keys < stop)).sum(1)  # rows that see a key, for the last key first
    is_masked = case.problem.causal or case.problem.window != (-1, -1)
    assume(not is_masked or seeing.min() < seq.seqlen_q or not draw(st.integers(0, 3)))
    row = int(keys[seeing.argmin(), 0]) if draw(st.integers(0, 3)) else draw(st.integers(0, _MOST))
    return {"rule": EVERY, "sequence": seq.index, "head": head, "row": row, "channel": channel}


def _sizes(problem: AttentionProblem, rule: Rule, seq: Sequence) -> tuple[int, int, int]:
    if rule.tensor == "q":
        return problem.nheads, seq.seqlen_q, problem.head_dim
    return problem.nheads_kv, seq.seqlen_k, problem.head_dim_v if rule.tensor == "v" else problem.head_dim


def _place(problem: AttentionProblem, rule: Rule, trial: Trial) -> _Place:
    seq = list(problem.sequences())[trial.integer("sequence", 0, problem.batch - 1)]
    names = zip(("head", "row", "channel"), _sizes(problem, rule, seq), strict=True)
    return _Place(seq, *(trial.integer(name, 0, _MOST) % size for name, size in names))


def _planted(setup: Setup, rule: Rule, place: _Place, value: float) -> Setup:
    """Return the call with a value at the place in the rule's operand."""
    problem = setup.problem
    arrays = {name: getattr(setup.operands, name).copy() for name in "qkv"}
    if rule.unit_query:
        problem.rows_q(arrays["q"], place.seq)[..., place.channel] = 1
    view = problem.rows_q if rule.tensor == "q" else problem.rows_k
    view(arrays[rule.tensor], place.seq)[place.row, place.head, place.channel] = value
    return setup.fed(**arrays)


def _seen(problem: AttentionProblem, rule: Rule, place: _Place) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return which rows see the planted element, which of them see no other key, and from which a mask
    hides it; bool in the layout of lse."""
    seen, alone, hidden = np.zeros((3, *problem.lse_shape), bool)
    first, stop = visible(problem, place.seq)
    if rule.tensor == "q":
        problem.rows_lse(seen, place.seq)[place.head, place.row] = stop[place.row] > first[place.row]
        return seen, alone, hidden
    heads = slice(place.head * problem.group, (place.head + 1) * problem.group)
    rows = (first <= place.row) & (place.row < stop)
    problem.rows_lse(seen, place.seq)[heads] = rows
    problem.rows_lse(alone, place.seq)[heads] = rows & (stop - first == 1)
    problem.rows_lse(hidden, place.seq)[heads] = ~rows
    return seen, alone, hidden


def _weightless(setup: Setup, place: _Place) -> np.ndarray:
    """Return the rows in which a key's weight may be 0 in binary32; bool in the layout of lse."""
    problem = setup.problem
    q, k, _ = setup.operands.dequantized(problem)
    heads = slice(place.head * problem.group, (place.head + 1) * problem.group)
    scores = np.full(problem.lse_shape, np.inf)
    queries = problem.rows_q(q, place.seq)[:, heads]
    key = problem.rows_k(k, place.seq)[place.row, place.head]
    problem.rows_lse(scores, place.seq)[heads] = (queries @ key).T * problem.softmax_scale
    return scores - setup.truth()["lse"] < _VANISHES


def _broken(effect: Effect, got: Outputs, clean: Outputs, apart: Outputs, channel: int, policy: Policy) -> Outputs:
    """Return which values of out, and of lse if it was returned, do not show an effect.

    Values that must be unchanged may differ from ``clean`` by ``apart``, which is 0 for a kernel whose bits repeat.
    """
    out, lse = (got[name].astype(np.float64) if name in got else np.array(math.nan) for name in ("out", "lse"))
    if effect == "nan":
        shown = (np.isnan(out), ~np.isfinite(lse))
    elif effect == "zero_or_nan":  # a sum of 0, as a row without a key has it
        is_due = np.isnan(lse) | np.isneginf(lse) | np.isposinf(lse) & (policy.empty_lse == "+inf")
        shown = (
            np.isnan(out) | (out == 0) | (policy.empty_out in ("mean", "undefined")),
            is_due | (policy.empty_lse in ("finite", "undefined")),
        )
    else:
        same = _equal(out, clean["out"].astype(np.float64), apart["out"])
        planted = np.arange(out.shape[-1]) == channel
        if effect == "nan_in_channel":
            same = np.where(planted, np.isnan(out), same)
        elif effect == "nonfinite_in_channel":
            same = np.where(planted, ~np.isfinite(out), same)
        elif effect == "maybe_nan_in_channel":
            same |= planted & np.isnan(out)
        shown = (same, _equal(lse, clean.get("lse", lse).astype(np.float64), apart.get("lse", 0.0)))
    return {name: ~x for name, x in zip(("out", "lse"), shown, strict=True) if name in got}


@np.errstate(invalid="ignore")
def _equal(a: np.ndarray, b: np.ndarray, apart: np.ndarray | float) -> np.ndarray:
    near = (np.abs(a - b) <= apart) & (apart > 0)
    return near | (a == b) | (np.isnan(a) & np.isnan(b))


def _check(setup: Setup, trial: Trial) -> Found:
    """Try every rule that the dtype can write, or the one that a trial names, as older trials do."""
    named = trial.choice("rule", (EVERY, *_RULES))
    rules = [_RULES[named]] if named != EVERY else list(POLICY)
    tried = 0
    for rule in rules:
        if setup.kernel.dtype == "e4m3" and not math.isnan(rule.value):
            continue
        try:
            yield from _followed(setup, trial, rule)
            tried += 1
        except Untaken:
            if named != EVERY:
                raise
    if not tried:
        raise Untaken("no rule can be tried here")


def _followed(setup: Setup, trial: Trial, rule: Rule) -> Found:
    """Yield a violation for each output in which the effects of one rule are not seen.

    The comparison is with a call that has 0 at the place, or a very low score where the rule plants one of -Inf.
    """
    problem = setup.problem
    policy = setup.kernel.policy.whole
    place = _place(problem, rule, trial)
    low = rule.unit_query and rule.value < 0
    plain = _planted(setup, rule, place, LOW_SCORE if low else 0.0)
    clean = plain.run()
    apart = slack(plain) or {name: np.zeros(x.shape) for name, x in clean.items()}
    got = _planted(setup, rule, place, rule.value).run()
    seen, alone, hidden = _seen(problem, rule, place)
    hidden &= policy.special_values == "visible"
    promised = np.ones(problem.lse_shape, bool)
    problem.rows_lse(promised, place.seq)[:] = policy.special_values != "undefined"
    if low:
        lse, lower = (_planted(setup, rule, place, x).truth()["lse"] for x in (LOW_SCORE, 2 * LOW_SCORE))
        if (lse != lower)[seen & ~alone].any():
            raise Untaken("beside scores as large as these the lowest one still has a weight")
    special = alone if rule.alone else np.zeros_like(alone)
    lost = _weightless(plain, place) & seen if rule.tensor == "v" else np.zeros_like(seen)
    effects: tuple[tuple[tuple[Effect, ...], np.ndarray], ...] = (
        ((rule.seen,), seen & ~special & ~lost),
        ((rule.seen, "unchanged"), lost),
        ((rule.alone or rule.seen,), special),
        ((rule.unseen,), ~seen & ~hidden),
        ((rule.unseen, "nan"), hidden),
    )
    for names, rows in effects:
        each = [_broken(effect, got, clean, apart, place.channel, policy) for effect in names]
        broken = {name: np.logical_and.reduce([x[name] for x in each]) for name in each[0]}
        broken = freed(policy, problem, broken, False)
        for name, where in rows_of(problem, rows & promised, broken).items():
            if name == "lse" and policy.special_values == "out":
                continue
            for index in np.argwhere(broken[name] & where)[:1].tolist():
                value, before = (float(r[name][tuple(index)]) for r in (got, clean))
                planted = f"{rule.tensor}{list(place[1:])} of sequence {place.seq.index}"
                message = f"{rule.name} at {planted}: {name}{index} = {value!r}, was {before!r}"
                words = f"{message}; promised: {' or '.join(names)} ({rule.reason})"
                yield Violation(words, Seen(name, rule=rule.name))


POLICY_LAWS = (
    law(
        "special_values_follow_policy",
        "NaN and Inf in Q, K or V reach exactly the rows and channels of the POLICY table; all other bits stay",
        "exact",
        _check,
        wanted=Wanted("mostly", softcap=False, empty=False, families=("normal", "peaky", "offset_v"), max_edits=0),
        parameters=_draw,
        # What NaN makes of the scale of its group, and of the codes of the others in it, no arithmetic says.
        applies=lambda kernel: not kernel.quantises.said,
    ),
)
