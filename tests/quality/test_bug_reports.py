"""What public bug reports of attention were about, made again with small inputs: each dump is judged rightly.

A report has tensors and what its author says of the call; here the tensors are those of a kernel that did otherwise, or
of a right one whose error was taken for a bug.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from click.testing import CliRunner

from fa3_reference.attention import attention
from fa3_reference.attention_bwd import attention_bwd
from fa3_reference.problem import AttentionProblem
from fa3_reference.score_term import ScoreTerm
from fa3verify.cli.main import main

SAID = AttentionProblem(1, 4, 2, 24, 40, 32)
EXIT = {"pass": 0, "fail": 1, "question": 6}
Q, K, V = (
    np.random.default_rng(seed).normal(size=shape).astype(np.float16)
    for seed, shape in enumerate((SAID.q_shape, SAID.k_shape, SAID.v_shape))
)


class Report(NamedTuple):
    """What was really computed, what the author says, and what is due."""

    did: AttentionProblem
    said: dict[str, Any]
    verdict: str
    explained: str = ""
    term: np.ndarray | None = None
    kv_heads: tuple[int, ...] = (0, 1)


MASK = np.random.default_rng(5).random((1, 1, 24, 40)) < 0.5
PADDING = np.arange(40)[None] < 31
REPORTS = {
    "the causal mask moved with an upgrade": Report(
        replace(SAID, causal=True, top_left=True), {"causal": True}, "question", "would be right with top_left=True"
    ),
    "the causal flag is on in one place only": Report(
        replace(SAID, causal=True), {}, "fail", "would be right with causal=True"
    ),
    "the scale is applied twice, or not at all": Report(
        replace(SAID, softmax_scale=1.0), {}, "fail", "would be right with softmax_scale=1.0"
    ),
    "a backend drops the softcap": Report(SAID, {"softcap": 2.0}, "fail", "would be right with softcap=0.0"),
    "the window has one key too few": Report(
        replace(SAID, causal=True, window=(7, 0)),
        {"causal": True, "window": (8, 0)},
        "fail",
        "would be right with window=(7, 0)",
    ),
    "padding is ignored": Report(
        SAID, {"key_padding_mask": PADDING}, "fail", "would be right with key_padding_mask=None"
    ),
    "the mask means what is hidden": Report(
        replace(SAID, term=ScoreTerm("attn_mask", "bh")), {"attn_mask": MASK}, "fail", term=~MASK
    ),
    "kv heads are repeated in the other order": Report(SAID, {}, "fail", kv_heads=(0, 1, 0, 1)),
    "nothing is wrong": Report(replace(SAID, causal=True), {"causal": True}, "pass"),
}


def computed(report: Report) -> np.ndarray:
    heads = [report.kv_heads[i % len(report.kv_heads)] for i in range(len(report.kv_heads))]
    problem = replace(report.did, nheads_kv=len(heads))
    given = [x.astype(np.float64) for x in (Q, K[:, :, heads], V[:, :, heads], report.term) if x is not None]
    return attention(problem, *given).out.astype(np.float16)


def judged(folder: Path, tensors: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Write a dump, and return the exit code of the verb and what it writes as JSON."""
    np.savez(folder / "dump.npz", **tensors)
    run = CliRunner().invoke(
        main, ["check", str(folder / "dump.npz"), "--layout", "bshd", "--rows", "all", "--json", "-"]
    )
    return run.exit_code, json.loads(run.stdout)


@pytest.mark.parametrize("name", REPORTS)
def test_a_dump_is_judged_rightly_and_the_mistake_named_where_one_fact_is_wrong(name: str, tmp_path: Path) -> None:
    report = REPORTS[name]
    code, found = judged(tmp_path, {"out": computed(report), "q": Q, "k": K, "v": V, **report.said})
    assert (found["verdict"], found["explained"]) == (report.verdict, report.explained)
    assert code == EXIT[report.verdict]


def test_rows_that_are_masked_whole_and_hold_nan_are_a_question(tmp_path: Path) -> None:
    mask = MASK.copy()
    mask[:, :, 3] = False
    problem = replace(SAID, term=ScoreTerm("attn_mask", "bh"))
    out = attention(problem, *(x.astype(np.float64) for x in (Q, K, V, mask))).out.astype(np.float16)
    out[:, 3] = np.nan
    code, found = judged(tmp_path, {"out": out, "q": Q, "k": K, "v": V, "attn_mask": mask})
    assert (code, found["verdict"]) == (6, "question")
    assert "rows that see no key" in found["explained"]


def test_an_error_of_a_thirtieth_of_large_values_is_rounding(tmp_path: Path) -> None:
    large = (30 * V).astype(np.float16)
    exact = attention(SAID, *(x.astype(np.float64) for x in (Q, K, large))).out
    out = exact.astype(np.float32).astype(np.float16)
    assert np.abs(out - exact).max() > 5e-3
    assert judged(tmp_path, {"out": out, "q": Q, "k": K, "v": large})[1]["verdict"] == "pass"


def test_gradients_of_k_of_one_head_of_a_group_are_wrong(tmp_path: Path) -> None:
    dout = np.random.default_rng(9).normal(size=SAID.out_shape).astype(np.float16)
    q, k, v, d = (x.astype(np.float64) for x in (Q, K, V, dout))
    forward = attention(SAID, q, k, v)
    due = attention_bwd(SAID, q, k, v, d, forward)
    alone = replace(SAID, nheads=2)
    of_one = attention(alone, q[:, :, ::2], k, v)
    dk = attention_bwd(alone, q[:, :, ::2], k, v, d[:, :, ::2], of_one).dk
    given = {"out": forward.out, "dout": dout, "dq": due.dq, "dk": dk, "dv": due.dv}
    tensors = {name: x.astype(np.float16) for name, x in given.items()} | {"q": Q, "k": K, "v": V}
    code, found = judged(tmp_path, tensors)
    assert (code, found["verdict"]) == (1, "fail")
    assert found["wrong"].startswith("80 rows of dk, heads 0, 1;")
