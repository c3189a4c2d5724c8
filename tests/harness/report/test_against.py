"""Two runs beside each other: what is said of each pair is right, whatever their names, profiles and errors."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fa3verify.campaign import atlas
from fa3verify.campaign.run import parse
from fa3verify.cli.main import main
from fa3verify.report import against, dataset, history
from tests.harness.report.stored_run import summary
from tests.harness.report.test_report import _parse

KERNEL = "twin.e4m3@64"
DRAWS = 8  # of each family


def made(
    factor: float = 1.0, *, noise: float = 0.0, name: str = KERNEL, only: tuple[str, ...] = (), draws: int = DRAWS
):
    """A run of one kernel with eight draws of each of three families, its errors times a factor."""
    body = summary()
    body["kernels"] = [row | {"name": name} for row in body["kernels"] if row["name"] == KERNEL]
    body["kernels"][0]["bits_lost"] = {"mean": 0.141 * factor, "worst": 0.41, "worst_family": "peaky", "families": 3}
    body["failures"], body["gate"] = [], []
    cases = []
    for row in body["cases"]:
        for seed in range(draws if row["kernel"] == KERNEL and (not only or row["family"] in only) else 0):
            case = copy.deepcopy(row) | {"kernel": name}
            case["case"] |= {"kernel": name, "recipe": case["case"]["recipe"] | {"seed": seed}}
            case["measures"]["rel_rmse_unrounded"] *= (1 + 0.1 * seed) * factor * math.exp(noise * (-1) ** seed)
            cases.append(case)
    body["cases"] = cases
    kept = {row["family"] for row in cases}
    body["kernels"][0]["families"] = [row for row in body["kernels"][0]["families"] if row["family"] in kept]
    return body


def side(body: dict[str, Any], name: str = "run.nc") -> against.Side:
    return against.of_run(name, parse(body, "summary"))


def words(old: dict[str, Any], new: dict[str, Any], given: tuple[tuple[str, str], ...] = ()) -> list[str]:
    """What is said of every family of the one pair."""
    first, second = side(old), side(new)
    (pair,) = against.pairs(first, second, given)
    return [family.word for family in against.compared(first, second, pair).families]


def without_finite(body: dict[str, Any]) -> dict[str, Any]:
    """The run with one output that is not finite."""
    body["cases"][0]["measures"] |= {"nonfinite": 1, "rel_rmse_unrounded": math.inf}
    return body


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (made(), made(), {"equal"}),
        (made(), made(0.9, noise=0.01), {"better"}),
        (made(), made(1.02, noise=0.005), {"worse"}),
        (made(noise=0.3), made(1.01), {"not told apart"}),
        (made(), made(name="mine@64"), {"equal"}),
        (made(), made(1.5, name="mine@64"), {"worse"}),
        (made(), made(1.3, draws=3), {"worse"}),
        (made(), made(1.3, draws=2), {"higher"}),
        (made(), made(0.9, draws=1), {"lower"}),
        (made(), made(1.005, draws=1), {"not told apart"}),
        (made(0.0), made(0.0), {"equal"}),
        (made(0.0), made(), {"worse"}),
    ],
    ids=[
        "equal",
        "better",
        "worse",
        "noise",
        "renamed",
        "renamed and worse",
        "other profile",
        "two cases",
        "one case",
        "one case and hardly a difference",
        "exact",
        "no longer exact",
    ],
)
def test_each_pair_is_called_what_it_is(old, new, expected):
    assert set(words(old, new)) == expected


def test_an_output_that_is_not_finite_decides_its_family_whatever_the_others_are():
    assert sorted(words(made(), without_finite(made(0.5)))) == ["better", "better", "worse"]
    assert sorted(words(without_finite(made()), made(2.0))) == ["better", "worse", "worse"]
    assert sorted(words(without_finite(made()), without_finite(made()))) == ["equal"] * 3


def test_as_many_cases_that_are_not_finite_are_not_called_equal_where_they_are_others_or_all():
    first, second, all_old, all_new = made(), made(), made(), made()
    for body, cases in ((first, [0]), (second, [1]), (all_old, range(DRAWS)), (all_new, range(DRAWS))):
        for case in cases:
            body["cases"][case]["measures"] |= {"nonfinite": 1, "rel_rmse_unrounded": math.inf}
    assert sorted(words(first, second)) == ["equal", "equal", "not told apart"]
    assert sorted(words(all_old, all_new)) == ["equal", "equal", "not told apart"]


def test_a_family_that_one_side_lacks_is_said_to_be_missing_and_decides_nothing():
    assert sorted(words(made(), made(only=("normal", "peaky")))) == ["equal", "equal", "only before"]
    assert sorted(words(made(only=("normal",)), made())) == ["equal", "only now", "only now"]


def test_a_pair_is_named_or_found_by_operation_and_format_where_there_is_one_alone():
    old, new = side(made()), side(made(name="mine@64"))
    assert against.pairs(old, new) == [(KERNEL, "mine@64")]
    assert against.pairs(old, new, [(KERNEL, "mine@64")]) == [(KERNEL, "mine@64")]
    with pytest.raises(ValueError, match="has no kernel yours"):
        against.pairs(old, new, [(KERNEL, "yours")])
    two = summary()  # another kernel of another format beside it
    assert len(against.pairs(side(two), new)) == 1


@pytest.mark.parametrize(("factor", "word"), [(1.2, "worse"), (0.8, "better"), (1.0, "equal")])
def test_families_of_one_case_together_say_whether_a_kernel_is_better(factor, word):
    old, new = side(made(draws=1)), side(made(factor, draws=1))
    found = against.compared(old, new, (KERNEL, KERNEL)).overall
    assert (found.word, found.cases) == (word, 3)


@pytest.mark.parametrize(
    ("new", "sentence"),
    [
        (made(), f"{KERNEL}: 3 families, equal in 3. It loses 0.141 bits, as before."),
        (
            made(0.5, noise=0.01),
            f"{KERNEL} is better, its error 0.500 times as large (0.500 to 0.500): 3 families, better in 3. "
            "It loses 0.070 bits, 0.141 before.",
        ),
        (
            without_finite(made(0.5)),
            f"{KERNEL}: 3 families, worse in 1, better in 2. It loses 0.070 bits, 0.141 before.",
        ),
    ],
    ids=["equal", "better", "both"],
)
def test_one_sentence_says_it(new, sentence):
    old = side(made())
    assert against.compared(old, side(new), (KERNEL, KERNEL)).sentence() == sentence


def stored(folder: Path, body: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    run = parse(body, "summary")
    dataset.save(dataset.to_tree(run), folder / "run.nc")
    (folder / "atlas.json").write_text(atlas.text(atlas.of(run)))
    return folder / "run.nc"


def report(*arguments: object):
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def test_the_page_says_what_the_console_says_and_opens_on_it(tmp_path):
    old, new = stored(tmp_path / "a", made()), stored(tmp_path / "b", made(1.2, name="mine@64"))
    found = report(new, "--against", old, "--out", tmp_path / "out")
    assert found.exit_code == 0, found.output
    sentence = (
        f"mine@64 beside {KERNEL} is worse, its error 1.20 times as large (1.20 to 1.20): 3 families, worse in 3. "
        "It loses 0.169 bits, 0.141 before."
    )
    assert found.output.splitlines() == [sentence, str(tmp_path / "out" / "against.html")]
    for page in (tmp_path / "out" / "against.html").read_text(), (tmp_path / "out" / "against.md").read_text():
        assert page.index(sentence) < page.index("1.20 to 1.20")
        assert f"Compared under two names: {KERNEL} and mine@64." in page
    assert not _parse((tmp_path / "out" / "against.html").read_text()).open


def test_other_profiles_and_kernels_without_a_partner_are_said(tmp_path):
    other = made() | {"profile": "release", "seed": 3}
    old = stored(tmp_path / "a", summary())
    found = report(stored(tmp_path / "b", other), "--against", old, "--out", tmp_path / "out")
    page = (tmp_path / "out" / "against.md").read_text()
    assert found.exit_code == 0
    assert "only cases that are in both are compared" in page
    assert "Only before: mine.py:mine@64. Name a pair by --pair OLD=NEW." in page


def test_of_atlases_no_family_has_an_interval(tmp_path):
    old, same, worse = (stored(tmp_path / n, b) for n, b in (("a", made()), ("b", made()), ("c", made(2.0))))
    sides = [against.read(path.with_name("atlas.json")) for path in (old, same, worse)]
    pair = (KERNEL, KERNEL)
    assert {family.word for family in against.compared(sides[0], sides[1], pair).families} == {"equal"}
    figures = sides[2].kernels[KERNEL].families[0].figures
    figures["rel_rmse_unrounded"] *= 2
    found = against.compared(sides[0], sides[2], pair).families[0]
    assert (found.word, found.ratio, math.isnan(found.low)) == ("higher", pytest.approx(2), True)
    found = report(worse.with_name("atlas.json"), "--against", old.with_name("atlas.json"), "--out", tmp_path / "out")
    assert (
        "An atlas holds no cases, so that no family of it has an interval."
        in (tmp_path / "out" / "against.md").read_text()
    )
    assert found.exit_code == 0


def test_figures_of_other_cases_are_not_held_against_each_other(tmp_path):
    """A kernel that claims more is asked more: its error had been told as 11.5 times as large."""
    sides = [against.read(stored(tmp_path / n, made()).with_name("atlas.json")) for n in "ab"]
    entry = sides[1].kernels[KERNEL]
    for figures, word, because in (
        ({"rel_rmse_unrounded": 7.6e28}, "not told apart", "other cases: 195, {} before"),
        ({"nonfinite": 3}, "worse", "not finite in 3 outputs"),
    ):
        asked = replace(entry.families[0], figures=entry.families[0].figures | {"cases": 195} | figures)
        more = replace(entry, families=(asked, *entry.families[1:]))
        side = replace(sides[1], atlas=replace(sides[1].atlas, kernels=(more,)))
        found = against.compared(sides[0], side, (KERNEL, KERNEL))
        assert (found.families[0].word, math.isnan(found.families[0].ratio)) == (word, True)
        assert because.format(entry.families[0].figures["cases"]) in found.families[0].because
        assert "times as large" not in found.sentence()


def test_a_history_draws_the_number_of_every_run_below_a_folder_oldest_first(tmp_path):
    for name, day, factor in (("second", 2, 2.0), ("first", 1, 1.0)):
        stored(tmp_path / "runs" / name, made(factor) | {"started": f"2026-11-0{day}T00:00:00Z"})
    found = report("--history", tmp_path / "runs", "--out", tmp_path / "out")
    assert found.exit_code == 0, found.output
    assert [(name, run.bits_lost) for name, run in history.runs_below(tmp_path / "runs").items()] == [
        ("first", {KERNEL: pytest.approx(0.141)}),
        ("second", {KERNEL: pytest.approx(0.282)}),
    ]
    page = (tmp_path / "out" / "history.html").read_text()
    assert page.index("0.141") < page.index("0.282")
    assert "<svg" in page
    assert not _parse(page).open


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "report needs DATA"),
        (("--history", "{}"), "has no run.nc below it"),
        (("x.json", "--history", "{}"), "neither DATA nor --against"),
        (("--history", "{}", "--pair", "a=b"), "neither DATA nor --against nor --pair"),
        (("x.json", "--pair", "a=b"), "--pair is for --against"),
        (("x.json", "--against", "y.json", "--pair", "a"), "--pair is OLD=NEW"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(arguments, says, tmp_path):
    found = report(*(argument.format(tmp_path) for argument in arguments), "--out", tmp_path / "out")
    assert found.exit_code == 2
    assert says in found.stderr
    assert found.stderr.count("\n") == 1


def test_a_case_is_the_same_for_kernels_of_two_names():
    first, second = side(made()), side(made(name="mine@64"))
    cases = [one.cases[name]["normal"] for one, name in ((first, KERNEL), (second, "mine@64"))]
    assert list(cases[0]) == list(cases[1])
    assert len(cases[0]) == DRAWS
    assert all(json.loads(case)["kernel"] == "" for case in cases[0])


def test_cases_are_compared_by_the_first_figure_that_both_sides_have():
    """A kernel whose outputs cannot be had before they are rounded has the error of rounded ones alone."""
    whole = {str(i): {"rel_rmse_unrounded": 1e-9, "rel_rmse_seen": 1e-3 * (1 + i)} for i in range(DRAWS)}
    rounded = {case: {"rel_rmse_seen": 2 * figures["rel_rmse_seen"]} for case, figures in whole.items()}
    for old, new, ratio in ((whole, rounded, 2.0), (rounded, whole, 0.5)):
        found = against.of_cases("normal", old, new)
        assert (found.word, found.ratio) == ("worse" if ratio > 1 else "better", pytest.approx(ratio))
