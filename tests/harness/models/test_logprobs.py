"""What kernels do to log-probabilities is measured, predicted where it is rounding, and named where it is a mistake."""

from __future__ import annotations

import csv
import json
import math
import re
from itertools import chain
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from fa3verify.cli.main import main
from tests.house import ROOT

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.optional

from fa3_reference.quantize import QuantScheme  # noqa: E402 (what needs torch comes behind it)
from fa3_reports.measured.predicted_logprobs import KERNELS, KINDS, SIZES, made, run, text  # noqa: E402
from fa3verify.known.registry import find  # noqa: E402
from fa3verify.models import attention, decoding, logprobs, page, rounding, spending  # noqa: E402

ANY = (
    *("missed_rescale", "dropped_last_tile", "kv_head_modulo", "stale_v", "missing_column"),
    *("truncated_p", "truncated_output", "coarse_exp2"),
)


@pytest.fixture(scope="module")
def llama() -> Any:
    return made()


@pytest.mark.parametrize("rest", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_rounding_does_is_predicted_and_no_right_call_is_called_wrong(kind: str, rest: Any) -> None:
    with (ROOT / "reports" / "logprobs" / "random_models.csv").open() as file:
        published = {
            row["kernel"]: row
            for row in csv.DictReader(file)
            if (row["model"], row["seed"], row["rest"]) == (kind, "0", rest)
        }
    found = run(kind, rest)
    assert found
    for kernel in found.kernels:
        assert 0.8 <= kernel.found.rms / kernel.predicted <= 1.25, str(kernel)
        assert kernel.predicted == pytest.approx(float(published[kernel.name]["predicted_nats"]), rel=0.05)
        assert kernel.calls == (0 if kernel.name in ("eager", "sdpa") else 4)
        assert sum(kernel.shares("layer").values()) == pytest.approx(1)


@pytest.mark.parametrize(("rest", "kernel"), [("fp32", "twin.bf16"), ("fp32", "twin.e4m3"), ("bf16", "sdpa")])
def test_95_percent_of_tokens_lie_within_two_deviations(llama: Any, rest: Any, kernel: str) -> None:
    both = logprobs.LanguageModel(llama, rest)
    scheme = QuantScheme("head", hadamard_seed=0)
    runs = [logprobs.run_text(both, text(seed=seed), 0, [kernel], scheme, by_token=True) for seed in range(4)]
    (found,) = logprobs.gathered([kernel], rest, runs).kernels
    z = np.concatenate(found.differences) / np.concatenate(found.deviations)
    assert 0.92 <= np.mean(np.abs(z) <= 2) <= 0.98
    assert np.sqrt(np.mean(np.square(found.deviations))) == pytest.approx(found.predicted, rel=0.15)
    worst = int(np.abs(z).argmax())
    assert f"largest {abs(z[worst]):.1f} (text {worst // 159 + 1}, token {worst % 159 + 1}); " in str(found)


def test_what_a_router_does_is_said_and_is_in_the_deviations() -> None:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    model = transformers.MixtralForCausalLM(config).to(torch.bfloat16).eval()
    both = logprobs.LanguageModel(model)
    runs = [logprobs.run_text(both, text(seed=seed), 0, ["twin.e4m3"], by_token=True) for seed in (1, 2)]
    (found,) = logprobs.gathered(["twin.e4m3"], "fp32", runs).kernels
    assert found.found.rerouted > 0
    assert f"a router picks other experts for {found.found.rerouted}\n" in str(found)
    assert found.found.rms / found.predicted > 1.5
    assert 0.8 <= found.found.rms / np.sqrt(np.mean(np.square(found.deviations))) <= 1.25
    assert logprobs.run_text(both, text(), 0, ["sdpa"])[0].sampled.experts.shape == (159, 4)


def test_a_rotation_is_predicted(llama: Any) -> None:
    plain, rotated = (
        logprobs.logprobs(llama, [text(), text(seed=2)], ["twin.e4m3"], scheme=QuantScheme("head", hadamard_seed=seed))
        for seed in (None, 0)
    )
    (kernel,) = rotated.kernels
    assert rotated
    assert 0.8 <= kernel.found.rms / kernel.predicted <= 1.25, str(kernel)
    assert kernel.predicted != plain.kernels[0].predicted


def test_gradients_of_a_prediction_keep_no_scores_of_attention(llama: Any) -> None:
    kept: list[int] = []

    def pack(x: Any) -> Any:
        kept.append(x.numel())
        return x

    tokens = text(1000)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        found = logprobs.predict(logprobs.LanguageModel(llama), tokens, [logprobs.attention_of("twin.bf16")], seed=0)
    assert sum(found["bf16"].values()) > 0
    assert max(kept) == len(tokens) ** 2  # the mask of a layer; the scores of a kv head are twice as many


def test_a_kernel_does_not_differ_from_itself(llama: Any) -> None:
    first, second, other = logprobs.logprobs(llama, [text()], ["twin.bf16", "twin.bf16", "twin.flash2.bf16"]).kernels
    assert (first.apart, first.first) == (None, "")
    assert second.apart.rms == second.apart.largest == second.apart.flips == 0
    assert second.first == ""
    assert other.apart.rms > 0
    assert re.match(r"first in layer \d, head \d, token \d+; ", other.first)


@pytest.mark.parametrize(
    "wrong",
    [
        *(f"twin.bf16+{fault}" for fault in (*ANY, "wrong_softmax_scale", "swapped_v_rows", "fp16_accumulator")),
        *(f"twin.fp16+{fault}" for fault in (*ANY, "bf16_p")),
        *(f"twin.flash3.bf16+{fault}" for fault in ANY[:4]),
        *(f"twin.e4m3+{fault}" for fault in ("descales_ignored", "uncleared_v_tail", "missed_rescale")),
    ],
)
def test_a_call_that_is_wrong_is_named_with_its_layer_head_and_token(llama: Any, wrong: str) -> None:
    scheme = QuantScheme("head")
    planted = attention.KernelAttention(find(wrong), scheme, keeps=True)
    mixed = attention.KernelAttention(find(wrong.partition("+")[0]), scheme, kept={1: planted}, keeps=True)
    logprobs.LanguageModel(llama).sample(text(300), mixed)
    assert not any(map(logprobs.judged, mixed.calls))
    (said,) = map(logprobs.judged, planted.calls)
    assert re.match(
        r"layer 1: error \S+ times its bound, at out of sequence 0, head \d, query \d+, channel \d+: ", said
    )


@pytest.mark.parametrize(
    ("name", "head_dim", "page_size", "keys"),
    [
        ("twin.vllm.e4m3", 64, 16, 97),
        ("twin.sglang.e4m3", 64, 16, 97),
        ("twin.flash3.bf16", 64, 0, 129),
        ("twin.flash3.fp16", 64, 0, 129),
        ("twin.vllm.bf16", 128, 16, None),
        ("twin.sglang.bf16", 128, 16, None),
        ("twin.flash3.e4m3", 64, 0, None),
        ("twin.bf16", 64, 0, None),
        ("twin.flash2.bf16", 64, 0, None),
    ],
)
def test_decoding_leaves_prefill_at_the_token_that_the_plans_say(
    name: str, head_dim: int, page_size: int, keys: int | None
) -> None:
    model = made(num_hidden_layers=1, head_dim=head_dim)
    found = decoding.decode(logprobs.LanguageModel(model), text(150), name, page_size=page_size)
    assert (found.planned, found.seen) == (keys, keys)
    assert (found.apart.rms > 0) == (keys is not None)


def test_layers_that_keep_a_kernel_are_those_that_pay() -> None:
    model = made(num_hidden_layers=6)
    texts = [text(seed=seed) for seed in range(4)]
    e4m3, bf16 = (attention.KernelAttention(find(name), QuantScheme("head")) for name in ("twin.e4m3", "twin.bf16"))
    everywhere, nowhere = (
        logprobs.logprobs(model, texts[:1], [each.kernel.name]).kernels[0].predicted for each in (e4m3, bf16)
    )
    budget = math.sqrt((everywhere**2 + nowhere**2) / 2)
    both = logprobs.LanguageModel(model)
    found = spending.spend(both, texts, (e4m3, bf16), budget)
    assert 0 < len(found.layers) < 6
    assert found.predicted <= budget
    assert 0.8 <= found.found.rms / found.predicted <= 1.3
    exact = logprobs.joined([both.sample(each, attention.ExactAttention(), exactly=True) for each in texts[1:]])

    def measured(layers: Any) -> float:
        mixed = attention.KernelAttention(e4m3.kernel, e4m3.scheme, dict.fromkeys(layers, bf16))
        return logprobs.Divergence.between(logprobs.joined([both.sample(each, mixed) for each in texts[1:]]), exact).rms

    assert measured(found.layers) == found.found.rms
    dear = set(range(6)) - set(found.layers)
    assert measured(sorted(dear)[: len(found.layers)]) > found.found.rms
    with pytest.raises(ValueError, match="in every layer is predicted to have"):
        spending.spend(both, texts, (e4m3, bf16), nowhere / 2)


@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3"])
def test_the_deviation_of_a_rounding_is_that_of_its_errors(name: str) -> None:
    dtype = rounding.TORCH[name]
    smallest = torch.finfo(dtype).smallest_normal
    random_numbers = torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for scale in (1.0, 3.7, smallest, smallest / 2):
        x = random_numbers * scale
        errors = float((x - x.to(dtype).double()).square().mean().sqrt())
        assert errors == pytest.approx(float(rounding.deviation(x, dtype).square().mean().sqrt()), rel=0.03)
    assert rounding.deviation(torch.zeros(3), dtype).tolist() == [0, 0, 0]


def test_a_model_is_left_as_it_was(llama: Any) -> None:
    before = {name: x.clone() for name, x in llama.state_dict().items()}
    implementation = llama.config._attn_implementation
    logprobs.logprobs(llama, [text(40)], ["twin.bf16"], "bf16")
    assert llama.config._attn_implementation == implementation
    assert all(x.requires_grad for x in llama.parameters())
    assert all(torch.equal(x, before[name]) and x.dtype is before[name].dtype for name, x in llama.state_dict().items())
    assert not llama.get_input_embeddings()._forward_hooks


def test_log_probabilities_of_stretches_are_those_of_the_whole(llama: Any) -> None:
    long = text(1100)
    both = logprobs.LanguageModel(llama)
    found = both.sample(long, attention.ExactAttention(torch.float32))
    with torch.no_grad(), attention.attending(both.wide, attention.ExactAttention(torch.float32)):
        logits = both.wide(long[None]).logits[0].double()
    due = torch.log_softmax(logits[:-1], -1).gather(1, long[1:, None])[:, 0]
    assert np.allclose(found.logprobs, due, rtol=0, atol=1e-12)


def test_figures_of_a_difference_are_what_they_are_called() -> None:
    b = np.zeros(4)
    d = np.array([0.0, 0.05, -0.2, 0.0])
    picked = np.zeros((4, 2), int)
    found = logprobs.Divergence.between(
        logprobs.Sampled(b + d, np.array([1, 2, 3, 4]), picked),
        logprobs.Sampled(b, np.array([1, 2, 3, 5]), picked + np.array([[0, 0], [0, 1], [1, 1], [0, 0]])),
    )
    weights = np.exp(d)
    assert found.rms == pytest.approx(math.sqrt((0.05**2 + 0.2**2) / 4))
    assert (found.largest, found.beyond_1, found.beyond_10, found.flips, found.tokens) == (0.2, 0.5, 0.25, 1, 4)
    assert found.rerouted == 2
    assert found.sample_size == pytest.approx(weights.sum() ** 2 / (4 * (weights**2).sum()))
    assert found.ratio == pytest.approx(np.exp(np.abs(d)).mean())
    assert found.divergence == pytest.approx((weights - 1 - d).mean())


def test_processes_find_what_one_process_finds(tmp_path: Any, llama: Any) -> None:
    llama.save_pretrained(tmp_path / "model")
    texts = [tmp_path / f"{seed}.npy" for seed in range(2)]
    for seed, path in enumerate(texts):
        np.save(path, text(40 + seed, seed).numpy())

    def told(kernel: str, workers: int) -> Any:
        options = [*chain(*(("--text", str(path)) for path in texts)), "--workers", str(workers)]
        given = ["logprobs", str(tmp_path / "model"), *options, "--kernel", "twin.bf16", "--kernel", kernel]
        return CliRunner().invoke(main, given)

    both, alone = (told("twin.e4m3", workers) for workers in (2, 1))
    assert both.exit_code == 0, both.output
    assert "79 tokens of 2 texts" in both.output
    for name in ("twin.bf16", "twin.e4m3"):  # the order of sums depends on the threads of a process
        line = rf"{name}: (\S+) nats RMS, predicted (\S+) .* 0 of 4 calls beyond their bound"
        found, due = (re.search(line, each.output) for each in (both, alone))
        assert found
        assert due
        assert [float(x) for x in found.groups()] == pytest.approx([float(x) for x in due.groups()], rel=0.02)
    for workers in (1, 2):
        refused = told("twin.backward.bf16", workers)
        assert refused.exit_code == 2, refused.output
        assert refused.stderr.endswith("fa3verify: twin.backward.bf16 computes backward, not attention\n")


def test_the_page_shows_what_was_found_and_refers_to_nothing_outside(llama: Any) -> None:
    kernels = ["twin.bf16", "twin.flash2.bf16", "twin.e4m3", "torch.math.fp32"]
    both = logprobs.LanguageModel(llama)
    found = logprobs.gathered(kernels, "fp32", [logprobs.run_text(both, text(), 0, kernels, by_token=True)])
    shown = page.page(found)
    assert len(shown) < 2_000_000
    assert not re.search(r"""(src|href)=["'](?!#)|url\((?!#)|@import""", shown)
    for kernel in found.kernels:
        assert f"{kernel.found.rms:.3g}</td>" in shown
    for panel in (
        "Where bf16 rounds",
        "Where e4m3 rounds",
        "Measured over",
        "each layer",
        "by position",
        "deviations of",
    ):
        assert re.search(rf"<figcaption>[^<]*{panel}", shown), panel
    assert "Where fp32 rounds" not in shown
    plain = page.page(logprobs.gathered(["sdpa"], "fp32", [logprobs.run_text(both, text(), 0, ["sdpa"])]))
    assert plain.count("<figcaption>") == 1


def test_a_mask_that_nobody_stated_is_refused(llama: Any) -> None:
    padded = torch.ones(1, 8, dtype=torch.int64)
    padded[0, 0] = 0
    refused = pytest.raises(ValueError, match="the model hands attention a mask")
    with attention.attending(llama, attention.ExactAttention()), torch.no_grad(), refused:
        llama(text(8)[None], attention_mask=padded)


def test_the_verb_reads_a_folder_and_exits_by_what_it_finds(tmp_path: Any, llama: Any) -> None:
    llama.save_pretrained(tmp_path / "model")
    np.save(tmp_path / "text.npy", text(60).numpy())

    def called(*options: str) -> Any:
        given = ["logprobs", str(tmp_path / "model"), "--text", str(tmp_path / "text.npy"), *options]
        return CliRunner().invoke(main, given)

    right = called("--kernel", "twin.bf16", "--kernel", "eager")
    assert right.exit_code == 0, right.output
    assert "59 tokens of a text, the rest in fp32" in right.output
    assert "0 of 2 calls beyond their bound" in right.output
    assert called("--kernel", "twin.bf16", "--gate", "1e-6").exit_code == 1
    assert called("--kernel", "twin.bf16+missed_rescale").exit_code in (0, 1)
    assert called("--kernel", "twin.bf16", "--decode").exit_code == 0
    alone = called("--kernel", "twin.bf16", "--budget", "0.1")
    assert (alone.exit_code, "a budget is for two kernels" in alone.output) == (2, True)
    for mode, *options in (
        ("--decode", "--gate", "1"),
        ("--decode", "--rotated"),
        ("--decode", "--budget", "1"),
        ("--budget 1", "--gate", "1"),
        ("--budget 1", "--page-size", "16"),
        ("--kernel alone", "--page-size", "16"),
    ):
        asked = [] if mode == "--kernel alone" else mode.split()
        refused = called("--kernel", "twin.bf16", *asked, *options)
        said = f"{options[0]}: no effect with {mode.removesuffix(' 1')}\n"
        assert (refused.exit_code, said in refused.stderr) == (2, True), refused.output
    file = tmp_path / "found.json"
    html = tmp_path / "found.html"
    assert called("--kernel", "twin.bf16", "--json", str(file), "--html", str(html)).exit_code == 0
    assert "<h1>What kernels do to log-probabilities</h1>" in html.read_text()
    for options in (("--html", str(html)), ("--by-token",)):
        assert called("--kernel", "twin.bf16", "--decode", *options).exit_code == 2
    (written,) = json.loads(file.read_text())["found"]
    (kernel,) = written["kernels"]
    assert math.sqrt(sum(x["variance"] for x in kernel["variances"])) == pytest.approx(kernel["found"]["rms"], rel=0.25)
    spent = called("--kernel", "twin.e4m3", "--kernel", "twin.bf16", "--budget", "1")
    assert spent.exit_code == 0
    assert "in 0 of 2 layers (none)" in spent.output


def test_the_page_on_fp8_prints_what_it_shows(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digits depend on how a machine adds: figures may differ by a tenth, words by nothing."""
    page = (ROOT / "docs" / "fp8-in-my-model.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec(page.split("```python\n")[1].split("```")[0], {})  # makes the model
    command, *shown = page.split("```text\n")[1].split("```")[0].splitlines()[1:]
    printed = CliRunner().invoke(main, command.removeprefix("$ fa3verify ").split()).stdout
    for line in shown:
        if "nats RMS, predicted" in line:
            name, measured, predicted = re.findall(r"^(\S+): (\S+) nats RMS, predicted (\S+) ", line)[0]
            found = re.search(
                rf"^{name}: (\S+) nats RMS, predicted (\S+) .*; 0 of 3 calls beyond", printed, re.MULTILINE
            )
            assert found, printed
            assert [float(x) for x in found.groups()] == pytest.approx([float(measured), float(predicted)], rel=0.1)
