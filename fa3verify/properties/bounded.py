"""Laws that hold within the operation's a-priori bound of rounding errors, and laws about the mean of many errors.

Two calls with the same exact result may differ by the sum of their bounds. No constant of these laws is a tolerance.

Rounding to nearest has no mean error. A step that truncates stays within the bound of each element: half an ulp too
small everywhere is no larger an error than half an ulp to either side. The mean over thousands of elements tells the
two apart. The channels of a row may share an error, such as that of a row sum in 16 bits, but rows do not share one. So
the mean is compared with the spread of the rows' means.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from fa3_kernels.plan.config import Setting
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, Descale, Operands
from fa3verify.cases.case import Case
from fa3verify.judging import hypotheses
from fa3verify.judging.verdict import Seen
from fa3verify.kernels.record import Kernel
from fa3verify.operations import Outputs
from fa3verify.properties.compare import Found, against_truth, near_truth, summed, within
from fa3verify.properties.law import Drawn, Refused, Setup, Trial, Untaken, Violation
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


_ROWS, _KEYS = 96, 320
_SIGMAS = 7.0  # allowed bias, in standard deviations of the mean of the rows' means
_ULPS = 2.02  # allowed error of a lone value: in e4m3 it is multiplied by a descale, and P has an offset to be removed
_LEAST = 0.02  # ulp; a smaller bias is always allowed, as an exponential may be off by as much


def _bias(setup: Setup, trial: Trial) -> Found:
    """Compare the mean error of all outputs, in ulp, towards or away from zero, with the spread over rows."""
    wide = _wide(setup, trial.case.recipe.seed)
    truth = wide.truth()["out"]
    got = wide.run()["out"].astype(np.float64)
    fmt = FORMATS[wide.config.out_dtype if hasattr(wide.config, "out_dtype") else wide.problem.dtype]
    ulp = np.exp2(np.floor(np.log2(np.abs(truth)))) * fmt.epsilon
    error = (got - truth) / ulp * np.sign(truth)
    if not np.isfinite(error).all():
        return  # another law judges NaN and infinities
    mean = float(error.mean())
    rows = error.mean(axis=-1)
    allowed = max(_LEAST, _SIGMAS * float(rows.std()) / math.sqrt(rows.size))
    if abs(mean) > allowed:
        side = "small" if mean < 0 else "large"
        words = (
            f"out is too {side} by {abs(mean):.3f} ulp in the mean of {error.size:,} values, {allowed:.3f} are allowed"
        )
        seen = Seen("out", ratio=abs(mean) / allowed)
        yield Violation(f"{words}: a step that rounds to nearest has no bias", seen)


def _wide(setup: Setup, seed: int) -> Setup:
    """Return a call of many rows and keys with all values of V between 1 and 2, dense, or causal if only that is taken.

    Untaken if the kernel takes neither.
    """
    kernel = setup.kernel
    rows, keys = kernel.sizes.queries(_ROWS), kernel.sizes.keys(_KEYS)
    batch = max(1, _ROWS // rows)
    problem = kernel.sizes.fitted(AttentionProblem(batch, 2, 2, rows, keys, setup.problem.head_dim, dtype=kernel.dtype))
    if problem.batch * rows < _ROWS:
        raise Untaken("it takes too few rows for a mean")
    if not kernel.supports(problem):
        problem = replace(problem, causal=True, seqlen_q=keys)
    if not kernel.supports(problem):
        raise Untaken(kernel.refusal(problem))
    rng = np.random.default_rng(seed)
    kind = FORMATS[kernel.dtype].dtype
    q, k = (rng.standard_normal(shape).astype(kind) for shape in (problem.q_shape, problem.k_shape))
    v = (1 + rng.random(problem.v_shape)).astype(kind)
    operands = replace(setup.operands, q=q, k=k, v=v)
    return setup._replace(problem=problem, operands=operands, config=kernel.config_for(problem))


def _lone(setup: Setup, trial: Trial) -> Found:
    lone, value = _one_key(setup, trial.case.recipe.seed)
    got = lone.run()["out"].astype(np.float64)
    fmt = FORMATS[lone.config.out_dtype]
    off = np.abs(got - value) > _ULPS * np.maximum(np.abs(value) * fmt.epsilon, fmt.min_subnormal)
    if off.any():
        index = tuple(int(i) for i in np.argwhere(off)[0])
        words = f"out{list(index)} of a single key is {float(got[index])!r}, its value {float(value[index])!r}"
        yield Violation(f"{words}: a weight divided by itself leaves the value, subnormal or not")


def _one_key(setup: Setup, seed: int) -> tuple[Setup, np.ndarray]:
    """Return a call of one row and one key, and its value in float64; Untaken if the kernel takes no such call."""
    kernel = setup.kernel
    problem = AttentionProblem(1, 1, 1, 1, 1, setup.problem.head_dim, dtype=kernel.dtype)
    if not kernel.supports(problem):
        raise Untaken(kernel.refusal(problem))
    rng = np.random.default_rng(seed)
    kind = FORMATS[kernel.dtype].dtype
    q, k = (rng.standard_normal(shape).astype(kind) for shape in (problem.q_shape, problem.k_shape))
    significand = rng.choice([-1, 1], problem.v_shape) * (1 + rng.random(problem.v_shape))
    least = -24 if kernel.dtype == "fp16" else -8  # subnormal numbers of fp16, and those of other formats that fit
    v = np.ldexp(significand, rng.integers(least, 0, problem.v_shape)).astype(kind)
    config = kernel.config_for(problem)
    if hypotheses.assumed(kernel, config).accumulator == "tf32":
        v = v.astype(FORMATS["bf16"].dtype).astype(kind)  # which tf32 holds
    operands = Operands(q, k, v)
    if kernel.dtype == "e4m3":
        scales = [Descale(np.full((1, 1, 1), x, np.float32)) for x in np.exp(rng.uniform(-2, 2, 3))]
        operands = replace(operands, q_descale=scales[0], k_descale=scales[1], v_descale=scales[2])
    value = operands.dequantized(problem)[2].reshape(problem.out_shape)
    return setup._replace(problem=problem, operands=operands, config=config), value


_PLAIN = Wanted(layout="batched", masks="none", softcap=False, max_edits=0, empty=False, families=("normal",))
BIAS_LAWS = (
    law(
        "errors_have_no_bias",
        "the errors of thousands of outputs have a mean of 0 but for what the means of rows scatter by, as steps that "
        "round to nearest leave it",
        "bounded",
        _bias,
        wanted=_PLAIN,
        # All rows share the errors of a quantised V, and small weights vanish in an integer P.
        applies=lambda kernel: kernel.dtype in ("fp16", "bf16") and not (kernel.quantises.v or kernel.quantises.p),
    ),
    law(
        "a_lone_key_returns_its_value",
        "a row that sees one key returns its value to two ulps, subnormal values of fp16 too",
        "bounded",
        _lone,
        wanted=_PLAIN,
        applies=lambda kernel: kernel.operation == "forward" and not kernel.quantises.v,
    ),
)
