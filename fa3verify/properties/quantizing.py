"""Laws of quantisers: codes near their exact values, exact scalings, and sequences that do not touch each other."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from fa3_reference.bounds.device import U_FP32
from fa3_reference.formats import FORMATS
from fa3_reference.problem import Descale, Operands, Sequence
from fa3_reference.quantize import quantize_qkv
from fa3_reference.scales import SHARING
from fa3verify.cases.case import Case
from fa3verify.kernels.record import Candidate
from fa3verify.operations import Outputs
from fa3verify.operations.quantize import NAMES
from fa3verify.properties.compare import against_truth, close, same_bits
from fa3verify.properties.law import Drawn, Setup, Trial, Violation, set_up
from fa3verify.properties.transforms import scaled_by_power_of_two
from fa3verify.properties.trials import Wanted, law

_OF = ("quantize",)
# sizes that a scaling by 2^3 leaves normal in fp16
LEAST = 2.0**-8
MOST = 2.0**8


def _within(candidate: Candidate, trial: Trial) -> Violation | None:
    return against_truth(candidate, set_up(candidate, trial.case), "against float64")


def _exact(candidate: Candidate, trial: Trial) -> Violation | None:
    setup = set_up(candidate, trial.case).configured(scale="power_of_two", rotate=False, subtract_k_mean=False)
    problem = setup.problem
    want = quantize_qkv(problem, *setup.operands.dequantized(problem), setup.config.scheme()).operands
    expected = {name: getattr(want, name) for name in NAMES}
    expected |= {f"{name}_descale": getattr(want, f"{name}_descale").values for name in NAMES}
    return same_bits("scaled by powers of two, against correct rounding", setup.run(candidate), expected)


def _exponent(draw: DrawFn, candidate: Candidate, case: Case) -> Drawn:
    return {"exponent": draw(st.sampled_from((1, -1, 3, -3)))}


def _scaled(candidate: Candidate, trial: Trial) -> Violation | None:
    n = trial.integer("exponent", -3, 3)
    setup = set_up(candidate, trial.case)
    sizes = {name: np.abs(getattr(setup.operands, name).astype(np.float64)) for name in NAMES}
    kept = {
        name: np.where((x >= LEAST) & (x <= MOST), getattr(setup.operands, name), 0).astype(setup.operands.q.dtype)
        for name, x in sizes.items()
    }
    plain = setup.fed(**kept)
    moved = plain.fed(**{name: scaled_by_power_of_two(x, n) for name, x in kept.items()})
    a = plain.run(candidate)
    b = moved.run(candidate)
    expected = {name: a[name] for name in NAMES}
    for name in NAMES:
        descale = a[f"{name}_descale"]
        expected[f"{name}_descale"] = np.where(_is_filled(a, name, setup), descale * np.float32(2.0**n), descale)
    return same_bits(f"q, k and v times 2^{n}", b, expected)


def _is_filled(got: Outputs, name: str, setup: Setup) -> np.ndarray:
    """Blocks with a code other than 0; the descale of the others is 1, whatever the scaling."""
    problem = setup.problem
    descale = got[f"{name}_descale"]
    rows_of = problem.rows_q if name == "q" else problem.rows_k
    rows = setup.config.descale_rows[NAMES.index(name)]
    filled = np.zeros(descale.shape, bool)
    for seq in problem.sequences():
        used = (rows_of(got[name], seq).astype(np.float64) != 0).any(axis=-1)  # (seqlen, heads)
        for block in range(descale.shape[2]):
            part = slice(block * rows, (block + 1) * rows) if rows else slice(None)
            filled[seq.index, :, block] = used[part].any(axis=0)
    shared = SHARING[setup.config.scope].heads_per_descale(name, problem.nheads, problem.nheads_kv)
    groups = filled.reshape(problem.batch, -1, shared, descale.shape[2])
    return np.repeat(groups.any(axis=2), shared, axis=1)


def _alone(candidate: Candidate, trial: Trial) -> Violation | None:
    setup = set_up(candidate, trial.case)
    problem = setup.problem
    operands = setup.operands
    whole = setup.run(candidate)
    for seq in problem.sequences():
        if not seq.seqlen_q or not seq.seqlen_k:
            continue
        single = replace(problem, batch=1, seqlen_q=seq.seqlen_q, seqlen_k=seq.seqlen_k, seqlens_q=None, seqlens_k=None)
        q, k, v = (np.ascontiguousarray(rows[None]) for rows in _rows(setup, seq, operands.q, operands.k, operands.v))
        alone = setup._replace(problem=single).fed(q=q, k=k, v=v).run(candidate)
        cut = _rows(setup, seq, whole["q"], whole["k"], whole["v"])
        expected: dict[str, np.ndarray] = {name: rows[None] for name, rows in zip(NAMES, cut)}
        for name in (*(f"{name}_descale" for name in NAMES), "k_mean"):
            if name in whole:
                expected[name] = whole[name][seq.index : seq.index + 1, :, : alone[name].shape[2]]
        if "lse_correction" in whole:
            expected["lse_correction"] = problem.rows_lse(whole["lse_correction"], seq)[None]
        if violation := same_bits(f"sequence {seq.index} alone against the whole call", alone, expected):
            return violation
    return None


def _rows(setup: Setup, seq: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    problem = setup.problem
    return problem.rows_q(q, seq), problem.rows_k(k, seq), problem.rows_k(v, seq)


def _scores(candidate: Candidate, trial: Trial) -> Violation | None:
    """Scores of the codes, with the LSE correction, are those of the inputs: no rotation or mean is known for that."""
    setup = set_up(candidate, trial.case)
    problem = setup.problem
    got = setup.run(candidate)
    q, k, _ = setup.operands.dequantized(problem)
    rows = zip(NAMES, setup.config.descale_rows, strict=True)
    q_descale, k_descale, v_descale = (Descale(got[f"{name}_descale"], n) for name, n in rows)
    codes = Operands(got["q"], got["k"], got["v"], q_descale, k_descale, v_descale)
    q8, k8, _ = codes.dequantized(problem)
    shift = got.get("lse_correction", np.zeros(problem.lse_shape))
    shift_bound = setup.bound(got).get("lse_correction")
    for seq in problem.sequences():
        if not seq.seqlen_q or not seq.seqlen_k:
            continue
        rows_q, rows_k, rows_q8, rows_k8 = _rows(setup, seq, q, k, k)[:2] + _rows(setup, seq, q8, k8, k8)[:2]
        rows_k, rows_k8 = (np.repeat(x, problem.group, axis=1) for x in (rows_k, rows_k8))
        centred = rows_k - (rows_k.mean(axis=0) if setup.config.subtract_k_mean else 0)
        seen, exact = (np.einsum("qhd,khd->hqk", a, b) for a, b in ((rows_q8, rows_k8), (rows_q, rows_k)))
        seen, exact = (problem.softmax_scale * x for x in (seen, exact))
        seen += problem.rows_lse(shift, seq)[..., None]
        lost_q = _lost(rows_q, q_descale, seq, 1)
        lost_k = _lost(centred, k_descale, seq, problem.group)
        norm_q, norm_k = (np.linalg.norm(x, axis=-1).T for x in (rows_q, centred))
        limit = lost_q[:, :, None] * (norm_k + lost_k)[:, None] + norm_q[:, :, None] * lost_k[:, None]
        limit = problem.softmax_scale * limit + 2.0**-40 * np.abs(exact)
        if shift_bound is not None:
            limit += problem.rows_lse(shift_bound, seq)[..., None]
        if violation := close(f"scores of sequence {seq.index}", seen, exact, np.where(np.isnan(limit), np.inf, limit)):
            return violation
    return None


def _lost(x: np.ndarray, descale: Descale, seq: Sequence, group: int) -> np.ndarray:
    """Return how far rounding may move a row (heads, rows) in the 2-norm, whatever orthogonal matrix turned it first.

    Half a unit of e4m3 in each channel, relative or of the smallest number, and binary32's error of turning, centring
    and scaling it.
    """
    head_dim = x.shape[-1]
    norm = np.linalg.norm(x, axis=-1).T
    turned = (math.log2(head_dim) + 8) * math.sqrt(head_dim) * U_FP32
    fmt = FORMATS["e4m3"]
    factors = [descale.rows(seq.index, head // group, x.shape[0]) for head in range(x.shape[1])]
    smallest = fmt.min_subnormal / 2 * math.sqrt(head_dim) * np.stack(factors)
    return fmt.unit_roundoff * norm * (1 + turned) + turned * norm + smallest


QUANTIZE_LAWS = (
    law(
        "stored_values_within_bound",
        "a code differs from the correctly rounded one only where the exact scaled value lies within binary32's "
        "error of a rounding boundary; descales, K mean and LSE correction lie within theirs",
        "bounded",
        _within,
        wanted=Wanted(),
        of=_OF,
    ),
    law(
        "powers_of_two_scale_exactly",
        "with power-of-two descales, no rotation and no K mean, every code and descale is the correctly rounded "
        "one, bit for bit",
        "exact",
        _exact,
        wanted=Wanted(),
        of=_OF,
    ),
    law(
        "descales_take_a_common_factor",
        "q, k and v times 2^n keep every code and give descales times 2^n, bit for bit, for values from 2^-8 to 2^8",
        "exact",
        _scaled,
        wanted=Wanted(),
        parameters=_exponent,
        of=_OF,
    ),
    law(
        "codes_keep_the_scores",
        "scores of the codes times their descales, with the LSE correction, are those of the inputs, within what half "
        "units of e4m3 move the rows of q and k: whatever turns them, the heads of a group share it with their kv head",
        "bounded",
        _scores,
        wanted=Wanted(empty=False),
        of=_OF,
    ),
    law(
        "sequences_are_quantised_alone",
        "every output of a sequence is what quantising it alone gives, bit for bit",
        "exact",
        _alone,
        wanted=Wanted(several=True),
        of=_OF,
    ),
)
