"""Every property, bound and policy has one clause, a clause's demand keeps its version, and a wrong kernel fails it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fa3_reports import conformance
from fa3verify.campaign import atlas, introduction
from fa3verify.campaign.findings import Finding, finding, with_clause
from fa3verify.campaign.introduction import Only
from fa3verify.campaign.plan import plan
from fa3verify.campaign.run import Introduction
from fa3verify.campaign.summary import of_kernel
from fa3verify.campaign.tasks import Outcome
from fa3verify.judging.clauses import Clause, clauses
from fa3verify.judging.verdict import Part, What
from fa3verify.known.registry import find
from fa3verify.properties.runner import find_law, run_law
from fa3verify.text import Failure

pytestmark = pytest.mark.usefixtures("shared_references")
ROOT = Path(__file__).parents[2]
CLAUSES = list(clauses().values())


def test_everything_that_can_fail_a_kernel_has_one_clause_and_no_clause_is_of_nothing():
    assert sorted(clauses()) == sorted(conformance.demands())
    numbers = [clause.number for clause in CLAUSES]
    by_letter = {letter: [n for n in numbers if n[0] == letter] for letter in conformance.SERIES}
    assert numbers == [f"{letter}{i:02d}" for letter, some in by_letter.items() for i in range(1, len(some) + 1)]


def test_every_part_of_a_verdict_that_a_kernel_can_fail_leads_to_a_clause():
    """A rule or a law has its own (above); whatever gave no result fails that of calls."""
    for part in set(Part) - {Part.LARGEST, Part.HUNT}:
        crashed = finding("k", What(part, "x"), Failure("RuntimeError: no"))
        assert with_clause(crashed, "forward").clause == "FA3V-C01, version 1"


@pytest.fixture(scope="module")
def digests() -> dict[str, str]:
    return conformance.digests()


def test_a_demand_keeps_its_version(digests):
    """Another demand is another version; the same one in other words is another digest alone (docs/conformance.md)."""
    found = digests
    moved = [f'{c.number}, digest = "{found[c.of]}"' for c in CLAUSES if found[c.of] != c.digest]
    assert not moved, f"raise the version if the demand is another, and write the digest: {'; '.join(moved)}"


def test_a_digest_sees_the_words_and_the_size_of_a_bound(digests, monkeypatch):
    before = digests
    figures = conformance.bounds()
    of = "forward: L1 lse error / bound"
    monkeypatch.setattr(conformance, "bounds", lambda: figures | {of: ["1e-9"]})
    law = conformance.LAWS[0]
    told = {"name": law.name, "statement": f"{law.statement} at times", "kind": law.kind, "operations": law.operations}
    monkeypatch.setattr(conformance, "LAWS", (type("Told", (), told), *conformance.LAWS[1:]))
    after = conformance.digests()
    assert {name for name in before if before[name] != after[name]} == {of, f"law {law.name}"}


def test_every_clause_says_why_and_in_whole_sentences():
    for of, demand in conformance.demands().items():
        why = clauses()[of].why
        assert bool(why) != bool(demand.why), of  # said once
        assert all(text.endswith(".") for text in (demand.text, why or demand.why)), of


def test_pages_are_those_of_the_registry_and_the_atlas():
    for place, text in conformance.render().items():
        assert (ROOT / place).read_text(encoding="utf-8") == text, f"{place}: {conformance.COMMAND}"


SHOWN = [clause for clause in CLAUSES if not clause.shown.startswith("tests/")]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("clause", SHOWN, ids=lambda clause: clause.number)
def test_a_wrong_kernel_does_not_meet_its_clause(clause):
    found = broken(clause)
    if clause.number[0] in "PB":
        assert clause.name in {each.clause for each in found}, [each.message for each in found]
    assert found


def broken(clause: Clause) -> list[Finding]:
    """Return findings of the part of a campaign that asks for a clause, about the kernel that is known to fail it."""
    kernel = find(clause.shown)
    asked = conformance.ASKED_BY.get(clause.of.partition(" ")[2], clause.of).format(operation=kernel.operation)
    if clause.number[0] == "S":
        asked = conformance.SPECIAL
    if asked.startswith("law "):
        law = find_law(asked.split()[1])
        outcome = run_law(law, kernel, max_examples=60, seed=0, shrink_seconds=0)
        assert outcome.violation is not None, f"{clause.shown} survives {outcome.examples} trials of {law.name}"
        assert outcome.violation.failure is None, outcome.violation.message
        if clause.number[0] == "S":
            assert outcome.violation.seen.rule == clause.of.split()[1]
        if asked == conformance.EMPTY and clause.number[0] == "D":
            assert clause.of.split("_")[1] in outcome.violation.message
        return [with_clause(finding(kernel.name, What.from_json(asked), outcome.violation.message), kernel.operation)]
    known = introduction.introduce(clause.shown, "quick")
    known = Only(families=("offset_v",)).of(known)
    (task,) = plan([known], "quick", 0)
    outcome = Outcome(task, task.run())
    return of_kernel(known, [outcome], None, profile="quick", seed=0)[2]


@pytest.mark.parametrize("clause", [c for c in CLAUSES if c not in SHOWN], ids=lambda clause: clause.number)
def test_the_test_that_shows_a_clause_is_there(clause):
    path, _, name = clause.shown.partition("::")
    assert f"\ndef {name}(" in (ROOT / path).read_text(encoding="utf-8")


def entry(findings: tuple[Finding, ...] = (), **changes) -> dict[str, str]:
    """Return what became of the clauses of a row of the atlas with some fields changed."""
    made = atlas.read(ROOT / "reports" / "atlas" / "h200" / "atlas.json")
    plain = next(each for each in made.kernels if each.name == "gluon.fp16")
    return conformance.status(replace(made, failures=findings), replace(plain, **changes))


def test_a_clause_is_met_where_all_that_asks_for_it_ran():
    met = entry()
    assert met["law error_within_bound"] == met["forward: L1 error / bound"] == met["rule nan_in_key"] == "pass"
    assert met["quantize: L1 error / bound"] == met["law gradients_within_bound"] == "not asked"
    assert met["L2 abs_bias"] == "not recorded"
    assert entry(laws=())["law error_within_bound"] == "not asked"
    assert entry(families=())["forward: L1 error / bound"] == "not asked"


def test_a_call_without_a_result_leaves_bounds_in_part_and_fails_the_clause_of_calls():
    what = What(Part.FAMILY, "cover")
    met = entry((Finding("gluon.fp16", what, "RuntimeError: x", cause="RuntimeError: x", raised="RuntimeError"),))
    assert met["forward: L1 error / bound"] == "in part"
    assert met["no result"] == "fail"
    assert met["law error_within_bound"] == "pass"


def test_what_is_declared_is_no_pass():
    declared = ("causal top_left", "special_values out", "min_seqlen 1")
    met = entry(introduction=Introduction("gluon.fp16", dtype="fp16", states_order=True, policy=declared))
    named = ("policy causal", "policy special_values", "law special_values_follow_policy", "rule nan_in_key")
    assert {met[of] for of in named} == {"declared"}
    assert met["policy empty_out"] == "pass"


def test_of_the_rules_of_a_failed_table_one_is_known():
    made = atlas.read(ROOT / "reports" / "atlas" / "cpu" / "atlas.json")
    met = conformance.status(made, next(each for each in made.kernels if each.name == "torch.flash.fp16"))
    assert met["rule nan_in_query"] == met["law special_values_follow_policy"] == "fail"
    assert met["rule nan_in_value"] == met["policy special_values"] == "not recorded"
