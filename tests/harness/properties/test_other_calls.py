"""Laws about the same rows in other calls: mistakes that show in some calls alone are found, sound kernels pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fa3_reference.problem import AttentionProblem
from fa3verify import find_kernel
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import Recipe
from fa3verify.known import registry
from fa3verify.properties import Trial, find_law, replay_trial, run_law
from fa3verify.properties.merging import merged
from tests.harness.known import ideals
from tests.harness.properties import planted

CONTRACTS = Path(__file__).parents[1] / "campaign" / "contracts.py"
WINDOW, CHUNKS = "windowed_row_equals_truncated_problem", "prefill_equals_its_chunks_and_decode"
RING, APPENDED = "ring_of_shards_equals_one_call", "appended_key_acts_by_its_score"
ORDER = "order_of_sequences_and_heads"
NEW = (WINDOW, CHUNKS, RING, APPENDED)
# Mistake, the law that finds it, and whether the kernel has to claim bits for that: the part of a windowed row that is
# compared within the bound has no window left.
FOUND_BY = (
    (planted.window_ignored_by_one_query, WINDOW, True),
    (planted.window_counted_from_the_top, WINDOW, False),
    (planted.prefill_aligned_to_the_top_left, CHUNKS, False),
    (planted.lse_of_masked_calls_in_base_2, RING, False),
    (planted.key_alone_in_a_tile_dropped, APPENDED, False),
)
PERMUTATIONS = (
    planted.third_sequence_reads_the_second,
    planted.third_head_reads_the_second,
    planted.last_of_a_group_scores_by_the_first,
)


@pytest.mark.parametrize(("mistake", "law", "claims"), FOUND_BY, ids=lambda x: getattr(x, "__name__", None))
def test_a_mistake_of_some_calls_is_found_by_its_law(mistake, law, claims):
    kernel = planted.planted(mistake, bitwise=frozenset({law} if claims else ()))
    outcome = run_law(find_law(law), kernel, max_examples=60, seed=0, shrink_seconds=0)
    assert outcome.violation is not None, f"{mistake.__name__} survives {outcome.examples} trials of {law}"
    assert outcome.violation.failure is None, outcome.violation.message


def test_a_prefill_aligned_top_left_is_cut_where_a_mask_has_the_diagonal_of_its_chunk():
    kernel = find_kernel(f"{CONTRACTS}:half_declared")
    problem = AttentionProblem(1, 1, 1, 20, 11, 64, causal=True, top_left=True)
    trial = Trial(CHUNKS, Case(kernel.name, problem, Recipe("normal")), {"starts": [9]})
    assert replay_trial(CHUNKS, kernel, trial) is None


@pytest.mark.parametrize("mistake", PERMUTATIONS, ids=lambda x: x.__name__)
def test_a_mistake_from_the_third_sequence_or_head_on_is_found_by_permuting_them(mistake):
    outcome = run_law(find_law(ORDER), planted.planted(mistake), max_examples=20, seed=0, shrink_seconds=0)
    assert outcome.violation is not None, f"{mistake.__name__} survives {outcome.examples} trials"
    assert outcome.violation.failure is None, outcome.violation.message


SCALED = (
    (planted.output_on_a_fixed_grid, "fp16", "value_scaling_by_powers_of_two"),
    (planted.small_k_descales_taken_for_one, "e4m3", "score_scaling_by_powers_of_two"),
)


@pytest.mark.parametrize(("mistake", "dtype", "law"), SCALED, ids=lambda x: getattr(x, "__name__", None))
def test_a_mistake_of_some_sizes_is_found_by_scaling(mistake, dtype, law):
    kernel = planted.planted(mistake, dtype, bitwise=frozenset({law}))
    outcome = run_law(find_law(law), kernel, max_examples=30, seed=0, shrink_seconds=0)
    assert outcome.violation is not None, f"{mistake.__name__} survives {outcome.examples} trials of {law}"
    assert outcome.violation.failure is None, outcome.violation.message


def test_permutations_are_of_three_and_more():
    law, kernel, seen = find_law(ORDER), registry.find("twin.fp16"), []

    def note(asked, trial):
        seen.append((trial.case.problem.batch, trial.case.problem.nheads_kv))

    run_law(replace(law, check=note), kernel, max_examples=20, seed=0)
    assert min(min(sizes) for sizes in seen) == 3
    assert {batch for batch, _ in seen} == {heads for _, heads in seen} == {3, 4}


@pytest.mark.parametrize("law", NEW)
@pytest.mark.parametrize("order", ideals.ORDERS)
def test_a_correct_kernel_of_another_order_agrees_with_itself_within_its_bounds(order, law):
    kernel = ideals.ideal(order, "bf16")
    outcome = run_law(find_law(law), kernel, max_examples=12, seed=0)
    assert outcome.violation is None, f"{outcome.trial.describe()}\n{outcome.violation.message}"
    assert outcome.status == ("pass" if find_law(law).applies(kernel) else "not_applicable")


@pytest.mark.parametrize("name", ["twin.flash3.bf16", "twin.flash2.fp16", "twin.cudnn.bf16", "twin.e4m3_chained"])
@pytest.mark.parametrize("law", NEW)
def test_twins_of_released_kernels_obey_the_laws_of_other_calls(law, name):
    outcome = run_law(find_law(law), registry.find(name), max_examples=12, seed=0)
    assert outcome.violation is None, f"{outcome.trial.describe()}\n{outcome.violation.message}"


def test_an_appended_key_of_no_weight_changes_no_bit_where_that_is_claimed():
    claims, claims_not = (planted.planted(planted.parity_of_keys_in_the_output, bitwise=b) for b in (None, frozenset()))
    case = Case("kernel", AttentionProblem(1, 2, 1, 5, 130, 64), Recipe("normal", seed=3))
    trial = Trial(APPENDED, case, {"before": 129, "score": "lowest"})
    assert "of no weight" in replay_trial(APPENDED, claims, trial).message
    assert replay_trial(APPENDED, claims_not, trial) is None
    assert replay_trial(APPENDED, registry.find("twin.fp16"), trial) is None


def test_parts_whose_lse_and_out_err_as_much_as_they_may_merge_within_the_bound():
    rng = np.random.default_rng(0)
    shape, parts = (1, 1, 1000), 3
    lse, off = rng.normal(0, 2, (parts, *shape)), rng.uniform(0, 0.3, (parts, *shape))
    out, each = rng.normal(0, 1, (parts, *shape, 1)), rng.uniform(0, 0.1, (parts, *shape, 1))

    def named(lse, out):
        return [{"lse": a, "out": b.transpose(0, 2, 1, 3)} for a, b in zip(lse, out)]

    bounds = named(off, each)
    exact, _ = merged(named(lse, out), bounds)
    largest = 0.0
    for _ in range(20):
        signs, others = (np.sign(rng.normal(size=x.shape)) for x in (lse, out))
        seen, bound = merged(named(lse + signs * off, out + others * each), bounds)
        for name in exact:
            ratio = np.abs(seen[name] - exact[name]) / bound[name]
            assert ratio.max() <= 1, name
            largest = max(largest, float(ratio.max()))
    assert largest > 0.5
