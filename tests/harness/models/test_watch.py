"""Watching a program: wrong attention is found in its layer and step, and right programs run as without it."""

from __future__ import annotations

import importlib
import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import fa3verify
from fa3_reference.problem import AttentionProblem
from fa3verify.checking.call import AttentionCall
from fa3verify.checking.dumps import load

torch = pytest.importorskip("torch")
WatchReport = importlib.import_module("fa3verify.models.report").WatchReport

pytestmark = pytest.mark.optional
F = torch.nn.functional
ORIGINAL = F.scaled_dot_product_attention


class Layer(torch.nn.Module):
    """Attention of 4 heads over 2 of K and V, whose output the model may be told to spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(64, 128)
        self.spoil: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (-1, 16)).transpose(1, 2) for y in self.qkv(x).split((64, 32, 32), -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + out.transpose(1, 2).flatten(2)


class Model(torch.nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList([Layer(), Layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def train(model: torch.nn.Module, steps: int, before: Any = lambda step: None) -> list[float]:
    """Train on one batch of 2 x 40 tokens, and return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(2))
    losses = []
    for step in range(steps):
        before(step)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Spoiled(torch.autograd.Function):
    """Return a tensor, or its gradient, with one factor on the rows of one head."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.factor = backward
        return x * forward

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient * ctx.factor, None, None


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Put a kernel in the place of torch's that is wrong as a dictionary says: by "out", "q", "k" or "v", a factor."""
    said: dict[str, Any] = {"at": lambda: True}

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
        factors = said if said["at"]() else {}
        query, key, value = (
            Spoiled.apply(x, 1, factors[name]) if name in factors else x
            for name, x in (("q", query), ("k", key), ("v", value))
        )
        out = ORIGINAL(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return Spoiled.apply(out, factors["out"], 1) if "out" in factors else out

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    return said


def test_sound_training_has_no_finding_and_all_layers_and_steps(tmp_path: Path, capsys: Any) -> None:
    with fa3verify.watch(one_in=1, budget=math.inf, folder=tmp_path) as found:
        watched = train(Model(), 4)
    assert found
    assert not found.reasons
    assert [(x.site.layer, x.site.step) for x in found.checked if x.kind == "outputs"] == [
        (f"layers.{i}", step) for step in range(4) for i in range(2)
    ]
    assert len(found.checked) == 16  # with gradients
    assert str(found) in capsys.readouterr().out
    assert watched == train(Model(), 4)


@pytest.mark.parametrize("name", ["out", "q", "k", "v"])
def test_one_layer_that_is_wrong_from_a_step_on_is_named_with_the_step(
    tmp_path: Path, spoiled: dict[str, Any], name: str
) -> None:
    model = Model()
    calls: list[int] = []
    spoiled |= {name: 1.02, "at": lambda: calls.append(0) or (len(calls) > 6 and len(calls) % 2 == 0)}
    with fa3verify.watch(one_in=1, budget=math.inf, folder=tmp_path) as found:
        train(model, 6)
    assert not found
    wrong = [x for x in found.checked if not x.found]
    assert {x.site.layer for x in wrong} == {"layers.1"}
    assert {x.site.step for x in wrong} == {3, 4, 5}
    assert {x.kind for x in wrong} == ({"outputs", "gradients"} if name == "out" else {"gradients"})
    assert not fa3verify.check(**load(found.dumps["layers.1"]), accumulator="fp32")
    assert "test_watch.py" in found.dumps["layers.1"].with_suffix(".txt").read_text()
    assert f"wrong in {len(wrong)} of 12 checks of layers.1, first: {wrong[0]}" in str(found)


def test_a_wrong_call_raises_where_it_is_asked_for(tmp_path: Path, spoiled: dict[str, Any]) -> None:
    spoiled["out"] = 1.02
    with (
        pytest.raises(AssertionError, match=r"in layers\.0, step 0"),
        fa3verify.watch(one_in=1, folder=tmp_path, raises=True),
    ):
        train(Model(), 1)
    assert F.scaled_dot_product_attention.__name__ == "attention"


def test_everything_is_put_back_and_other_holders_of_the_function_are_watched(tmp_path: Path) -> None:
    layer = torch.nn.Module()
    layer.attention = F.scaled_dot_product_attention
    registry = {"sdpa": F.scaled_dot_product_attention}
    x = torch.randn(1, 1, 4, 8)
    with fa3verify.watch(one_in=1, folder=tmp_path) as found:
        from torch.nn.functional import scaled_dot_product_attention as taken

        layer.attention(x, x, x)
        registry["sdpa"](x, x, x)
        torch.nn.MultiheadAttention(8, 1)(x[0], x[0], x[0], need_weights=False)
    assert found.calls == {"scaled_dot_product_attention": 3}
    assert layer.attention is registry["sdpa"] is F.scaled_dot_product_attention is ORIGINAL
    assert torch.equal(taken(x, x, x), ORIGINAL(x, x, x))
    assert found.calls.total() == 3


@pytest.mark.parametrize(("name", "kind"), [("out", "out"), ("q", "operands")])
def test_the_first_nan_is_told_with_its_place_and_layer(
    tmp_path: Path, spoiled: dict[str, Any], name: str, kind: str
) -> None:
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    (q if name == "q" else v)[0, :, 5, 2] = math.nan if name == "q" else 1
    spoiled |= {"out": math.inf} if name == "out" else {}
    with fa3verify.watch(one_in=1, folder=tmp_path) as found:
        F.scaled_dot_product_attention(q, k, v)
    assert list(found.not_finite) == [kind]
    place = "out[0, 0, 0, 0]" if name == "out" else "q[0, 0, 5, 2]"
    assert found.not_finite[kind].startswith(f"{place} is not finite")
    assert bool(found) == (name == "q")
    assert ("values of which operands" in str(found)) == (name == "q")


def test_shapes_of_drawn_calls_are_lines_that_are_read_as_problems(tmp_path: Path) -> None:
    q, k = torch.randn(2, 4, 9, 8, dtype=torch.bfloat16), torch.randn(2, 2, 9, 8, dtype=torch.bfloat16)
    with fa3verify.watch(one_in=1, budget=math.inf, folder=tmp_path):
        for _ in range(3):
            F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
    (line,) = map(json.loads, (tmp_path / "shapes-rank0.jsonl").read_text().splitlines())
    assert (line["drawn"], line["function"]) == (3, "scaled_dot_product_attention")
    problem = AttentionProblem.from_json(line["problem"])
    assert problem == AttentionProblem(2, 4, 2, 9, 9, 8, dtype="bf16", causal=True, top_left=True)


def test_copies_that_wait_for_gradients_stay_within_the_memory_that_is_allowed(tmp_path: Path) -> None:
    x = torch.randn(1, 1, 64, 16, requires_grad=True)
    allowed = 5 * 2 * 4 * x.nbytes
    with fa3verify.watch(one_in=1, budget=math.inf, memory_bytes=allowed, folder=tmp_path) as found:
        waiting = [F.scaled_dot_product_attention(x, x, x) for _ in range(8)]
        torch.stack(waiting).sum().backward()
    kinds = Counter(part.kind for part in found.checked)
    assert 3 <= kinds["gradients"] < 8
    assert kinds["gradients"] + found.reasons["gradients for lack of time or memory"] == 8
    assert 0 < found.most_held_bytes <= allowed


def test_a_second_watch_is_refused_while_one_is_running(tmp_path: Path) -> None:
    with (
        fa3verify.watch(folder=tmp_path),
        pytest.raises(ValueError, match="another watch is running"),
        fa3verify.watch(folder=tmp_path),
    ):
        pass


def test_all_checks_together_stay_within_the_budget_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("fa3verify.models.report.time.perf_counter", lambda: now[0])
    report = WatchReport(1, 0.02, 0, 0, tmp_path)
    rng = random.Random(0)
    for _ in range(4000):
        now[0] += 0.03
        for kind, work in (("outputs", rng.randint(1, 20)), ("gradients", rng.randint(50, 90))):
            if report._has_time(kind, work):
                with report._spending(kind, work):
                    now[0] += work * 2e-3
    assert report.elapsed_s * 0.017 < sum(report.spent_s.values()) <= report.elapsed_s * 0.02
    assert min(report.spent_s["outputs"], report.spent_s["gradients"]) > report.elapsed_s * 0.005


@pytest.mark.parametrize("one_of", [1, 5, 200])
def test_probability_of_detection_is_the_frequency_with_which_errors_are_found(tmp_path: Path, one_of: int) -> None:
    calls, checked, rows, rows_of, runs = 60, 15, 8, 64, 4000
    x = torch.ones(1, 1, 8, 8)
    report = WatchReport(4, 0.02, 0, 0, tmp_path)
    with fa3verify.watch(one_in=1, folder=tmp_path) as watched:
        F.scaled_dot_product_attention(x, x, x)
    (part,) = watched.checked
    report.calls["f"] = calls
    report.checked = [part._replace(rows_of=rows_of)] * checked
    assert part.found.rows == rows
    rng = random.Random(1)
    hits = 0
    for _ in range(runs):
        wrong = [rng.randrange(rows_of) if rng.randrange(one_of) == 0 else None for _ in range(calls)]
        drawn = rng.sample(range(calls), checked)
        hits += any(wrong[i] is not None and wrong[i] < rows for i in drawn)
    expected = report.detection(one_of)
    assert abs(hits / runs - expected) < 4 * math.sqrt(expected * (1 - expected) / runs) + 0.02


def with_one_wrong_row(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
):
    out = ORIGINAL(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    out[1, 4, 123] = out[1, 4, 124]
    return out


def test_one_wrong_row_of_one_head_is_found_in_any_drawn_call_whose_rows_are_all_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AttentionCall, "is_on_gpu", True)  # a CPU computes as a GPU does
    monkeypatch.setattr(F, "scaled_dot_product_attention", with_one_wrong_row)
    q, k, v = torch.randn(3, 2, 6, 300, 32, generator=torch.Generator().manual_seed(1)).half()
    for seed in range(5):
        with fa3verify.watch(one_in=1, budget=math.inf, folder=tmp_path, seed=seed) as found:
            F.scaled_dot_product_attention(q, k, v)
        assert not found
        assert "the worst of 3,600 that were computed on the GPU" in str(found)
        assert "sequence 1, head 4" in str(found.checked[0])
        assert found.detection(1) == 1
    dump = next(iter(found.dumps.values()))
    assert fa3verify.check(**load(dump)).verdict == "fail"
