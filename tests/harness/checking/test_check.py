"""Calls checked from their tensors: right ones pass in every layout, of wrong ones it is told what they would be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fa3_reference.attention import attention
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, Operands
from fa3_reference.quantize import QuantScheme
from fa3_reference.score_term import ScoreTerm
from fa3verify import assert_attention, check
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import Recipe
from fa3verify.operations.forward import Forward

BATCH: dict[str, Any] = {"batch": 2, "nheads": 4, "nheads_kv": 2, "seqlen_q": 70, "seqlen_k": 100, "head_dim": 32}
ARGUMENTS = {"alibi": "alibi_slopes", "key_padding": "key_padding_mask", "attn_mask": "attn_mask"}


def ideal(problem: AttentionProblem, seed: int = 3) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors of a call of an ideal kernel, and what is said of it; layout bshd, or packed."""
    scheme = QuantScheme("head") if problem.dtype == "e4m3" else None
    case = Case("twin.fp16", problem, Recipe("normal", {}, seed), scheme)
    arrays = Forward().draw(problem, case.recipe)
    operands = Forward().prepare(problem, arrays, scheme, {}).operands
    truth = attention(problem, *operands.dequantized(problem))
    fmt = FORMATS["bf16" if problem.dtype == "e4m3" else problem.dtype].dtype
    tensors = {"out": truth.out.astype(fmt), "q": operands.q, "k": operands.k, "v": operands.v}
    return tensors, {"lse": truth.lse.astype(np.float32)} | said_of(problem, operands)


def said_of(problem: AttentionProblem, operands: Operands) -> dict[str, Any]:
    """Return what is said of a call of a problem."""
    said: dict[str, Any] = {"softmax_scale": problem.softmax_scale}
    said |= {name: getattr(problem, name) for name in ("causal", "window", "softcap", "top_left")}
    said |= {"sinks": operands.sinks} if problem.sinks else {}
    for name in ("q_descale", "k_descale", "v_descale"):
        if (descale := getattr(operands, name)) is not None:
            said[name] = descale.by_kv_head(problem.nheads_kv)
    if problem.is_varlen:
        said |= {"cu_seqlens_q": problem.cu_seqlens_q, "cu_seqlens_k": problem.cu_seqlens_k}
    else:
        said["layout"] = "bshd"
    if problem.term is not None:
        said[ARGUMENTS.get(problem.term.kind, "bias")] = operands.term
    return said


RIGHT = {
    "plain": AttentionProblem(**BATCH),
    "causal": AttentionProblem(**BATCH, causal=True),
    "top_left": AttentionProblem(**BATCH, causal=True, top_left=True),
    "empty_rows": AttentionProblem(**BATCH | {"seqlen_k": 40}, causal=True),
    "window": AttentionProblem(**BATCH, window=(20, 3)),
    "softcap": AttentionProblem(**BATCH, softcap=2.0, softmax_scale=0.7),
    "sinks": AttentionProblem(**BATCH, sinks=True),
    "binary32": AttentionProblem(**BATCH, dtype="fp32"),
    "bf16_head_dim_v": AttentionProblem(**BATCH, head_dim_v=48, dtype="bf16"),
    "e4m3": AttentionProblem(**BATCH, dtype="e4m3"),
    "decode": AttentionProblem(**BATCH | {"seqlen_q": 1}, causal=True),
    "packed": AttentionProblem.varlen((1, 0, 70), (17, 5, 100), nheads=4, nheads_kv=2, head_dim=32, causal=True),
    "packed_alibi": AttentionProblem.varlen(
        (1, 70), (17, 100), nheads=4, nheads_kv=2, head_dim=32, term=ScoreTerm("alibi", "b")
    ),
    "bias": AttentionProblem(**BATCH, term=ScoreTerm("bias")),
    "bias_of_heads": AttentionProblem(**BATCH, term=ScoreTerm("bias_fp32", "bq")),
    "mask": AttentionProblem(**BATCH, term=ScoreTerm("attn_mask", "h")),
    "padding": AttentionProblem(**BATCH, term=ScoreTerm("key_padding")),
    "alibi": AttentionProblem(**BATCH, term=ScoreTerm("alibi")),
}


@pytest.mark.parametrize("rows", ["all", 24])
@pytest.mark.parametrize("name", RIGHT)
def test_what_an_ideal_kernel_returned_is_right_in_every_kind_of_call(name: str, rows: Any) -> None:
    problem = RIGHT[name]
    tensors, said = ideal(problem)
    found = check(**tensors, **said, rows=rows)
    assert found.verdict == "pass", str(found)
    total = sum(seq.seqlen_q for seq in problem.sequences()) * problem.nheads
    assert found.rows_of == total
    assert found.rows == total if rows == "all" else 0 < found.rows <= min(24 + 8 * problem.group, total)
    assert found.bits_lost < 1e-6  # a rounding to bf16 by way of binary32


@pytest.mark.parametrize("name", RIGHT)
def test_one_channel_of_one_row_of_the_last_head_that_is_too_large_is_wrong(name: str) -> None:
    tensors, said = ideal(RIGHT[name])
    out = tensors["out"].copy()
    last = out.reshape(-1, *out.shape[-2:])[-1, -1]
    channel = int(np.argmax(np.abs(last.astype(np.float32))))
    last[channel] *= 1.3 if name == "e4m3" else 1.02
    found = check(**tensors | {"out": out}, **said, rows="all")
    assert found.verdict == "fail"
    assert not found
    assert found.wrong.startswith(f"1 rows of out, heads {RIGHT[name].nheads - 1}; queries ")
    assert found.wrong.endswith(f"channels {channel}")
    with pytest.raises(AssertionError, match="FAIL, errors in"):
        assert_attention(**tensors | {"out": out}, **said, rows="all")


@pytest.mark.parametrize(
    ("said", "verdict", "explained"),
    [
        ({"causal": False}, "fail", "causal=True"),
        ({"causal": True, "top_left": True}, "question", "top_left=False"),
        ({"causal": True, "softmax_scale": 1.0}, "fail", "softmax_scale=1 / sqrt(head_dim)"),
        ({"causal": True, "softcap": 0.5}, "fail", "softcap=0.0"),
        ({"causal": True, "window": (20, -1)}, "fail", "window=(-1, -1)"),
        ({"causal": True, "alibi_slopes": np.ones(4, np.float32)}, "fail", "alibi_slopes=None"),
    ],
    ids=["mask", "alignment", "scale", "softcap", "window", "slopes"],
)
def test_one_fact_that_was_said_wrongly_is_named(said: dict[str, Any], verdict: str, explained: str) -> None:
    tensors, _ = ideal(RIGHT["causal"])
    found = check(**tensors, layout="bshd", **said)
    assert (found.verdict, found.explained) == (verdict, f"would be right with {explained}")


def test_a_window_that_is_one_key_too_wide_is_named() -> None:
    tensors, said = ideal(RIGHT["window"])
    found = check(**tensors, **said | {"window": (21, 3)})
    assert found.explained == "would be right with window=(20, 3)"


def test_an_lse_in_base_2_is_a_question_and_right_where_it_is_said() -> None:
    tensors, said = ideal(RIGHT["plain"])
    in_base_2 = said | {"lse": (said["lse"].astype(np.float64) / np.log(2)).astype(np.float32)}
    found = check(**tensors, **in_base_2)
    assert (found.verdict, found.explained) == ("question", "would be right with lse_base=2")
    assert check(**tensors, **in_base_2, lse_base=2).verdict == "pass"


@pytest.mark.parametrize("seqlen_q", [3, 30])
def test_a_small_call_is_checked_whole_whatever_its_groups(seqlen_q: int) -> None:
    tensors, said = ideal(AttentionProblem(2, 2, 1, seqlen_q, 50, 16, causal=True))
    found = check(**tensors, **said)
    assert (found.rows, found.rows_of) == (4 * seqlen_q, 4 * seqlen_q)


def test_rows_that_are_named_are_checked_in_all_heads_and_no_others() -> None:
    tensors, said = ideal(RIGHT["causal"])
    out = tensors["out"].copy()
    out[1, 40, 3] *= 1.02
    found = check(**tensors | {"out": out}, **said, rows=[3, 40])
    assert (found.verdict, found.rows) == ("fail", 2 * 2 * 4)
    assert found.wrong.startswith("1 rows of out, heads 3; queries 40;")
    assert check(**tensors | {"out": out}, **said, rows=[3, 41]).verdict == "pass"


def test_heads_that_read_the_kv_head_of_their_number_modulo_are_found_in_the_rows_that_are_drawn_first() -> None:
    tensors, said = ideal(AttentionProblem(1, 8, 4, 200, 300, 32))
    heads = [0, 2, 4, 6, 1, 3, 5, 7]  # of which numbers 0 and 7 read the right kv head
    mixed = tensors["q"][:, :, heads]
    found = attention(AttentionProblem(1, 8, 4, 200, 300, 32), mixed, tensors["k"], tensors["v"])
    out = found.out[:, :, np.argsort(heads)].astype(np.float16)
    assert check(**tensors | {"out": out}, layout="bshd", rows=64).verdict == "fail"
    assert check(**tensors, **said).verdict == "pass"


def test_what_two_mistakes_explain_is_wrong_without_a_reason() -> None:
    tensors, _ = ideal(RIGHT["causal"])
    found = check(**tensors, layout="bshd", softmax_scale=1.0)
    assert (found.verdict, found.explained) == ("fail", "")


def test_rows_without_a_key_that_hold_the_mean_of_v_are_a_question_and_with_another_error_wrong() -> None:
    tensors, said = ideal(RIGHT["empty_rows"])
    out = tensors["out"].copy()
    out[:, :30] = tensors["v"].mean(axis=1, keepdims=True)[:, :, [0, 0, 1, 1]]
    found = check(**tensors | {"out": out}, **said, rows="all")
    assert found.verdict == "question"
    assert "rows that see no key" in found.explained
    out[:, 40] *= 1.02
    assert check(**tensors | {"out": out}, **said, rows="all").verdict == "fail"


def test_nan_of_a_hidden_key_is_a_question_and_nan_without_a_cause_wrong() -> None:
    tensors, said = ideal(RIGHT["causal"])
    k = tensors["k"].copy()
    k[0, -1] = np.nan
    out = tensors["out"].copy()
    out[0] = np.nan
    found = check(**tensors | {"out": out, "k": k}, **said, rows="all")
    assert (found.verdict, found.unjudged) == ("question", 4 * 32)  # the last row sees the key
    assert check(**tensors | {"out": out}, **said, rows="all").verdict == "fail"


def test_the_other_layout_and_pages_and_a_longer_cache_are_the_same_call() -> None:
    problem = RIGHT["causal"]
    tensors, said = ideal(problem)
    want = check(**tensors, **said, rows="all")
    swapped = {name: x.swapaxes(1, 2) for name, x in tensors.items()}
    assert check(**swapped, **said | {"layout": "bhsd"}, rows="all") == want
    longer = {name: np.pad(tensors[name], ((0, 0), (0, 28), (0, 0), (0, 0))) for name in "kv"}
    lengths = {"cache_seqlens": np.array([100, 100], np.int32)}
    assert check(**tensors | longer, **said, **lengths, rows="all") == want
    table = np.random.default_rng(0).permutation(16).reshape(2, 8).astype(np.int32)
    pages = {name: np.empty((16, 16, 2, 32), np.float16) for name in "kv"}
    for name, x in pages.items():
        x[table] = longer[name].reshape(2, 8, 16, 2, 32)
    assert check(**tensors | pages, **said, **lengths, page_table=table, rows="all") == want


@pytest.mark.optional
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_tensors_of_torch_and_jax_are_read_bit_for_bit(dtype: Any) -> None:
    pytest.importorskip("torch")
    jax = pytest.importorskip("jax")
    from fa3verify.tensors.convert import to_torch

    tensors, said = ideal(replace(RIGHT["causal"], dtype=dtype))
    want = check(**tensors, **said)
    named = {name: x for name, x in said.items() if isinstance(x, np.ndarray)}
    for kind in (to_torch, jax.numpy.asarray):
        foreign = {name: kind(x) for name, x in tensors.items()}
        assert check(**foreign, **said | {name: kind(x) for name, x in named.items()}) == want


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"layout": ""}, "nothing else can tell them apart"),
        ({"out": np.zeros((2, 70, 4, 16), np.float16)}, r"out must have shape \(2, 70, 4, 32\)"),
        ({"q": np.zeros((70, 4, 32), np.float16), "out": np.zeros((70, 4, 32), np.float16)}, "needs cu_seqlens_q"),
        ({"k": np.zeros((2, 100, 3, 32), np.float16)}, "heads must be a multiple of kv heads, got 4 and 3"),
        ({"bias": np.zeros(1), "attn_mask": np.ones(1, bool)}, "one of .* may be given, got bias and attn_mask"),
        ({"out": np.zeros((2, 70, 4, 32))}, "out of fp16, bf16 or fp32"),
        ({"page_table": np.zeros((2, 8), np.int32)}, "a page_table needs cache_seqlens"),
        ({"cache_seqlens": np.array([3])}, "as many sequences as q, got 1 and 2"),
    ],
    ids=["layout", "out", "packed", "heads", "terms", "format", "pages", "lengths"],
)
def test_arrays_that_do_not_fit_each_other_are_refused_with_the_rule(change: dict[str, Any], rule: str) -> None:
    tensors, _ = ideal(RIGHT["plain"])
    with pytest.raises(ValueError, match=rule):
        check(**{**tensors, "layout": "bshd", **change})
