"""Problems written in a line: every word becomes its field, and what is not understood is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from fa3_reference.layout import Cache
from fa3_reference.problem import AttentionProblem
from fa3verify.cases import lines
from fa3verify.cases.practice import models

DENSE = AttentionProblem(8, 28, 4, 730, 7700, 128, dtype="bf16")
EVERY = [
    *("28/4", "8 x 730 x 7700", "d192/128", "fp16", "causal", "packed", "window 40,-1", "chunk 512", "softcap 2.5"),
    "scale 1e-3",
]


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("", {}),
        ("causal", {"causal": True}),
        ("window 128", {"window": (128, 0)}),
        ("window -1,7", {"window": (-1, 7)}),
        ("d64", {"head_dim": 64, "head_dim_v": 64, "softmax_scale": None}),
        ("d192/128", {"head_dim": 192, "head_dim_v": 128, "softmax_scale": None}),
        ("e4m3", {"dtype": "e4m3"}),
        ("softcap 50", {"softcap": 50.0}),
        ("scale 0.25", {"softmax_scale": 0.25}),
        ("chunk 2048", {"attention_chunk": 2048}),
    ],
)
def test_a_word_changes_its_field_alone(words: str, fields: dict[str, Any]) -> None:
    assert lines.read_line(f"28/4 8 x 730 x 7700 {words}") == (replace(DENSE, **fields), "forward")


@pytest.mark.parametrize(
    ("sizes", "queries", "keys"),
    [
        ("2 x 50 packed", (50, 50), (50, 50)),
        ("2 x 1 x 50 page 16", (1, 1), (50, 50)),
        ("3 x 300,1,500", (300, 1, 500), (300, 1, 500)),
        ("2 x 3,4 x 300,70", (3, 4), (300, 70)),
        ("2 x 3,4 x 300", (3, 4), (300, 300)),
        ("2 x 1 x 300,70", (1, 1), (300, 70)),
        ("2 x 300,70", (300, 70), (300, 70)),
    ],
)
def test_lengths_of_their_own_are_packed(sizes: str, queries: tuple[int, ...], keys: tuple[int, ...]) -> None:
    problem, _ = lines.read_line(f"4 {sizes}")
    assert (problem.seqlens_q, problem.seqlens_k) == (queries, keys)


def test_keys_lie_in_pages_or_rows_and_gradients_are_asked_for() -> None:
    assert lines.read_line("8/2 4 x 1 x 99 page 16")[0].cache == Cache(16)
    assert lines.read_line("8/2 4 x 1 x 99 rows")[0].cache == Cache()
    assert lines.read_line("8/2 4 x 99 backward")[1] == "backward"


@given(st.permutations(EVERY), st.sampled_from([" ", ", ", "  "]))
def test_words_come_in_any_order(words: list[str], between: str) -> None:
    assert lines.read_line(between.join(words)) == lines.read_line(" ".join(EVERY))


@given(st.integers(1, 70), st.integers(0, 9), st.integers(1, 40), st.integers(0, 90))
def test_a_range_draws_lengths_within_it_by_the_seed(batch: int, seed: int, low: int, more: int) -> None:
    line = f"4 {batch} x {low}-{low + more}"
    problem, _ = lines.read_line(line, seed)
    assert problem == lines.read_line(line, seed)[0]
    assert problem.seqlens_k is not None
    assert all(low <= n <= low + more for n in problem.seqlens_k)
    assert problem.seqlens_q == problem.seqlens_k
    if batch > 20 and more > 20:
        assert len(set(problem.seqlens_k)) > 1
        assert problem != lines.read_line(line, seed + 1)[0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("28/4 8 x 77 pge 16", "'pge' is not understood; words are HEADS[/KV], BATCH x [QUERIES x] KEYS, dHEAD_DIM"),
        ("28/4 8 x 77 d128/64/32", "'d128/64/32' is not understood"),
        ("28/4 8 x 77 page", "'page' is not understood"),
        ("28/4 8 x 77 causal page causal", "'page' is not understood"),
        ("28/4 8 x 77 page 16 page 64", "'page 64' states again what another word did"),
        ("28/4 8 x 77 page 16 rows", "'rows' states again"),
        ("28/4 16 8 x 77", "'16' states again"),
        ("8 x 77", "heads and sizes must be there"),
        ("28/4 d64", "heads and sizes must be there"),
        ("28/4 3000-13000", "'3000-13000' is not understood"),
        ("28/4 3 x 1 x 5,6", "a list must have a length for each of 3 sequences, got '5,6'"),
        ("28/4 4 x 1 x 5,6", "a list must have a length for each of 4 sequences, got '5,6'"),
        ("28/4 3 x 9-5", "low > high"),
        ("28/5 8 x 77", "nheads must be a multiple of nheads_kv, got 28 and 5"),
        ("28/4 8 x 77 page 16 backward", "keys in page or rows of a cache have no backward"),
    ],
)
def test_what_is_not_understood_is_named(line: str, said: str) -> None:
    with pytest.raises(ValueError, match="problem ") as raised:
        lines.read_line(line)
    assert str(raised.value).startswith(f"problem {line!r}: {said}")


def test_a_file_has_a_problem_a_line(tmp_path: Path) -> None:
    path = tmp_path / "problems.txt"
    path.write_text("# ours\n16 2 x 300 causal  # a layer\n\n8 2 x 5-90\n")
    assert lines.lines_in(path) == ["16 2 x 300 causal", "8 2 x 5-90"]


def test_lines_of_models_have_the_heads_and_masks_of_every_layer() -> None:
    asked = [lines.read_line(line) for line in dict.fromkeys(lines.lines_of_models((1, 16)))]
    assert len(asked) == len(set(asked))
    for model in models():
        own = model.share
        layer = own.problem("bf16", 1, 4096)
        alike = [
            problem
            for problem, _ in asked
            if (problem.nheads, problem.nheads_kv) == (own.nheads, own.nheads_kv)
            and (problem.head_dim, problem.head_dim_v) == (layer.head_dim, layer.head_dim_v)
            and (problem.softcap, problem.softmax_scale) == (layer.softcap, layer.softmax_scale)
            and problem.window == layer.window
            and max(problem.seqlens_k or ()) <= min(model.context, 13000)
        ]
        assert {problem.batch for problem in alike} == {1, 8, 64}, model.name
        assert {problem.cache.page_size if problem.cache else 0 for problem in alike} >= (
            {1, 16} if model.causal else {0}
        )
        steps = [problem for problem in alike if problem.seqlen_q == 1]
        assert bool(steps) == model.causal
        prompts = [problem for problem in alike if problem.seqlen_q > 1]
        assert any(problem.causal == (model.causal and model.window < 0) for problem in prompts)
