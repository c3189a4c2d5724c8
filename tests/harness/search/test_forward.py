"""Colonies: judging many problems at once changes no bit of any, and one of them is stored exactly."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from fa3_kernels.plan.families import OURS
from fa3_kernels.twin.forward import forward
from fa3_reference.formats import FORMATS, round_to
from fa3_reference.problem import AttentionProblem, Operands
from fa3_reports.adversary.causes import CAUSES, cause_of
from fa3_reports.adversary.forward import ISLANDS, UNROUNDED, judge, judge_rounded
from fa3_reports.adversary.search import island_of
from fa3verify.search.colony import Environment
from fa3verify.search.forward.chains import _full_fractions
from fa3verify.search.forward.colony import ForwardColony, Island, individual
from fa3verify.search.forward.guide import Guide
from fa3verify.search.forward.judge import truth_error
from fa3verify.search.forward.surroundings import mutate
from tests.reference.exact import exact_attention


def label(island: Island) -> str:
    return f"{island.dtype} {island.name}"


def normal(where: Island, seed: int = 0) -> ForwardColony:
    return ForwardColony.normal(where, np.random.default_rng(seed))


def as_one_problem(colony: ForwardColony, row: int) -> tuple[AttentionProblem, Operands]:
    """One row as a problem of one query that has its own channels and sees its own keys only."""
    where, operands = colony.island, colony.operands
    keys = int(where.visible[row].sum())
    problem = replace(colony.problem, batch=1, seqlen_q=1, seqlen_k=keys, head_dim=where.width, causal=False)
    batch, place = divmod(row, where.rows)
    channels = slice(place * where.width, (place + 1) * where.width)
    arrays = (
        operands.q[batch : batch + 1, place : place + 1, :, channels],
        operands.k[batch : batch + 1, :keys, :, channels],
        operands.v[batch : batch + 1, :keys],
    )
    if operands.q_descale is None or operands.k_descale is None or operands.v_descale is None:
        return problem, Operands(*arrays)
    q_descale = replace(operands.q_descale, values=operands.q_descale.values[batch : batch + 1, :, place : place + 1])
    blocks = -(-keys // operands.k_descale.block_rows) if operands.k_descale.block_rows else 1
    shared = (
        replace(d, values=d.values[batch : batch + 1, :, :blocks]) for d in (operands.k_descale, operands.v_descale)
    )
    return problem, Operands(*arrays, q_descale, *shared)


@pytest.mark.parametrize("where", [island for island in ISLANDS if island.family == OURS], ids=label)
def test_a_row_has_the_bits_of_a_problem_of_its_own(where):
    colony = normal(where)
    together = forward(colony.problem, colony.operands, where.config)
    for row in (0, where.problems // 2, where.problems - 1):
        problem, operands = as_one_problem(colony, row)
        apart = forward(problem, operands, where.config)
        assert np.array_equal(
            together.out.reshape(where.problems, -1)[row].view(np.uint16), apart.out.ravel().view(np.uint16)
        )
        assert together.lse.reshape(-1)[row] == apart.lse.ravel()[0]


@pytest.mark.parametrize("where", ISLANDS, ids=label)
def test_an_individual_comes_back_from_json_with_its_ratios(where):
    colony = normal(where)
    row, column = where.problems - 2, 3
    together, lone = judge(colony), judge(colony.alone((row, column))[0])
    back, place = individual(json.loads(json.dumps(colony.to_json((row, column)))))
    assert place == (row, column)
    again = judge(back)
    assert again["out"][place] == lone["out"][place] >= together["out"][place] * (1 - 1e-9)
    assert again["lse"][row] == lone["lse"][row] >= together["lse"][row] * (1 - 1e-9)


@pytest.mark.parametrize("where", ISLANDS[::4], ids=label)
def test_the_last_rounding_alone_is_between_both_outputs(where):
    colony = normal(where)
    before = forward(colony.problem, colony.operands, where.config, ideal=UNROUNDED).out
    after = forward(colony.problem, colony.operands, where.config).out
    assert before.dtype == np.float32
    assert np.array_equal(before.astype(after.dtype).view(np.uint16), after.view(np.uint16))
    published = judge_rounded(colony)
    assert (published <= 1).all()
    np.testing.assert_allclose(judge(colony)["rounded"], published, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "e4m3"])
def test_all_of_the_error_is_a_rest_where_rounding_p_costs_nothing(dtype):
    """Scores that are all equal have weights of 1, so that only the division by the number of keys rounds."""
    colony = normal(island_of(dtype, "causal"))
    colony.q = np.zeros_like(colony.q)
    judged = judge(colony)
    assert (judged["out"] > 0).mean() > 0.5
    assert np.array_equal(judged["rest"], judged["out"])


@pytest.mark.parametrize("size", [1.0, 2.0**40, 2.0**-40])
@pytest.mark.parametrize(
    "where", [island_of("fp16", "chains"), island_of("bf16", "softcap"), island_of("bf16", "causal")], ids=label
)
def test_the_truth_errs_by_less_than_is_taken_off(where, size):
    pytest.importorskip("flint", reason="needs python-flint (extra 'test')")
    from fa3_reference.attention import attention

    colony = normal(where)
    colony.environment = replace(colony.environment, softmax_scale=colony.environment.softmax_scale * 40)
    colony.v = colony.v * size if where.dtype == "bf16" else colony.v
    problem, arrays = colony.problem, colony.operands.dequantized(colony.problem)
    truth, exact = attention(problem, *arrays), exact_attention(problem, *arrays)
    shape = (where.problems, -1)
    _, out_error, lse_error = truth_error(colony, truth.lse.reshape(-1))
    assert (np.abs(truth.out - exact.out).reshape(shape) <= out_error).all()
    assert (np.abs(truth.lse - exact.lse).reshape(-1) <= lse_error).all()
    assert (out_error <= 2.0**-30 * np.abs(colony.v).max()).all()


@pytest.mark.parametrize("name", ["few", "tile", "two tiles", "tiles", "softcap", "causal"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_guide_foresees_the_error_of_lse(dtype, name):
    """To the last bit: what it takes for exact, scores of one product, is exact here."""
    colony = normal(island_of(dtype, name))
    exact = Guide.of(colony)
    lse = forward(colony.problem, colony.operands, colony.island.config).lse.reshape(-1)
    truth = (exact.top + np.log2(exact.exact.sum(1))) / np.log2(np.e)
    np.testing.assert_allclose(exact.lse_error, np.abs(lse - truth), rtol=0, atol=1e-13)


def of_cause(cause: str) -> ForwardColony:
    """A colony whose row 0 with column 0 has the trigger of one cause."""
    dtype, name = {
        "subnormal": ("e4m3", "few"),
        "flushed": ("bf16", "two tiles"),
        "unnormalised": ("bf16", "few"),
        "raw score": ("bf16", "few"),
        "scale product": ("e4m3", "few"),
        "descale ratio": ("e4m3", "two tiles"),
        "softcap": ("bf16", "softcap"),
        "large maximum": ("bf16", "few"),
        "split": ("e4m3", "splits"),
        "other": ("bf16", "few"),
    }[cause]
    colony = normal(island_of(dtype, name))
    e = colony.environment
    if cause == "subnormal":
        colony.v[0] = 2.0**-9
    elif cause == "flushed":
        colony.q[0], colony.k[0, 16:] = 1, -112
    elif cause == "unnormalised":
        colony.q[0], colony.v[0] = 0, 2.0**126
    elif cause == "raw score":
        colony.q[0], colony.k[0, 0] = 2.0**64, 2.0**64
        colony.environment = replace(e, softmax_scale=2.0**-125)
    elif cause == "scale product":
        colony.q_descale[0], colony.environment = 3.4e38, replace(e, k_descale=np.array([1e-37], np.float32))
    elif cause == "large maximum":
        colony.environment = replace(e, softmax_scale=2.0**40)
    elif cause == "split":
        colony.environment = replace(e, v_descale=np.array([1, 1, 2.0**125], np.float32))
        colony.v[0] = 128
    elif cause == "descale ratio":
        colony.environment = replace(e, v_descale=np.array([1e-20, 1e20], np.float32))
    elif cause == "softcap":
        colony.environment = Environment(e.softmax_scale, 1e-39, e.k_descale, e.v_descale)
    return colony


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_is_told_by_its_trigger(cause):
    assert cause_of(of_cause(cause), 0, 0) == cause


def test_scores_that_are_equal_rescale_nothing_however_low_they_are():
    colony = normal(island_of("bf16", "two tiles"))
    colony.q[0] = 16
    colony.k[0] = -8
    colony.environment = replace(colony.environment, softmax_scale=1.0)
    assert Guide.of(colony).scores[0].max() < -150
    assert cause_of(colony, 0, 0) == "other"


def test_a_wild_mutation_moves_descales_of_neighbouring_blocks_apart():
    where = island_of("e4m3", "splits")
    rng = np.random.default_rng(0)
    colonies = [normal(where) for _ in range(40)]
    before = colonies[0].environment
    apart = 0
    for colony in colonies:
        mutate(colony, 1.0, True, rng)
        for name in ("k_descale", "v_descale"):
            moved = np.log2(getattr(colony.environment, name) / getattr(before, name).astype(np.float64))
            apart += moved.size >= 3 and bool((np.abs(np.diff(moved)) > 40).all() and (np.abs(moved) > 20).all())
    assert apart


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "e4m3"])
def test_a_chain_that_is_made_to_end_in_ones_does_so_in_q_and_in_some_keys_and_keeps_zeros(dtype):
    fmt = FORMATS[dtype]
    rng = np.random.default_rng(3)
    q = round_to(rng.standard_normal(16), fmt, "ieee")
    k = round_to(rng.standard_normal((40, 16)), fmt, "ieee")
    k[:, 5] = 0.0
    chosen = np.array([3, 7, 31])
    row = SimpleNamespace(q=q.copy(), k=k.copy(), fmt=fmt, dtype=dtype, some=lambda: chosen)
    _full_fractions(row, rng)  # type: ignore[arg-type]
    changed = {int(key) for key in np.flatnonzero((row.k != k).any(1))}
    assert changed
    assert changed <= set(chosen.tolist())
    assert (row.k[:, 5] == 0).all()
    fractions = 2 * np.abs(np.frexp(row.k[chosen])[0])
    assert (fractions[row.k[chosen] != 0] >= 2 - 3 * fmt.epsilon).all()
    assert (row.q != q).any()
