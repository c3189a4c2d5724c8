"""Functions that merge partial results: right ones of every order pass, and each wrong one is found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest

from fa3_reference.problem import AttentionProblem
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging.judgement import judge, passes
from fa3verify.kernels.functions import array_kernel
from fa3verify.kernels.record import Kernel
from fa3verify.operations.merge import PARTS
from fa3verify.properties import find_law, run_law
from tests.quality import merge_kernels
from tests.quality.merge_kernels import RIGHT, RIGHT_PAIRS, WRONG, WRONG_PAIRS
from tests.quality.merge_search import searched

PROBLEMS = (
    AttentionProblem(1, 2, 2, 5, 17, 64, causal=True),
    AttentionProblem(2, 1, 1, 9, 150, 64),
    AttentionProblem(1, 1, 1, 4, 3, 32, causal=True),  # fewer keys than parts, and a row without a key
)
RECIPES = tuple(
    Recipe(name, settings, seed)
    for seed, (name, settings) in enumerate(
        (
            ("normal", {}),
            ("peaky", {}),
            ("outlier_channels", {"ratio": 1000.0}),
            ("huge", {}),
            ("level", {"nats": 120.0}),
            ("vanishing", {"nats": -100.0}),
        )
    )
)
DTYPES = ("fp16", "bf16", "fp32")

pytestmark = pytest.mark.usefixtures("shared_references")  # the wrong kernel is given what the right one was


def of_parts(steps: Any, dtype: Any, **facts: Any) -> Kernel:
    function = steps if callable(steps) else partial(merge_kernels.at_once, **steps)
    (kernel,) = array_kernel(function, name="mine", merge="parts", layout="bshd", dtypes=(dtype,), **facts)
    return kernel


def of_pairs(steps: Any, dtype: Any, out_dtype: Any = "fp32") -> Kernel:
    function = steps if callable(steps) else partial(merge_kernels.pair, **steps)
    facts: Any = {"merge": "pairs", "layout": "bshd", "out_dtype": out_dtype}
    (kernel,) = array_kernel(function, name="mine", dtypes=(dtype,), **facts)
    return kernel


def cases(kernel: Kernel, **changes: Any) -> Iterator[Case]:
    """Every problem with every recipe, each in two numbers of parts."""
    for turn, (problem, recipe) in enumerate(product(PROBLEMS, RECIPES)):
        for parts in (PARTS[turn % len(PARTS)], PARTS[(turn + 2) % len(PARTS)]):
            own = replace(problem, dtype=kernel.dtype)
            yield Case(kernel.name, own, recipe, changes=(("parts", parts), *changes.items()), operation="merge")


def findings(kernel: Kernel, **changes: Any) -> Iterator[str]:
    for case in cases(kernel, **changes):
        measures = judge(kernel, case, unrounded=False).measures
        if not passes(kernel, measures):
            yield f"{case.describe()}: {measures['ratio_max']}, {measures['ratio_lse_max']}"
    outcome = run_law(find_law("error_within_bound"), kernel, max_examples=8, seed=0, shrink_seconds=0)
    if outcome.violation:
        yield outcome.violation.message


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_merge_of_parts_passes(name: str, dtype: str) -> None:
    assert not list(findings(of_parts(RIGHT[name], dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RIGHT_PAIRS)
def test_a_right_merge_of_two_passes_in_ring_order(name: str, dtype: str) -> None:
    steps, out_dtype = RIGHT_PAIRS[name]
    assert not list(findings(of_pairs(steps, dtype, out_dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_in_a_merge_of_parts_is_found(name: str, dtype: str) -> None:
    found = next(findings(of_parts(WRONG[name], dtype)), "")
    assert found
    assert "Error" not in found


@pytest.mark.parametrize("name", WRONG_PAIRS)
def test_a_mistake_in_a_merge_of_two_is_found(name: str) -> None:
    for dtype in ("fp16", "fp32"):
        found = next(findings(of_pairs(WRONG_PAIRS[name], dtype)), "")
        assert found
        assert "Error" not in found


def test_a_merge_that_reads_parts_without_a_key_is_wrong_only_where_it_declares_not_to() -> None:
    reads, skips = (of_parts({"skips": skips}, "bf16", features=("unwritten",)) for skips in (False, True))
    assert not list(findings(skips, unwritten=True))
    assert next(findings(reads, unwritten=True), "")
    assert not list(findings(of_parts({}, "bf16")))


def test_no_parts_that_are_bred_take_a_right_merge_beyond_its_bound() -> None:
    """20,000 problems by python -m tests.quality.merge_search, of two seeds: 0.69 at most."""
    worst = searched(150)[0]
    assert 0.1 < worst.ratio <= 1, f"{worst.order}: {worst.ratio:.3g}"
