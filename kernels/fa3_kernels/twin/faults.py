"""Planted faults: single mistakes that real attention kernels have shipped with, switched on by an argument.

A :class:`Fault` is a value handed to :func:`fa3_kernels.twin.forward.forward`, a :class:`QuantizerFault` one handed to
:func:`fa3_kernels.twin.quantize.quantize_qkv`, a :class:`BackwardFault` one handed to
:func:`fa3_kernels.twin.backward.backward`; nothing global is ever patched. Each row of ``DESCRIPTIONS`` says what goes
wrong and, where there is one, the public report of such a bug.
"""

from __future__ import annotations

from enum import StrEnum


class Fault(StrEnum):
    """One planted mistake."""

    DROPPED_LAST_TILE = "dropped_last_tile"
    MISSED_RESCALE = "missed_rescale"
    WRONG_SOFTMAX_SCALE = "wrong_softmax_scale"
    STALE_V = "stale_v"
    SWAPPED_V_ROWS = "swapped_v_rows"
    NEIGHBOUR_Q_DESCALE = "neighbour_q_descale"
    NEIGHBOUR_K_DESCALE = "neighbour_k_descale"
    NEIGHBOUR_V_DESCALE = "neighbour_v_descale"
    FROZEN_V_RATIO = "frozen_v_ratio"
    DESCALES_IGNORED = "descales_ignored"
    NO_P_OFFSET = "no_p_offset"
    NO_PROMOTION = "no_promotion"
    TRUNCATED_P = "truncated_p"
    BF16_P = "bf16_p"
    TRUNCATED_OUTPUT = "truncated_output"
    FP16_ROW_SUM = "fp16_row_sum"
    FP16_ACCUMULATOR = "fp16_accumulator"
    MISSING_COLUMN = "missing_column"
    COARSE_EXP2 = "coarse_exp2"
    UNMASKED_TAIL = "unmasked_tail"
    UNCLEARED_V_TAIL = "uncleared_v_tail"
    UNGUARDED_INF = "unguarded_inf"
    FINITE_SENTINEL = "finite_sentinel"
    CAUSAL_TOP_LEFT = "causal_top_left"
    WINDOW_OFF_BY_ONE = "window_off_by_one"
    KV_HEAD_MODULO = "kv_head_modulo"
    LSE_BASE_2 = "lse_base_2"
    LSE_KEEPS_OFFSET = "lse_keeps_offset"
    UNGUARDED_COMBINE = "unguarded_combine"
    SOFTCAP_AFTER_MASK = "softcap_after_mask"
    UNCLAMPED_SCALE = "unclamped_scale"


class QuantizerFault(StrEnum):
    """One planted mistake of the quantiser."""

    NEIGHBOUR_DESCALE = "neighbour_descale"
    TRUNCATED_CODES = "truncated_codes"
    FLIPPED_SIGN = "flipped_sign"
    MEAN_OF_LONGEST = "mean_of_longest"
    NEIGHBOUR_MEAN = "neighbour_mean"
    HEAD_LEFT_OUT = "head_left_out"
    ROUNDED_DOWN_DESCALE = "rounded_down_descale"
    UNSCALED_CORRECTION = "unscaled_correction"


class BackwardFault(StrEnum):
    """One planted mistake of the backward."""

    NO_ROW_DOTS = "no_row_dots"
    NEIGHBOUR_ROW_DOT = "neighbour_row_dot"
    LSE_BASE_2 = "lse_base_2"
    EMPTY_ROW_LSE = "empty_row_lse"
    ROUNDED_P_IN_DS = "rounded_p_in_ds"
    TRUNCATED_P = "truncated_p"
    TRUNCATED_DS = "truncated_ds"
    BF16_DS = "bf16_ds"
    UNSCALED_DK = "unscaled_dk"
    SCALED_TWICE_DQ = "scaled_twice_dq"
    DROPPED_LAST_ROWS = "dropped_last_rows"
    DROPPED_DQ_PART = "dropped_dq_part"
    DOUBLED_DQ_PART = "doubled_dq_part"
    LAST_HEAD_ONLY = "last_head_only"
    ROUNDED_PARTS = "rounded_parts"
    KV_HEAD_MODULO = "kv_head_modulo"
    CAUSAL_TOP_LEFT = "causal_top_left"
    CAUSAL_OFF_BY_ONE = "causal_off_by_one"
    TRUNCATED_GRADIENTS = "truncated_gradients"
    NO_SOFTCAP_SLOPE = "no_softcap_slope"
    SLOPE_OF_UNCAPPED = "slope_of_uncapped"


DESCRIPTIONS: dict[Fault | QuantizerFault | BackwardFault, str] = {
    Fault.DROPPED_LAST_TILE: "the last key block of every row tile is never visited",
    Fault.MISSED_RESCALE: "O is not rescaled in the second visited block; the row sum is",
    Fault.WRONG_SOFTMAX_SCALE: "scores are scaled by 1/sqrt(head_dim + 1)",
    Fault.STALE_V: "the second visited V tile still holds the tile before it",
    Fault.SWAPPED_V_ROWS: "rows 2 and 3 of every 16 rows of V are exchanged in the in-kernel transpose",
    Fault.NEIGHBOUR_Q_DESCALE: "Q rows use the descale of the block before theirs",
    Fault.NEIGHBOUR_K_DESCALE: "K tiles use the descale of the block before theirs",
    Fault.NEIGHBOUR_V_DESCALE: "V tiles use the descale of the block before theirs",
    Fault.FROZEN_V_RATIO: "O takes on the V descale of the first visited block over this one's "
    "(our own kernel, see reports/notes)",
    Fault.DESCALES_IGNORED: "every descale is taken as 1 (vLLM issue 51363)",
    Fault.NO_P_OFFSET: "P is not scaled by 2^8 before it is rounded to e4m3 (flash-attention PR 1173)",
    Fault.NO_PROMOTION: "P V is chained in the 13-bit accumulator although promotion is on (vLLM issue 23813)",
    Fault.TRUNCATED_P: "P is truncated instead of rounded to nearest",
    Fault.BF16_P: "P of a 16-bit kernel passes through bf16",
    Fault.TRUNCATED_OUTPUT: "the output is truncated instead of rounded to nearest",
    Fault.FP16_ROW_SUM: "the row sum is kept in fp16 between blocks",
    Fault.FP16_ACCUMULATOR: "O is kept in fp16 between blocks (SageAttention issue 93)",
    Fault.MISSING_COLUMN: "column 0 of every tile is left out of the row sum",
    Fault.COARSE_EXP2: "exp2 is a quadratic polynomial, wrong by up to 2e-3",
    Fault.UNMASKED_TAIL: "keys beyond seqlen_k inside the last tile are not masked",
    Fault.UNCLEARED_V_TAIL: "rows of V beyond seqlen_k hold NaN instead of zero (flash-attention issue 1745)",
    Fault.UNGUARDED_INF: "-inf minus -inf is computed for rows that have seen no key yet (flashinfer PR 4401)",
    Fault.FINITE_SENTINEL: "the running maximum starts at -5e4 instead of -inf (flashinfer issue 4267)",
    Fault.CAUSAL_TOP_LEFT: "the causal diagonal starts at the top left when seqlen_q != seqlen_k",
    Fault.WINDOW_OFF_BY_ONE: "the left window bound is one key too wide",
    Fault.KV_HEAD_MODULO: "query head h reads kv head h mod nheads_kv",
    Fault.LSE_BASE_2: "lse is returned in base 2",
    Fault.LSE_KEEPS_OFFSET: "the 2^8 of P is not taken out of the e4m3 lse (flash-attention issue 1711)",
    Fault.UNGUARDED_COMBINE: "a row that is empty in every split is combined without a guard "
    "(flash-attention 26d7d92f)",
    Fault.SOFTCAP_AFTER_MASK: "softcap is applied after the mask, which revives masked keys",
    Fault.UNCLAMPED_SCALE: "scale times tiny descales underflows to 0, and 0 * -inf of a masked key is NaN "
    "(flash-attention issue 1461)",
    QuantizerFault.NEIGHBOUR_DESCALE: "rows are divided by the descale of the block before theirs",
    QuantizerFault.TRUNCATED_CODES: "values are truncated to e4m3 instead of rounded to nearest",
    QuantizerFault.FLIPPED_SIGN: "the rotation of K has the wrong sign in channel 3",
    QuantizerFault.MEAN_OF_LONGEST: "the K mean of every packed sequence is divided by the longest sequence's length",
    QuantizerFault.NEIGHBOUR_MEAN: "K is centred by the mean of the sequence before its own",
    QuantizerFault.HEAD_LEFT_OUT: "the maximum of a group of query heads leaves out the last of them",
    QuantizerFault.ROUNDED_DOWN_DESCALE: "a power-of-two descale is rounded down, and the largest values saturate",
    QuantizerFault.UNSCALED_CORRECTION: "the LSE correction lacks softmax_scale",
    BackwardFault.NO_ROW_DOTS: "D is left out of dS",
    BackwardFault.NEIGHBOUR_ROW_DOT: "rows take D of the row before theirs",
    BackwardFault.LSE_BASE_2: "lse is taken to be in base 2",
    BackwardFault.EMPTY_ROW_LSE: "the lse of a row without keys is not set to 0 first: -inf minus -inf",
    BackwardFault.ROUNDED_P_IN_DS: "dS takes P after it was rounded to 16 bits",
    BackwardFault.TRUNCATED_P: "P is truncated instead of rounded to nearest",
    BackwardFault.TRUNCATED_DS: "dS is truncated instead of rounded to nearest",
    BackwardFault.BF16_DS: "dS of an fp16 kernel passes through bf16",
    BackwardFault.UNSCALED_DK: "dK lacks softmax_scale",
    BackwardFault.SCALED_TWICE_DQ: "softmax_scale multiplies dQ once more than it should",
    BackwardFault.DROPPED_LAST_ROWS: "the last row block of every key block is never visited",
    BackwardFault.DROPPED_DQ_PART: "dQ lacks the part of the second key block: two CTAs added at the same time",
    BackwardFault.DOUBLED_DQ_PART: "the second key block's part is added to dQ twice",
    BackwardFault.LAST_HEAD_ONLY: "dK and dV of a group of heads are those of its last one",
    BackwardFault.ROUNDED_PARTS: "parts that are added in memory, of dQ and of grouped heads, are rounded to 16 bits",
    BackwardFault.KV_HEAD_MODULO: "query head h reads kv head h mod nheads_kv",
    BackwardFault.CAUSAL_TOP_LEFT: "the causal diagonal starts at the top left when seqlen_q != seqlen_k",
    BackwardFault.CAUSAL_OFF_BY_ONE: "the causal mask hides the diagonal",
    BackwardFault.TRUNCATED_GRADIENTS: "dQ, dK and dV are truncated instead of rounded to nearest",
    BackwardFault.NO_SOFTCAP_SLOPE: "dS lacks the derivative of the softcap (flash-attention issue 1033)",
    BackwardFault.SLOPE_OF_UNCAPPED: "the derivative of the softcap is taken at the score, not at score / softcap",
}
