"""Our own backward on the twin: gradients within their bound, heads in one chain, an order of each sequence's own."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from fa3_kernels.plan.backward import backward_config
from fa3_kernels.plan.config import default_config
from fa3_kernels.twin.backward import Gradients, backward
from fa3_kernels.twin.forward import forward
from fa3_reference.attention import Attention
from fa3_reference.attention_bwd import attention_bwd
from fa3_reference.bounds.backward import backward_bound
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, BackwardOperands
from fa3_reports.gradient_range import backward_range

FAMILY = "gluon"
# Three or more key blocks add to some rows, so that the order of dQ's parts counts; ends that fill no tile.
PROBLEMS = {
    "dense": AttentionProblem(1, 2, 2, 200, 460, 64),
    "folded": AttentionProblem(1, 1, 1, 400, 400, 128, causal=True),
    "grouped": AttentionProblem(1, 4, 2, 130, 200, 96, dtype="bf16", causal=True),
    "narrow values": AttentionProblem(1, 1, 1, 100, 260, 192, head_dim_v=128),
    "wide": AttentionProblem(1, 1, 1, 100, 260, 200, head_dim_v=136),
    "window": AttentionProblem(1, 2, 1, 150, 400, 64, window=(290, 10)),
    "softcap": AttentionProblem(1, 1, 1, 100, 260, 64, softcap=3.0),
    "rows without keys": AttentionProblem(1, 2, 1, 200, 140, 64, causal=True),
    "packed": AttentionProblem.varlen((140, 0, 70), (150, 20, 260), nheads=2, nheads_kv=1, head_dim=64),
}


def operands_of(problem: AttentionProblem, *, seed: int = 0, offset: float = 0) -> BackwardOperands:
    """Normal operands, with what our forward returns for them; ``offset`` is added to K, so that parts of dQ cancel."""
    rng, dtype = np.random.default_rng(seed), FORMATS[problem.dtype].dtype
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape, problem.out_shape)
    q, k, v, dout = (rng.standard_normal(shape) for shape in shapes)
    q, k, v, dout = (x.astype(dtype) for x in (q, k + offset, v, dout))
    given = BackwardOperands(q, k, v, dout=dout, out=dout, lse=np.zeros(problem.lse_shape, np.float32))
    out, lse = forward(problem, given, default_config(problem))
    return replace(given, out=out, lse=lse)


@cache
def gradients(name: str) -> tuple[BackwardOperands, Gradients]:
    problem = PROBLEMS[name]
    operands = operands_of(problem)
    return operands, backward(problem, operands, backward_config(problem, family=FAMILY))


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_lie_within_their_bound_of_the_float64_reference(name):
    problem, (operands, got) = PROBLEMS[name], gradients(name)
    q, k, v, dout, out, lse = operands.dequantized(problem)
    want = attention_bwd(problem, q, k, v, dout, Attention(out, lse))
    bound = backward_bound(problem, operands, backward_config(problem, family=FAMILY).model)
    for found, true, allowed in zip(got, want, bound, strict=True):
        error = np.abs(found.astype(np.float64) - true)
        assert (error <= allowed).all()
        assert error.max() > 0


@pytest.mark.parametrize(("name", "padded"), [("grouped", 128), ("narrow values", 256)])
def test_three_boxes_of_channels_have_the_bits_of_a_power_of_two(name: str, padded: int) -> None:
    """Channels that are padded add zeros to chains that take the others in the same order, and D is added over both."""
    problem, (operands, got) = PROBLEMS[name], gradients(name)
    config = backward_config(problem, family=FAMILY)
    assert config.head_dim * 4 == padded * 3
    same = backward(problem, operands, replace(config, head_dim=padded))
    assert all(np.array_equal(x, y) for x, y in zip(same, got, strict=True))


def test_rows_without_a_key_have_no_gradient():
    problem, (_, got) = PROBLEMS["rows without keys"], gradients("rows without keys")
    empty = problem.seqlen_q - problem.seqlen_k
    assert not got.dq[:, :empty].any()
    assert got.dq[:, empty + 1 :].any()


def test_dk_and_dv_of_a_group_are_one_chain_over_its_heads():
    problem, (operands, got) = PROBLEMS["grouped"], gradients("grouped")
    config = backward_config(problem, family=FAMILY)
    added = backward(problem, operands, config, order=replace(config.backward.order, heads="added"))
    assert np.array_equal(added.dq, got.dq)
    assert not np.array_equal(added.dk, got.dk)
    assert not np.array_equal(added.dv, got.dv)


@pytest.mark.parametrize("name", ["dense", "folded", "window"])
def test_the_order_of_the_key_blocks_shows_in_dq_alone(name):
    problem = PROBLEMS[name]
    operands, config = operands_of(problem, offset=1000), backward_config(problem, family=FAMILY)
    got = backward(problem, operands, config)
    ascending = backward(problem, operands, config, order=replace(config.backward.order, keys="ascending"))
    assert np.mean(ascending.dq != got.dq) > 0.001
    assert np.array_equal(ascending.dk, got.dk)
    assert np.array_equal(ascending.dv, got.dv)


@pytest.mark.parametrize("name", ["dense", "folded"])
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(name):
    problem, (alone, got) = PROBLEMS[name], gradients(name)
    both, other = replace(problem, batch=2), operands_of(problem, seed=1)
    joined = {x: np.concatenate([getattr(other, x), getattr(alone, x)]) for x in ("q", "k", "v", "dout", "out", "lse")}
    of_both = backward(both, BackwardOperands(**joined), backward_config(both, family=FAMILY))
    assert all(np.array_equal(x[1:], y) for x, y in zip(of_both, got, strict=True))


def test_a_packed_sequence_has_the_bits_that_it_has_alone():
    problem, (operands, got) = PROBLEMS["packed"], gradients("packed")
    for seq in problem.sequences():
        if not seq.seqlen_q:
            continue
        one = AttentionProblem.varlen((seq.seqlen_q,), (seq.seqlen_k,), nheads=2, nheads_kv=1, head_dim=64)
        given = {x: problem.rows_q(getattr(operands, x), seq) for x in ("q", "dout", "out")}
        given |= {x: problem.rows_k(getattr(operands, x), seq) for x in ("k", "v")}
        given["lse"] = problem.rows_lse(operands.lse, seq)
        alone = backward(one, BackwardOperands(**given), backward_config(one, family=FAMILY))
        assert np.array_equal(alone.dq, problem.rows_q(got.dq, seq))
        assert np.array_equal(alone.dk, problem.rows_k(got.dk, seq))
        assert np.array_equal(alone.dv, problem.rows_k(got.dv, seq))


def test_the_gradient_of_lse_is_taken_from_the_dots_of_the_rows():
    """As if D had been another: of P that are powers of two and dO of zeros, dQ has the bits of P dlse K."""
    problem = AttentionProblem(1, 1, 1, 3, 4, 64, softmax_scale=1.0)
    zeros = np.zeros(problem.q_shape, np.float16)
    k = np.random.default_rng(0).standard_normal(problem.k_shape).astype(np.float16)
    lse = np.full(problem.lse_shape, np.log(4), np.float32)
    dlse = np.array([1.0, -0.5, 3.0], np.float32).reshape(problem.lse_shape)
    given = BackwardOperands(zeros, k, np.ones_like(k), dout=zeros, out=zeros, lse=lse, dlse=dlse)
    got = backward(problem, given, backward_config(problem, family=FAMILY))
    assert np.array_equal(got.dq[0, :, 0], (dlse.reshape(3, 1) / 4 * k[0, :, 0].astype(np.float32).sum(0)).astype("f2"))
    assert not got.dk.any()
    assert not got.dv.any()


def test_the_gradient_of_lse_of_a_row_without_a_key_is_not_read():
    problem, (operands, got) = PROBLEMS["rows without keys"], gradients("rows without keys")
    dlse = np.where(np.isneginf(operands.lse), np.float32(np.nan), np.float32(0))
    found = backward(problem, replace(operands, dlse=dlse), backward_config(problem, family=FAMILY))
    assert np.isnan(dlse).any()
    assert all(np.array_equal(x, y) for x, y in zip(found, got, strict=True))


def test_a_family_whose_lse_has_no_gradient_refuses_one():
    problem, (operands, _) = PROBLEMS["dense"], gradients("dense")
    with pytest.raises(ValueError, match=r"flash3\.dew does not take the gradient of lse"):
        backward(problem, replace(operands, dlse=operands.lse), backward_config(problem, family="flash3.dew"))


@pytest.mark.parametrize("seqlens_k", [(150, 0), (0, 150), (0, 0)])
def test_range_of_a_packed_batch_holds_for_a_sequence_without_keys(seqlens_k: tuple[int, int]) -> None:
    problem = AttentionProblem.varlen((20, 30), seqlens_k, nheads=2, nheads_kv=1, head_dim=64)
    operands = operands_of(problem)
    config = backward_config(problem, family=FAMILY)
    got = backward(problem, operands, config)
    ends = backward_range(problem, operands, config)
    assert not any(is_outside.any() for is_outside in ends.outside(got))
    assert bool(got.dq.any()) is any(seqlens_k)
