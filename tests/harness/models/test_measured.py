"""From log-probabilities of two programs alone: rounding is called rounding, and a planted mistake by its name."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import fa3verify
from fa3verify.cli.main import main

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.optional

from fa3_reference.problem import AttentionProblem  # noqa: E402 (what needs torch comes behind it)
from fa3_reports.measured.predicted_logprobs import made, text  # noqa: E402
from fa3_reports.measured.told_mistakes import planned, program, sampled  # noqa: E402
from fa3verify.models.attention import ExactAttention, LayerCall, attending  # noqa: E402
from fa3verify.models.logprobs import LanguageModel, attention_of, rounded_in  # noqa: E402
from fa3verify.models.measured import Explained, dumped, explain, explained, read  # noqa: E402
from fa3verify.models.mistakes import Layer, known, rotary  # noqa: E402
from fa3verify.models.rounding import deviations  # noqa: E402

TOKENS = 150  # a block of keys has 128


@pytest.fixture(scope="module")
def llama() -> LanguageModel:
    return LanguageModel(made(seed=7), "bf16")


@pytest.fixture(scope="module")
def texts() -> list[Any]:
    return [text(TOKENS, seed=21), text(TOKENS - 10, seed=22)]


@pytest.fixture(scope="module")
def right(llama: LanguageModel, texts: list[Any]) -> dict[str, list[Any]]:
    return {name: sampled(llama, texts, attention_of(name)) for name in ("eager", "sdpa", "twin.flash3.bf16")}


def test_right_programs_are_within_rounding_and_planted_mistakes_are_named(
    llama: LanguageModel, texts: list[Any], right: dict[str, list[Any]]
) -> None:
    plan = planned(random.Random(0), rotary(llama.wide).numpy(), 2, 2, TOKENS - 10)
    cases = [plan[number] for number in (0, 3, 8, 15, 18, 24)]
    others = [sampled(llama, texts, program(each, 2, True)) for each in cases]
    programs = [right["eager"], right["sdpa"], right["twin.flash3.bf16"], *others]
    found = explained(llama, texts, [[b - a for a, b in zip(right["eager"], each)] for each in programs])
    equal, *pairs = found[:3]
    assert equal
    assert equal.seen == equal.relative == 0
    for pair in pairs:
        assert pair, str(pair)
        assert pair.seen > 0
        assert pair.tested == len(known_of(llama)) * 3
    for planted, each in zip(cases, found[3:]):
        assert not each
        assert each.named is not None, f"{planted}: {each}"
        assert (each.named.words, each.named.layer) == (planted.words, planted.layer), f"{planted}: {each}"
        assert each.named.amount == pytest.approx(planted.amount, rel=0.25)
    assert re.match(
        r"not rounding of bf16: as scores scaled by \+[01]\.\d\d% in every layer of the second program "
        r"\(\d+\.\d sigma\); \S+ nats RMS predicted, \S+ seen on 288 tokens$",
        str(found[3]),
    )


def layer_of(llama: LanguageModel, number: int = 0) -> LayerCall:
    calls = []

    class Kept(ExactAttention):
        def attend(self, asked: LayerCall) -> Any:
            calls.append(asked)
            return super().attend(asked)

    with attending(llama.wide, Kept()), torch.no_grad():
        llama.wide(text(TOKENS, seed=21)[None])
    return calls[number]


def known_of(llama: LanguageModel) -> dict[str, Any]:
    return known(Layer.of(layer_of(llama), rotary(llama.wide)))


def test_a_layer_is_exact_and_every_mistake_changes_it(llama: LanguageModel) -> None:
    asked = layer_of(llama, 1)
    layer = Layer.of(asked, rotary(llama.wide))
    assert torch.allclose(layer.out, ExactAttention().attend(asked)[0], atol=1e-5)
    for words, mistake in known(layer).items():
        out = mistake.attend(layer, mistake.amount)
        assert torch.isfinite(out).all(), words
        assert (out - layer.out).abs().max() > 1e-4, words


def test_a_mistake_of_the_first_program_is_told_from_one_of_the_second(
    llama: LanguageModel, texts: list[Any], right: dict[str, list[Any]]
) -> None:
    planted = planned(random.Random(0), rotary(llama.wide).numpy(), 2, 2, TOKENS - 10)[13]
    wrong = sampled(llama, texts, program(planted, 2, True))
    there, back = explained(
        llama, texts, [[b - a for a, b in zip(*pair)] for pair in ((right["eager"], wrong), (wrong, right["eager"]))]
    )
    assert there.named is not None
    assert back.named is not None
    assert there.named.amount == pytest.approx(-back.named.amount)
    assert "of the second program" in str(there)
    assert "of the first program" in str(back)


def test_an_effect_without_a_template_is_no_rounding_and_has_no_name(
    llama: LanguageModel, texts: list[Any], right: dict[str, list[Any]]
) -> None:
    noise = [each + 0.1 * torch.randn(len(each), generator=torch.Generator().manual_seed(3)) for each in right["sdpa"]]
    (found,) = explained(llama, texts, [[b - a for a, b in zip(right["eager"], noise)]])
    assert not found
    assert found.named is None
    assert str(found).startswith("not rounding of bf16, and none of the known mistakes; ")


def test_deviations_are_those_of_right_programs(
    llama: LanguageModel, texts: list[Any], right: dict[str, list[Any]]
) -> None:
    exact = llama.sample(texts[0], ExactAttention(torch.float32), exactly=True).logprobs
    for name, logprobs in right.items():
        (rounded,) = rounded_in(llama, texts[0], [attention_of(name)])
        ratio = ((logprobs[0].numpy() - exact) ** 2).mean() / (deviations(rounded, texts[0]) ** 2).mean()
        assert 0.75 <= ratio**0.5 <= 1.3, name


def test_a_dump_has_the_last_log_probabilities_of_its_tokens() -> None:
    tokens = np.arange(5)
    every = dumped(tokens, [-1, -2, -3, -4]).logprobs
    assert every.tolist() == dumped(tokens, [0, -1, -2, -3, -4]).logprobs.tolist() == [-1, -2, -3, -4]
    response = dumped(tokens, [-3, -4], most=4)
    assert response.tokens.tolist() == [0, 1, 2, 3]
    assert response.logprobs.isnan().tolist() == [True, True, False]
    assert response.logprobs[-1] == -3


@pytest.mark.parametrize(
    ("tokens", "logprobs", "reason"),
    [
        ([1, 2, 3], [-1, np.nan], "must be finite and at most 0: 1 are not"),
        ([1, 2, 3], [-1, -np.inf], "must be finite and at most 0: 1 are not"),
        ([1, 2, 3], [0.5, -1], "must be finite and at most 0: 1 are not"),
        ([1, 2, 3], [-1] * 4, "n integers and at most n log-probabilities"),
        ([1.0, 2.0], [-1], "n integers and at most n log-probabilities"),
        ([[1, 2]], [-1], "n integers and at most n log-probabilities"),
        ([1], [-1], "n integers and at most n log-probabilities"),
    ],
)
def test_what_is_no_dump_is_refused(tokens: Any, logprobs: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        dumped(np.array(tokens), np.array(logprobs))


def test_dumps_of_other_tokens_are_refused(llama: LanguageModel) -> None:
    ids = np.arange(5)
    logprobs = np.full(4, -1.0)
    one = dumped(ids, logprobs)
    for other in ([dumped(ids[::-1], logprobs)], [one, one], []):
        with pytest.raises(ValueError, match="the same tokens of the same texts"):
            explain(llama, [one], other)
    with pytest.raises(ValueError, match="zip"):
        fa3verify.explain(llama.wide, [ids], [logprobs], [])


def test_a_stale_page_is_attention_with_another_page(llama: LanguageModel) -> None:
    layer, _, (q, k, v), _ = layer_of(llama)
    for window, softcap, sinks in ((0, 0.0, None), (40, 0.0, None), (40, 2.0, torch.randn(4))):
        sizes = {"causal": True, "softcap": softcap, "window": (window - 1, 0) if window else (-1, -1)}
        problem = AttentionProblem(1, 4, 2, TOKENS, TOKENS, 64, sinks=sinks is not None, **sizes)
        mistakes = known(x := Layer.of(LayerCall(layer, problem, (q, k, v), sinks), rotary(llama.wide)))
        stale = [each.clone() for each in (k, v)]
        for each in stale:
            each[:, 1, 64:80] = each[:, 1, 48:64].clone()
        due = ExactAttention().attend(LayerCall(layer, problem, (q, *stale), sinks))[0]
        out = mistakes["page 4 of kv head 1 with K and V of the page before"].attend(x, 1)
        assert torch.allclose(out, due, atol=1e-5)
        assert ("windows left out" in mistakes, "softcap left out" in mistakes) == (window > 0, softcap > 0)


def test_the_verb_reads_two_files_and_exits_by_what_it_finds(
    tmp_path: Path, llama: LanguageModel, texts: list[Any], right: dict[str, list[Any]]
) -> None:
    assert llama.narrow is not None
    llama.narrow.save_pretrained(tmp_path / "model")

    def written(name: str, logprobs: list[Any]) -> str:
        named = {f"tokens_{number}": each.numpy() for number, each in enumerate(texts)}
        named |= {f"logprobs_{number}": each.numpy() for number, each in enumerate(logprobs)}
        np.savez(tmp_path / name, **named)
        return str(tmp_path / name)

    trainer = written("trainer.npz", right["eager"])
    engine = written("engine.npz", right["sdpa"])
    wrong = written("wrong.npz", [each - 0.1 for each in right["sdpa"]])
    assert [len(each.tokens) for each in read(Path(trainer), 145)] == [145, TOKENS - 10]

    def called(*options: str) -> Any:
        return CliRunner().invoke(main, ["logprobs", str(tmp_path / "model"), "--measured", *options])

    file = tmp_path / "found.json"
    page = tmp_path / "found.html"
    within = called(trainer, engine, "--tokens", "140", "--json", str(file), "--html", str(page))
    assert within.exit_code == 0, within.output
    assert "within rounding of bf16; " in within.output
    (found,) = json.loads(file.read_text())["found"]
    assert found["tokens"] == 278
    assert f"{within.stdout.strip()}." in page.read_text()
    named = [float(z) for z in re.findall(r"</dt><dd><i [^>]*></i>([^<]*)</dd>", page.read_text())]
    assert named == [pytest.approx(each["z"], rel=1e-2) for each in found["suspects"]]
    assert [*map(abs, named)] == sorted(map(abs, named), reverse=True)
    assert {field for field in found if field != "suspects"} < set(Explained.__slots__)
    beyond = called(trainer, wrong, "--tokens", "140")
    assert beyond.exit_code == 1, beyond.output
    idle = (("--kernel", "eager"), ("--gate", "1"), ("--rotated",), ("--by-token",), ("--page-size", "16"))
    for options in idle:
        refused = called(trainer, engine, *options)
        assert (refused.exit_code, refused.stdout) == (2, ""), options
        assert refused.stderr == f"fa3verify: {options[0]}: no effect with --measured\n"
    refused = called(trainer, engine, "--rest", "fp32")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "--measured is of programs in 16 bits: --rest must be bf16 or fp16, got fp32" in refused.stderr
    np.savez(tmp_path / "empty.npz", logprobs=np.zeros(3))
    assert "needs tokens, and logprobs of each" in called(trainer, str(tmp_path / "empty.npz")).output
    alone = CliRunner().invoke(main, ["logprobs", str(tmp_path / "model")])
    assert (alone.exit_code, "a kernel and a text are needed" in alone.output) == (2, True)
