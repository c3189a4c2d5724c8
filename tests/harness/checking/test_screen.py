"""Rows that a GPU names: its float64 is numpy's, the worst row of all is among them, right calls stay right.

A CPU stands in for the GPU, as the arithmetic is torch's on either.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa3_reference.attention import attention
from fa3_reference.problem import AttentionProblem
from fa3verify import check
from fa3verify.checking.call import AttentionCall
from tests.harness.checking.test_check import RIGHT, ideal

pytestmark = pytest.mark.optional
SCREENED = [name for name, problem in RIGHT.items() if problem.term is None]


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(AttentionCall, "is_on_gpu", True)


def of_torch(given: dict[str, Any]) -> dict[str, Any]:
    from fa3verify.tensors.convert import to_torch

    return {name: to_torch(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}


@pytest.mark.parametrize("name", SCREENED)
def test_all_rows_of_a_right_call_are_computed_and_the_worst_pass(name: str) -> None:
    problem = RIGHT[name]
    tensors, said = ideal(problem)
    found = check(**of_torch(tensors), **of_torch(said))
    assert found.verdict == "pass", str(found)
    assert found.screened == found.rows_of
    assert 4 <= found.rows <= 16
    assert f"the worst of {found.rows_of:,} that were computed on the GPU" in str(found)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SCREENED)
def test_one_wrong_row_of_one_head_is_found_wherever_it_is(name: str, seed: int) -> None:
    problem = RIGHT[name]
    tensors, said = ideal(problem)
    out = tensors["out"].copy()
    rows = out.reshape(-1, out.shape[-1])
    sizes = np.abs(rows.astype(np.float32)).max(axis=1)
    row = int(np.random.default_rng(seed).choice(np.flatnonzero(sizes > 0.05 * sizes.max())))
    rows[row] *= 1.5 if problem.dtype == "e4m3" else 1.05
    found = check(**of_torch(tensors | {"out": out}), **of_torch(said))
    assert found.verdict == "fail", str(found)
    assert found.wrong.startswith(f"1 rows of out, heads {row % problem.nheads};")


@pytest.mark.parametrize("name", ["causal", "empty_rows", "window", "softcap", "sinks", "e4m3", "packed"])
def test_what_is_computed_there_is_the_truth_in_float64(name: str) -> None:
    from fa3verify.checking import screen

    problem = RIGHT[name]
    tensors, said = ideal(problem)
    call = AttentionCall(**of_torch(tensors), **of_torch(said))
    for sequence, head in [(i, head) for i, n in enumerate(call.lengths_q) if n for head in (0, 1)]:
        part = call.part(sequence, call.heads_of(head), np.arange(call.lengths_q[sequence]))
        truth = attention(part.problem, *part.operands.dequantized(part.problem)).out[0]
        exact = screen.exact_out(call, sequence, head)[0].numpy()
        assert np.allclose(exact, truth, rtol=1e-12, atol=1e-13)
        lse = attention(part.problem, *part.operands.dequantized(part.problem)).lse[0].T
        assert np.allclose(screen.exact_out(call, sequence, head)[2].numpy(), lse, rtol=1e-13)


@pytest.mark.parametrize("name", ["causal", "packed"])
def test_one_wrong_lse_of_a_row_whose_out_is_right_is_found(name: str) -> None:
    tensors, said = ideal(RIGHT[name])
    lse = said["lse"].copy()
    lse.reshape(-1)[-7] += 0.01
    found = check(**of_torch(tensors), **of_torch(said | {"lse": lse}))
    assert found.verdict == "fail", str(found)
    assert found.wrong.startswith("1 rows of lse, ")


def test_roundings_of_kernels_for_cpus_excuse_nothing_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, said = ideal(AttentionProblem(1, 1, 1, 1, 1, 32))
    lse = said["lse"] + np.float32(8e-5)  # as exponentials that are 2^-13.6 off make it
    given = of_torch(tensors) | of_torch(said | {"lse": lse}) | {"accumulator": "fp32"}
    assert check(**given).verdict == "fail"
    monkeypatch.setattr(AttentionCall, "is_on_gpu", False)
    assert check(**given).verdict == "question"


def test_nan_in_out_comes_first() -> None:
    tensors, said = ideal(RIGHT["causal"])
    out = tensors["out"].copy()
    out[1, 50, 2] = np.nan
    found = check(**of_torch(tensors | {"out": out}), **of_torch(said))
    assert found.verdict == "fail"
    assert found.wrong.startswith("1 rows of out, heads 2; queries 50;")


def test_a_call_with_a_bias_is_sampled() -> None:
    tensors, said = ideal(RIGHT["bias"])
    assert check(**of_torch(tensors), **of_torch(said)).screened == 0


def test_rows_are_computed_in_tiles_and_units_stop_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    from fa3verify.checking import screen

    tensors, said = ideal(AttentionProblem(2, 4, 2, 70, 100, 32, causal=True))
    whole = check(**of_torch(tensors), **of_torch(said))
    whole_rows = screen.exact_out
    monkeypatch.setattr(screen, "exact_out", lambda *given: whole_rows(*given[:3], 2000))
    assert check(**of_torch(tensors), **of_torch(said)) == whole
    found = check(**of_torch(tensors), **of_torch(said), pairs=30_000)
    assert (found.screened, found.rows_of) == (280, 560)
