"""The run for a GPU, whole and small on a CPU: a row for each kernel that says what it did, or why it could not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.optional

from fa3_kernels.audit.evidence import evidence_sha256  # noqa: E402 (what needs torch comes behind it)
from fa3_reports.measured import gpu_logprobs  # noqa: E402
from fa3_reports.stored import read_csv  # noqa: E402
from fa3verify.known.registry import find  # noqa: E402

FLASH3 = "twin.flash3.bf16"


def measured(folder: Path, *arguments: str) -> list[dict[str, str]]:
    """Run it on the small model with the arguments, and return the rows that it writes."""
    out = folder / "found.csv"
    gpu_logprobs.main([str(out), "--shape", "tiny", "--device", "cpu", "--peers", str(folder), *arguments])
    return read_csv(out)


def test_every_kernel_has_a_row_within_its_prediction_and_what_ran_lies_beside(tmp_path: Path) -> None:
    rows = measured(tmp_path, "--tokens", "192", "--judged", "2")
    twins = gpu_logprobs.KERNELS["cpu"]
    assert [(row["rest"], row["kernel"]) for row in rows] == [
        *(("bf16", name) for name in (*twins, "eager", "sdpa")),
        *(("fp32", name) for name in twins),
    ]
    for row in rows:
        assert 0.8 <= float(row["ratio"]) <= 1.25, row
        assert float(row["measured_nats"]) / float(row["predicted_nats"]) == pytest.approx(float(row["ratio"]), 1e-3)
        is_ours = row["kernel"] in twins
        assert (row["calls"], row["judged"], row["wrong"]) == (("3", "2", "0") if is_ours else ("0", "0", "0"))
        assert row["note"] == ("judged are layers 0, 2" if is_ours else "")
        assert row["launches_sha256"] == evidence_sha256("forward")
    ran = json.loads((tmp_path / "found_provenance.json").read_text())
    assert ran["evidence_of"] == "forward"
    assert ran["kernels"].keys() == set(twins)


def test_kernels_alone_are_compared_with_the_first_of_them(tmp_path: Path) -> None:
    rows = measured(tmp_path, "--tokens", "--alone", "300", "--kernel", FLASH3, "--kernel", "twin.bf16")
    assert [(row["kernel"], row["beside"], row["predicted_nats"]) for row in rows] == [
        ("twin.bf16", FLASH3, ""),
        ("sdpa", FLASH3, ""),
    ]
    assert all(float(row["measured_nats"]) > 0 for row in rows)


def test_a_kernel_that_cannot_run_and_a_text_that_is_too_long_have_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find("gluon.bf16").unavailable is None:
        pytest.skip("there is a GPU")
    monkeypatch.setitem(gpu_logprobs.MOST_TOKENS, "eager", 32)
    rows = measured(tmp_path, "--tokens", "64", "--kernel", "gluon.bf16", "--kernel", FLASH3)
    of_bf16 = {row["kernel"]: row for row in rows if row["rest"] == "bf16"}
    assert of_bf16["gluon.bf16"]["note"] == find("gluon.bf16").unavailable
    assert of_bf16["eager"]["note"].endswith("too many of this text")
    assert of_bf16["gluon.bf16"]["measured_nats"] == of_bf16["eager"]["measured_nats"] == ""
    assert float(of_bf16[FLASH3]["ratio"]) > 0


def test_what_fails_is_said_and_the_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> str:
        raise RuntimeError("out of memory")

    def fails_to_predict(*_: object, **__: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(gpu_logprobs, "judged", fails)
    monkeypatch.setattr(gpu_logprobs, "predict", fails_to_predict)
    rows = measured(tmp_path, "--tokens", "64", "--kernel", FLASH3)
    assert [(row["kernel"], row["note"]) for row in rows if row["note"]] == [
        (FLASH3, "RuntimeError: out of memory")
    ] * 2
    assert [(row["kernel"], row["predicted_nats"]) for row in rows if not row["note"]] == [("eager", ""), ("sdpa", "")]
    assert "no room" in capsys.readouterr().err


def test_the_shape_is_that_of_a_model_of_more_than_a_billion_parameters() -> None:
    with torch.device("meta"):
        model = gpu_logprobs.made(**gpu_logprobs.SHAPES["Llama-3.2-1B"])
    assert sum(x.numel() for x in model.parameters()) == 1_235_814_400


def test_what_was_measured_on_a_gpu_is_within_what_was_wanted() -> None:
    rows = read_csv(Path(gpu_logprobs.__file__).parents[2] / "logprobs" / "llama_1b_h200.csv")
    timed = [row for row in rows if row["measured_nats"]]
    assert {row["kernel"] for row in timed} == {"gluon.bf16", "flash2.bf16", "flash3.bf16", "sdpa"}
    assert all(0.8 < float(row["measured_nats"]) / float(row["predicted_nats"]) < 1.25 for row in timed)
    assert not any(int(row["wrong"]) for row in timed)
