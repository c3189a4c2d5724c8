"""Gradients of the released FlashAttention-3 on the twin: 0 values differ from what it returned on a GPU.

``golden/backward.json`` holds seeds and hashes, ``golden/backward.npz`` some of the gradients: to locate a difference,
and where more parts meet in dQ than decide its bits. What the forward returned comes of its twin.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from fa3_kernels.faults.table import BackwardFault, faulty
from fa3_kernels.plan.backward import BackwardConfig, backward_config
from fa3_kernels.plan.config import default_config
from fa3_kernels.plan.order import BackwardOrder
from fa3_kernels.twin.backward import Gradients, backward
from fa3_kernels.twin.forward import forward
from fa3_reference.attention import attention
from fa3_reference.attention_bwd import attention_bwd
from fa3_reference.formats import FORMATS, narrowed
from fa3_reference.problem import AttentionProblem, BackwardOperands
from fa3_reports.gradient_range import backward_range
from tests.kernels.device_inputs import GOLDEN
from tests.kernels.twin.test_released import sha

FAMILY = "flash3.dew"
PARTS = 4  # of the recorded calls, so that workers share them
NAMES = ("dq", "dk", "dv")


class Recorded(NamedTuple):
    """One recorded call; a hash is None where bits depend on the order of additions in memory."""

    key: str
    problem: AttentionProblem
    operands: BackwardOperands
    hashes: dict[str, str | None]

    @property
    def config(self) -> BackwardConfig:
        return backward_config(self.problem, family=FAMILY)

    def differing(self, got: Gradients) -> list[str]:
        return [name for name in NAMES if self.hashes[name] not in (None, sha(getattr(got, name)))]


def with_forward(problem: AttentionProblem, q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray):
    """What the backward is given after the family's own forward."""
    given = BackwardOperands(q, k, v, dout=dout, out=dout, lse=np.zeros(problem.lse_shape, np.float32))
    out, lse = forward(problem, given, default_config(problem, family=FAMILY))
    return replace(given, out=out, lse=lse)


@cache
def golden() -> dict[str, Any]:
    return json.loads((GOLDEN / "backward.json").read_text())


@cache
def recorded(key: int) -> Recorded:
    entry = next(e for e in golden()["cases"] if e["key"] == key)
    problem = AttentionProblem(*entry["sizes"], dtype=entry["dtype"], causal=entry["causal"])
    rng = np.random.default_rng([golden()["seed"], key])
    shapes = {"q": problem.q_shape, "k": problem.k_shape, "v": problem.v_shape, "dout": problem.out_shape}
    arrays = [drawn(entry["recipe"], rng, shape, which) for which, shape in shapes.items()]
    q, k, v, dout = (narrowed(x, FORMATS[problem.dtype]) for x in arrays)
    assert sha(np.concatenate([x.reshape(-1).view(np.uint16) for x in (q, k, v, dout)])) == entry["inputs"]
    return Recorded(str(key), problem, with_forward(problem, q, k, v, dout), {name: entry[name] for name in NAMES})


def drawn(recipe: str, rng: np.random.Generator, shape: tuple[int, ...], which: str) -> np.ndarray:
    """Values as the recorded calls drew them."""
    x = rng.standard_normal(shape)
    if recipe == "peaky" and which in "qk":
        x = x * 4
    if recipe == "outlier":
        x = x + 10 * rng.standard_normal(shape) * (rng.random(shape) < 0.002)
    return x + 1 if recipe == "offset" and which == "v" else x


def dq_of_one_run(case: Recorded) -> np.ndarray:
    """Return the dQ that the library returned once, of several that it may return."""
    with np.load(GOLDEN / "backward.npz") as stored:
        return stored[f"{case.key}.dq"].view(case.operands.q.dtype)


@pytest.mark.parametrize("part", range(PARTS))
def test_no_gradient_differs_from_what_the_released_kernel_returned(part: int) -> None:
    cases = [recorded(entry["key"]) for entry in golden()["cases"][part::PARTS]]
    assert len(cases) >= 12
    assert not [f"{c.key}: {names}" for c in cases if (names := c.differing(backward(c.problem, c.operands, c.config)))]


# Every head_dim, both formats, dense and causal, grouped heads, most with two key blocks: the shortest that decide.
DECISIVE = (44, 43, 18, 21, 6, 14, 48)
OTHER = {
    "exponent": "natural",
    "contracts_exponent": False,
    "dots_run": 4,
    "dots_far_first": False,
    "contracts_ds": True,
    "scales_ds": True,
    "scales_sums": True,
    "rows": "descending",
    "heads": "chained",
}
# All scales of these calls give one factor, no value is subnormal and none is packed, which later recordings decide
# (test_backward_recorded.py); the order of key blocks is free; the build has no softcap.
NOT_RECORDED = {"factor", "keeps_subnormals", "keys", "reads_past", "softcap"}


def test_every_switch_of_the_order_is_tried() -> None:
    assert {f.name for f in fields(BackwardOrder)} == {*OTHER, *NOT_RECORDED}


@pytest.mark.parametrize(("switch", "value"), OTHER.items())
def test_every_switch_of_the_order_shows_in_recorded_gradients(switch: str, value: object) -> None:
    cases = [recorded(key) for key in DECISIVE]
    order = replace(cases[0].config.backward.order, **{switch: value})
    assert any(c.differing(backward(c.problem, c.operands, c.config, order=order)) for c in cases)


@pytest.mark.parametrize("fault", [fault for fault in BackwardFault if "slope" not in fault])
def test_every_planted_mistake_shows_in_recorded_gradients(fault: BackwardFault) -> None:
    cases = [recorded(key) for key in (48, 43, 9, 5)] if fault not in EMPTY_ROWS else [empty_rows()]
    assert any(c.differing(faulty(fault)(c.problem, c.operands, c.config)) for c in cases)


EMPTY_ROWS = {BackwardFault.EMPTY_ROW_LSE, BackwardFault.KV_HEAD_MODULO}


@cache
def empty_rows() -> Recorded:
    """Rows without a key and two kv heads, which no recorded call has: the twin's own gradients."""
    problem = AttentionProblem(1, 4, 2, 70, 40, 64, dtype="bf16", causal=True)
    rng = np.random.default_rng(5)
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape, problem.out_shape)
    operands = with_forward(problem, *(rng.standard_normal(s).astype(FORMATS["bf16"].dtype) for s in shapes))
    found = Recorded("", problem, operands, dict.fromkeys(NAMES))
    got = backward(problem, operands, found.config)
    return found._replace(hashes={name: sha(getattr(got, name)) for name in NAMES})


def test_rows_without_a_key_have_zero_gradients_and_add_nothing() -> None:
    case = empty_rows()
    got = backward(case.problem, case.operands, case.config)
    assert np.isneginf(case.operands.lse).any()
    assert not got.dq[:, :30].astype(np.float32).any()
    assert all(np.isfinite(x.astype(np.float32)).all() for x in got)
    silent = case.operands.dout.copy()
    silent[:, :30] = 0
    without = backward(case.problem, replace(case.operands, dout=silent), case.config)
    assert all(np.array_equal(a.view(np.uint16), b.view(np.uint16)) for a, b in zip(got, without, strict=True))


@pytest.mark.parametrize("key", [43, 24, 6])
def test_gradients_are_near_the_truth(key: int) -> None:
    case = recorded(key)
    given = case.operands
    q, k, v, dout = (x.astype(np.float64) for x in (given.q, given.k, given.v, given.dout))
    truth = attention_bwd(case.problem, q, k, v, dout, attention(case.problem, q, k, v))
    for got, want in zip(backward(case.problem, case.operands, case.config), truth, strict=True):
        error = np.sqrt(np.mean(np.square(got.astype(np.float64) - want)) / np.mean(np.square(want)))
        assert error < (1e-3 if case.problem.dtype == "fp16" else 8e-3)  # rel_rmse of the recorded outputs themselves


# dQ of up to 12 key blocks, as the library returned it once.
MANY_BLOCKS = (0, 10, 30, 2, 7, 12, 17, 22, 27, 32, 37, 42, 47)


@pytest.mark.parametrize("key", MANY_BLOCKS)
def test_every_recorded_dq_lies_within_what_some_order_gives(key: int) -> None:
    case = recorded(key)
    observed = dq_of_one_run(case)
    ends = backward_range(case.problem, case.operands, case.config)
    ours = backward(case.problem, case.operands, case.config)
    assert not ends.outside(ours._replace(dq=observed)).dq.any()
    assert not any(x.any() for x in ends.outside(ours))


def test_the_order_of_key_blocks_changes_dq_within_its_range() -> None:
    case = recorded(30)
    ends = backward_range(case.problem, case.operands, case.config)
    order = replace(case.config.backward.order, keys="descending")
    a, b = (backward(case.problem, case.operands, case.config, order=o) for o in (None, order))
    assert (a.dq != b.dq).any()
    assert not ends.outside(b).dq.any()


@pytest.mark.parametrize("name", ["dropped_dq_part", "doubled_dq_part", "rounded_parts"])
def test_a_mistake_in_the_additions_leaves_the_range(name: str) -> None:
    fault = BackwardFault(name)
    case = recorded(30)
    ends = backward_range(case.problem, case.operands, case.config)
    outside = ends.outside(faulty(fault)(case.problem, case.operands, case.config)).dq
    assert outside.mean() > (0.9 if fault is not BackwardFault.ROUNDED_PARTS else 0.05)


def test_what_is_not_known_is_refused_with_the_reason() -> None:
    for changes, words in (
        ({"head_dim_v": 32}, "head_dim_v"),
        ({"seqlen_k": 0}, "keys"),
        ({"softcap": 1.0}, "softcap"),
    ):
        problem = replace(AttentionProblem(1, 1, 1, 8, 8, 64), **changes)
        shapes = (problem.q_shape, problem.k_shape, problem.v_shape, problem.out_shape, problem.out_shape)
        q, k, v, dout, out = (np.zeros(shape, np.float16) for shape in shapes)
        operands = BackwardOperands(q, k, v, dout=dout, out=out, lse=np.zeros(problem.lse_shape, np.float32))
        with pytest.raises(ValueError, match=words):
            backward(problem, operands, backward_config(problem, family=FAMILY))
