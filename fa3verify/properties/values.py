"""Laws about the values that a result can take, within the bound: averages of V, and lse of capped scores."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from fa3_reference.bounds.quantises import CODES
from fa3_reference.formats import FORMATS
from fa3_reference.problem import Descale
from fa3verify.properties.compare import Found, against_truth, close, within
from fa3verify.properties.law import Setup, Trial
from fa3verify.properties.transforms import visible
from fa3verify.properties.trials import LONG, Wanted, drawn, law, needs

SOFTCAP = 50.0  # the largest of public models, Gemma 2's: kernels that know those of a few models take it for another


def _hull(setup: Setup, trial: Trial) -> Found:
    """Compare every output with the nearest value between the least and the largest V that its row sees."""
    problem = setup.problem
    out = setup.run()["out"].astype(np.float64)
    v = setup.operands.dequantized(problem)[2]
    nearest = np.where(np.isnan(out), 0.0, out)  # NaN is near nothing
    for seq in problem.sequences():
        values = np.repeat(problem.rows_k(v, seq), problem.group, axis=1)  # (seqlen_k, nheads, head_dim_v)
        target = problem.rows_q(nearest, seq)
        for row, (first, stop) in enumerate(zip(*visible(problem, seq), strict=True)):
            if stop > first:
                seen = values[first:stop]
                target[row] = np.clip(target[row], seen.min(0), seen.max(0))
    yield close(
        "out against the nearest value inside the range of the visible V", "out", out, nearest, setup.bound()["out"]
    )


def _constant_values(setup: Setup, trial: Trial) -> Found:
    """Set all of V to one value, and compare the output with it; rows without a key have 0."""
    problem = setup.problem
    is_one = trial.choice("value", ("one", "below_two")) == "one"
    value = 1.0 if is_one else 2.0 - FORMATS[problem.dtype].epsilon
    old = setup.operands.v_descale
    ones = old and Descale(np.ones_like(old.values), old.block_rows)
    setup = setup.fed(v=np.full_like(setup.operands.v, value), v_descale=ones)
    expected = np.zeros(problem.out_shape)
    for seq in problem.sequences():
        first, stop = visible(problem, seq)
        problem.rows_q(expected, seq)[stop > first] = value
    out = setup.run()["out"].astype(np.float64)
    yield close(f"out with V = {value:g} everywhere", "out", out, expected, setup.bound()["out"])


def _equal_scores(setup: Setup, trial: Trial) -> Found:
    """Set K to 0, and compare out with the mean of V and lse with the logarithm of the number of keys."""
    problem = setup.problem
    setup = setup.fed(k=np.zeros_like(setup.operands.k))
    v = setup.operands.dequantized(problem)[2]
    out = np.zeros(problem.out_shape)
    lse = np.full(problem.lse_shape, -np.inf)
    for seq in problem.sequences():
        if seq.seqlen_k:
            mean = problem.rows_k(v, seq).mean(axis=0)  # (nheads_kv, head_dim_v)
            problem.rows_q(out, seq)[:] = np.repeat(mean, problem.group, axis=0)
            problem.rows_lse(lse, seq)[:] = math.log(seq.seqlen_k)
    expected = {"out": out, "lse": lse}
    yield within("K = 0 against the mean of V and log(seqlen_k)", setup.run(), expected, setup.bound())


def _capped(setup: Setup, trial: Trial) -> Found:
    """Compare scores near a softcap of models with the truth, and lse with the nearest value within softcap of the
    logarithm of the number of visible keys."""
    large = {name: getattr(setup.operands, name).copy() for name in ("q", "k")}
    for x in large.values():
        x[..., 0] = min(math.sqrt(SOFTCAP / setup.problem.softmax_scale), FORMATS["e4m3"].max_finite)
    near = setup.fed(**large)._replace(problem=replace(setup.problem, softcap=SOFTCAP))
    yield against_truth(near, f"scores near a softcap of {SOFTCAP:g}")
    problem = replace(setup.problem, softcap=float(trial.integer("softcap", 1, 64)))
    setup = setup._replace(problem=problem)
    result = setup.run()
    if "lse" not in result:
        return
    lse = result["lse"].astype(np.float64)
    nearest = np.where(np.isnan(lse), 0.0, lse)
    for seq in problem.sequences():
        first, stop = visible(problem, seq)
        with np.errstate(divide="ignore"):
            middle = np.log(np.maximum(stop - first, 0).astype(np.float64))
        rows = problem.rows_lse(nearest, seq)
        rows[:] = np.clip(rows, middle - problem.softcap, middle + problem.softcap)
    yield close("lse against log(visible keys) +- softcap", "lse", lse, nearest, setup.bound()["lse"])


def _own_descales(setup: Setup, trial: Trial) -> Found:
    """Multiply descales by another power of two for each sequence and kv head, and compare with the truth."""
    problem = setup.problem
    # 2 b + h is another number for (h, b) wherever they differ
    octaves = 2 * np.arange(problem.batch)[:, None] + np.arange(problem.nheads_kv) - problem.batch
    moved = {}
    for name, sign in (("q_descale", 1), ("k_descale", -1), ("v_descale", 1)):
        old: Descale | None = getattr(setup.operands, name)
        if old is None:
            raise ValueError(f"{trial.law} needs a quantisation scheme")
        own = np.repeat(octaves, old.values.shape[1] // problem.nheads_kv, axis=1)[:, :, None]
        moved[name] = Descale(np.ldexp(old.values, sign * own), old.block_rows)
    yield against_truth(setup.fed(**moved), "descales of sequences and heads octaves apart")


def _codes(setup: Setup, trial: Trial) -> Found:
    """Give operands numbers whose codes are exact, then one of them numbers just below codes; compare with truth."""
    low = trial.choice("low", ("", "q", "k", "v"))
    rng = np.random.default_rng(trial.integer("seed", 0, 99))
    for each in dict.fromkeys(("", low)):
        drawn = {name: _of_groups(setup, name, rng, each) for name in ("q", "k", "v")}
        yield against_truth(setup.fed(**drawn), f"numbers of {each} just below a code" if each else "exact codes")


def _of_groups(setup: Setup, name: str, rng: np.random.Generator, low: str) -> np.ndarray:
    """Return an operand of random signs, whose magnitude is a power of two from 1/4 to 2 that a group shares.

    With ``low`` none is negative, so that errors add up. In every second pair of rows of that operand one number of a
    group stays; the others are 4.9 or 5.9 codes, which cutting takes farther than rounding to nearest in every format.
    Where K loses its mean, the rows of a pair are opposite, and the last one without another is 0.
    """
    problem = setup.problem
    by = setup.kernel.quantises
    fmt, shared = by.said.get(name, ("int8", "tensor"))
    old = getattr(setup.operands, name)
    x = np.ones(old.shape) if low else rng.choice((-1.0, 1.0), old.shape)
    for seq in problem.sequences():
        rows = (problem.rows_q if name == "q" else problem.rows_k)(x, seq)
        tokens, heads, channels = np.indices(rows.shape)
        within = tokens // shared if isinstance(shared, int) else channels * (shared == "channel")
        others = (seq.index + heads) * (shared != "tensor")
        rows *= 2.0 ** ((within + others + "qkv".index(name)) % 4 - 2)
        if name == low:
            below = rng.choice((4.9, 5.9), rows.shape) / CODES[fmt].max_finite * (tokens // 2 % 2)
            rows *= np.where(tokens == 0 if shared == "channel" else channels == 0, 1, below)
        if name == "k" and by.smooth_k:
            opposite = np.where(tokens // 2 * 2 + 1 < len(rows), (-1.0) ** tokens, 0)
            rows[:] = np.repeat(rows[::2], 2, axis=0)[: len(rows)] * opposite
    return x.astype(old.dtype)


VALUE_LAWS = (
    law(
        "output_within_hull_of_values",
        "every output channel lies between the least and largest visible V of that channel, extended by the bound",
        "bounded",
        _hull,
        wanted=Wanted(),
    ),
    law(
        "constant_values_come_back",
        "V = c gives out = c within the bound: about P's unit roundoff (2^-11 fp16, 2^-8 bf16, 2^-4 e4m3) plus half "
        "an output ulp",
        "bounded",
        _constant_values,
        wanted=Wanted(),
        parameters=drawn(value=st.sampled_from(("one", "below_two"))),
    ),
    law(
        "descales_reach_their_heads",
        "e4m3: with the descales of sequences and kv heads octaves apart, those of Q and K so that scores stay, every "
        "out and lse lies within its bound",
        "bounded",
        _own_descales,
        wanted=Wanted(permuted=True, empty=False),
        applies=needs(dtypes=("e4m3",)),
    ),
    law(
        "codes_are_as_declared",
        "of a kernel that quantises: where all numbers of a group have one magnitude, octaves from its neighbours', so "
        "that codes are exact, and where those of one operand lie just below a code, every out and lse lies within its "
        "bound, which is narrow there",
        "bounded",
        _codes,
        wanted=Wanted(empty=False, seqlens_k=(300, 129, 70, 17)),  # several blocks of keys, or room for those of rows
        parameters=drawn(low=st.sampled_from(("", "q", "k", "v")), seed=st.integers(0, 99)),
        applies=lambda kernel: bool(kernel.quantises.said),
    ),
    law(
        "equal_scores_average_values",
        "K = 0 gives the mean of V and lse = log(seqlen_k) within the bound, which is tight as P = 1 exactly: drift "
        "shows; dense, long rows",
        "bounded",
        _equal_scores,
        wanted=Wanted(
            masks="none",
            single=True,
            longest_q=2,
            seqlens_k=LONG,
            families=("offset_v", "positive", "normal"),
            max_edits=0,
        ),
    ),
    law(
        "softcap_confines_lse",
        "with softcap c the lse lies within c of log(visible keys), extended by the bound; where scores are near one "
        "of 50, every out and lse lies within its bound",
        "bounded",
        _capped,
        wanted=Wanted(softcap=False),
        parameters=drawn(softcap=st.sampled_from((1, 4, 16))),
        applies=needs("softcap"),
    ),
)
