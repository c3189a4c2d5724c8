"""Samples of timed outputs: they are the rows that they say, under every mask; wrong kernels do not pass. No GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from fa3_kernels.plan.choose import config_of
from fa3_kernels.twin.forward import forward
from fa3_reference.attention import attention
from fa3_reference.bounds import KernelModel
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, Descale, Operands
from fa3verify.bench import check
from fa3verify.known.launches import Given, LaunchOutput

pytestmark = pytest.mark.optional
PROBLEM = AttentionProblem(2, 2, 1, 200, 200, 64, dtype="bf16")
# Both sides of the diagonal, more and fewer queries than keys, and windows wider than what is beyond the sampled rows.
MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"window": (40, 0)},
    {"window": (40, 24)},
    {"window": (-1, 7)},
    {"window": (30, -1)},
    {"window": (150, 195)},
    {"causal": True, "window": (16, 5)},
    {"seqlen_q": 130, "window": (30, 10)},
    {"seqlen_k": 90, "window": (50, 20)},
    {"seqlen_k": 90, "causal": True},
    {"seqlen_q": 3, "window": (30, 10)},
)


@pytest.fixture(autouse=True)
def arrays_for_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "to_numpy", np.ascontiguousarray)


def drawn(problem: AttentionProblem) -> Given:
    rng = np.random.default_rng(0)
    is_fp8 = problem.dtype == "e4m3"
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape)
    q, k, v = (
        (rng.standard_normal(shape) * (64 if is_fp8 else 1)).astype(FORMATS[problem.dtype].dtype) for shape in shapes
    )
    factor: Any = np.full((problem.batch, problem.nheads_kv), 1 / 64, np.float32) if is_fp8 else None
    return Given(q, k, v, factor, factor, factor)  # pyright: ignore[reportArgumentType]


def operands(problem: AttentionProblem, given: Given) -> Operands:
    heads = (problem.nheads, problem.nheads_kv, problem.nheads_kv)
    descales = [
        None if x is None else Descale(np.full((problem.batch, n, 1), 1 / 64, np.float32))
        for n, x in zip(heads, given[3:6])
    ]
    return Operands(*given[:3], *descales)  # pyright: ignore[reportArgumentType]


def exact(problem: AttentionProblem, given: Given, dtype: str = "bf16") -> LaunchOutput:
    out = attention(problem, *operands(problem, given).dequantized(problem)).out
    return LaunchOutput(out.astype(FORMATS[dtype].dtype))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_sample_is_the_problem_of_its_rows(mask: dict[str, Any]) -> None:
    problem = replace(PROBLEM, **mask)
    given = drawn(problem)
    whole = attention(problem, *operands(problem, given).dequantized(problem)).out
    for start in range(0, problem.seqlen_q, 8):
        rows = slice(start, min(start + 8, problem.seqlen_q))
        part = check.sample(problem, given, LaunchOutput(whole), rows, 1, 0)  # pyright: ignore[reportArgumentType]
        np.testing.assert_allclose(part.truth, whole[1:, rows], rtol=1e-12, atol=1e-14, err_msg=str(rows))


def bound_of(problem: AttentionProblem, out_dtype: Any = "bf16") -> KernelModel:
    return KernelModel.any_order(problem.dtype, out_dtype, accumulator="either")


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_rounded_output_is_within_the_bound_and_one_of_another_mask_is_not(mask: dict[str, Any]) -> None:
    problem = replace(PROBLEM, **mask)
    given = drawn(problem)
    model = bound_of(problem)
    assert check.outside_bound(problem, given, model, exact(problem, given)) == ""
    left, right = problem.window
    others = {
        replace(problem, causal=not problem.causal, window=(-1, -1)),
        replace(problem, window=(left, -1), causal=False),
        replace(problem, window=(-1, right)),
        replace(problem, window=(left + 1, right)) if left >= 0 else problem,
        replace(problem, window=(left, right + 1)) if right >= 0 else problem,
    }
    sees = problem.visible_keys(np.arange(problem.seqlen_q), problem.seqlen_q, problem.seqlen_k)
    for other in others:
        seen = other.visible_keys(np.arange(problem.seqlen_q), problem.seqlen_q, problem.seqlen_k)
        ends = np.r_[0:8, -8:0] if problem.seqlen_q > 8 else np.arange(problem.seqlen_q)
        if all(np.array_equal(a[ends], b[ends]) for a, b in zip(sees, seen)):
            continue  # the same keys in the rows that are sampled
        told = check.outside_bound(problem, given, model, exact(other, given))
        assert told.startswith("computes something else: error / bound"), other


@pytest.mark.parametrize("wrong", ["scale", "nan", "head", "last row"])
def test_other_mistakes_of_a_peer_do_not_pass(wrong: str) -> None:
    problem = replace(PROBLEM, causal=True)
    given = drawn(problem)
    output = exact(problem, given)
    out = np.array(output.out)
    if wrong == "scale":
        out = (np.array(exact(replace(problem, softmax_scale=0.1), given).out)).astype(out.dtype)
    elif wrong == "nan":
        out[1, 3, 1, 5] = np.nan
    elif wrong == "head":
        out = out[:, :, ::-1]
    else:
        out[:, -1] = out[:, -2]
    assert check.outside_bound(problem, given, bound_of(problem), LaunchOutput(out)).startswith("computes")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (40, 24)}, {"softcap": 20.0}], ids=str)
@pytest.mark.parametrize("splits", [1, 2])
def test_the_twin_of_the_whole_has_the_bits_of_the_twin_of_a_sample(dtype: Any, mask: dict[str, Any], splits: int):
    problem = AttentionProblem(1, 2, 1, 200, 300, 64, dtype=dtype, **mask)
    given = drawn(problem)
    config = config_of(problem, num_splits=splits)
    found = forward(problem, operands(problem, given), config)
    output = LaunchOutput(found.out, found.lse)  # pyright: ignore[reportArgumentType]
    assert check.wrong_bits(problem, given, config, output) == ""
    found.out.view(np.uint16)[0, -1, 0, 0] ^= 1
    assert check.wrong_bits(problem, given, config, output) == "1 bits differ from the twin"
    assert "differ" in check.wrong_bits(replace(problem, softmax_scale=0.2), given, config, output)
