"""The laws find every planted fault, without comparing with the unmutated twin, and shrink what they find."""

from __future__ import annotations

import pytest

from fa3_kernels.faults.table import Fault, QuantizerFault, description
from fa3_reference.problem import Dtype
from fa3verify.kernels.twins import twin
from fa3verify.known.registry import find
from fa3verify.properties import LawOutcome, find_law, run_law

pytestmark = pytest.mark.usefixtures("shared_references")
MAX_EXAMPLES = 100

# fault -> (kernel it is planted in, laws expected to find it, the most telling first)
FOUND_BY: dict[Fault, tuple[Dtype, tuple[str, ...]]] = {
    Fault.DROPPED_LAST_TILE: ("fp16", ("output_within_hull_of_values", "error_within_bound")),
    Fault.MISSED_RESCALE: ("fp16", ("constant_values_come_back", "error_within_bound")),
    Fault.WRONG_SOFTMAX_SCALE: ("fp16", ("softmax_shift_invariance", "error_within_bound")),
    Fault.STALE_V: ("fp16", ("causal_row_equals_truncated_problem", "error_within_bound")),
    Fault.SWAPPED_V_ROWS: ("e4m3", ("key_order_is_irrelevant", "error_within_bound")),
    Fault.NEIGHBOUR_Q_DESCALE: (
        "e4m3",
        ("block_descale_moves_into_stored_values", "numeric_switches_stay_within_bound"),
    ),
    Fault.NEIGHBOUR_K_DESCALE: ("e4m3", ("block_descale_moves_into_stored_values", "error_within_bound")),
    Fault.NEIGHBOUR_V_DESCALE: (
        "e4m3",
        ("block_descale_moves_into_stored_values", "rotation_and_centring_keep_attention"),
    ),
    Fault.FROZEN_V_RATIO: ("e4m3", ("block_descale_moves_into_stored_values", "numeric_switches_stay_within_bound")),
    Fault.DESCALES_IGNORED: ("e4m3", ("value_scaling_by_powers_of_two", "error_within_bound")),
    Fault.NO_P_OFFSET: ("e4m3", ("error_within_bound", "key_order_is_irrelevant")),
    Fault.NO_PROMOTION: ("e4m3", ("equal_scores_average_values", "error_within_bound_on_long_rows")),
    Fault.TRUNCATED_P: ("e4m3", ("constant_values_come_back", "error_within_bound")),
    Fault.BF16_P: ("fp16", ("error_within_bound_on_long_rows", "constant_values_come_back")),
    Fault.TRUNCATED_OUTPUT: ("fp16", ("constant_values_come_back", "error_within_bound")),
    Fault.FP16_ROW_SUM: ("fp16", ("error_within_bound_on_long_rows", "key_order_is_irrelevant")),
    Fault.FP16_ACCUMULATOR: ("fp16", ("error_within_bound_on_long_rows", "split_keys_merge_by_lse")),
    Fault.MISSING_COLUMN: ("fp16", ("constant_values_come_back", "output_within_hull_of_values")),
    Fault.COARSE_EXP2: ("fp16", ("key_order_is_irrelevant", "error_within_bound_on_long_rows")),
    Fault.UNMASKED_TAIL: ("fp16", ("constant_values_come_back", "output_within_hull_of_values")),
    Fault.UNCLEARED_V_TAIL: ("fp16", ("constant_values_come_back", "error_within_bound")),
    Fault.UNGUARDED_INF: ("fp16", ("causal_row_equals_truncated_problem", "empty_rows_are_zero")),
    Fault.FINITE_SENTINEL: ("fp16", ("softmax_shift_invariance",)),
    Fault.CAUSAL_TOP_LEFT: ("fp16", ("causal_row_equals_truncated_problem", "invisible_keys_never_matter")),
    Fault.WINDOW_OFF_BY_ONE: ("fp16", ("output_within_hull_of_values", "invisible_keys_never_matter")),
    Fault.KV_HEAD_MODULO: ("fp16", ("grouped_heads_equal_repeated_heads", "neighbours_never_leak")),
    Fault.LSE_BASE_2: ("fp16", ("split_keys_merge_by_lse", "error_within_bound")),
    Fault.LSE_KEEPS_OFFSET: ("e4m3", ("softcap_confines_lse", "error_within_bound")),
    Fault.UNGUARDED_COMBINE: ("e4m3", ("empty_rows_are_zero",)),
    Fault.SOFTCAP_AFTER_MASK: ("fp16", ("softcap_confines_lse", "invisible_keys_never_matter")),
}
# Faults that random laws meet too rarely to be held to it, with the input family of every campaign that shows them.
LEFT_TO_FAMILIES: dict[Fault, str] = {Fault.UNCLAMPED_SCALE: "faint"}

# fault of the quantiser -> law that finds it
QUANTIZER_FOUND_BY: dict[QuantizerFault, str] = {
    QuantizerFault.NEIGHBOUR_DESCALE: "powers_of_two_scale_exactly",
    QuantizerFault.TRUNCATED_CODES: "powers_of_two_scale_exactly",
    QuantizerFault.FLIPPED_SIGN: "stored_values_within_bound",
    QuantizerFault.MEAN_OF_LONGEST: "sequences_are_quantised_alone",
    QuantizerFault.NEIGHBOUR_MEAN: "sequences_are_quantised_alone",
    QuantizerFault.HEAD_LEFT_OUT: "stored_values_within_bound",
    QuantizerFault.ROUNDED_DOWN_DESCALE: "powers_of_two_scale_exactly",
    QuantizerFault.UNSCALED_CORRECTION: "stored_values_within_bound",
}

# fault -> law, and the keys of the smallest problem that shows it
SMALLEST_KEYS = (
    (Fault.MISSING_COLUMN, "constant_values_come_back", 1),  # column 0 exists from the first key on
    (Fault.SWAPPED_V_ROWS, "error_within_bound", 3),  # row 2 changes places with the cleared row 3
    (Fault.STALE_V, "error_within_bound", 129),  # needs a second block of 128 keys
)


def _search(fault: Fault, dtype: Dtype, law: str, shrink_seconds: float = 0.0) -> LawOutcome:
    candidate = twin(dtype, fault=fault)
    return run_law(find_law(law), candidate, max_examples=MAX_EXAMPLES, seed=0, shrink_seconds=shrink_seconds)


def test_every_fault_is_assigned_once():
    assert set(FOUND_BY) | set(LEFT_TO_FAMILIES) == set(Fault)
    assert not set(FOUND_BY) & set(LEFT_TO_FAMILIES)
    assert set(QUANTIZER_FOUND_BY) == set(QuantizerFault)


# fp16 accumulators overflow on purpose
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("fault", FOUND_BY, ids=str)
def test_some_expected_law_finds_fault(fault):
    dtype, laws = FOUND_BY[fault]
    tried = []
    for law in laws:
        outcome = _search(fault, dtype, law)
        tried.append(f"{law}: {outcome.status} after {outcome.examples}")
        if outcome.violation is not None and outcome.violation.failure is None:
            return
    pytest.fail(f"{fault} ({description(fault)}) survives in {dtype}: {'; '.join(tried)}")


@pytest.mark.parametrize("fault", QUANTIZER_FOUND_BY, ids=str)
def test_the_expected_law_finds_the_quantisers_fault(fault):
    law = find_law(QUANTIZER_FOUND_BY[fault])
    faulty = find(f"twin.quantize+{fault}")
    outcome = run_law(law, faulty, max_examples=MAX_EXAMPLES, seed=0, shrink_seconds=0)
    assert outcome.violation is not None, f"{fault} ({description(fault)}) survives {law.name}"
    assert outcome.violation.failure is None, outcome.violation.message


@pytest.mark.parametrize(("fault", "law", "keys"), SMALLEST_KEYS, ids=lambda value: str(value))
def test_fault_shrinks_to_its_smallest_problem(fault, law, keys):
    outcome = _search(fault, "fp16", law, shrink_seconds=600)
    problem = outcome.trial.case.problem
    assert (problem.seqlen_q, problem.seqlen_k) == (1, keys), outcome.trial.describe()
    assert (problem.batch, problem.nheads) == (1, 1), outcome.trial.describe()
