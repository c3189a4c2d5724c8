"""The first screen of a report: a sentence, the number that ranks, one figure beside the ideal kernel."""

from __future__ import annotations

import math
import re

import pytest

from fa3verify.judging.bits_lost import bits_text
from fa3verify.report import first_screen, words
from fa3verify.report.build import PAGE, environment, render
from tests.harness.report.fake_summary import read, summary


def test_a_pass_is_told_in_one_sentence_with_what_it_does_not_say():
    made = summary(kernels=("mine",))
    made["kernels"][0] |= {"cases": 1582}
    assert first_screen.headline(read(made)) == "mine was right in all 1,582 cases that were tried."
    sizes = {"calls": 302, "head_dim": [64, 128], "head_dim_v": [[64, 64]], "group": [1], "nheads": [4]}
    sizes |= {"sequences": [1], "seqlen_q": [129], "seqlen_k": [1030], "layout": "contiguous", "repeated_runs": True}
    sizes |= {"features": [], "not_tried": []}
    made["kernels"][0]["tried"] = sizes
    told = first_screen.not_said(read(made))
    assert told == "It says nothing of other sizes: head_dim 64, 128 and keys up to 1,030 were tried."
    several = summary()
    for kernel in several["kernels"]:
        kernel["tried"] = sizes
    assert first_screen.headline(read(several)).startswith("All 3 kernels were right in all ")
    assert first_screen.not_said(read(several)).endswith("and keys up to 1,030 were tried of each.")


def test_a_failure_names_the_kernel_the_symptom_and_one_finding_in_the_singular():
    made = summary(verdict="fail")
    cases = sum(kernel["cases"] for kernel in made["kernels"])
    told = first_screen.headline(read(made))
    assert told.startswith("twin.fp16 failed, 2 other kernels did not: ")
    assert told.endswith(f"(1 finding in {cases:,} cases).")
    assert first_screen.not_said(read(made)) == ""
    page = render(read(made), "ab" * 32)[PAGE]
    assert "1 finding of 1 symptom," in page
    assert "1 findings" not in page


def test_no_verdict_claims_no_case_was_right():
    assert first_screen.headline(read(summary(verdict="inconclusive"))).startswith("No verdict: too little of ")


def ranked(**figures):
    made = summary(kernels=("mine", "other"))
    for kernel, mean in zip(made["kernels"], (0.3, 1.2), strict=True):
        kernel |= {"dtype": "bf16", "families": kernel["families"][:2]}
        kernel["bits_lost"] = {
            "mean": mean,
            "worst": 2.0,
            "worst_family": kernel["families"][1]["family"],
            "families": 2,
        }
        for family in kernel["families"]:
            family |= {"rel_rmse_seen": 2.13e-3, "rel_rmse_ideal": 1.6e-3, "bits_lost": 0.41, "ratio_max": 0.9}
    made["kernels"][0]["families"][0] |= figures
    return made


def test_the_heat_map_has_every_family_beside_the_ideal_of_its_format():
    heat = first_screen.heat_map(read(ranked()))
    told = [(row["name"], row["kind"]) for row in heat.rows]
    assert told[:3] == [("mine", "kernel"), ("ideal bf16", "ideal"), ("bits lost", "bits")]
    assert [name for name, _ in heat.families] == ["normal", "fa3_outliers"]
    assert [cell.text for cell in heat.families[0][1]] == ["2.1e-3", "1.6e-3", "0.41"] * 2
    assert [cell.shade for cell in heat.families[0][1][:2]] == ["1.00", "0.00"]
    assert heat.families[1][1][2].state == "worst"


@pytest.mark.parametrize(
    ("figures", "text", "state"),
    [
        ({"ratio_max": 1.5}, "2.1e-3", "wrong"),
        ({"nonfinite": 1, "bits_lost": "Infinity"}, "2.1e-3", "wrong"),
        ({"rel_rmse_seen": "Infinity"}, "∞", "kernel"),
        ({"rel_rmse_seen": 0.0}, "0", "kernel"),
        ({}, "2.1e-3", "kernel"),
    ],
)
def test_a_cell_is_marked_where_an_error_leaves_its_bound_and_nowhere_else(figures, text, state):
    cell = first_screen.heat_map(read(ranked(**figures))).families[0][1][0]
    assert (cell.text, cell.state) == (text, state)


def test_one_family_of_hardly_any_error_does_not_make_all_others_alike():
    heat = first_screen.heat_map(read(ranked(rel_rmse_seen=1e-12, rel_rmse_ideal=1e-3)))
    cells = heat.families[0][1]
    assert (cells[0].text, cells[0].shade) == ("1e-12", "0.00")
    assert 0.9 < float(cells[1].shade) < 1


def test_the_page_opens_with_sentence_number_and_figure():
    made = ranked()
    page = render(read(made), "ab" * 32)[PAGE]
    places = [page.index(part) for part in ("<h1>All 2 kernels", "<strong>1.20 bits</strong>", 'id="heat"', "<nav")]
    assert places == sorted(places)
    made["kernels"][1]["bits_lost"]["mean"] = math.inf
    assert bits_text(words.ranked(read(made).kernels)[0][1].mean) == "infinitely many"


def test_a_relative_error_of_an_exact_zero_says_so_on_the_page():
    page = render(read(ranked(rel_rmse_unrounded="Infinity")), "ab" * 32)[PAGE]
    table = page[page.index('id="headline"') :]
    assert re.search(r'<td class="n">exact is 0</td>', table)


def test_a_template_is_compiled_once():
    page, again = (environment(autoescape=True).get_template("report.html.j2") for _ in range(2))
    assert page is again
    assert environment(autoescape=False).get_template("report.html.j2") is not page
