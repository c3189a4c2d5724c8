"""A baseline of one's own kernel, from the command line: written, held, and broken by an FP8 error that grew."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from fa3verify.campaign import plan
from fa3verify.campaign.introduction import Only
from fa3verify.campaign.run import parse
from fa3verify.campaign.tasks import Outcome
from fa3verify.cases import coverage
from fa3verify.cli.main import main
from fa3verify.commands import verify
from fa3verify.judging import gate
from fa3verify.known import registry
from tests.conftest import subject

# An FP8 kernel that rounds P to e4m3, and nothing else beyond binary32; for one head_dim, so that it is judged quickly.
KERNEL = """
import ml_dtypes
import numpy as np
import fa3verify

GROWTH = {growth}


@fa3verify.kernel(dtypes=("e4m3",), features=(), head_dims=(64,), min_seqlen=1)
def kernel(q, k, v, *, softmax_scale, q_descale, k_descale, v_descale):
    stored = (q, q_descale), (k, k_descale), (v, v_descale)
    q, k, v = (x.astype(np.float32) * descale[..., None, None] for x, descale in stored)
    s = q @ k.swapaxes(2, 3) * np.float32(softmax_scale)
    top = s.max(3, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(3, keepdims=True)
    exact = p @ v / total
    error = (p * 256).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) / 256 @ v / total - exact
    return (exact + (1 + GROWTH) * error).astype(ml_dtypes.bfloat16), (np.log(total) + top)[..., 0]
"""


GROWN = ("normal", "offset_v")  # families whose error is that of P


def _verify(tmp_path: Path, growth: float, *options: str) -> tuple[int, dict]:
    (tmp_path / "mine.py").write_text(KERNEL.format(growth=growth))
    asked = ["verify", "mine.py:kernel", "--quick", "--quiet", "--workers", "1", *options]
    with pytest.MonkeyPatch.context() as patch:  # another run would be another process, which reads the file again
        patch.setattr(sys, "dont_write_bytecode", True)
        code = CliRunner().invoke(main, [*asked, "--out", "out"]).exit_code
    sys.modules.pop("mine")
    return code, json.loads((tmp_path / "out" / "summary.json").read_text())


@pytest.mark.usefixtures("in_this_process")
def test_an_fp8_error_that_grew_by_a_fifth_breaks_the_baseline_of_ones_own_kernel(tmp_path, monkeypatch):
    """Of some families alone: each has its own figures, and a baseline has no others."""
    monkeypatch.chdir(tmp_path)
    whole = plan.plan
    monkeypatch.setattr(plan, "plan", lambda *a: [t for t in whole(*a) if subject(t) in GROWN])
    monkeypatch.setattr(coverage, "REQUIRED", 0.0)  # of so little no verdict would be given
    code, sound = _verify(tmp_path, 0.0, "--update-baseline", "mine.json")
    assert (code, sound["layers"]["L2"]) == (0, "not compared")
    rows = gate.baseline_rows(parse(sound, "summary").kernels[0], gate.read_baseline(Path("mine.json")))
    assert len(rows) > 6 * len(GROWN)
    assert {row.status for row in rows} == {"pass"}
    code, grown = _verify(tmp_path, 0.2, "--baseline", "mine.json")
    assert (code, grown["layers"]["L1"], grown["layers"]["L2"]) == (1, "pass", "fail")
    failed = {row["family"] for row in grown["gate"] if row["rule"] == "rel_rmse_seen" and row["status"] == "fail"}
    assert failed == set(GROWN)


def test_a_baseline_keeps_the_kernels_that_a_run_did_not_judge():
    def of(name: str, x: float) -> gate.Baseline:
        return gate.Baseline("quick", 0, {name: {"normal": {"abs_bias": x}}})

    both = of("a", 2.0).with_kernels_of(gate.Baseline("quick", 0, {**of("a", 1.0).kernels, **of("b", 1.0).kernels}))
    assert both.kernels == {**of("a", 2.0).kernels, **of("b", 1.0).kernels}
    assert of("a", 1.0).with_kernels_of(None) == of("a", 1.0)


def test_a_baseline_of_another_seed_is_not_updated(tmp_path):
    (tmp_path / "b.json").write_text(gate.Baseline("quick", 1, {}).text())
    settings = verify.Settings(("twin.fp16",), "quick", 0, tmp_path / "out", update_baseline=tmp_path / "b.json")
    with pytest.raises(ValueError, match=r"b\.json is for profile quick and seed 1, not quick and 0"):
        verify.run(settings, lambda total, outcome: None)


@pytest.mark.usefixtures("in_this_process")
def test_an_interrupted_campaign_leaves_the_baseline_as_it_was(tmp_path):
    """It once wrote the figures of the families that had ended, and dropped the kernels that it had not judged."""
    before = gate.Baseline("quick", 0, {}).text()
    (tmp_path / "b.json").write_text(before)
    settings = verify.Settings(("twin.quantize",), "quick", 0, tmp_path / "out", update_baseline=tmp_path / "b.json")

    def interrupts(total: int, outcome: Outcome | None) -> None:
        if outcome:
            raise KeyboardInterrupt

    with pytest.raises(verify.Interrupted, match="has what was found so far"):
        verify.run(replace(settings, only=Only(families=("tiny",))), interrupts)
    assert (tmp_path / "b.json").read_text() == before


def test_a_kernel_in_a_folder_with_a_plus_has_figures_of_its_own():
    stored = gate.Baseline("quick", 0, {"c++/mine.py:kernel": {"normal": {"abs_bias": 1.0}}, "twin.fp16": {}})
    assert stored.figures("c++/mine.py:kernel", "normal") == {"abs_bias": 1.0}
    assert stored.figures("twin.fp16+stale_v", "normal") is None


def test_a_file_is_loaded_by_its_path_and_not_taken_for_another_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))  # which undoes what loading adds
    (tmp_path / "my_own_kernel.py").write_text(KERNEL.format(growth=0.0))
    reference = f"{tmp_path}/my_own_kernel.py:kernel"
    assert registry.find(reference).name == reference
    (tmp_path / "json.py").write_text(KERNEL.format(growth=0.0))
    with pytest.raises(ValueError, match=r"the module json is .*: rename"):
        registry.find(f"{tmp_path}/json.py:kernel")
    with pytest.raises(ValueError, match=r"there is no file .*nowhere\.py"):
        registry.find(f"{tmp_path}/nowhere.py:kernel")
