"""Laws of backward kernels: gradients near the truth, linear in dO, and reached only by what the mask lets through.

The last ones are of inputs where gradients of released kernels were wrong: exponents far from zero, one query, lengths
that end in the middle of a tile, and the gradient of a real loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
from hypothesis import strategies as st

from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem
from fa3verify.cases.coverage import adapted
from fa3verify.files import Json
from fa3verify.inputs.loss import readout_dout
from fa3verify.kernels.policy import empty_rows, out_rows
from fa3verify.operations import Outputs
from fa3verify.operations.backward import LSE_GRADIENT
from fa3verify.properties.compare import (
    Found,
    against_truth,
    near_truth,
    same_bits,
    same_values,
    summed,
    unsigned_zeros,
    within,
)
from fa3verify.properties.law import Setup, Trial, Untaken, Violation, set_up
from fa3verify.properties.trials import Wanted, drawn, law, needs

_OF = ("backward",)
_MOST = 2**20  # largest drawn position, which is taken modulo the size
# By how many nats all scores of a row are moved. Where lse is below -88, exp(-lse) overflows binary32.
SHIFTS = (-100, 100, -1000, 1000)
SOFTCAPS = (50.0, 30.0)  # those of public models
HALF_TILES = (64, 192)  # 64 beyond a whole tile of 128, where cuDNN 9 returned NaN in dQ
MASKS: Mapping[str, Json] = {"dense": {}, "causal": {"causal": True}, "window": {"window": (33, 5)}}


def _dout(setup: Setup) -> np.ndarray:
    """Return a copy of dO."""
    return setup.operands.dout.copy()  # type: ignore[attr-defined]


def _zero(what: str, output: str, x: np.ndarray, bound: np.ndarray, mask: np.ndarray | bool = True) -> Violation | None:
    """Compare a gradient with zeros of any sign, where its bound is finite: it is not where a forward overflows."""
    unsigned = np.where(x == 0, np.zeros_like(x), x)
    return same_values(f"{what}: {output}", output, unsigned, np.zeros_like(x), mask & np.isfinite(bound))


def _silent(setup: Setup, trial: Trial) -> Found:
    silent = setup.fed(dout=np.zeros_like(_dout(setup)))
    bound = silent.bound()
    for name, x in silent.run().items():
        yield _zero("dO of zeros", name, x, bound[name])


def _negated(setup: Setup, trial: Trial) -> Found:
    plain = setup.run()
    other = setup.fed(dout=-_dout(setup)).run()
    yield same_bits("dO negated", unsigned_zeros(other), unsigned_zeros({name: -x for name, x in plain.items()}))


def _split(setup: Setup, trial: Trial) -> Found:
    """Compare the gradients with the sum of those of dO in one half of the rows and in the other, within all bounds."""
    dout = _dout(setup)
    rows = np.arange(dout.shape[-3])[:, None, None] % 2 == 0
    setups = [setup, *(setup.fed(dout=np.where(keep, dout, np.zeros_like(dout))) for keep in (rows, ~rows))]
    whole, *halves = [x.run() for x in setups]
    with np.errstate(invalid="ignore"):
        total = summed(*({name: x.astype(np.float64) for name, x in half.items()} for half in halves))
    yield within("dO in two halves", whole, total, summed(*(x.bound() for x in setups)))


def _one_channel(name: str, symbol: str, setup: Setup, trial: Trial) -> Found:
    """Negate one channel of V or of dO: it moves no bit of dV, but for dO of dV's own channel."""
    channel = trial.integer("position", 0, _MOST) % setup.problem.head_dim_v
    x = getattr(setup.operands, name).copy()
    x[..., channel] *= -1
    plain = setup.run()
    other = setup.fed(**{name: x}).run()
    kept = (np.arange(x.shape[-1]) != channel) | (name == "v")
    yield same_values(f"{symbol} negated in channel {channel}: dv", "dv", other["dv"], plain["dv"], kept)


def _batch(setup: Setup, trial: Trial) -> Found:
    """Put every sequence twice into the batch: both copies must have the gradients of the one."""
    names = ("q", "k", "v", "dout", "out", "lse")
    twice = {name: np.concatenate([getattr(setup.operands, name)] * 2) for name in names}
    larger = _on(setup, batch=2 * setup.problem.batch).fed(**twice)
    alone = setup.run()
    both = larger.run()
    yield same_bits("every sequence twice", both, {name: np.concatenate([x, x]) for name, x in alone.items()})


def _scaled_scores(setup: Setup, trial: Trial) -> Found:
    """Double Q and halve softmax_scale: P, dV and dK keep their bits, and dQ is halved where that is exact."""
    problem = setup.problem
    q = setup.operands.q
    two = q.dtype.type(2)
    plain = setup.run()
    other = _on(setup, softmax_scale=problem.softmax_scale / 2).fed(q=q * two).run()
    # A dQ of min_normal or less may have been rounded, and is not compared.
    exact = np.abs(other["dq"].astype(np.float64)) > FORMATS[problem.dtype].min_normal
    twice = {**other, "dq": np.where(exact, other["dq"] * two, plain["dq"])}
    yield same_bits("Q times 2, softmax_scale halved", twice, plain)


def _one_row(setup: Setup, trial: Trial) -> Found:
    """Negate dO of one row of each sequence: dQ of others, and dK and dV of keys that it does not see, must stay."""
    problem = setup.problem
    dout = _dout(setup)
    rows_reached, keys_reached = (np.zeros((*shape[:-1], 1), bool) for shape in (problem.q_shape, problem.k_shape))
    for seq in problem.sequences():
        if seq.seqlen_q:
            row = np.array([trial.integer("position", 0, _MOST) % seq.seqlen_q])
            problem.rows_q(dout, seq)[row] *= -1
            first, stop = problem.visible_keys(row, seq.seqlen_q, seq.seqlen_k)
            problem.rows_q(rows_reached, seq)[row] = True
            problem.rows_k(keys_reached, seq)[first[0] : max(first[0], stop[0])] = True
    plain = setup.run()
    other = setup.fed(dout=dout).run()
    unreached = {"dq": ~rows_reached, "dk": ~keys_reached, "dv": ~keys_reached}
    yield same_bits("dO of one row negated", {name: other[name] for name in unreached}, plain, unreached)


def _no_key(setup: Setup, trial: Trial) -> Found:
    got = setup.run()
    mask = out_rows(setup.problem, empty_rows(setup.problem))
    yield _zero("rows without a key", "dq", got["dq"], setup.bound()["dq"], mask)


def _ungrouped(setup: Setup, trial: Trial) -> Found:
    """Compare dK and dV of a kv head with the sums over query heads that each have a copy of K and V."""
    problem = setup.problem
    copies = {name: np.repeat(getattr(setup.operands, name), problem.group, axis=-2) for name in ("k", "v")}
    spread = _on(setup, nheads_kv=problem.nheads).fed(**copies)
    whole = setup.run()
    apart = spread.run()

    @np.errstate(invalid="ignore")
    def over_groups(of: Outputs) -> Outputs:
        shape = (problem.nheads_kv, problem.group)
        wide = {name: of[name].astype(np.float64) for name in ("dk", "dv")}
        return {name: x.reshape(*x.shape[:-2], *shape, x.shape[-1]).sum(-2) for name, x in wide.items()}

    allowed = summed(over_groups(spread.bound()), setup.bound())
    yield within("grouped heads against the sum over copies", whole, over_groups(apart), allowed)


def _lse(setup: Setup, trial: Trial) -> Found:
    """Add a gradient of lse: beside dO gradients lie within the bound; alone, dV is 0, as lse does not depend on V."""
    rng = np.random.default_rng(trial.case.recipe.seed)
    both = setup.fed(dlse=rng.standard_normal(setup.problem.lse_shape).astype(np.float32))
    yield against_truth(both, "with a gradient of lse")
    alone = both.fed(dout=np.zeros_like(_dout(setup)))
    yield against_truth(alone, "the gradient of lse alone")
    yield _zero("the gradient of lse alone", "dv", alone.run()["dv"], alone.bound()["dv"])


def _sinks(setup: Setup, trial: Trial) -> Found:
    """Add a sink to each head, next to the lse of a row, and, if that is claimed, a gradient of lse as well."""
    sunk = set_up(setup.kernel, replace(trial.case, problem=replace(setup.problem, sinks=True)))
    yield against_truth(sunk, "with sinks")
    if LSE_GRADIENT in setup.kernel.features:
        rng = np.random.default_rng(trial.case.recipe.seed)
        both = sunk.fed(dlse=rng.standard_normal(setup.problem.lse_shape).astype(np.float32))
        yield against_truth(both, "with sinks and a gradient of lse")


def _on(setup: Setup, **changes: int | float) -> Setup:
    """Return the call with a changed problem, in the configuration that the kernel chooses for it."""
    problem: AttentionProblem = replace(setup.problem, **changes)
    return setup._replace(problem=problem, config=setup.kernel.code.configure(problem))


def _against_truth(setup: Setup, arrays: tuple[np.ndarray, ...], what: str) -> Violation | None:
    """Compare the call on other inputs, q, k, v and dout, with the truth; out and lse are computed for them."""
    operands = setup.operation.prepare(setup.problem, arrays, None, {}).operands
    return against_truth(setup._replace(operands=operands), what)


def _far_scores(setup: Setup, trial: Trial) -> Found:
    """Use channel 0 of Q and K to add the same to all scores, which moves lse and changes no gradient but its own.

    Under a softcap that they nearly reach, all have a slope far from 1, and none so large a weight that its gradient
    vanishes.
    """
    shift = trial.integer("shift", min(SHIFTS), max(SHIFTS))
    yield _shifted(setup, trial, shift)
    for softcap in SOFTCAPS if "softcap" in setup.kernel.features else ():
        if setup.kernel.supports(replace(setup.problem, softcap=softcap)):
            yield _shifted(_on(setup, softcap=softcap), trial, math.copysign(softcap, shift))


def _shifted(setup: Setup, trial: Trial, shift: float) -> Violation | None:
    scale = setup.problem.softmax_scale
    q, k, v, dout = (x.copy() for x in trial.case.draw()[0])
    q[..., 0] = 2.0 ** np.round(np.log2(np.sqrt(abs(shift) / scale)))
    k[..., 0] = shift / scale / q.flat[0]
    return _against_truth(setup, (q, k, v, dout), f"scores shifted by {shift:g}, softcap {setup.problem.softcap:g}")


def _telling_lengths(setup: Setup, trial: Trial) -> Found:
    """Compare one query, and half a tile of them, under every mask that the kernel claims and takes here."""
    seqlen_k = trial.integer("seqlen_k", 1, max(HALF_TILES))
    kernel = setup.kernel
    masks = {name: mask for name, mask in MASKS.items() if name == "dense" or name in kernel.features}
    taken = []
    for seqlen_q, (name, mask) in product((1, 64), masks.items()):
        plain = replace(setup.problem, causal=False, window=(-1, -1), seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        problem = adapted(kernel, replace(plain, **mask))
        if kernel.supports(problem):
            taken.append((f"{name}, {problem.seqlen_q} queries, {problem.seqlen_k} keys", problem))
    if not taken:
        raise Untaken("the kernel refuses every mask beside so few queries")
    for words, problem in taken:
        yield against_truth(set_up(kernel, replace(trial.case, problem=problem)), words)


def _loss(setup: Setup, trial: Trial) -> Found:
    q, k, v, _ = trial.case.draw()[0]
    with np.errstate(all="ignore"):
        dout = readout_dout(setup.problem, q, k, v, trial.case.recipe.seed)
    yield _against_truth(setup, (q, k, v, dout), "dO of a cross entropy")


_ANY = Wanted(empty=False, max_edits=0)
_PLAIN = ("normal", "peaky", "outlier_channels", "block_scaled")
GRADIENT_LAWS = (
    law(
        "gradients_within_bound",
        "dQ, dK and dV lie within the rounding-error bound of the stated order of operations",
        "bounded",
        near_truth,
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
        partial(_one_channel, "v", "V"),
        wanted=_ANY,
        parameters=drawn(position=st.integers(0, _MOST)),
        of=_OF,
    ),
    law(
        "dv_channels_are_independent",
        "a changed channel of dO leaves the other channels of dV as they are, bit for bit",
        "invariant",
        partial(_one_channel, "dout", "dO"),
        wanted=_ANY,
        parameters=drawn(position=st.integers(0, _MOST)),
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
        parameters=drawn(position=st.integers(0, _MOST)),
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
        "gradients_with_sinks",
        "with sinks dQ, dK, dV and the gradient of sinks, if it is returned, lie within the bound, and so with a "
        "gradient of lse where that is claimed",
        "bounded",
        _sinks,
        wanted=_ANY,
        applies=needs("sinks"),
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
    law(
        "gradients_of_far_scores",
        "dQ, dK and dV lie within the bound where all scores, and so lse, are moved by 100 or 1,000 nats either way, "
        "and by as much as a softcap of 30 or 50 under it",
        "bounded",
        _far_scores,
        wanted=replace(_ANY, softcap=False, families=_PLAIN),  # any other softcap would undo the shift
        parameters=drawn(shift=st.sampled_from(SHIFTS)),
        of=_OF,
    ),
    law(
        "gradients_at_telling_lengths",
        "dQ, dK and dV lie within the bound for one query and for lengths of half a tile, under every mask",
        "bounded",
        _telling_lengths,
        wanted=replace(_ANY, layout="batched", single=True, families=_PLAIN),
        parameters=drawn(seqlen_k=st.sampled_from(HALF_TILES)),
        of=_OF,
    ),
    law(
        "gradients_of_a_loss",
        "dQ, dK and dV lie within the bound where dO is that of the cross entropy of a linear readout",
        "bounded",
        _loss,
        wanted=_ANY,
        of=_OF,
    ),
)
