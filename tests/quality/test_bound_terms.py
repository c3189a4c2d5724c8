"""The pinned tests of the bounds see terms that are missing or halved: the holes that were known, planted again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fa3_reference.bounds import steps
from tests.quality.bound_terms import EXPLAINED, MODULES, _mutant, breaks, explained, functions_of, terms
from tests.quality.weighed_bound import SOURCES, weighed
from tests.reference.bounds import (
    test_terms_backward,
    test_terms_enclosure,
    test_terms_forward,
    test_terms_quantiser,
)

GRADIENTS = test_terms_backward.test_the_bound_of_gradients_is_what_its_formulas_make_by_hand
FORWARD = test_terms_forward.test_the_bound_is_what_its_formulas_make_by_hand
ENCLOSURE = test_terms_enclosure.test_the_enclosure_is_what_its_program_makes_by_hand
COST = test_terms_quantiser.test_what_quantising_costs_is_what_its_formulas_make_by_hand

# Each passed every test of the README's command when the harness was first put under mutation, but the last two.
HOLES = {
    "B2": ("gradient_steps.weights: gamma(roundings) * (np.abs(x) + dx)", "deleted"),
    "B3": ("backward._differences: gamma(depth) * size * OUTWARD", "deleted"),
    "B4": ("backward._differences: U_FP32 * (larger + error)", "deleted"),
    "B6": ("gradient_steps._chain_error: steps * cut * (1 + steps * 2.0 ** (-19))", "halved"),
    "B7": ("gradient_steps.added: gamma(count) * (size + error)", "deleted"),
    "row sum": ("model.row_sum_depth: self.tile_n // 4", "halved"),
    "quantisation": ("quantisation._tile_bound: 2 * slack[:, None]", "halved"),
    "rcp": ("epilogue.finish: RCP_REL", "halved"),
    "enclosed rcp": ("enclosure._finish: RCP_REL", "halved"),
}
CHECKS: dict[str, Callable[[], object]] = {
    "B7": lambda: GRADIENTS("blocks of keys and rows"),
    "row sum": lambda: FORWARD("fp16", "as it is"),
    "quantisation": lambda: COST((0, 0, 0), 0.0),
    "rcp": lambda: FORWARD("bf16", "as it is"),
    "enclosed rcp": lambda: ENCLOSURE("bf16", "as it is"),
}


@pytest.mark.parametrize("hole", HOLES)
def test_a_term_that_no_test_saw_is_seen_by_a_pinned_one(hole: str) -> None:
    key, edit = HOLES[hole]
    term = next(term for term in terms(key.split(".")[0]) if term.key == key)
    check = CHECKS.get(hole, lambda: GRADIENTS("weights in binary32"))
    check()  # of the bound as it is
    assert breaks(check, term, edit)


@pytest.mark.parametrize("key", ["backward.pairs_of: np.inf", "enclosure._softmax: end"])
def test_an_arm_whose_other_one_is_a_number_is_deleted_by_code_that_runs(key: str) -> None:
    """What chose between an array and a number is read by its rows, which a number alone does not have."""
    arms = [term for term in terms(key.split(".")[0]) if term.key == key and term.kind == "arm"]
    assert arms
    for term in arms:
        _mutant(term, "deleted")


def test_every_reason_is_of_a_term_that_exists() -> None:
    keys = {term.key for module in MODULES for term in terms(module)}
    assert set(explained()) <= keys, f"terms of {EXPLAINED.name} that the bounds no longer have"


@pytest.mark.parametrize("module", MODULES)
def test_the_terms_of_every_module_are_found(module: str) -> None:
    assert {term.kind for term in terms(module)} & {"addend", "arm", "value"}


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_of_error_is_weighed_where_it_stands_and_only_inside_its_block(source: str) -> None:
    places = [(module, function) for module in {m for m, _ in SOURCES[source]} for function, _ in functions_of(module)]
    before = [function.__code__ for _, function in places]
    with weighed(**{source: 0.0}):
        assert any(function.__code__ is not code for (_, function), code in zip(places, before, strict=True))
    assert [function.__code__ for _, function in places] == before


def test_a_source_or_a_line_that_the_bound_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"must be one of scores, .*, got 'rounding'"), weighed(rounding=0.5):
        pass
    monkeypatch.setitem(SOURCES, "gone", ((steps, "own = «own» + own"),))
    with pytest.raises(ValueError, match=r"steps must have this line once, got 0: own = own \+ own"), weighed(gone=0.5):
        pass
