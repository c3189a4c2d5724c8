"""Gradients of the bench are judged on cuts of their own output."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("triton")

from fa3_kernels.faults.table import BackwardFault, faulty
from fa3_kernels.plan.backward import backward_config
from fa3_kernels.twin.backward import backward
from fa3_reference.attention import attention
from fa3_reference.bounds.backward import backward_bound
from fa3_reference.problem import BackwardOperands
from fa3_reports.bench import check
from fa3_reports.bench.cells import Cell, select
from fa3_reports.bench.check import judge_gradients as judge
from fa3_reports.bench.kernels import TimedKernel
from fa3verify.known.launches import GivenBackward
from fa3verify.tensors.convert import to_torch

pytestmark = pytest.mark.optional

DENSE = Cell("backward", "fp16", 2, 200, 300, 4, 2, 64, False)
CAUSAL = Cell("backward", "fp16", 1, 260, 260, 2, 2, 128, True)


def timed(cell: Cell, fault: BackwardFault | None = None) -> tuple[GivenBackward, tuple]:
    """What a launch read and returned, by the twin."""
    problem, rng = cell.problem, np.random.default_rng(3)
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape, problem.out_shape)
    q, k, v, dout = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)
    out, lse = attention(problem, *(x.astype(np.float64) for x in (q, k, v)))
    given = BackwardOperands(q, k, v, dout=dout, out=out.astype(np.float16), lse=lse.astype(np.float32))
    found = (faulty(fault) if fault else backward)(problem, given, backward_config(problem, family="gluon"))
    arrays = (given.q, given.k, given.v, given.dout, given.out, given.lse)
    return GivenBackward(*map(to_torch, arrays)), tuple(map(to_torch, found))


@pytest.mark.parametrize("cell", [DENSE, CAUSAL])
def test_right_gradients_are_within_the_bound(cell: Cell) -> None:
    verdict = judge(cell, *timed(cell))
    assert 0 < verdict.ratio_max <= 1
    assert verdict.rel_rmse < 1e-3
    assert verdict.trouble is None


@pytest.mark.parametrize(
    ("cell", "fault"),
    [
        (DENSE, BackwardFault.NO_ROW_DOTS),
        (DENSE, BackwardFault.UNSCALED_DK),
        (DENSE, BackwardFault.KV_HEAD_MODULO),
        (CAUSAL, BackwardFault.CAUSAL_OFF_BY_ONE),
        (CAUSAL, BackwardFault.DROPPED_DQ_PART),
    ],
)
def test_another_function_has_no_speed(cell: Cell, fault: BackwardFault) -> None:
    trouble = judge(cell, *timed(cell, fault)).trouble
    assert trouble is not None
    assert re.fullmatch(r"computes something else: error / bound [0-9.e+]{3,8} in the sampled rows", trouble)


def test_the_truth_of_a_cell_is_computed_once_for_all_of_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    x, found = timed(DENSE)
    cuts = []
    monkeypatch.setattr(
        check, "backward_bound", lambda problem, *rest: cuts.append(problem) or backward_bound(problem, *rest)
    )
    first = judge(DENSE, x, found)
    assert (judge(DENSE, x, found), len(cuts)) == (first, 2)
    assert judge(DENSE, x._replace(dout=2 * x.dout), found).trouble is not None
    assert len(cuts) == 4


def test_gradients_count_two_and_a_half_times_the_forward() -> None:
    backward_cells, forward_cells = (select(grid, ["fp16"], seqlens=[1024]) for grid in ("backward", "paper"))
    assert [2 * a.flops for a in backward_cells] == [5 * b.flops for b in forward_cells]
    assert not select("backward", ["e4m3"])


def test_forwards_and_backwards_are_timed_in_grids_of_their_own() -> None:
    def nothing(*_: object) -> object:
        raise AssertionError

    plain = TimedKernel("a", "", ("fp16",), nothing)  # type: ignore[arg-type]
    of_gradients = TimedKernel("b", "", ("fp16",), nothing, operation="backward")  # type: ignore[arg-type]
    paper = Cell("paper", "fp16", 1, 64, 64, 1, 1, 64, False)
    assert [plain.takes(paper), of_gradients.takes(paper)] == [True, False]
    assert [plain.takes(DENSE), of_gradients.takes(DENSE)] == [False, True]
