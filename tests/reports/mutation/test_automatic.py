"""A campaign is the same for the same seed, goes on from what it has, and counts what became of each mutant."""

from __future__ import annotations

from concurrent.futures import Executor, Future

import pytest

from fa3_reports.mutation import automatic, edits, reach, tables
from fa3_reports.mutation.automatic import Fate, Row, Settings
from fa3_reports.mutation.equivalence import EQUIVALENT
from fa3_reports.mutation.examine import Examination

LINES = {"twin.fp16": {module: list(range(1, 600)) for module in ("softmax", "combine")}}


class Now(Executor):
    """Runs every call at once and in this process, and what examines a mutant not at all."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def submit(self, fn, /, *args, **kwargs):
        future: Future = Future()
        mutant = fn.__self__.arguments["mutant"]
        self.asked.append(mutant)
        parts = ("L1", "L2") if "softmax" in mutant else ()
        future.set_result(Examination(parts, "normal", "twin.fp16", "", 1, 2.0))
        return future

    def map(self, fn, *iterables, **_):  # type: ignore[override]
        return [LINES[kernel] for kernel in iterables[0]]


@pytest.fixture
def settings(tmp_path) -> Settings:
    return Settings(tmp_path, count=40, kernels=("twin.fp16",), modules=("softmax", "combine"))


def test_the_same_seed_chooses_the_same_mutants(settings):
    first = automatic.chosen(settings, LINES)
    assert first == automatic.chosen(settings, LINES)
    assert len(first) == 40


def test_a_campaign_goes_on_from_what_it_has(settings, monkeypatch):
    monkeypatch.setattr(automatic.provenance, "keys", lambda kind: {"twin": "one"})
    pool = Now()
    fates = automatic.run(settings, pool, lambda _: None)
    assert len(pool.asked) == len(fates) == 40
    again = Now()
    assert [f.status for f in automatic.run(settings, again, lambda _: None)] == [f.status for f in fates]
    assert again.asked == []
    monkeypatch.setattr(automatic.provenance, "keys", lambda kind: {"twin": "another"})
    with pytest.raises(ValueError, match="other code"):
        automatic.run(settings, again, lambda _: None)


def test_release_sees_what_quick_did_not_find_task_by_task(settings, monkeypatch):
    monkeypatch.setattr(automatic.provenance, "keys", lambda kind: {"twin": "one"})
    from dataclasses import replace

    pool = Now()
    fates = automatic.run(replace(settings, profile="release"), pool, lambda _: None)
    missed = next(fate for fate in fates if fate.status == "missed")
    assert len({row.plan for row in missed.rows}) == len(missed.rows) > 30
    caught = next(fate for fate in fates if fate.status == "caught")
    assert [row.plan for row in caught.rows] == ["all"]


def test_release_sees_what_an_argument_covers_last(settings, monkeypatch):
    monkeypatch.setattr(automatic.provenance, "keys", lambda kind: {"twin": "one"})
    from dataclasses import replace

    argued = next(name for name in EQUIVALENT if name.startswith("combine"))
    open_one = next(m.identity for m in edits.mutants("combine") if m.identity not in EQUIVALENT)
    monkeypatch.setattr(automatic, "chosen", lambda *_: [edits.find(argued), edits.find(open_one)])
    pool = Now()
    automatic.run(replace(settings, profile="release"), pool, lambda _: None)
    assert pool.asked[:2] == [argued, open_one]
    assert set(pool.asked[2:]) == {argued, open_one}
    assert pool.asked[2:] == sorted(pool.asked[2:], key=lambda identity: identity == argued)


def test_an_argument_counts_until_bits_contradict_it():
    fate = Fate(edits.find(next(iter(EQUIVALENT))))
    fate.rows.append(Row(fate.mutant.identity, "constant", "quick", "all", "", "", "", "", 9, 1.0, ""))
    assert fate.status == "equivalent"
    fate.rows.append(Row(fate.mutant.identity, "constant", "quick", "all", "", "", "", "normal", 9, 1.0, ""))
    assert fate.status == "missed"


def test_the_page_counts_every_mutant_once(settings, monkeypatch):
    monkeypatch.setattr(automatic.provenance, "keys", lambda kind: {"twin": "one"})
    fates = automatic.run(settings, Now(), lambda _: None)
    *_, (name, mutants, *counts, share) = tables.scores(fates, lambda fate: fate.mutant.module)
    crash, laws, bound, baseline, _bits, equal, missed, unfinished = counts
    assert (name, mutants) == ("all", 40)
    assert crash + laws + bound + baseline + equal + missed + unfinished == 40
    assert share == f"{100 * bound / (bound + missed):.1f} %"


def test_compiled_loops_count_as_run_where_their_caller_is():
    lines: dict[str, set[int]] = {module: set() for module in edits.modules()}
    caller = next(line for line in reach._mentions("float32")["_fma_loop"])
    lines["float32"].add(caller)
    reach._with_compiled(lines)
    inner = next(mutant for mutant in edits.mutants("float32") if mutant.function == "fma_one")
    assert reach.is_run(inner, {module: sorted(run) for module, run in lines.items()})
    other = next(mutant for mutant in edits.mutants("float32") if mutant.function == "_row_max_loop")
    assert not reach.is_run(other, {module: sorted(run) for module, run in lines.items()})
