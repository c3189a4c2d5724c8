"""A peer that computes something else has no speed, one that only rounds has: fakes in place of libraries, no GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("triton")

from fa3_kernels.plan.config import default_config
from fa3_kernels.twin.forward import forward
from fa3_reference.attention import attention
from fa3_reference.formats import FORMATS
from fa3_reference.problem import Descale, Dtype, Operands
from fa3_reports.bench import check, peers, results
from fa3_reports.bench.cells import Cell
from fa3_reports.bench.kernels import Given
from fa3_reports.bench.sustained import Times
from fa3verify.known.launches import LaunchOutput
from fa3verify.timed.timing import LaunchTime

pytestmark = pytest.mark.optional


@pytest.fixture(autouse=True)
def arrays_for_tensors(monkeypatch):
    monkeypatch.setattr("fa3verify.bench.check.to_numpy", np.ascontiguousarray)


def inputs(cell: Cell) -> Given:
    rng = np.random.default_rng(0)
    problem, fmt = cell.problem, FORMATS[cell.dtype]
    factor = 1 / 64 if cell.dtype == "e4m3" else 1.0
    shapes = ((problem.q_shape, 0.0), (problem.k_shape, 0.0), (problem.v_shape, cell.v_mean))
    q, k, v = (((rng.standard_normal(shape) + mean) / factor).astype(fmt.dtype) for shape, mean in shapes)
    factors = [np.full((cell.batch, cell.nheads_kv), factor, np.float32) if cell.dtype == "e4m3" else None] * 3
    return Given(q, k, v, *factors)


def operands(cell: Cell, given: Given) -> Operands:
    if cell.dtype != "e4m3":
        return Operands(*given[:3])
    heads = (cell.nheads, cell.nheads_kv, cell.nheads_kv)
    scales = (Descale(np.full((cell.batch, n, 1), x[0, 0], np.float32)) for n, x in zip(heads, given[3:6]))
    return Operands(*given[:3], *scales)


def cell(dtype: Dtype, seqlen_q: int, seqlen_k: int, causal: bool, v_mean: float = 0.0) -> Cell:
    return Cell("gqa", dtype, 1, seqlen_q, seqlen_k, 2, 1, 64, causal, v_mean)


def ratio(name: str, of: Cell, given: Given, out: np.ndarray, scale: float = 1.0) -> float:
    return check.judge(
        check.gather(of, given, LaunchOutput(out, None, scale), None, peers.model_of(name, of))
    ).ratio_max


SQUARE, TALL = cell("bf16", 300, 300, True), cell("bf16", 100, 700, True)


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("flash3", SQUARE),
        ("flash3", TALL),
        ("flash3", cell("e4m3", 64, 700, False)),
        ("cudnn", SQUARE),
        ("flash2", cell("fp16", 200, 200, True)),
    ],
)
def test_the_bits_of_a_library_are_within_its_bound_and_those_of_a_wrong_mask_are_not(name, of):
    given, problem = inputs(of), of.problem
    for causal in {of.causal, not of.causal}:
        run = replace(problem, causal=causal)
        out = forward(run, operands(of, given), default_config(run, family=name)).out
        assert (ratio(name, of, given, out) <= 1) == (causal == of.causal)


def test_a_causal_mask_aligned_top_left_is_flagged_where_lengths_differ():
    given = inputs(TALL)
    q, k, v = (x.astype(np.float64) for x in given[:3])
    rows = TALL.seqlen_q
    top_left = attention(replace(TALL.problem, seqlen_k=rows), q, k[:, :rows], v[:, :rows]).out
    right = attention(TALL.problem, q, k, v).out
    found = [ratio("cudnn", TALL, given, out.astype(FORMATS["bf16"].dtype)) for out in (right, top_left)]
    assert found[0] <= 1 < 100 < found[1]


def test_fp8_loss_over_long_rows_is_within_the_bound_and_a_lost_block_of_them_is_not():
    of = cell("e4m3", 8, 8192, False, v_mean=1.0)
    given = inputs(of)
    config = default_config(of.problem, family="flash3")
    found = LaunchOutput(forward(of.problem, operands(of, given), config).out)
    verdict = check.judge(check.gather(of, given, found, None, peers.model_of("flash3", of)))
    assert verdict.gain < -0.05
    assert verdict.ratio_max <= 1
    of = replace(of, seqlen_k=2048)  # over 32,768 keys the bound of a chained accumulator is as wide as the output
    given = inputs(of)
    half = attention(of.problem, *(x.astype(np.float64) / 64 for x in given[:3])).out / 2
    assert ratio("flash3", of, given, half.astype(FORMATS["bf16"].dtype)) > 1


def test_an_output_in_e4m3_is_allowed_its_own_last_rounding_and_no_other():
    of = cell("bf16", 64, 700, False)  # whose bound is much narrower than what an output in e4m3 is rounded by
    given, e4m3, bf16 = inputs(of), FORMATS["e4m3"].dtype, FORMATS["bf16"].dtype
    exact = attention(of.problem, *(x.astype(np.float64) for x in given[:3])).out
    scale = float(np.abs(exact).max()) / 440
    rounded = (exact / scale).astype(e4m3)
    assert ratio("flash3", of, given, rounded, scale) <= 1
    assert ratio("flash3", of, given, rounded.astype(bf16), scale) > 1  # a format that needs no such rounding
    clipped = np.clip(exact / scale * 3, -448, 448).astype(e4m3)
    assert ratio("flash3", of, given, clipped, scale / 3) > 1
    fewer_bits = (np.round(rounded.astype(np.float64) / 16) * 16).astype(e4m3)
    assert ratio("flash3", of, given, fewer_bits, scale) > 1


def test_fp8_of_an_unknown_order_is_judged_by_a_bound_that_holds():
    of = cell("e4m3", 64, 700, False)
    given = inputs(of)
    exact = attention(of.problem, *(x.astype(np.float64) / 64 for x in given[:3])).out
    out, scale = (exact * 1000).astype(FORMATS["e4m3"].dtype), 1e-3
    assert ratio("cudnn.fp8", of, given, out, scale) <= 1
    assert ratio("cudnn.fp8", of, given, -out, 5 * scale) > 1


def test_outputs_whose_truth_is_zero_have_no_relative_error_and_are_judged_by_their_bound():
    given = inputs(SQUARE)
    given = given._replace(v=np.zeros_like(given.v))
    for out, is_right in ((given.q * 0, True), (given.q, False)):
        gathered = check.gather(SQUARE, given, LaunchOutput(out), None, peers.model_of("flash3", SQUARE))
        verdict = check.judge(gathered)
        assert np.isnan([verdict.rel_rmse, verdict.gain]).all()
        assert (verdict.ratio_max <= 1) == is_right


def test_nan_is_outside_every_bound_and_what_is_outside_has_a_status_and_no_speed():
    given = inputs(SQUARE)
    out = attention(SQUARE.problem, *(x.astype(np.float64) for x in given[:3])).out.astype(FORMATS["bf16"].dtype)
    sound = check.judge(check.gather(SQUARE, given, LaunchOutput(out), None, peers.model_of("cuda.flex", SQUARE)))
    out[0, -1, 1, 5] = np.nan
    broken = check.judge(check.gather(SQUARE, given, LaunchOutput(out), None, peers.model_of("cuda.flex", SQUARE)))
    times = Times([LaunchTime(1.0, 1700.0)], [1980.0])
    right, wrong = (results.measured("cuda.flex", "script", times, verdict) for verdict in (sound, broken))
    assert (right.status, right.burst_ms) == ("ok", 1.0)
    assert wrong.status == "computes something else: error / bound inf in the sampled rows"
    assert np.isnan(wrong.burst_ms)
    assert wrong.rounds_ms == ()
