"""Gradients checked from their tensors: right ones pass in every kind of call, one wrong row of each is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa3_reference.attention import Attention, attention
from fa3_reference.attention_bwd import attention_bwd
from fa3_reference.problem import AttentionProblem
from fa3verify import check
from fa3verify.checking import gradients
from tests.harness.checking.test_check import RIGHT, ideal

WITH_GRADIENTS = sorted(RIGHT.keys() - {"e4m3", "alibi", "packed_alibi"})


def differentiated(problem: AttentionProblem) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors of a call of an ideal kernel and of its backward, and what is said of it."""
    tensors, said = ideal(problem)
    dtype = tensors["q"].dtype
    dout = np.random.default_rng(5).normal(size=problem.out_shape).astype(dtype)
    q, k, v, d = (x.astype(np.float64) for x in (tensors["q"], tensors["k"], tensors["v"], dout))
    term = next((said[x] for x in ("bias", "attn_mask", "key_padding_mask") if x in said), None)
    further = [x.astype(np.float64) for x in (said.get("sinks"), term) if x is not None]
    forward = Attention(tensors["out"].astype(np.float64), said["lse"].astype(np.float64))
    found = attention_bwd(problem, q, k, v, d, forward, None, *further[problem.sinks :])
    return tensors, said | {"dout": dout} | {name: x.astype(dtype) for name, x in found._asdict().items()}


@pytest.mark.parametrize(("rows", "with_lse"), [("all", False), (24, True)])
@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients_that_an_ideal_kernel_returned_are_right_in_every_kind_of_call(
    name: str, rows: Any, with_lse: bool
) -> None:
    tensors, said = differentiated(RIGHT[name])
    found = check(**tensors, **said | ({} if with_lse else {"lse": None}), rows=rows, accumulator="fp32")
    assert found.verdict == "pass", str(found)
    assert ("D is of dO and O" if with_lse else "the forward is its own") in found.gradients
    assert "rows of dq" in found.gradients
    assert "rows of dv" in found.gradients


@pytest.mark.parametrize("gradient", ["dq", "dk", "dv"])
@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_a_gradient_with_one_row_too_large_in_one_head_is_wrong_and_the_row_is_named(name: str, gradient: str) -> None:
    problem = RIGHT[name]
    tensors, said = differentiated(problem)
    wrong = said[gradient].copy()
    rows = wrong.reshape(-1, *wrong.shape[-2:])
    row = int(np.argmax(np.abs(rows[:, -1].astype(np.float32)).max(axis=1)))
    rows[row, -1] *= 1.1
    found = check(**tensors, **said | {gradient: wrong}, rows="all")
    assert found.verdict == "fail", str(found)
    assert found.wrong.startswith(f"1 rows of {gradient}, heads {wrong.shape[-2] - 1}; ")


def test_gradients_of_another_mask_than_the_output_are_wrong_and_the_mask_is_named() -> None:
    tensors, said = differentiated(RIGHT["causal"])
    problem = RIGHT["plain"]
    q, k, v = (tensors[name].astype(np.float64) for name in "qkv")
    unmasked = attention_bwd(problem, q, k, v, said["dout"].astype(np.float64), attention(problem, q, k, v))
    said |= {name: x.astype(np.float16) for name, x in unmasked._asdict().items()} | {"lse": None}
    found = check(**tensors, **said)
    assert (found.verdict, found.explained) == ("fail", "would be right with causal=False")


def test_heads_of_a_group_that_were_not_added_are_wrong_in_rows_that_are_sampled() -> None:
    tensors, said = differentiated(RIGHT["causal"])
    found = check(**tensors, **said | {"dk": (0.5 * said["dk"]).astype(np.float16)}, rows=24)
    assert found.verdict == "fail"


def test_a_long_call_without_lse_says_which_gradients_were_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "MOST_PAIRS", 100)
    tensors, said = differentiated(RIGHT["causal"])
    found = check(**tensors, **said | {"lse": None})
    assert found.verdict == "pass"
    assert "not dk and dv, which need lse or rows='all' at this length" in found.gradients
    assert "rows of dv" in check(**tensors, **said).gradients


def test_a_long_call_that_only_a_backward_with_its_own_forward_might_explain_is_a_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors, said = differentiated(RIGHT["causal"])
    said |= {"dk": (1.1 * said["dk"]).astype(np.float16)}
    assert check(**tensors, **said).verdict == "fail"
    monkeypatch.setattr(gradients, "MOST_PAIRS", 100)
    found = check(**tensors, **said)
    assert (found.verdict, found.explained.split(":")[1]) == ("question", " rows='all' does")
    assert check(**tensors, **said, rows="all").verdict == "fail"


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"dout": None}, "gradients need dout"),
        ({"dk": np.zeros((2, 70, 2, 32), np.float16)}, r"dk must have shape \(2, 100, 2, 32\)"),
        ({"cache_seqlens": np.array([100, 90])}, "with a cache or alibi_slopes are not checked"),
    ],
    ids=["dout", "shape", "cache"],
)
def test_gradients_that_do_not_fit_the_call_are_refused_with_the_rule(change: dict[str, Any], rule: str) -> None:
    tensors, said = differentiated(RIGHT["plain"])
    with pytest.raises(ValueError, match=rule):
        check(**tensors, **said | change)


@pytest.mark.optional
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "MATH"])
def test_gradients_of_torch_are_right_or_those_of_its_kernels_for_cpus(dtype: str, backend: str) -> None:
    torch = pytest.importorskip("torch")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 2, 150, 64, dtype=getattr(torch, dtype), requires_grad=True) for _ in range(3))
    with sdpa_kernel(getattr(SDPBackend, backend)):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    lse = getattr(out.grad_fn, "_saved_logsumexp", None)
    dout = torch.randn_like(out)
    out.backward(dout)
    named = {"dout": dout, "dq": q.grad, "dk": k.grad, "dv": v.grad, "lse": lse}
    operands = (x.detach() for x in (out, q, k, v))
    found = check(*operands, **named, layout="bhsd", causal=True, accumulator="fp32")
    of_coarse = lse is not None and dtype != "float32"
    assert found.verdict == ("question" if of_coarse else "pass"), str(found)
    assert found.explained.startswith("would be right with exponentials that err") == of_coarse
