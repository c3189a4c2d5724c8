"""What finds each planted fault of the twins: one table for tests of properties, of campaigns and of gradients."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from fa3_kernels.faults.table import BackwardFault, Fault, QuantizerFault

DEW = "twin.flash3.dew.backward.fp16"
OURS = "twin.backward.fp16"  # where the other does not take what a fault is about, a softcap


class Quick(NamedTuple):
    """The kernel it is planted in, the task of its quick plan that finds it, and the layer that says so."""

    kernel: str
    task: str
    layer: str


class Laws(NamedTuple):
    """The kernel it is planted in, and laws expected to find it, the most telling first."""

    kernel: str
    names: tuple[str, ...]


class Found(NamedTuple):
    """A fault and its finders; no laws where random trials meet it too rarely, or its bound alone is asked."""

    fault: StrEnum
    quick: Quick
    laws: Laws | None = None

    def __str__(self) -> str:
        """Name the fault in its kernel: faults of two operations may have one name."""
        return f"{self.quick.kernel}+{self.fault}"


FOUND_BY: tuple[Found, ...] = (
    Found(
        Fault.DROPPED_LAST_TILE,
        Quick("twin.bf16", "normal", "L1"),
        Laws("twin.fp16", ("output_within_hull_of_values", "error_within_bound")),
    ),
    Found(
        Fault.MISSED_RESCALE,
        Quick("twin.bf16", "normal", "L1"),
        Laws("twin.fp16", ("constant_values_come_back", "error_within_bound")),
    ),
    Found(
        Fault.WRONG_SOFTMAX_SCALE,
        Quick("twin.fp16", "normal", "L1"),
        Laws("twin.fp16", ("softmax_shift_invariance", "error_within_bound")),
    ),
    Found(
        Fault.STALE_V,
        Quick("twin.e4m3", "normal", "L1"),
        Laws("twin.fp16", ("causal_row_equals_truncated_problem", "error_within_bound")),
    ),
    Found(
        Fault.SWAPPED_V_ROWS,
        Quick("twin.e4m3", "normal", "L1"),
        Laws("twin.e4m3", ("key_order_is_irrelevant", "error_within_bound")),
    ),
    Found(
        Fault.NEIGHBOUR_Q_DESCALE,
        Quick("twin.e4m3", "block_scaled", "L1"),
        Laws("twin.e4m3", ("block_descale_moves_into_stored_values", "numeric_switches_stay_within_bound")),
    ),
    Found(
        Fault.NEIGHBOUR_K_DESCALE,
        Quick("twin.e4m3", "block_scaled", "L1"),
        Laws("twin.e4m3", ("block_descale_moves_into_stored_values", "error_within_bound")),
    ),
    Found(
        Fault.NEIGHBOUR_V_DESCALE,
        Quick("twin.e4m3", "block_scaled", "L1"),
        Laws("twin.e4m3", ("block_descale_moves_into_stored_values", "rotation_and_centring_keep_attention")),
    ),
    Found(
        Fault.FROZEN_V_RATIO,
        Quick("twin.e4m3", "block_scaled", "L1"),
        Laws("twin.e4m3", ("block_descale_moves_into_stored_values", "numeric_switches_stay_within_bound")),
    ),
    Found(
        Fault.DESCALES_IGNORED,
        Quick("twin.e4m3", "normal", "L1"),
        Laws("twin.e4m3", ("value_scaling_by_powers_of_two", "error_within_bound")),
    ),
    Found(
        Fault.NO_P_OFFSET,
        Quick("twin.e4m3", "peaky", "L1"),
        Laws("twin.e4m3", ("error_within_bound", "key_order_is_irrelevant")),
    ),
    Found(
        Fault.NO_PROMOTION,
        Quick("twin.e4m3", "offset_v", "L2"),
        Laws("twin.e4m3", ("equal_scores_average_values", "error_within_bound_on_long_rows")),
    ),
    Found(
        Fault.TRUNCATED_P,
        Quick("twin.e4m3", "offset_v", "L1"),
        Laws("twin.e4m3", ("constant_values_come_back", "error_within_bound")),
    ),
    Found(
        Fault.BF16_P,
        Quick("twin.fp16", "offset_v", "L1"),
        Laws("twin.fp16", ("error_within_bound_on_long_rows", "constant_values_come_back")),
    ),
    Found(
        Fault.TRUNCATED_OUTPUT,
        Quick("twin.bf16", "offset_v", "L1"),
        Laws("twin.fp16", ("constant_values_come_back", "error_within_bound")),
    ),
    Found(
        Fault.FP16_ROW_SUM,
        Quick("twin.fp16", "offset_v", "L1"),
        Laws("twin.fp16", ("error_within_bound_on_long_rows", "key_order_is_irrelevant")),
    ),
    Found(
        Fault.FP16_ACCUMULATOR,
        Quick("twin.fp16", "normal", "L1"),
        Laws("twin.fp16", ("error_within_bound_on_long_rows", "split_keys_merge_by_lse")),
    ),
    Found(
        Fault.MISSING_COLUMN,
        Quick("twin.fp16", "normal", "L1"),
        Laws("twin.fp16", ("constant_values_come_back", "output_within_hull_of_values")),
    ),
    Found(
        Fault.COARSE_EXP2,
        Quick("twin.fp16", "normal", "L1"),
        Laws("twin.fp16", ("key_order_is_irrelevant", "error_within_bound_on_long_rows")),
    ),
    Found(
        Fault.UNMASKED_TAIL,
        Quick("twin.fp16", "normal", "L1"),
        Laws("twin.fp16", ("constant_values_come_back", "output_within_hull_of_values")),
    ),
    Found(
        Fault.UNCLEARED_V_TAIL,
        Quick("twin.fp16", "normal", "L1"),
        Laws("twin.fp16", ("constant_values_come_back", "error_within_bound")),
    ),
    Found(
        Fault.UNGUARDED_INF,
        Quick("twin.fp16", "normal", "L1"),
        Laws("twin.fp16", ("causal_row_equals_truncated_problem", "empty_rows_are_zero")),
    ),
    Found(
        Fault.FINITE_SENTINEL,
        Quick("twin.fp16", "softmax_shift_invariance", "laws"),
        Laws("twin.fp16", ("softmax_shift_invariance",)),
    ),
    Found(
        Fault.CAUSAL_TOP_LEFT,
        Quick("twin.fp16", "normal", "L1"),
        Laws("twin.fp16", ("causal_row_equals_truncated_problem", "invisible_keys_never_matter")),
    ),
    Found(
        Fault.WINDOW_OFF_BY_ONE,
        Quick("twin.fp16", "normal", "L1"),
        Laws("twin.fp16", ("output_within_hull_of_values", "invisible_keys_never_matter")),
    ),
    Found(
        Fault.KV_HEAD_MODULO,
        Quick("twin.fp16", "normal", "L1"),
        Laws("twin.fp16", ("grouped_heads_equal_repeated_heads", "neighbours_never_leak")),
    ),
    Found(
        Fault.LSE_BASE_2,
        Quick("twin.fp16", "normal", "L1"),
        Laws("twin.fp16", ("split_keys_merge_by_lse", "error_within_bound")),
    ),
    Found(
        Fault.LSE_KEEPS_OFFSET,
        Quick("twin.e4m3", "normal", "L1"),
        Laws("twin.e4m3", ("softcap_confines_lse", "error_within_bound")),
    ),
    Found(
        Fault.UNGUARDED_COMBINE,
        Quick("twin.e4m3", "empty_rows_are_zero", "laws"),
        Laws("twin.e4m3", ("empty_rows_are_zero",)),
    ),
    Found(
        Fault.SOFTCAP_AFTER_MASK,
        Quick("twin.fp16", "normal", "L1"),
        Laws("twin.fp16", ("softcap_confines_lse", "invisible_keys_never_matter")),
    ),
    Found(Fault.UNCLAMPED_SCALE, Quick("twin.e4m3", "faint", "L1")),
    Found(
        QuantizerFault.NEIGHBOUR_DESCALE,
        Quick("twin.quantize", "normal", "L1"),
        Laws("twin.quantize", ("powers_of_two_scale_exactly",)),
    ),
    Found(
        QuantizerFault.TRUNCATED_CODES,
        Quick("twin.quantize", "normal", "L2"),
        Laws("twin.quantize", ("powers_of_two_scale_exactly",)),
    ),
    Found(
        QuantizerFault.FLIPPED_SIGN,
        Quick("twin.quantize", "normal", "L1"),
        Laws("twin.quantize", ("stored_values_within_bound",)),
    ),
    Found(
        QuantizerFault.MEAN_OF_LONGEST,
        Quick("twin.quantize", "normal", "L1"),
        Laws("twin.quantize", ("sequences_are_quantised_alone",)),
    ),
    Found(
        QuantizerFault.NEIGHBOUR_MEAN,
        Quick("twin.quantize", "normal", "L1"),
        Laws("twin.quantize", ("sequences_are_quantised_alone",)),
    ),
    Found(
        QuantizerFault.HEAD_LEFT_OUT,
        Quick("twin.quantize", "normal", "L1"),
        Laws("twin.quantize", ("stored_values_within_bound",)),
    ),
    Found(
        QuantizerFault.ROUNDED_DOWN_DESCALE,
        Quick("twin.quantize", "normal", "L1"),
        Laws("twin.quantize", ("powers_of_two_scale_exactly",)),
    ),
    Found(
        QuantizerFault.UNSCALED_CORRECTION,
        Quick("twin.quantize", "normal", "L1"),
        Laws("twin.quantize", ("stored_values_within_bound",)),
    ),
    Found(BackwardFault.NO_ROW_DOTS, Quick(DEW, "normal", "L1"), Laws(DEW, ("gradients_within_bound",))),
    Found(BackwardFault.NEIGHBOUR_ROW_DOT, Quick(DEW, "normal", "L1"), Laws(DEW, ("rows_reach_what_they_see",))),
    Found(BackwardFault.LSE_BASE_2, Quick(DEW, "normal", "L1"), Laws(DEW, ("gradients_of_far_scores",))),
    Found(
        BackwardFault.EMPTY_ROW_LSE,
        Quick(DEW, "rows_without_a_key_have_zero_dq", "laws"),
        Laws(DEW, ("rows_without_a_key_have_zero_dq",)),
    ),
    Found(BackwardFault.ROUNDED_P_IN_DS, Quick(DEW, "normal", "L1")),
    Found(BackwardFault.TRUNCATED_P, Quick(DEW, "normal", "L1")),
    Found(BackwardFault.TRUNCATED_DS, Quick(DEW, "normal", "L1")),
    Found(BackwardFault.BF16_DS, Quick(DEW, "normal", "L1")),
    Found(BackwardFault.UNSCALED_DK, Quick(DEW, "normal", "L1")),
    Found(BackwardFault.SCALED_TWICE_DQ, Quick(DEW, "normal", "L1"), Laws(DEW, ("gradients_follow_scaled_scores",))),
    Found(BackwardFault.DROPPED_LAST_ROWS, Quick(DEW, "normal", "L1")),
    Found(BackwardFault.DROPPED_DQ_PART, Quick(DEW, "normal", "L1")),
    Found(BackwardFault.DOUBLED_DQ_PART, Quick(DEW, "normal", "L1"), Laws(DEW, ("gradients_of_a_loss",))),
    Found(BackwardFault.LAST_HEAD_ONLY, Quick(DEW, "normal", "L1"), Laws(DEW, ("grouped_heads_add_up",))),
    Found(BackwardFault.ROUNDED_PARTS, Quick(DEW, "normal", "L1")),
    Found(BackwardFault.KV_HEAD_MODULO, Quick(DEW, "normal", "L1")),
    Found(BackwardFault.CAUSAL_TOP_LEFT, Quick(DEW, "normal", "L1"), Laws(DEW, ("gradients_at_telling_lengths",))),
    Found(BackwardFault.CAUSAL_OFF_BY_ONE, Quick(DEW, "normal", "L1"), Laws(DEW, ("gradients_within_bound",))),
    Found(BackwardFault.TRUNCATED_GRADIENTS, Quick(DEW, "normal", "L1")),
    Found(BackwardFault.NO_SOFTCAP_SLOPE, Quick(OURS, "normal", "L1")),
    Found(BackwardFault.SLOPE_OF_UNCAPPED, Quick(OURS, "normal", "L1")),
)
FAULTS = (Fault, QuantizerFault, BackwardFault)


def of(*kinds: type[StrEnum]) -> list[Found]:
    """Return the rows of some kinds of faults."""
    return [found for found in FOUND_BY if isinstance(found.fault, kinds)]
