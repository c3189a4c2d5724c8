"""Other libraries on a CPU: no false alarm under the order that each states, and mistakes around them are found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fa3_reference.score_term import KINDS
from fa3verify.campaign.profiles import PROFILES, family_cases
from fa3verify.cases.practice import practice
from fa3verify.judging.judgement import judge, passes
from fa3verify.known.cpu_kernels import cpu
from fa3verify.operations.forward import Result
from fa3verify.properties import LAWS, run_law

pytest.importorskip("torch", reason="needs torch (extra 'adapters')")
KERNELS = [kernel for kernel in cpu() if kernel.unavailable is None and kernel.operation == "forward"]
ONE_OF_EACH = list({kernel.name.rpartition(".")[0]: kernel for kernel in KERNELS}.values())
TERMS = [kernel for kernel in ONE_OF_EACH if kernel.features & frozenset(KINDS)]
MOST_SCORES = 12_000  # of a case with a term
MISSING = [kernel for kernel in cpu() if kernel.unavailable is not None]
# Defects of the libraries themselves, which their pages in reports/findings describe.
KNOWN = {
    ("torch.flash", "special_values_follow_policy"),
    ("torch.sdpa_masked", "special_values_follow_policy"),
    ("torch.math", "neighbours_never_leak"),
}
QUICK = PROFILES["quick"]
# Of all families: where scores are large, weights tiny, sums cancel, and formats end. All of quick ran once by hand.
TELLING = ("normal", "very_peaky", "outlier_channels_1000", "cancelling_v", "subnormals", "huge")
SLOW = ("jax.xla", "torch.flex", "torch.flex_modified")  # compiled for every shape, or never
pytestmark = pytest.mark.optional


@pytest.mark.parametrize("families", [TELLING[:2], pytest.param(TELLING[2:], marks=pytest.mark.nightly)], ids=len)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_library_breaks_no_bound_of_its_order(kernel, families):
    wrong = []
    for family in families:
        for case in family_cases(kernel, family, QUICK, seed=0):
            measures = judge(kernel, case, unrounded=False).measures
            wrong += [] if passes(kernel, measures) else [(case.describe(), measures["ratio_max"])]
    assert wrong == []


@pytest.mark.usefixtures("short_walks")
@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(kernel, marks=[pytest.mark.nightly] if kernel.name.startswith(SLOW) else [], id=kernel.name)
        for kernel in ONE_OF_EACH
    ],
)
def test_a_library_breaks_no_property_but_where_it_has_a_known_defect(kernel):
    library = kernel.name.rpartition(".")[0]
    examples = 2 if library in SLOW else 4
    found = {
        (library, law.name)
        for law in LAWS
        if run_law(law, kernel, max_examples=examples, seed=0, shrink_seconds=0).status == "fail"
    }
    assert found == {known for known in KNOWN if known[0] == library}


def _dropped(problem, operands, run):
    keys = max(1, problem.seqlen_k - 64)
    term = operands.term
    if problem.term and problem.term.kind != "alibi" and "k" not in problem.term.shared:
        term = term[..., : term.shape[-1] - (problem.seqlen_k - keys)]
    cut = replace(operands, k=operands.k[:, :keys], v=operands.v[:, :keys], term=term)
    return run(replace(problem, seqlen_k=keys, causal=False), cut)


def _scaled(problem, operands, run):
    return run(replace(problem, softmax_scale=problem.softmax_scale * 1.1), operands)


def _shifted(problem, operands, run):
    moved = {name: np.roll(getattr(operands, name), -1, axis=1) for name in "kv"}
    return run(problem, replace(operands, **moved))


@pytest.mark.parametrize("mistake", [_dropped, _scaled, _shifted], ids=["dropped tile", "wrong scale", "mask shifted"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_mistake_around_a_library_is_found(kernel, mistake):
    def run(problem, operands, config) -> Result:
        return mistake(problem, operands, lambda p, o: kernel.code.run(p, o, config))

    broken = kernel.altered(run=run)
    cases = family_cases(broken, "normal", QUICK, seed=0) + family_cases(broken, "peaky", QUICK, seed=0)
    assert not all(passes(broken, judge(broken, case, unrounded=False).measures) for case in cases)


@pytest.mark.parametrize("kernel", TERMS, ids=lambda kernel: kernel.name)
def test_a_library_keeps_the_bound_with_each_of_its_terms_and_without_its_term_does_not(kernel):
    def run(problem, operands, config) -> Result:
        return kernel.code.run(replace(problem, term=None), replace(operands, term=None), config)

    broken = kernel.altered(run=run)
    asked = [case for case in practice(kernel, "quick", 0) if case.problem.term and scores(case) <= MOST_SCORES]
    for kind in kernel.features & frozenset(KINDS):
        cases = [case for case in asked if case.problem.term.kind == kind]
        assert all(passes(kernel, judge(kernel, case, unrounded=False).measures) for case in cases), kind
        assert not all(passes(broken, judge(broken, case, unrounded=False).measures) for case in cases), kind


def scores(case) -> int:
    problem = case.problem
    return problem.batch * problem.nheads * problem.seqlen_q * problem.seqlen_k


@pytest.mark.parametrize("kernel", MISSING or [pytest.param(None, marks=pytest.mark.skip(reason="none is missing"))])
def test_a_missing_library_says_how_to_get_it(kernel):
    assert "pip install '" in kernel.unavailable
    assert "fa3verify" not in kernel.unavailable
