"""The verb hazards: all schedules that ship, of which those of one shape share a proof."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from fa3_kernels.plan.families import OURS
from fa3_reference.problem import AttentionProblem
from fa3_reports import schedules
from fa3_reports.cli.hazards import hazards
from fa3_simulator.backward_choice import shipped_schedule


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(hazards, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_kernels_of_one_shape_are_told_together_and_are_clean_for_any_number_of_blocks() -> None:
    code, out, _ = run("backward_d128")
    assert code == 0
    assert out.startswith(
        "no hazard: backward_d128_dense, backward_d128_in_turn, backward_d128_causal_in_turn and 2 more"
    )
    assert "stand for all)" in out
    (row,) = json.loads(run("flash3_backward_d256", "--json", "-")[1])["shapes"]
    assert (row["kernels"], row["findings"], row["is_complete"]) == (["flash3_backward_d256"], [], True)


def test_a_hazard_is_named_and_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that run ahead of a single slot of Q wait for what they would free."""
    wrong = replace(shipped_schedule(AttentionProblem(1, 1, 1, 64, 64, 128), OURS), num_stages=1)
    monkeypatch.setattr(schedules, "named", lambda: {"mine": wrong})
    code, out, _ = run()
    assert code == 1
    assert out.startswith(("1 findings: mine", "2 findings: mine", "3 findings: mine"))


def test_an_unknown_kernel_is_refused_with_the_beginnings_that_are_known() -> None:
    code, _, err = run("fp32")
    assert code == 2
    assert "no kernel is called fp32 or begins so" in " ".join(err.split())
