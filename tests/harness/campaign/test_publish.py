"""The table of libraries: figures come from summaries, and a library that fails costs its own rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fa3verify.campaign import libraries, verify
from fa3verify.studies import accumulator_loss

FAMILY = {"rmse_seen": 1.0, "rmse_unrounded": 2.0, "rel_rmse_seen": 0.25, "rel_rmse_unrounded": 0.5, "outputs": 100}
LOSS = {"rel_rmse": 0.573, "bias": -0.57}


def kernel(name: str, **changes) -> dict:
    families = [
        {"family": "fa3_outliers", "ratio_max": 0.98765, "bits_differing": 0, **FAMILY},
        {"family": "faint", "ratio_max": float("inf"), "bits_differing": 2, **FAMILY},
    ]
    laws = [{"law": "repeated_run_is_identical", "status": "pass", "examples": 6, "outputs": 1234}]
    coverage = {"kinds": {"feature": {"claimed": 3, "tried": 2}, "size": {"claimed": 5, "tried": 5}}, "not_tried": []}
    coverage["not_claimed"] = ["feature varlen", "policy causal top_left"]
    body = {"name": name, "description": "", "verdict": "fail", "inconclusive": None, "outputs": 4321}
    return body | {"families": families, "laws": laws, "coverage": coverage} | changes


def failure(name: str, message: str) -> dict:
    return {"kernel": name, "what": "law sign_symmetry", "message": message, "cause": message}


def cells(row: dict) -> dict[str, str]:
    return dict(zip(libraries.HEADER, libraries._cells(row), strict=True))


def test_a_row_holds_what_the_summary_says_of_its_kernel_alone():
    failures = [failure("a.fp16", "wrong"), failure("a.fp16", "wrong"), failure("b.fp16", "of another")]
    row = libraries.row_of(kernel("a.fp16"), failures, LOSS)
    assert row["findings"] == ["property sign_symmetry: wrong (1 more of this cause)"]
    found = cells(row)
    assert found["claims tried"] == "7 of 8"
    assert found["largest error / bound"] == "0.988; faint inf"
    assert found["bits unlike the twin's"] == "2 of 200"
    assert found["relative RMSE, outliers"] == "2.50e-01, 5.00e-01"
    assert found["relative RMSE, activations"] == "-"  # no such family ran
    assert found[f"loss at {libraries.LOSS_KEYS:,} keys"] == "5.73e-01 (-5.7e-01)"
    assert found["policy"] == "causal top_left"
    assert found["same call twice"] == "pass, 1,234 outputs"


def test_bits_that_were_not_compared_are_not_said_to_be_equal():
    bare = [{"family": "normal", "ratio_max": 0.5, "bits_differing": None, **FAMILY}]
    row = libraries.row_of(kernel("a.fp16", families=bare, laws=[]), [], {"error": "two\nlines"})
    found = cells(row)
    assert found["bits unlike the twin's"] == "not compared"
    assert found["same call twice"] == "not claimed"
    assert found[f"loss at {libraries.LOSS_KEYS:,} keys"] == "two lines"


def test_a_library_that_fails_costs_its_own_rows(monkeypatch, tmp_path):
    def campaign(settings, progress):
        if settings.kernels[0].startswith("broken"):
            raise RuntimeError("two\nlines")
        return {"kernels": [kernel(name) for name in settings.kernels], "failures": []}

    monkeypatch.setattr(verify, "run", campaign)
    monkeypatch.setattr(libraries, "_losses", lambda settings: dict.fromkeys(settings.kernels, LOSS))
    names = ("a.bf16", "a.e4m3", "broken.fp16", "c.fp16")
    told: list[str] = []
    settings = verify.Settings(names, "quick", 0, tmp_path)
    rows = libraries.run(settings, {"d.fp16": "no such package"}, told.append)
    assert [row["name"] for row in rows] == ["d.fp16", *names]
    assert told == ["a.bf16 fail, a.e4m3 fail", "broken.fp16 RuntimeError: two lines", "c.fp16 fail"]
    stored = json.loads((tmp_path / "libraries.json").read_text())
    assert (stored["schema"], len(stored["kernels"])) == (libraries.SCHEMA, 5)
    text = (tmp_path / "libraries.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert "| broken.fp16 | not judged: RuntimeError: two lines |" in text
    assert "| d.fp16 | not judged: no such package |" in text


@pytest.mark.parametrize("name", ["twin.flash3.e4m3", "twin.cudnn.fp16"])
def test_accumulator_loss_is_measured_in_the_kernels_own_format(name):
    (found,) = accumulator_loss.measure(name, 1.0, 4096, 2, 0)
    assert (found["bias"] < -0.02) == name.endswith("e4m3")  # FP8 sums keep 13 bits of a fraction
    assert found["rel_rmse"] < 0.1


def test_the_report_of_the_table_names_no_machine_path(tmp_path):
    facts = libraries.provenance(verify.Settings((), "quick", 3, Path(tmp_path)))
    assert facts["seed"] == 3
    assert not any(str(value).startswith("/") for value in facts.values())
