"""The survey of edits draws what it says, puts a file back as it was, and tries first the tests that are nearest."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason="cosmic-ray is in the extra 'dev'")
pytest.importorskip("coverage", reason="coverage comes with the extra 'dev'")

from tests.quality import mutant_runs
from tests.quality.harness_mutants import draw, modules, page, places
from tests.quality.mutant_runs import Edit, Outcome, apply, edit, rounds
from tests.quality.reached_lines import Reached

pytestmark = pytest.mark.optional

ROOT = Path(__file__).parents[2]
SOURCE = '''"""A module."""

from functools import cache


@cache
def larger(x: int | None, least: int = 3) -> bool:
    """Tell whether x is the larger one."""
    return x is not None and x > least
'''


def test_an_edit_is_drawn_where_the_program_changes_and_nowhere_else(tmp_path):
    file = tmp_path / "module.py"
    file.write_text(SOURCE)
    lines = {place.start[0] for place in places(file, tmp_path)}
    assert lines == {7, 9}  # neither the decorator, which saves time, nor the annotations
    columns = {place.start[1] for place in places(file, tmp_path) if place.start[0] == 7}
    assert columns == {SOURCE.splitlines()[6].index("3")}


def test_the_same_seed_draws_the_same_edits_of_the_cpu_side():
    files = [str(path.relative_to(ROOT)) for path in modules(ROOT)]
    assert {"fa3verify/judging/gate.py", "reference/fa3_reference/bounds/forward.py"} <= set(files)
    assert "fa3verify/bench/tuning.py" not in files  # it needs torch
    assert "kernels/fa3_kernels/twin/forward.py" not in files


def test_an_edit_is_made_and_undone(tmp_path):
    file = tmp_path / "module.py"
    file.write_text(SOURCE)
    change = edit("module.py", SOURCE, SOURCE.replace("x > least", "x >= least"))
    assert (change.line, change.first, change.last) == (9, 8, 9)  # of the function, without its head
    assert apply(change, tmp_path) == SOURCE
    assert "x >= least" in file.read_text()
    with pytest.raises(ValueError, match=r"line 9 of module\.py is not"):
        apply(change, tmp_path)


def test_tests_that_reach_the_function_come_first_and_their_files_follow():
    change = Edit("fa3verify/judging/gate.py", 9, "a", "b", 8, 9)
    seconds = {
        "tests/x.py::slow": 5.0,
        "tests/test_gate.py::near": 9.0,
        "tests/x.py::far": 1.0,
        "tests/y.py::none": 0.1,
    }
    reached = Reached(
        seconds, {"fa3verify/judging/gate.py": {9: frozenset({"tests/x.py::slow", "tests/test_gate.py::near"})}}
    )
    assert rounds(change, reached) == [["tests/test_gate.py::near", "tests/x.py::slow"], ["tests/x.py::far"]]


def test_a_planted_edit_is_found_by_a_test_that_reaches_it_and_survives_one_that_does_not_look(tmp_path):
    (tmp_path / "module.py").write_text(SOURCE)
    (tmp_path / "conftest.py").write_text("")
    (tmp_path / "test_module.py").write_text(
        "from module import larger\n\n\ndef test_looks():\n    assert not larger(3)\n\n\n"
        "def test_only_calls():\n    larger(3)\n\n\ndef test_is_wrong_anyway():\n    assert larger(3)\n"
    )
    change = edit("module.py", SOURCE, SOURCE.replace("x > least", "x >= least"))
    for test, found in (("test_module.py::test_looks", True), ("test_module.py::test_only_calls", False)):
        reached = Reached({test: 0.1}, {"module.py": {9: frozenset({test})}})
        outcome = mutant_runs.run(change, tmp_path, reached)
        assert outcome.found is found
        assert (tmp_path / "module.py").read_text() == SOURCE
    both = ["test_module.py::test_looks", "test_module.py::test_is_wrong_anyway"]
    assert mutant_runs.fail_without_an_edit(both, tmp_path) == {both[1]}


def test_the_page_counts_by_package_and_names_every_survivor_with_its_reason():
    found = Outcome(Edit("fa3verify/judging/gate.py", 1, "a", "b", 1, 1), True, "FAILED x", 1.0)
    left = Outcome(Edit("fa3verify/text.py", 1, "c | d", "e", 1, 1), False, "", 1.0)
    text = page(7, [found, left], {left.edit.key: "They are equal."})
    assert "| fa3verify | 2 | 1 | 50 % |" in text
    assert "| fa3verify/text.py | `c \\| d` | `e` | They are equal. |" in text
    assert "not explained" in page(7, [left], {})


def test_a_draw_changes_the_syntax_tree(tmp_path):
    folder = tmp_path / "fa3verify"
    folder.mkdir()
    (folder / "gate.py").write_text(SOURCE)
    (folder / "tensors.py").write_text(f"import torch\n{SOURCE}")
    edits = draw(tmp_path, 10, 1)
    assert edits == draw(tmp_path, 10, 1)
    assert len({change.key for change in edits}) == len(edits) == len(places(folder / "gate.py", tmp_path))
