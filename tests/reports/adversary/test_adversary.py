"""Whole searches: one result on any number of processes, a file that can be judged again, a verb with exit codes."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from fa3_reference.bounds.forward import ErrorBound, forward_bound
from fa3_reports.__main__ import main
from fa3_reports.adversary import search as adversary
from fa3_reports.adversary.forward import ISLANDS, TwinSearch, over_bound
from fa3_reports.adversary.gradients.search import GradientSearch
from fa3_reports.adversary.search import islands_of
from fa3verify.files import json_text
from fa3verify.search.forward.colony import individual
from tests.sampling import sampled


def halved(problem, operands, model):
    return ErrorBound(*(bound / 2 for bound in forward_bound(problem, operands, model)))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A small search by the verb, and what it printed."""
    out = tmp_path_factory.mktemp("adversary") / "found.json"
    arguments = ["adversary", "--dtype", "bf16", "--problems", "80", "--jobs", "2", "--seed", "3", "--out", str(out)]
    return out, CliRunner().invoke(main, arguments)


def test_the_verb_writes_counts_ratios_and_individuals(file):
    out, result = file
    body = json.loads(out.read_text())
    assert result.exit_code == (1 if body["above_1"] else 0), result.output
    assert list(body["dtypes"]) == ["bf16"]
    part = body["dtypes"]["bf16"]
    assert set(part["islands"]) == {island.name for island in islands_of("bf16")}
    assert part["problems"] == sum(x["problems"] for x in part["islands"].values()) >= 80
    assert part["generations"] == sum(x["generations"] for x in part["islands"].values())
    for island in part["islands"].values():
        assert set(island["best"]) == set(over_bound().records)
        assert all(0 < find["value"] <= part["ratio"][name] for name, find in island["best"].items())


def test_the_number_of_processes_does_not_change_the_result(file):
    out, _ = file
    alone = adversary.run(("bf16",), 80, 3, jobs=1)
    assert json_text(alone.to_json() | {"seed": 3, "problems": 80}) == out.read_text()


def test_a_file_is_judged_again_to_the_last_bit(file):
    out, _ = file
    body = json.loads(out.read_text())
    for island in body["dtypes"]["bf16"]["islands"].values():
        for name, find in island["best"].items():
            assert over_bound().again(*individual(find["content"]))[name] == find["value"]
    result = CliRunner().invoke(main, ["adversary", "--replay", str(out)])
    assert result.exit_code == (1 if body["above_1"] else 0)
    islands = body["dtypes"]["bf16"]["islands"].values()
    assert result.output.count("stored") == sum(len(x["best"]) + len(x["violations"]) for x in islands)


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "fa3verify.replay/1"}'])
def test_a_foreign_file_is_refused_by_name(tmp_path, text):
    path = tmp_path / "foreign.json"
    path.write_text(text)
    result = CliRunner().invoke(main, ["adversary", "--replay", str(path)])
    assert result.exit_code == 2
    assert "foreign.json is not a file of the adversary" in result.output


SEEDED = [(TwinSearch, island) for island in ISLANDS[::5]] + [(GradientSearch, GradientSearch.ISLANDS[0])]


@pytest.mark.parametrize(("search", "island"), sampled(SEEDED, [SEEDED[0], SEEDED[-1]]))
def test_a_seed_decides_the_search(search, island):
    first, second, other = (search(island, seed).until(10 * island.problems) for seed in (1, 1, 2))
    assert first == second
    name = search.JUDGE.records[0]
    assert first.best[name].content != other.best[name].content


@pytest.mark.parametrize(
    ("search", "words"),
    [
        (TwinSearch, "an individual is incomplete or damaged"),
        (GradientSearch, "there is no island 'nowhere' of gradients for 'fp16'"),
    ],
)
def test_an_individual_that_is_damaged_is_refused(search, words):
    values = search(search.ISLANDS[0], 0).normal().to_json((0, 0))
    with pytest.raises(ValueError, match=words):
        search.individual(values | {"island": "nowhere"})
    with pytest.raises(ValueError, match="an individual is incomplete or damaged"):
        search.individual({key: value for key, value in values.items() if key != "v"})


def test_half_the_bound_is_broken_in_every_island_and_what_breaks_it_is_kept():
    broken = over_bound(halved)
    for island in ISLANDS[:2]:
        found = TwinSearch(island, 0, broken).until(20 * island.problems)
        assert found.above_1 > 0
        for find in found.violations.values():
            ratios = broken.again(*individual(find.content))
            assert max(ratios["out"], ratios["lse"]) == find.value > 1


def test_a_plan_shares_the_problems_among_islands_and_seeds():
    tasks = [task.arguments for task in adversary.plan(("fp16", "e4m3"), 1_000_000, 5)]
    for dtype in ("fp16", "e4m3"):
        mine = [task for task in tasks if task["dtype"] == dtype]
        assert sum(task["problems"] for task in mine) >= 1_000_000
        assert {task["name"] for task in mine} == {island.name for island in islands_of(dtype)}
        assert max(task["problems"] for task in mine) <= adversary.CHUNK
    seeds = [(task["dtype"], tuple(task["seed"])) for task in tasks]
    assert len(set(seeds)) == len(seeds)
