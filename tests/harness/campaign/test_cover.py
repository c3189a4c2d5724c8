"""Covering arrays: every pair of classes that can meet does, in cases that the kernel takes and that are small."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations, product

import numpy as np
import pytest

from fa3_kernels.faults.table import Fault
from fa3_kernels.plan.config import default_config
from fa3verify.campaign.cover import _array, cover
from fa3verify.cases import coverage, space
from fa3verify.cases.case import Case
from fa3verify.judging.judgement import judge, passes
from fa3verify.kernels.twins import twin
from fa3verify.known.registry import find
from tests.harness import third_party

MOST_CELLS = 3 * 10**6  # scores times channels of a case
pytestmark = pytest.mark.usefixtures("shared_references")


@cache
def covered(name: str) -> list[tuple[space.Point, Case | None]]:
    """Return the pairs' cases of seed 0, which nobody may change."""
    return cover(find(name), 2, 0)


MANY_DIMENSIONS = [pytest.param(name, marks=pytest.mark.nightly) for name in ("twin.e4m3", "twin.quantize")]


@pytest.mark.parametrize("name", ["twin.cudnn.fp16", "twin.backward.fp16", *MANY_DIMENSIONS])
def test_every_pair_of_claimed_classes_that_the_kernel_takes_meets(name):
    kernel = find(name)
    rows = covered(name)
    met = coverage.pairs(space.point(kernel, case) for _, case in rows)
    cells = [(name, c) for name, classes in space.claimed(kernel).items() for c in classes]
    missing = {tuple(sorted(p)) for p in combinations(cells, 2) if p[0][0] != p[1][0]} - met
    assert len(missing) <= 6  # as below
    for pair in missing:
        with pytest.raises(ValueError, match=r"\w"):
            kernel.config_for((case := space.case_of(kernel, dict(pair))).problem, case.changes)


def test_a_case_has_the_classes_of_its_row_and_is_small():
    kernel = find("twin.fp16")
    for row, case in covered("twin.fp16"):
        assert space.point(kernel, case) == row
        problem = case.problem
        assert problem.batch * problem.nheads * problem.seqlen_q * problem.seqlen_k * problem.head_dim < 8 * MOST_CELLS


def test_heads_and_sequences_come_in_more_than_fours():
    problems = [case.problem for _, case in covered("twin.fp16") if case]
    for name, values in (("nheads_kv", {1, 2, 3, 4, 9}), ("group", {1, 2, 4, 5, 8}), ("batch", {1, 2, 3, 5})):
        counts = [getattr(p, name) for p in problems]
        assert set(counts) == values
        assert sum(n > 4 for n in counts) >= 5


def test_a_size_that_a_kernel_does_not_take_leaves_the_class_to_another():
    def configure(problem):
        if problem.nheads_kv == 9:
            raise ValueError("9 heads are refused")
        return default_config(problem)

    rows = cover(find("twin.fp16").altered(configure=configure), 2, 0)
    counts = {case.problem.nheads_kv for _, case in rows if case}
    assert 4 in counts
    assert 9 not in counts


def test_triples_meet():
    classes = tuple((name, ("0", "1", "2")) for name in "abcd")
    forbidden = frozenset({(("a", "0"), ("b", "0"))})
    rows = [dict(row) for row in _array(classes, forbidden, 3, 0)]
    met = {cells for row in rows for cells in combinations(sorted(row.items()), 3)}
    for names in combinations("abcd", 3):
        for values in product("012", repeat=3):
            cells = tuple(zip(names, values))
            assert (cells in met) != ({("a", "0"), ("b", "0")} <= set(cells)), cells


def test_another_seed_gives_another_array_and_the_same_seed_the_same():
    classes = tuple((name, ("0", "1", "2")) for name in "abcd")
    first, again, other = (_array.__wrapped__(classes, frozenset(), 2, seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    kernel = find("twin.cudnn.fp16")
    assert [row for row, _ in covered(kernel.name)] != [row for row, _ in cover(kernel, 2, 1)]


def test_a_kernel_is_asked_what_it_takes():
    rows = cover(third_party.only_64(), 2, 0)
    assert rows
    assert {case.problem.head_dim for _, case in rows} == {64}
    assert cover(third_party.picky(), 2, 0) == []


def test_a_kernel_that_takes_nothing_without_a_mask_is_covered_under_masks():
    def configure(problem):
        if not problem.causal:
            raise ValueError("a causal mask is needed")
        return default_config(problem)

    rows = cover(
        replace(third_party.only_64().altered(configure=configure), features=frozenset({"causal", "gqa"})), 2, 0
    )
    assert rows
    assert all(case.problem.causal for _, case in rows)


@pytest.mark.parametrize("fault", [Fault.CAUSAL_TOP_LEFT, Fault.KV_HEAD_MODULO, Fault.UNMASKED_TAIL])
def test_the_array_finds_faults_of_single_classes(fault):
    kernel = twin("fp16", fault=fault)
    cases = sorted((case for _, case in covered("twin.fp16") if case), key=lambda case: np.prod(case.problem.q_shape))
    assert any(not passes(kernel, judge(kernel, case, unrounded=False).measures) for case in cases)


def _clipped(problem, result):
    """An lse by way of exp, which overflows."""
    return result._replace(lse=np.clip(result.lse, -88, 88, where=np.isfinite(result.lse), out=result.lse.copy()))


def _sentinel(problem, result):
    """Rows with scores of -1e4 pass for rows without a key."""
    return result._replace(lse=np.where(result.lse < -1e4, np.float32(-np.inf), result.lse))


# Channels a thousand times larger lead to such an lse as well, by chance, and values whose weight vanishes later.
@pytest.mark.parametrize(("mistake", "beside"), [(_clipped, {"outliers", "cancelling"}), (_sentinel, set())])
def test_mistakes_about_far_scores_are_found_by_inputs_of_that_kind(mistake, beside):
    plain = twin("fp16")
    wrong = replace(plain.altered(run=lambda p, o, c: mistake(p, plain.code.run(p, o, c))), name="wrong")
    rows = [(row["inputs"], case) for row, case in covered("twin.fp16") if row["scale"] == "default"]
    small = [(kind, case) for kind, case in rows if case.problem.seqlen_q <= 5][:60]
    found = {kind for kind, case in small if not passes(wrong, judge(wrong, case, unrounded=False).measures)}
    assert "far scores" in found <= {"far scores"} | beside


def test_a_kernel_whose_shortest_case_is_costly_is_covered_all_the_same():
    kernel = third_party.in_whole_tiles()
    tried = {cell for row, case in cover(kernel, 2, 0) if case for cell in row.items()}
    assert {(name, c) for name, classes in space.claimed(kernel).items() for c in classes} <= tried
