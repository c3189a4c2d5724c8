"""Builds that serve are called so that their arguments mean the problem: a stand-in that reads them has its truth."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch (extra 'gpu')")

import torch

from fa3_reference.attention import attention
from fa3_reference.cache import Cache
from fa3_reference.problem import AttentionProblem
from fa3_reference.score_term import ScoreTerm
from fa3_reports.bits.record import chosen
from fa3_reports.recordings import Recorded, refusal
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import Recipe
from fa3verify.known import flash3_serving, launches, registry
from fa3verify.known.peers import PEERS

pytestmark = pytest.mark.optional

NAMES = (
    *("q", "k", "v", "k_new", "v_new", "q_v", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_k"),
    *("max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k", "q_descale", "k_descale"),
    *("v_descale", "softmax_scale", "is_causal", "window_size_left", "window_size_right", "num_splits"),
    *("rotary_cos", "rotary_sin", "is_rotary_interleaved"),
)


def keys_of(call: dict[str, Any], name: str, sequence: int) -> torch.Tensor:
    """Keys or values of a sequence, by pages or rows, and what is appended."""
    stored = call[name]
    if (packed := call["cu_seqlens_k"]) is not None:
        return stored[packed[sequence] : packed[sequence + 1]]
    used = int(call["seqused_k"][sequence])
    if call["page_table"] is not None:
        own = stored[call["page_table"][sequence].long()].flatten(0, 1)[:used]
    else:
        row = sequence if call["kv_batch_idx"] is None else int(call["kv_batch_idx"][sequence])
        first = 0 if call["leftpad_k"] is None else int(call["leftpad_k"][sequence])
        own = stored[row, first:used]
    new = call[f"{name}_new"]
    if new is None:
        return own
    starts = call["cu_seqlens_k_new"]
    added = new[sequence] if starts is None else new[starts[sequence] : starts[sequence + 1]]
    is_turned = name == "k" and call["rotary_cos"] is not None
    return torch.cat([own, turned(added, used + torch.arange(len(added)), call) if is_turned else added])


def turned(x: torch.Tensor, positions: torch.Tensor, call: dict[str, Any]) -> torch.Tensor:
    """Rows of heads rotated by their positions, in float64; a build reads tables of as many rows as the cache has."""
    assert len(call["rotary_cos"]) == len(call["rotary_sin"]) >= call["max_seqlen_k"]
    cos, sin = (call[name].double()[positions][:, None] for name in ("rotary_cos", "rotary_sin"))
    half = cos.shape[-1]
    shape, axis = ((half, 2), -1) if call["is_rotary_interleaved"] else ((2, half), -2)
    a, b = x.double()[..., : 2 * half].unflatten(-1, shape).unbind(axis)
    pairs = torch.stack([a * cos - b * sin, a * sin + b * cos], axis)
    return torch.cat([pairs.flatten(-2), x[..., 2 * half :].double()], -1)


def stand_in(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64 of what an operator is called with."""
    call = dict(zip(NAMES, arguments, strict=True))
    starts = call["cu_seqlens_q"].tolist()
    queries = call["q"] if call["q_v"] is None else torch.cat([call["q"], call["q_v"]], dim=-1)
    if call["rotary_cos"] is not None:
        is_masked = call["is_causal"] or call["window_size_left"] >= 0
        steps = [
            int(n) + torch.arange(len(x)) * is_masked
            for n, x in zip(call["seqused_k"], queries.tensor_split(starts[1:-1]))
        ]
        queries = turned(queries, torch.cat(steps), call)
    keys, values = ([keys_of(call, name, i) for i in range(len(starts) - 1)] for name in "kv")
    if call["q_v"] is not None:
        keys = [torch.cat(x, dim=-1) for x in zip(keys, values, strict=True)]
    problem = AttentionProblem.varlen(
        np.diff(starts).tolist(),
        [len(x) for x in keys],
        nheads=queries.shape[1],
        nheads_kv=keys[0].shape[1],
        head_dim=queries.shape[2],
        head_dim_v=values[0].shape[2],
        softmax_scale=call["softmax_scale"],
        causal=call["is_causal"],
        window=(-1, -1) if call["is_causal"] else (call["window_size_left"], call["window_size_right"]),
        dtype="bf16",
        qv=call["q_v"] is not None,
    )
    assert call["max_seqlen_q"] == max(np.diff(starts))
    assert call["max_seqlen_k"] >= max(map(len, keys) if call["seqused_k"] is None else call["seqused_k"])
    found = attention(problem, *(x.double().numpy() for x in (queries, torch.cat(keys), torch.cat(values))))
    return torch.from_numpy(found.out), torch.from_numpy(found.lse)


OPERATOR = stand_in
OPERATOR._schema = SimpleNamespace(arguments=[SimpleNamespace(name=name) for name in NAMES])  # type: ignore[attr-defined]
FLASH2 = (  # the names by which FlashAttention-2's operator for packed sequences takes its arguments
    *("q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "block_table", "alibi_slopes"),
    *("max_seqlen_q", "max_seqlen_k", "p_dropout", "softmax_scale", "zero_tensors", "is_causal", "window_size_left"),
    *("window_size_right", "softcap", "return_softmax", "num_splits", "gen"),
)
LENGTHS = ((1, 5, 70), (17, 100, 70))
CACHES = {
    "pages": Cache(16, behind="nan"),
    "rows": Cache(leftpad=(3, 0, 9), indexed=True),
    "appended_to_pages": Cache(64, new=(1, 5, 70)),
    "appended_to_rows": Cache(new=(2, 2, 2)),
    "rotated_in_pages": Cache(64, new=(1, 5, 70), rotary_dim=16),
    "rotated_in_rows": Cache(new=(1, 5, 70), rotary_dim=32, interleaved=True),
}


def on_this_machine(x: np.ndarray) -> torch.Tensor:
    """Stands in for the copy to a GPU."""
    return torch.from_numpy(np.array(x, np.float32 if x.dtype.kind == "V" else x.dtype))


@pytest.mark.parametrize("mask", [{"causal": True}, {}, {"window": (20, 5)}], ids=str)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("is_absorbed", [False, True])
def test_what_a_build_is_called_with_is_the_problem(monkeypatch, cache, mask, is_absorbed) -> None:
    monkeypatch.setattr(launches, "to_gpu", on_this_machine)
    sizes = {"head_dim": 96, "head_dim_v": 32, "qv": True} if is_absorbed else {"head_dim": 32}
    problem = AttentionProblem.varlen(
        *LENGTHS, nheads=4, nheads_kv=2, dtype="bf16", cache=CACHES[cache], **sizes, **mask
    )
    case = Case("vllm.bf16", problem, Recipe("normal", {}, 1))
    operands = case.operands()
    out, lse = flash3_serving.prepare(OPERATOR, problem, launches.served(problem, operands), {})()[:2]
    truth = attention(problem, *operands.dequantized(problem))
    np.testing.assert_allclose(out.numpy(), truth.out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse.numpy(), truth.lse, rtol=1e-12)


def test_an_argument_that_a_build_does_not_have_is_refused() -> None:
    problem = AttentionProblem.varlen((1,), (5,), nheads=1, nheads_kv=1, head_dim=16, dtype="bf16", cache=Cache())
    given = {"q": torch.zeros(1, 1, 1, 16), "sinks": torch.zeros(1), "k_cache": torch.zeros(1, 6, 1, 16)}
    with pytest.raises(ValueError, match="this build takes no sinks"):
        flash3_serving.prepare(OPERATOR, problem, given, {})


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["batch", "packed"])
def test_slopes_of_alibi_reach_the_build_that_takes_them_and_no_other(monkeypatch, lengths) -> None:
    monkeypatch.setattr(launches, "to_gpu", on_this_machine)
    sizes: dict[str, Any] = {"nheads": 4, "nheads_kv": 2, "head_dim": 32, "term": ScoreTerm("alibi", shared="b")}
    problem = (
        AttentionProblem.varlen(*lengths, **sizes) if lengths else AttentionProblem(2, seqlen_q=5, seqlen_k=9, **sizes)
    )
    operands = Case("flash2.vllm.fp16", problem, Recipe("normal", {}, 1)).operands()
    given = launches.served(problem, operands)
    seen: dict[str, Any] = {}

    def flash2(*arguments: Any) -> list[torch.Tensor]:
        seen.update(zip(FLASH2, arguments, strict=True))
        packed = seen["q"]
        return [packed, torch.zeros(packed.shape[1], len(packed))]

    flash2._schema = SimpleNamespace(arguments=[SimpleNamespace(name=name) for name in FLASH2])  # type: ignore[attr-defined]
    out, lse = flash3_serving.prepare(flash2, problem, given, {})()[:2]
    assert (tuple(out.shape), tuple(lse.shape)) == (problem.out_shape, problem.lse_shape)
    np.testing.assert_array_equal(seen["alibi_slopes"], operands.term)
    assert seen["p_dropout"] == 0.0
    assert seen["max_seqlen_k"] == problem.seqlen_k
    assert len(seen["cu_seqlens_k"]) == problem.batch + 1
    with pytest.raises(ValueError, match="this build takes no alibi_slopes"):
        flash3_serving.prepare(OPERATOR, problem, given, {})


@pytest.mark.parametrize("library", [name for name, peer in PEERS.items() if peer.serves and peer.family])
def test_every_case_that_is_recorded_has_a_twin(library: str) -> None:
    cases = chosen(library, "broad", rounds=1, every=1)
    assert len({case.key() for case in cases}) == len(cases)
    assert not {refusal(library, Recorded(case, "")) for case in cases} - {""}


@pytest.mark.parametrize(
    "problem",
    [
        AttentionProblem(3, 4, 2, 17, 40, 32, dtype="bf16", causal=True),
        AttentionProblem.varlen(*LENGTHS, nheads=4, nheads_kv=2, head_dim=32, dtype="bf16", window=(20, 5)),
    ],
    ids=["batch", "packed"],
)
def test_keys_that_lie_in_no_cache_are_packed(monkeypatch, problem) -> None:
    monkeypatch.setattr(launches, "to_gpu", on_this_machine)
    operands = Case("vllm.bf16", problem, Recipe("normal", {}, 1)).operands()
    out, lse = flash3_serving.prepare(OPERATOR, problem, launches.served(problem, operands), {})()[:2]
    truth = attention(problem, *operands.dequantized(problem))
    np.testing.assert_allclose(out.numpy(), truth.out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse.numpy(), truth.lse, rtol=1e-12)


def test_appending_more_queries_than_keys_is_not_asked_of_a_build_that_refuses_it():
    """The operator holds the queries, and not the new keys, against the places of the cache."""
    sizes = {"nheads": 1, "nheads_kv": 1, "head_dim": 128, "dtype": "bf16", "causal": True}
    refused, taken = (AttentionProblem.varlen((n,), (5,), cache=Cache(16, new=(2,)), **sizes) for n in (6, 5))
    kernel = registry.find("sglang.bf16")
    config = kernel.config_for(taken)
    assert "no more queries than keys" in kernel.refusal(refused)
    assert "no more queries than keys" in kernel.unreachable(refused, config)  # where a property comes to such a call
    assert kernel.refusal(taken) is kernel.unreachable(taken, config) is None
