"""Every term of the bound of gradients: tiny problems whose bound is worked out by hand, one number at a time."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fa3_reference.attention import attention
from fa3_reference.bounds.backward import backward_bound
from fa3_reference.bounds.device import TANH_REL
from fa3_reference.bounds.model import BackwardModel
from fa3_reference.formats import FORMATS, encode
from fa3_reference.problem import AttentionProblem, BackwardOperands
from tests.reference.bounds.by_hand_backward import Rows, dq_bound, keys_bound, pairs_of

FREE = BackwardModel.any_order("fp16")
# What a model says beyond the default, by what it brings into the bound.
MODELS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "blocks of keys and rows": {"tile_n": 2, "tile_m": 1, "dots_depth": 1},
    "binary32 sums": {"accumulator": "fp32"},
    "either accumulator": {"accumulator": "either"},
    "rounded exponents, a coarse exponential": {"exponent": "rounded", "exp_error": 2.0**-12},
    "scaled weights": {"scales": "weights"},
    "any scales, heads and tanh": {"scales": "any", "heads": "any", "tanh_error": TANH_REL},
    "one chain": {"heads": "chained", "tanh_error": TANH_REL},
    "scores in bf16": {"scores": "bf16"},
    "dP in bf16": {"dp": "bf16"},
    "scores and dP in bf16, binary32 sums": {"scores": "bf16", "dp": "bf16", "accumulator": "fp32"},
    "scores and dP in fp16": {"scores": "fp16", "dp": "fp16"},
    "D of weights": {"dots": "weights", "accumulator": "fp32"},
    "dS of rounded P": {"ds_of": "rounded"},
    "a forward of its own": {"forward": "own", "accumulator": "fp32"},
    "a forward of its own, kept": {"forward": "own", "accumulator": "fp32", "weights": "fp32"},
    "a forward of its own, any order": {"forward": "own", "accumulator": "either", "scales": "any", "heads": "any"},
    "parts in bf16": {"parts": "bf16", "tile_n": 2},
    "parts in bf16, tiles unknown": {"parts": "bf16"},
    "weights in binary32": {"weights": "fp32"},
}


def drawn(dtype: str, seed: int, nheads: int = 2, seqlen_q: int = 2, seqlen_k: int = 3, **rest: Any) -> tuple:
    """A problem of one kv head and its operands: numbers of full significands."""
    problem = AttentionProblem(1, nheads, 1, seqlen_q, seqlen_k, 2, 3, dtype=dtype, **rest)  # type: ignore[arg-type]
    rng = np.random.default_rng(seed)
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape, problem.out_shape, problem.out_shape)
    q, k, v, dout, out = (encode(rng.standard_normal(x), FORMATS[dtype], "ieee") for x in shapes)
    lse = rng.uniform(1, 3, problem.lse_shape).astype(np.float32)
    return problem, BackwardOperands(q, k, v, dout=dout, out=out, lse=lse)


def times(x: BackwardOperands, **factors: float) -> BackwardOperands:
    """The same operands, some of them times a power of two."""
    each = {name: getattr(x, name) for name in factors}
    return replace(x, **{name: (a.astype(np.float64) * factors[name]).astype(a.dtype) for name, a in each.items()})


def heads_of(problem: AttentionProblem, x: BackwardOperands, model: BackwardModel) -> list[Rows]:
    """The operands as lists; of a forward of its own with the exact out and lse."""
    q, k, v, dout, out, lse = (np.asarray(a, np.float64) for a in (x.q, x.k, x.v, x.dout, x.out, x.lse))
    if model.forward == "own":
        out, lse = attention(problem, q, k, v)
    first, stop = problem.visible_keys(np.arange(problem.seqlen_q), problem.seqlen_q, problem.seqlen_k)
    keys = np.arange(problem.seqlen_k)
    visible = ((keys >= first[:, None]) & (keys < stop[:, None])).tolist()
    dlse = np.zeros(lse.shape) if x.dlse is None else x.dlse.astype(np.float64)
    dlse = np.where(np.any(visible, axis=1), dlse, 0.0)
    return [
        Rows(
            *(a[0, :, h].tolist() for a in (q,)),
            *(a[0, :, 0].tolist() for a in (k, v)),
            *(a[0, :, h].tolist() for a in (dout, out)),
            lse[0, h].tolist(),
            dlse[0, h].tolist(),
            problem.softmax_scale,
            problem.softcap,
            visible,
        )
        for h in range(problem.nheads)
    ]


_BY_HAND: dict[bytes, list] = {}  # a survey runs these tests on thousands of mutants of the bound


def by_hand(problem: AttentionProblem, x: BackwardOperands, model: BackwardModel) -> list:
    """The bounds of dQ, by query head, of dK and of dV."""
    heads = heads_of(problem, x, model)
    pairs = [pairs_of(rows, model) for rows in heads]
    return [
        [dq_bound(rows, own, model) for rows, own in zip(heads, pairs, strict=True)],
        keys_bound(heads, pairs, model, "k"),
        keys_bound(heads, pairs, model, "v"),
    ]


def assert_is_by_hand(problem: AttentionProblem, x: BackwardOperands, model: BackwardModel) -> None:
    """The two agree to some 2^-53 of a weight over its rounding, and to that of a tanh's differences."""
    key = pickle.dumps((problem, x, model))
    if key not in _BY_HAND:
        _BY_HAND[key] = by_hand(problem, x, model)
    bound = backward_bound(problem, x, model)
    rtol = 1e-8 if problem.softcap or model.weights == "fp32" else 1e-11
    for name, found, expected in zip(("dQ", "dK", "dV"), bound, _BY_HAND[key], strict=True):
        found = np.swapaxes(found[0], 0, 1) if name == "dQ" else found[0, :, 0]
        assert np.isfinite(expected).all()
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=0, err_msg=f"{name} of {model}")


@pytest.mark.parametrize("name", MODELS)
def test_the_bound_of_gradients_is_what_its_formulas_make_by_hand(name: str) -> None:
    model = BackwardModel("bf16", out_dtype="fp32", **MODELS[name])
    for softcap in (0.0, 1.5) if model.scores == "fp32" else (0.0,):
        problem, x = drawn("bf16", len(name), softcap=softcap, softmax_scale=0.3)
        assert_is_by_hand(problem, x, model)
        assert_is_by_hand(replace(problem, causal=True), x, replace(model, out_dtype="bf16"))


@pytest.mark.parametrize("facts", [{}, {"accumulator": "either"}, {"accumulator": "fp32"}])
def test_a_gradient_of_lse_takes_part_in_the_differences(facts: dict[str, Any]) -> None:
    problem, x = drawn("bf16", 3, softmax_scale=0.3)
    for size in (1.0, 100.0):
        dlse = (size * np.random.default_rng(1).standard_normal(problem.lse_shape)).astype(np.float32)
        assert_is_by_hand(problem, replace(x, dlse=dlse), BackwardModel("bf16", out_dtype="fp32", **facts))


@pytest.mark.parametrize("facts", [{"tile_m": 4, "tile_n": 8}, {}, {"accumulator": "either"}, {"parts": "bf16"}])
def test_chains_of_several_steps_count_each_of_them(facts: dict[str, Any]) -> None:
    problem, x = drawn("bf16", 5, 1, 9, 17, softmax_scale=0.3)
    assert_is_by_hand(problem, x, BackwardModel("bf16", out_dtype="fp32", **facts))


SMALL = (
    {},
    {"accumulator": "fp32"},
    {"accumulator": "either", "scales": "weights"},
    {"parts": "bf16", "tile_n": 2},
    {"dots": "weights"},
    {"forward": "own", "accumulator": "fp32", "weights": "fp32"},
    {"forward": "own"},
    {"dp": "bf16"},
)


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("small", [{"dout": 2.0**-107}, {"dout": 2.0**-107, "out": 2.0**-107}, {"v": 2.0**-107}])
def test_what_flushed_results_cost_counts_beside_small_gradients(small: dict[str, float], softcap: float) -> None:
    """Differences near 2^-107, whose roundings are near the least normal number."""
    problem, x = drawn("bf16", 7, softcap=softcap, softmax_scale=0.3)
    x = times(x, **small)
    for facts in SMALL:
        model = BackwardModel("bf16", out_dtype="fp32", **facts)
        for power in (0, -1 if len(small) > 1 else 0):
            dlse = None if not power else np.full(problem.lse_shape, 2.0**-107, np.float32)
            assert_is_by_hand(problem, replace(x, dlse=dlse), model)


@pytest.mark.parametrize("scale", [2.0**-118, 2.0**90])
def test_what_flushed_results_cost_counts_beside_a_small_or_a_large_scale(scale: float) -> None:
    """Scores of some 2^118 and a factor of 2^-118, and the other way round: what is flushed of them counts."""
    half = 2.0 ** (-np.log2(scale) // 2)
    for softcap in (0.0, 1.5):
        problem, x = drawn("bf16", 8, softcap=softcap, softmax_scale=scale)
        x = times(x, q=half, k=half)
        for facts in ({}, {"accumulator": "fp32"}, {"scales": "any"}, {"forward": "own"}):
            assert_is_by_hand(problem, x, BackwardModel("bf16", out_dtype="fp32", **facts))


@pytest.mark.parametrize("forward", ["given", "own"])
def test_a_softcap_near_the_end_of_binary32_counts_what_its_factors_flush(forward: str) -> None:
    problem, x = drawn("bf16", 8, softcap=2.0**-119, softmax_scale=2.0**-100)
    for tanh in (0.0, TANH_REL):
        model = BackwardModel("bf16", out_dtype="fp32", tanh_error=tanh, forward=forward)  # type: ignore[arg-type]
        assert_is_by_hand(problem, times(x, q=2.0**-10, k=2.0**-10), model)


@pytest.mark.parametrize("small", [{"q": 2.0**-18, "dout": 2.0**-18}, {"k": 2.0**-18, "v": 2.0**-18}, {}])
def test_subnormal_operands_and_weights_are_aligned_by_the_least_normal_number(small: dict[str, float]) -> None:
    problem, x = drawn("fp16", 9, softmax_scale=0.3)
    x = times(x, **small)
    far = replace(x, lse=x.lse + np.float32(14))
    for facts in MODELS.values():
        model = BackwardModel("fp16", **{"out_dtype": "fp32", **facts})
        assert_is_by_hand(problem, x, model)
        assert_is_by_hand(problem, far, replace(model, parts="fp16"))


def test_weights_at_the_end_of_binary32_may_be_flushed_and_never_err_by_nothing() -> None:
    problem, x = drawn("bf16", 10, softmax_scale=1.0)
    for lse in (126 * np.log(2) - 0.5, 126 * np.log(2), 126 * np.log(2) + 0.5, 360.0):
        for facts in ({}, {"accumulator": "fp32"}):
            far = replace(x, lse=np.full_like(x.lse, lse))
            assert_is_by_hand(problem, far, BackwardModel("bf16", out_dtype="fp32", **facts))


def test_a_gradient_of_lse_of_a_row_that_sees_no_key_counts_nowhere() -> None:
    problem, x = drawn("bf16", 11, 2, 3, 2, causal=True, softmax_scale=0.3)
    dlse = np.zeros(problem.lse_shape, np.float32)
    dlse[..., 0] = 1
    for facts in ({}, {"accumulator": "fp32"}):
        assert_is_by_hand(problem, replace(x, dlse=dlse), BackwardModel("bf16", out_dtype="fp32", **facts))
