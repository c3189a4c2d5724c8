"""Laws of backward kernels: gradients near the truth, linear in dO, and reached only by what the mask lets through."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem
from fa3verify.cases.case import Case
from fa3verify.kernels.policy import empty_rows, out_rows
from fa3verify.kernels.record import Candidate
from fa3verify.operations.backward import LSE_GRADIENT
from fa3verify.properties.compare import against_truth, same_bits, same_values, unsigned_zeros, within
from fa3verify.properties.law import Drawn, Setup, Trial, Violation, set_up
from fa3verify.properties.trials import Wanted, law, needs

_OF = ("backward",)
_MOST = 2**20  # of drawn positions


def _within(candidate: Candidate, trial: Trial) -> Violation | None:
    return against_truth(candidate, set_up(candidate, trial.case), "against float64")


def _silent(candidate: Candidate, trial: Trial) -> Violation | None:
    setup = set_up(candidate, trial.case)
    silent = setup.fed(dout=np.zeros_like(setup.operands.dout))  # type: ignore[attr-defined]
    bound = silent.bound()
    got = unsigned_zeros(silent.run(candidate))
    for name, x in got.items():
        promised = np.isfinite(bound[name])  # a forward of the kernel's own may overflow
        if violation := same_values(f"dO of zeros: {name}", x, np.zeros_like(x), promised):
            return violation
    return None


def _negated(candidate: Candidate, trial: Trial) -> Violation | None:
    setup = set_up(candidate, trial.case)
    dout = setup.operands.dout  # type: ignore[attr-defined]
    plain = setup.run(candidate)
    other = setup.fed(dout=-dout).run(candidate)
    expected = {name: -x for name, x in plain.items()}
    return same_bits("dO negated", *(unsigned_zeros(x) for x in (other, expected)))


def _split(candidate: Candidate, trial: Trial) -> Violation | None:
    """g(dO) = g(dO in one half of the rows) + g(dO in the other), within the three bounds."""
    setup = set_up(candidate, trial.case)
    dout = setup.operands.dout  # type: ignore[attr-defined]
    rows = np.arange(dout.shape[-3])[:, None, None] % 2 == 0
    setups = [setup, *(setup.fed(dout=np.where(keep, dout, np.zeros_like(dout))) for keep in (rows, ~rows))]
    (whole, *halves), bounds = [x.run(candidate) for x in setups], [x.bound() for x in setups]
    with np.errstate(invalid="ignore"):
        total = {name: np.sum([half[name].astype(np.float64) for half in halves], axis=0) for name in whole}
    return within("dO in two halves", whole, total, {name: np.sum([b[name] for b in bounds], axis=0) for name in whole})


def _position(draw: DrawFn, candidate: Candidate, case: Case) -> Drawn:
    return {"position": draw(st.integers(0, _MOST))}


def _one_channel(candidate: Candidate, trial: Trial) -> Violation | None:
    setup = set_up(candidate, trial.case)
    channel = trial.integer("position", 0, _MOST) % setup.problem.head_dim_v
    v = setup.operands.v.copy()
    v[..., channel] = -v[..., channel]
    plain = setup.run(candidate)
    other = setup.fed(v=v).run(candidate)
    return same_bits(f"V negated in channel {channel}", {"dv": other["dv"]}, {"dv": plain["dv"]})


def _one_dout_channel(candidate: Candidate, trial: Trial) -> Violation | None:
    setup = set_up(candidate, trial.case)
    channel = trial.integer("position", 0, _MOST) % setup.problem.head_dim_v
    dout = setup.operands.dout.copy()  # type: ignore[attr-defined]
    dout[..., channel] = -dout[..., channel]
    plain = setup.run(candidate)
    other = setup.fed(dout=dout).run(candidate)
    others = np.arange(setup.problem.head_dim_v) != channel
    return same_values(f"dO negated in channel {channel}: dv", other["dv"], plain["dv"], others)


def _batch(candidate: Candidate, trial: Trial) -> Violation | None:
    """Return every sequence twice: both have the gradients of the one."""
    setup = set_up(candidate, trial.case)
    names = ("q", "k", "v", "dout", "out", "lse")
    twice = {name: np.concatenate([getattr(setup.operands, name)] * 2) for name in names}
    larger = _on(setup, replace(setup.problem, batch=2 * setup.problem.batch), candidate).fed(**twice)
    alone = setup.run(candidate)
    both = larger.run(candidate)
    return same_bits("every sequence twice", both, {name: np.concatenate([x, x]) for name, x in alone.items()})


def _scaled_scores(candidate: Candidate, trial: Trial) -> Violation | None:
    """Q times 2 and softmax_scale halved leave P: dV and dK keep their bits, and dQ is halved where that is exact."""
    setup = set_up(candidate, trial.case)
    problem = setup.problem
    q = setup.operands.q
    halved = replace(problem, softmax_scale=problem.softmax_scale / 2)
    plain = setup.run(candidate)
    other = _on(setup, halved, candidate).fed(q=q * q.dtype.type(2)).run(candidate)
    exact = np.abs(other["dq"].astype(np.float64)) > FORMATS[problem.dtype].min_normal  # to which smaller ones round
    twice = {**other, "dq": np.where(exact, other["dq"] * q.dtype.type(2), plain["dq"])}
    return same_bits("Q times 2, softmax_scale halved", twice, plain)


def _one_row(candidate: Candidate, trial: Trial) -> Violation | None:
    """dO of one row reaches neither dQ of other rows nor dK and dV of keys that the row does not see."""
    setup = set_up(candidate, trial.case)
    problem = setup.problem  # type: ignore[attr-defined]
    dout = setup.operands.dout.copy()  # type: ignore[attr-defined]
    rows_reached, keys_reached = (np.zeros((*shape[:-1], 1), bool) for shape in (problem.q_shape, problem.k_shape))
    for seq in problem.sequences():
        if seq.seqlen_q:
            row = np.array([trial.integer("position", 0, _MOST) % seq.seqlen_q])
            problem.rows_q(dout, seq)[row] *= -1
            first, stop = problem.visible_keys(row, seq.seqlen_q, seq.seqlen_k)
            problem.rows_q(rows_reached, seq)[row] = True
            problem.rows_k(keys_reached, seq)[first[0] : max(first[0], stop[0])] = True
    plain = setup.run(candidate)
    other = setup.fed(dout=dout).run(candidate)
    for name, free in (("dq", rows_reached), ("dk", keys_reached), ("dv", keys_reached)):
        if violation := same_values(f"dO of one row negated: {name}", other[name], plain[name], ~free):
            return violation
    return None


def _no_key(candidate: Candidate, trial: Trial) -> Violation | None:
    setup = set_up(candidate, trial.case)
    got = setup.run(candidate)
    mask = out_rows(setup.problem, empty_rows(setup.problem))
    promised = mask & np.isfinite(setup.bound()["dq"])  # dO V^T may overflow, and 0 * Inf is NaN
    return same_values("rows without a key: dq", np.abs(got["dq"]), np.zeros_like(got["dq"]), promised)


def _ungrouped(candidate: Candidate, trial: Trial) -> Violation | None:
    """dK and dV of a kv head are the sums over the heads that read it, each with a copy of its own."""
    setup = set_up(candidate, trial.case)
    problem = setup.problem
    group = setup.problem.group
    copies = {name: np.repeat(getattr(setup.operands, name), group, axis=-2) for name in ("k", "v")}
    spread = _on(setup, replace(problem, nheads_kv=problem.nheads), candidate).fed(**copies)
    whole = setup.run(candidate)
    apart = spread.run(candidate)
    bound = setup.bound()
    bounds = spread.bound()

    def summed(x: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return x.astype(np.float64).reshape(*x.shape[:-2], problem.nheads_kv, group, x.shape[-1]).sum(-2)

    total = {name: summed(apart[name]) for name in ("dk", "dv")}
    allowed = {name: bound[name] + summed(bounds[name]) for name in total}
    return within("grouped heads against the sum over copies", {name: whole[name] for name in total}, total, allowed)


def _lse(candidate: Candidate, trial: Trial) -> Violation | None:
    """lse grows by P with each score, and not with V: beside dO within the bound, and alone without a dV."""
    setup = set_up(candidate, trial.case)
    rng = np.random.default_rng(trial.case.recipe.seed)
    both = setup.fed(dlse=rng.standard_normal(setup.problem.lse_shape).astype(np.float32))
    if violation := against_truth(candidate, both, "with a gradient of lse"):
        return violation
    alone = both.fed(dout=np.zeros_like(setup.operands.dout))  # type: ignore[attr-defined]
    if violation := against_truth(candidate, alone, "the gradient of lse alone"):
        return violation
    dv = alone.run(candidate)["dv"]
    promised = np.isfinite(alone.bound()["dv"])
    return same_values("the gradient of lse alone: dv", np.abs(dv), np.zeros_like(dv), promised)


def _on(setup: Setup, problem: AttentionProblem, candidate: Candidate) -> Setup:
    return setup._replace(problem=problem, config=candidate.configure(problem))


_ANY = Wanted(empty=False, max_edits=0)
GRADIENT_LAWS = (
    law(
        "gradients_within_bound",
        "dQ, dK and dV lie within the rounding-error bound of the stated order of operations",
        "bounded",
        _within,
        wanted=_ANY,
        of=_OF,
    ),
    law(
        "zero_dout_gives_zero_gradients",
        "dO of zeros gives gradients of zeros, where the bound promises anything",
        "exact",
        _silent,
        wanted=_ANY,
        of=_OF,
    ),
    law(
        "negated_dout_negates_gradients",
        "negating dO negates dQ, dK and dV bit for bit",
        "invariant",
        _negated,
        wanted=_ANY,
        of=_OF,
    ),
    law(
        "gradients_are_linear_in_dout",
        "gradients of dO are the sum of those of its two halves, within the bounds of all three",
        "bounded",
        _split,
        wanted=_ANY,
        of=_OF,
    ),
    law(
        "dv_does_not_depend_on_v",
        "a changed channel of V leaves dV as it is, bit for bit",
        "invariant",
        _one_channel,
        wanted=_ANY,
        parameters=_position,
        of=_OF,
    ),
    law(
        "dv_channels_are_independent",
        "a changed channel of dO leaves the other channels of dV as they are, bit for bit",
        "invariant",
        _one_dout_channel,
        wanted=_ANY,
        parameters=_position,
        of=_OF,
    ),
    law(
        "gradients_do_not_depend_on_the_batch",
        "a batch in which every sequence stands twice gives each the bits that it has alone",
        "invariant",
        _batch,
        wanted=replace(_ANY, layout="batched"),
        of=_OF,
    ),
    law(
        "gradients_follow_scaled_scores",
        "Q times 2 with half the softmax_scale leaves the bits of dK and dV and halves dQ",
        "invariant",
        _scaled_scores,
        wanted=replace(_ANY, families=("normal", "peaky", "outlier_channels")),
        of=_OF,
    ),
    law(
        "rows_reach_what_they_see",
        "dO of a row changes no bit of dQ of other rows, nor of dK and dV of keys that the mask hides from the row",
        "invariant",
        _one_row,
        wanted=_ANY,
        parameters=_position,
        of=_OF,
    ),
    law(
        "rows_without_a_key_have_zero_dq",
        "dQ of rows that see no key is 0, where the bound promises anything",
        "exact",
        _no_key,
        wanted=replace(_ANY, masks="causal", seqlens_k=(1, 17, 40)),  # fewer than queries, as a rule
        applies=needs("causal"),
        of=_OF,
    ),
    law(
        "gradient_of_the_lse",
        "with a gradient of lse dQ, dK and dV lie within the bound, beside dO and without it, where dV is 0",
        "bounded",
        _lse,
        wanted=_ANY,
        applies=needs(LSE_GRADIENT),
        of=_OF,
    ),
    law(
        "grouped_heads_add_up",
        "dK and dV of grouped heads are the sums of those of copied K and V, within the bounds of both",
        "bounded",
        _ungrouped,
        wanted=replace(_ANY, grouped=True),
        applies=needs("gqa"),
        of=_OF,
    ),
)
