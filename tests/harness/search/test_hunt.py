"""The hunt: any kernel, three objectives, finds that are judged again to the last bit, and a journal."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from fa3_reference.attention import attention as exact_attention
from fa3_reference.bounds.forward import forward_bound
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem
from fa3_reference.quantize import QuantScheme
from fa3verify.cases.case import Case
from fa3verify.cli.main import main
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging import gate
from fa3verify.judging.judgement import judge
from fa3verify.kernels.functions import array_kernel
from fa3verify.known.registry import find
from fa3verify.search import Difference, OverBaseline, Ratio, hunt
from fa3verify.search.climb import Findings
from fa3verify.search.forward.colony import ForwardColony
from fa3verify.search.forward.judge import truth_error
from fa3verify.search.grounds import grounds_of, value_of
from fa3verify.search.objectives import LEAST_DIFFERENCE, call_of, objective_from, unrounded

BASELINE = gate.shipped_baseline("quick", 0)
assert BASELINE is not None


def attention(q, k, v, *, softmax_scale, causal, first=0):
    """Plain attention in binary32; with ``first`` 1 it forgets the first key."""
    s = np.einsum("bhqd,bhkd->bhqk", q.astype(np.float32), k.astype(np.float32))[..., first:] * np.float32(
        softmax_scale
    )
    s = np.where(np.tri(*s.shape[-2:], s.shape[-1] - s.shape[-2], dtype=bool) | (not causal), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    out = np.einsum("bhqk,bhkd->bhqd", p, v.astype(np.float32)[:, :, first:]) / p.sum(-1, keepdims=True)
    return out.astype(np.float16)


(PLAIN,) = array_kernel(attention, features=("causal",), min_seqlen=1)
(FORGETFUL,) = array_kernel(
    lambda q, k, v, **options: attention(q, k, v, first=1, **options), features=("causal",), min_seqlen=2
)


@pytest.mark.parametrize(
    ("kernel", "objective", "ground"),
    [
        ("twin.fp16", Ratio(), "softcap"),
        ("twin.flash3.e4m3", Ratio(), "few"),
        ("twin.bf16", Ratio(), "cases"),
        ("twin.quantize", Ratio(), "cases"),
        ("twin.backward.fp16", Ratio(), "cases"),
        ("twin.e4m3", OverBaseline(BASELINE), "cases"),
        ("twin.fp16", Difference(find("twin.flash3.fp16")), "few"),
        ("twin.fp16", Difference(find("twin.flash3.fp16"), "ulp"), "few"),
        ("twin.backward.fp16", Difference(find("twin.backward.fp16+truncated_ds"), "ulp"), "cases"),
    ],
    ids=lambda value: str(getattr(value, "words", value))[:40],
)
def test_every_find_is_judged_again_to_the_last_bit(kernel, objective, ground):
    asked = find(kernel)
    found = hunt(asked, objective, 12 if "cases" in ground else 64, seed=1, grounds=(ground,))
    assert found.largest is not None
    assert found.largest.value > 0
    for output, best in found.best.items():
        content = json.loads(json.dumps(best.content))
        goal = objective_from(json.loads(json.dumps(objective.to_json())))
        assert value_of(asked, goal, content)[output] == best.value


def test_a_seed_decides_what_a_hunt_finds():
    first, again, other = (hunt(find("twin.fp16"), Ratio(), 64, seed, grounds=("few",)).best for seed in (1, 1, 2))
    assert first == again != other


def test_the_search_closes_the_gap_that_random_draws_leave():
    """The measured table is in reports/notes; this is its smallest row."""
    gaps = []
    for at_random in (False, True):
        found = hunt(find("twin.fp16"), Ratio(), 640, 1, grounds=("tile",), at_random=at_random)
        assert found.problems >= 640
        gaps.append(1 - found.best["out"].value)
    assert 0 <= gaps[0] <= 0.1 * gaps[1]


def test_another_kernel_stays_within_its_bound_and_a_planted_mistake_does_not():
    sound = hunt(PLAIN, Ratio(), 192, 1, grounds=("few", "causal"))
    assert 0 < max(best.value for best in sound.best.values()) <= 1
    wrong = hunt(FORGETFUL, Ratio(), 64, 1, grounds=("few",))
    assert wrong.largest is not None
    assert wrong.largest.value > 1


def test_the_error_before_the_last_rounding_is_never_told_too_large():
    """Of a kernel that tells its rounded output only; the twin knows what it was."""
    twin = find("twin.fp16")
    hidden = twin.altered(run=twin.code.run)
    case = Case(twin.name, grounds_of(twin)[0].islands[0].problem(0.25, 0.0), Recipe("normal"))
    call = call_of(hidden, case)
    truth = call.truth({})["out"]
    rounded = call.run()["out"]
    least, told = (unrounded(k, call.problem, call.operands, call.config, truth)["out"] for k in (hidden, twin))
    assert (np.abs(least - truth) <= np.abs(told - truth)).all()
    assert (np.abs(least - truth) > 0).any()
    spread = np.abs(least - rounded.astype(np.float64))
    assert (spread <= np.spacing(np.abs(rounded)).astype(np.float64) / 2).all()


def test_equal_kernels_do_not_differ_and_a_mutant_does():
    twin = find("twin.fp16")
    for unit in ("bound", "ulp"):
        same = hunt(twin, Difference(twin, unit), 40, 1, grounds=("few", "cases"))
        assert {best.value for best in same.best.values()} == {0.0}
    other = hunt(find("twin.fp16+truncated_p"), Difference(twin, "ulp"), 32, 1, grounds=("few",))
    assert other.best["out"].value >= 1


def test_error_over_a_baseline_is_that_of_the_inputs_own_family():
    """V of one mean over 2,048 keys: what accumulators lose stands out beside the stored figure of such V."""
    problem = AttentionProblem(1, 1, 1, 4, 2048, 64, dtype="e4m3")
    case = Case("twin.e4m3", problem, Recipe("offset_v"), QuantScheme("head"))
    sound, faulty = (find(name) for name in ("twin.e4m3", "twin.e4m3+no_promotion"))
    expected = judge(sound, case).measures["rel_rmse_seen"] / BASELINE.kernels["twin.e4m3"]["offset_v"]["rel_rmse_seen"]
    assert OverBaseline(BASELINE).of_case(sound, case) == {"rel_rmse": expected}
    lost = OverBaseline(BASELINE).of_case(faulty, replace(case, kernel=faulty.name))["rel_rmse"]
    assert lost > 3 * expected
    with pytest.raises(ValueError, match="the baseline has no figure"):
        OverBaseline(replace(BASELINE, kernels={})).of_case(sound, case)


def test_zeros_of_either_sign_differ_by_the_least():
    objective = Difference(find("twin.fp16"), "ulp")
    case = Case("twin.fp16", grounds_of(find("twin.fp16"))[0].islands[0].problem(0.25, 0.0), Recipe("normal"))
    call = call_of(find("twin.fp16"), case)
    pair = np.array([0.0, 1.0, np.nan, np.nan], np.float16), np.array([-0.0, 1 + 2**-10, np.nan, 1], np.float16)
    heights = objective.heights(call.operation.outputs[0], pair, None, call.config)
    assert heights.tolist() == [LEAST_DIFFERENCE, 1.0, 0.0, np.inf]
    assert FORMATS[call.config.out_dtype].fraction_bits == 10


def test_the_niches_of_a_difference_are_by_the_weights_of_the_truth():
    """Not by those of an lse of 0, which is how far two equal kernels are apart."""
    kernel = find("twin.fp16")
    colony = ForwardColony.normal(grounds_of(kernel)[0].islands[0], np.random.default_rng(0))
    objective = Difference(kernel).of_colonies(kernel)
    assert objective is not None
    problem, operands = colony.problem, colony.operands
    truth = exact_attention(problem, *operands.dequantized(problem))
    bound = forward_bound(problem, operands, colony.island.config.kernel_model())
    size = truth_error(colony, truth.lse.reshape(-1))[0]
    niches = np.log2(bound.out.reshape(size.shape) / size)
    np.testing.assert_allclose(objective.ratios(colony)["rest_bound"], niches, rtol=1e-12)


def test_every_kernel_has_a_ground():
    for name in ("twin.e4m3", "twin.flash3.e4m3", "twin.cudnn.fp16", "twin.flash2.bf16", "twin.triton_unscaled.fp16"):
        islands = [island for ground in grounds_of(find(name)) for island in ground.islands]
        assert {"few", "tile", "long"} <= {island.name for island in islands}
        assert all(find(name).refusal(island.problem(1.0, 1.0)) is None for island in islands)


def test_a_kernel_of_one_head_dim_has_rows_of_one_channel():
    """Their scores are all but exact."""
    for name in ("twin.cudnn.fp16", "twin.flash2.bf16"):
        few = next(ground for ground in grounds_of(find(name)) if ground.name == "few")
        assert few.islands[0].width == 1, name


@pytest.mark.parametrize(("head_dim", "width"), [(16, 1), (64, 4), (128, 8)])
def test_a_kernel_of_one_head_dim_has_sixteen_rows_that_fill_it(head_dim, width):
    """Without such rows no ground would be left of a kernel that takes 128 channels alone."""
    kernel = replace(find("twin.fp16"), head_dims=(head_dim,))
    few = next(ground for ground in grounds_of(kernel) if ground.name == "few")
    assert {(island.rows, island.width) for island in few.islands if island.rows > 1} == {(16, width)}


def test_only_rows_of_one_sequence_have_descales_by_tile():
    """Rows of batches of their own have descales of their own already."""
    islands = [island for ground in grounds_of(find("twin.e4m3")) for island in ground.islands]
    assert {(island.rows > 1, island.descale_tiles) for island in islands} == {(True, 1), (False, 0)}
    assert {island.descale_tiles for ground in grounds_of(find("twin.fp16")) for island in ground.islands} == {0}


def test_what_is_drawn_at_random_for_a_ground_of_splits_is_split():
    for ground, changes in (("splits", {"num_splits": 3}), ("few", {})):
        found = hunt(find("twin.fp16"), Ratio(), 4, 1, grounds=(ground,), at_random=True)
        assert found.best["out"].content["case"].get("changes", {}) == changes


def test_grounds_share_problems_and_seconds(monkeypatch):
    asked = []

    def search(kernel, objective, ground, seed, problems, *, at_random, seconds):
        asked.append((ground.name, problems, seconds))
        return Findings(problems=problems)

    monkeypatch.setattr("fa3verify.search.run.search", search)
    assert hunt(find("twin.fp16"), Ratio(), 60, 1, grounds=("few", "tile", "long"), seconds=6.0).problems == 60
    assert asked == [("few", 20, 2.0), ("tile", 20, 2.0), ("long", 20, 2.0)]


def test_what_a_later_search_found_is_told_at_its_time():
    later = Findings(problems=10, cpu_s=0.5)
    later.meet("out", 0.75, dict)
    whole = Findings(problems=20, cpu_s=1.125)
    whole.add(later)
    assert whole.curve == [(30, 1.625, "out", 0.75)]


def test_the_verb_goes_on_from_its_journal_on_any_number_of_processes(tmp_path):
    command = ["hunt", "twin.fp16", "--ground", "few", "--ground", "tile", "--problems", "16", "--seed", "3"]

    def run(out, *more):
        result = CliRunner().invoke(main, [*command, "--out", str(out), *more])
        assert result.exit_code == 0, result.output
        body = json.loads((out / "hunt.json").read_text())
        return {name: [(b["value"], b["problems"]) for b in g["best"].values()] for name, g in body["grounds"].items()}

    whole = run(tmp_path / "one", "--workers", "1")
    assert whole == run(tmp_path / "two", "--workers", "2")
    kept = sorted((tmp_path / "two" / ".partial").glob("*.json"))
    assert len(kept) == 8  # two grounds in four rounds
    for lost in kept[::2]:
        lost.unlink()
    before = {path: path.stat().st_mtime_ns for path in kept[1::2]}
    assert whole == run(tmp_path / "two", "--resume", "--workers", "1")
    assert {path: path.stat().st_mtime_ns for path in before} == before, "what was kept was not searched again"


@pytest.mark.usefixtures("in_this_process")
def test_the_verb_finds_a_planted_mistake_and_its_replay_file_shows_it(tmp_path):
    command = ["hunt", "twin.fp16+missing_column", "--ground", "few", "--problems", "64", "--workers", "1"]
    result = CliRunner().invoke(main, [*command, "--out", str(tmp_path)])
    assert result.exit_code == 1, result.output
    assert "| few | out |" in result.output
    again = CliRunner().invoke(main, ["replay", str(tmp_path / "largest" / "few_out.json")])
    assert again.exit_code == 1
    assert "still broken" in again.output
    sound = CliRunner().invoke(main, ["replay", str(tmp_path / "largest" / "few_out.json"), "--kernel", "twin.fp16"])
    assert sound.exit_code == 0, sound.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["twin.fp17"], "unknown kernel 'twin.fp17'"),
        (["twin.fp16", "--ground", "moon"], "ground of twin.fp16 must be one of few"),
        (["twin.fp16", "--objective", "difference"], "--objective difference goes with --against"),
        (["twin.fp16", "--problems", "5", "--seconds", "5"], "the budget is --problems or --seconds"),
        (["twin.fp16", "--baseline", "x.json"], "--baseline goes with --objective baseline"),
    ],
)
def test_wrong_options_are_refused(arguments, words, tmp_path):
    result = CliRunner().invoke(main, ["hunt", *arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2, result.output
    assert words in result.output


@pytest.mark.parametrize("objective", [Ratio(), Difference(find("twin.flash3.fp16"))], ids=lambda x: type(x).__name__)
def test_every_figure_climbs_as_often_from_extremes_as_from_inputs_that_are_not(objective):
    judged = objective.of_colonies(find("twin.fp16"))
    assert judged is not None
    starts = Counter(judged.objectives)
    figures = {figure for figure, _ in starts}
    assert {"lse"} < figures
    assert all(starts[figure, True] == starts[figure, False] for figure in figures)
