"""hazards as a user calls it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
from click.testing import CliRunner

from fa3_kernels.plan.config import Config
from fa3_kernels.plan.families import OURS
from fa3_reference.problem import AttentionProblem
from fa3_simulator.backward_choice import shipped_schedule
from fa3_simulator.unbounded import Proof
from fa3verify import hazards
from fa3verify.cli import hazards as verb
from fa3verify.cli.main import main


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["hazards", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_a_schedule_that_options_name_is_clean_for_any_number_of_blocks() -> None:
    code, out, _ = run("--backward", "--head-dim", 128)
    assert code == 0
    assert out.startswith("no hazard: gluon backward ")
    assert "stand for all)" in out
    (row,) = json.loads(run("flash3", "--backward", "--head-dim", 256, "--json", "-")[1])["shapes"]
    assert row["kernels"] == [row["program"]]
    assert row["program"].startswith("flash3 backward ")
    assert (row["findings"], row["is_complete"]) == ([], True)


def test_settings_of_a_family_stand_behind_its_name_as_for_simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(hazards, "check", lambda config: asked.append(config) or hazards.Checked((), "", EMPTY))
    assert run("flash3,tile=128x176", "gluon", "--dtype", "bf16", "--head-dim", 64)[0] == 0
    assert [(c.family, c.dtype, c.head_dim, c.tile_n) for c in asked] == [
        ("flash3", "bf16", 64, 176),
        ("gluon", "bf16", 64, 128),
    ]


EMPTY = Proof([], 1, 1, True)


def test_a_hazard_is_named_and_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that run ahead of a single slot of Q wait for what they would free."""
    wrong = replace(shipped_schedule(AttentionProblem(1, 1, 1, 64, 64, 128), OURS), num_stages=1)
    monkeypatch.setattr(verb, "family_of", lambda kernel, options: (None, wrong, None))
    code, out, _ = run()
    assert code == 1
    assert "deadlock: circle of waits: " in out


def test_a_search_that_was_ended_is_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "family_of", lambda kernel, options: (None, Config(), None))
    monkeypatch.setattr(hazards.unbounded, "prove", partial(_proved, Proof([], 3, 3, False)))
    code, out, _ = run()
    assert code == 5
    assert "then the search ended" in out


def _proved(proof: Proof, *_: object, **__: object) -> Proof:
    return proof


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (("fp32",), "fp32"),
        (("--clock-mhz", 1500), "hazards are of any clock, and do not take --clock-mhz"),
        (("--tile", "192x176", "--head-dim", 256), "this schedule does not fit an SM of the H200"),
    ],
)
def test_what_is_no_schedule_is_refused_by_its_rule(arguments: tuple, rule: str) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert rule in " ".join(err.split())
