"""Trials depend on the law, the seed and their number: not on each other, on loaded code or on where the code lies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from hypothesis.internal.conjecture.provider_conformance import run_conformance_test

import fa3_kernels
import fa3_reference
import fa3verify
from fa3_reference.problem import AttentionProblem
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import Recipe
from fa3verify.known.registry import find
from fa3verify.properties import LAWS, Trial, find_law, run_law
from fa3verify.properties.draws import IndependentDraws, independent
from fa3verify.properties.law import set_up
from fa3verify.properties.structure import SWITCHES
from tests.sampling import sampled

# Prints a digest of the trials of two laws of different rooms; an argument is a module to load first.
DIGEST = """
import hashlib, importlib, sys
from dataclasses import replace
if len(sys.argv) > 1:
    importlib.import_module(sys.argv[1])
from fa3verify.known.registry import find
from fa3verify.properties import find_law, run_law
digest = hashlib.sha256()
for name in ("error_within_bound", "schedule_switches_change_no_bit"):
    law = replace(find_law(name), check=lambda kernel, trial: digest.update(repr(trial.to_json()).encode()))
    run_law(law, find("twin.e4m3"), max_examples=40, seed=5)
print(digest.hexdigest())
"""


def _trials(law: str, max_examples: int, *, seed: int = 0, kernel: str = "twin.e4m3") -> list[Trial]:
    trials: list[Trial] = []
    run_law(
        replace(find_law(law), check=lambda c, trial: trials.append(trial)),
        find(kernel),
        max_examples=max_examples,
        seed=seed,
    )
    return trials


KERNELS = ("twin.e4m3", "twin.quantize", "twin.backward.fp16")


@pytest.mark.parametrize("kernel", sampled(KERNELS, ["twin.quantize"]))
def test_thirty_trials_of_a_law_hold_more_than_twenty_five_seeds(kernel):
    for law in LAWS:
        if law.applies(find(kernel)):
            seeds = {trial.case.recipe.seed for trial in _trials(law.name, 30, kernel=kernel)}
            assert len(seeds) > 25, law.name


def test_sixty_trials_draw_every_schedule_switch_and_most_windows():
    trials = _trials("schedule_switches_change_no_bit", 60)
    assert len({str(trial.parameters) for trial in trials}) == 10
    assert len({trial.case.problem.window for trial in trials}) >= 12


def test_few_trials_are_the_first_of_many():
    assert _trials("error_within_bound", 40)[:10] == _trials("error_within_bound", 10)


def test_another_seed_draws_other_trials():
    first, second = (_trials("error_within_bound", 10, seed=seed)[1:] for seed in (0, 1))
    assert not {trial.case.key() for trial in first} & {trial.case.key() for trial in second}


def _digest(root: Path, *arguments: str) -> str:
    roots = [str(root), str(root / "kernels"), str(root / "simulator"), str(root / "reference")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(roots), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", DIGEST, *arguments]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly  # copies of the sources; test_distinct_draws pins what a seed draws here
def test_the_same_seed_draws_the_same_trials_beside_an_edited_kernel_from_another_checkout_and_as_installed(tmp_path):
    here = Path(fa3verify.__file__).parents[1]
    expected = _digest(here)
    checkout, installed = tmp_path / "checkout", tmp_path / "site-packages"
    for package, room in ((fa3verify, ""), (fa3_kernels, "kernels"), (fa3_reference, "reference")):
        source = Path(package.__path__[0])
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, checkout / room / source.name, ignore=ignored)
        shutil.copytree(source, installed / source.name, ignore=ignored)
    constants = ", ".join(str(3 * n + 1) for n in range(400))
    (checkout / "edited_kernel.py").write_text(f"LENGTHS = ({constants})\nSCALES = (0.123, 7.5e-3, 19.0)\n")
    assert _digest(checkout) == expected
    assert _digest(checkout, "edited_kernel") == expected
    assert _digest(installed) == expected


def test_the_backend_draws_what_hypothesis_allows():
    run_conformance_test(
        IndependentDraws,
        settings=settings(
            max_examples=20,
            deadline=None,
            database=None,
            derandomize=True,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_numbers_are_drawn_from_all_magnitudes_and_both_ends():
    drawn: list[float] = []
    with independent("numbers") as backend:

        @settings(backend=backend, max_examples=200, deadline=None, database=None)
        @given(st.floats(0.001, 100))
        def collect(x: float) -> None:
            drawn.append(x)

        collect()
    assert {0.001, 100} <= set(drawn)
    for low, high in ((0.001, 0.1), (0.1, 10), (10, 100)):
        assert sum(low < x < high for x in drawn) > 15, (low, high)


@pytest.mark.parametrize(("low", "high"), [(None, None), (None, 7), (-7, None), (3, 9)])
def test_integers_without_an_end_are_of_2_to_the_64_values(low, high):
    drawn = IndependentDraws(None)
    values = [drawn.draw_integer(low, high) for _ in range(200)]
    least = -(2**63) if low is high else high - 2**64 if low is None else low
    most = least + 2**64 if high is None else high
    assert least <= min(values)
    assert max(values) <= most
    width = max(values) - min(values)
    assert width > (most - least) // 2


def test_a_weighted_integer_is_as_frequent_as_it_is_asked_to_be():
    drawn = IndependentDraws(None)
    values = [drawn.draw_integer(0, 2**40, weights={5: 0.5, 6: 0.25}) for _ in range(400)]
    assert 160 < values.count(5) < 240
    assert 60 < values.count(6) < 140


def test_every_switch_is_another_configuration_than_ours_at_head_dim_128():
    config = find("twin.fp16").config_for(AttentionProblem(1, 4, 2, 300, 300, 128))
    for name, changes in SWITCHES.items():
        is_other = any(getattr(config, field) != value for field, value in changes.items())
        assert is_other or name in ("no_pack_gqa", "two_warpgroups"), name  # whose opposites stand beside them


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch_is_a_configuration_that_our_twin_takes(switch):
    """A configuration that a kernel refuses is not judged, so that a switch which nobody takes would test nothing."""
    kernel = find("twin.fp16")
    case = Case(kernel.name, AttentionProblem(1, 4, 2, 5, 9, 128), Recipe("normal"))
    assert set(set_up(kernel, case).configured(**SWITCHES[switch]).run()) == {"out", "lse"}
