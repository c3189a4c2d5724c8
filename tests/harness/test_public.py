"""``import fa3verify``: every public name is there, costs nothing until it is used, and is no module's name."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import fa3verify
from fa3verify.campaign import replay_files
from fa3verify.commands import verify as campaign

PROBLEM = fa3verify.AttentionProblem(1, 1, 1, 8, 40, 64)


def fresh(code: str) -> str:
    """What a program prints in a Python that has imported nothing."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_imports_nothing_heavy_and_its_names_no_torch():
    heavy = "[m for m in ('numpy', 'numba', 'xarray', 'hypothesis', 'rich', 'torch') if m in sys.modules]"
    assert fresh(f"import sys, fa3verify; dir(fa3verify); print({heavy})") == "[]"
    names = "import sys; from fa3verify import *; print(len(dir()) > 20, judge.__name__, 'torch' in sys.modules)"
    assert fresh(names) == "True judge False"


def test_no_public_name_is_a_submodule_that_would_shadow_it():
    assert not set(fa3verify.__all__) & {module.name for module in pkgutil.iter_modules(fa3verify.__path__)}


@pytest.mark.parametrize("first", ["import fa3verify.judging.judgement, fa3verify.commands.verify", "fa3verify.judge"])
def test_verbs_stay_functions_whatever_is_imported_first(first):
    then = "import fa3verify.judging.judgement, fa3verify.commands.verify, fa3verify.commands.replay"
    calls = "print(*(callable(getattr(fa3verify, name)) for name in fa3verify.__all__))"
    assert set(fresh(f"import fa3verify\n{first}\n{then}\n{calls}").split()) == {"True"}


def test_unknown_names_are_attribute_errors_and_the_listing_is_complete():
    with pytest.raises(AttributeError, match="has no attribute 'forage'"):
        fa3verify.forage  # type: ignore[attr-defined]  # noqa: B018
    assert set(fa3verify.__all__) <= set(dir(fa3verify))


def test_judge_takes_a_kernel_or_its_name_and_a_problem_or_a_case():
    by_name = fa3verify.judge("twin.fp16", PROBLEM, fa3verify.Recipe("peaky", seed=3), tile_n=64)
    case = fa3verify.Case("other", PROBLEM, fa3verify.Recipe("peaky", seed=3), None, (("tile_n", 64),))
    by_case = fa3verify.judge(fa3verify.find_kernel("twin.fp16"), case)
    assert by_name.case == by_case.case
    assert by_name.measures == by_case.measures
    with pytest.raises(ValueError, match="change the case"):
        fa3verify.judge("twin.fp16", case, tile_n=32)


def test_verify_asks_for_the_campaign_it_was_told(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(campaign, "run", lambda settings, progress: asked.append(settings) or {"verdict": "pass"})
    assert fa3verify.verify(out=tmp_path, workers=1)["verdict"] == "pass"
    assert fa3verify.verify("twin.fp16", profile="release", seed=5, activations="own")["verdict"] == "pass"
    assert (asked[0].profile, asked[0].out, asked[0].workers) == ("quick", tmp_path, 1)
    assert {"twin.fp16", "twin.bf16", "twin.e4m3"} <= set(asked[0].kernels)
    assert (asked[1].kernels, asked[1].profile, asked[1].seed) == (("twin.fp16",), "release", 5)
    assert (asked[0].activations, asked[1].activations) == (None, Path("own"))
    assert asked[1].command == "fa3verify.verify(('twin.fp16',), profile='release', seed=5)"
    with pytest.raises(ValueError, match="profile must be one of quick, release, soak, got 'slow'"):
        fa3verify.verify(profile="slow")  # type: ignore[arg-type]


def test_replay_says_whether_a_kernel_holds(tmp_path):
    case = fa3verify.Case("twin.fp16", PROBLEM, fa3verify.Recipe("normal"))
    replay_files.write(
        tmp_path / "case.json", replay_files.ReplayFile("twin.fp16", replay_files.LARGEST, case.to_json())
    )
    assert fa3verify.replay(tmp_path / "case.json").holds
    assert not fa3verify.replay(tmp_path / "case.json", kernel="twin.fp16+wrong_softmax_scale").holds


def test_the_backward_is_simulated_and_tuned_from_python():
    lengths = (512, 1024)
    packed = fa3verify.AttentionProblem.varlen(lengths, lengths, nheads=4, nheads_kv=2, head_dim=128, window=(300, 0))
    ours, upstream = (fa3verify.simulate(packed, backward=True, family=family) for family in ("gluon", "flash3"))
    assert 0 < upstream.main_cycles < ours.main_cycles < ours.cycles
    ranked = fa3verify.tune(fa3verify.AttentionProblem(1, 16, 16, 2048, 2048, 128), backward=True, family="gluon")
    assert (ranked[0].config.tile_m, ranked[0].config.tile_n) == (64, 128)
    with pytest.raises(ValueError, match="are 280 registers, a thread has 240"):
        fa3verify.simulate(packed, (128, 128), backward=True)


@pytest.mark.parametrize(
    ("problem", "options", "rule"),
    [
        ({"window": (64, 0), "softcap": 30.0}, {}, "the forward is simulated without softcap"),
        ({"head_dim": 256}, {"tile": (128, 256)}, "this schedule does not fit an SM of the H200"),
        ({}, {"machine": "b200"}, "machine must be one of h100, h200 or a .toml file, got 'b200'"),
    ],
)
def test_simulate_refuses_what_it_does_not_know(problem, options, rule):
    sizes = {"batch": 1, "nheads": 1, "nheads_kv": 1, "seqlen_q": 512, "seqlen_k": 512, "head_dim": 128}
    asked = fa3verify.AttentionProblem(**sizes | problem)
    with pytest.raises(ValueError, match=rule):
        fa3verify.simulate(asked, **options)
