"""Bugs that only uncommon inputs show: quick finds them by the task that is named, and sound kernels pass it."""

from __future__ import annotations

import numpy as np
import pytest

from fa3_kernels.faults.table import Rewrite
from fa3_reference.problem import AttentionProblem
from fa3_reports.mutation import museum, uncommon
from fa3_reports.mutation.examine import examine, found_by
from fa3verify.cases.case import Case
from fa3verify.cases.coverage import COVER
from fa3verify.inputs.recipe import Recipe
from fa3verify.known import registry
from tests.sampling import sampled

# Quick ones, and three of the covering array; the command `python -m fa3_reports mutants uncommon` examines all.
TRIED = [
    e
    for e in uncommon.EXHIBITS
    if e.kernel == "twin.fp16" and (e.task != COVER or "-5e4" in e.what or "modulo" in e.what)
]
LINES = [e for e in uncommon.EXHIBITS if isinstance(e.plant, Rewrite)]


def label(exhibit):
    return f"{exhibit.what}, {exhibit.kernel}"


@pytest.mark.parametrize(
    "exhibit", sampled(TRIED, [e for e in TRIED if "sequences are counted" not in e.what]), ids=label
)
def test_quick_finds_what_uncommon_inputs_show(exhibit):
    plan = [(exhibit.kernel, exhibit.task)]
    found = examine(lambda _: museum.kernel_of_exhibit(exhibit, bits=False), plan, "quick", 0)
    assert found is not None
    assert found.found_by, found
    assert found.found_by != ("crash",), found


@pytest.mark.parametrize("exhibit", LINES, ids=label)
def test_what_is_planted_in_a_line_finds_that_line(exhibit):
    assert exhibit.plant.tree().body


@pytest.mark.parametrize("task", sorted({exhibit.task for exhibit in TRIED} - {COVER}))  # a campaign has that one
def test_the_sound_twin_passes_the_same_tasks(task):
    asked = {exhibit.sound.features: exhibit.sound for exhibit in TRIED if exhibit.task == task}
    for sound in asked.values():
        assert found_by(sound, task, "quick", 0) == ()


@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_a_window_is_ignored_where_there_is_one_query_and_nowhere_else(seqlen_q):
    (exhibit,) = [e for e in uncommon.EXHIBITS if e.what == "a window is ignored where there is one query"]
    problem = AttentionProblem(1, 1, 1, seqlen_q, 40, 64, dtype="fp16", window=(3, 3))
    operands = Case("twin.fp16", problem, Recipe("normal")).draw()[1].operands
    sound = registry.find("twin.fp16")
    config = sound.config_for(problem)
    wrong = museum.kernel_of_exhibit(exhibit, bits=False).code.run(problem, operands, config)
    assert np.array_equal(wrong.out, sound.code.run(problem, operands, config).out) == (seqlen_q > 1)
