"""The adversary in a campaign: searches for the twins, a failure for every hole, a file beside the report."""

from __future__ import annotations

import json
from dataclasses import replace

from fa3verify.campaign.tasks import Outcome
from fa3verify.search import adversary


def test_only_soak_searches_and_only_for_twins_of_the_forward(monkeypatch):
    kernels = ("twin.fp16", "twin.quantize", "twin.e4m3", "third_party:sound")
    assert adversary.tasks(kernels, "quick", 0) == []
    assert adversary.tasks(("twin.quantize",), "soak", 0) == []
    tasks = adversary.tasks(kernels, "soak", 7)
    assert {task.arguments["dtype"] for task in tasks} == {"fp16", "e4m3"}
    assert sum(t.arguments["problems"] for t in tasks) >= 2 * adversary.PROBLEMS["soak"]


def test_a_hole_and_a_lost_search_are_failures(monkeypatch, tmp_path):
    monkeypatch.setitem(adversary.PROBLEMS, "soak", 100)
    tasks = adversary.tasks(("twin.fp16",), "soak", 0)[:3]
    outcomes = [Outcome(task, adversary.search_island(**task.arguments)) for task in tasks]
    sound = [replace(o, value=o.value | {"violations": {}, "above_1": 0}) for o in outcomes]
    assert adversary.write(sound, tmp_path) == []
    hole = {"subnormal": outcomes[0].value["best"]["out"] | {"value": 1.5}}
    wrong = replace(sound[0], value=sound[0].value | {"violations": hole, "above_1": 1})
    failures = adversary.write([wrong, sound[1], replace(sound[2], value=None, error="lost")], tmp_path)
    assert [f.kernel for f in failures] == ["-", "twin.fp16"]
    assert failures[1].message == "error / bound 1.5, subnormal; see adversary.json"
    body = json.loads((tmp_path / adversary.FILE).read_text())
    assert body["above_1"] == 1
    assert list(body["dtypes"]["fp16"]["islands"]) == ["few", "tile"]


def test_a_campaign_without_searches_writes_no_file(tmp_path):
    assert adversary.write([], tmp_path) == []
    assert list(tmp_path.iterdir()) == []
