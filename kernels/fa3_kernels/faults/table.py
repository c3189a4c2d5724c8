"""The planted mistakes: bugs that real attention kernels have shipped with, each as a rewrite of the twin's source.

``faults.toml`` says for every mistake what goes wrong and which text of the twin is replaced by which.
:mod:`fa3_kernels.faults.package` loads the changed twin. A rewrite whose text does not stand in the twin raises
ValueError, so that a mistake cannot silently be planted nowhere. Users of this table are the tests that ask whether a
mistake is found, and ``fa3verify``'s own check of its comparisons.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from fa3_kernels.faults.package import Rewrite, load


class Fault(StrEnum):
    """Mistakes of the forward; the value is the entry ``[Fault.value]`` of faults.toml."""

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
    """Mistakes of the quantiser; the value is the entry ``[QuantizerFault.value]`` of faults.toml."""

    NEIGHBOUR_DESCALE = "neighbour_descale"
    TRUNCATED_CODES = "truncated_codes"
    FLIPPED_SIGN = "flipped_sign"
    MEAN_OF_LONGEST = "mean_of_longest"
    NEIGHBOUR_MEAN = "neighbour_mean"
    HEAD_LEFT_OUT = "head_left_out"
    ROUNDED_DOWN_DESCALE = "rounded_down_descale"
    UNSCALED_CORRECTION = "unscaled_correction"


class BackwardFault(StrEnum):
    """Mistakes of the backward; the value is the entry ``[BackwardFault.value]`` of faults.toml."""

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


AnyFault = Fault | QuantizerFault | BackwardFault
_FUNCTIONS = {Fault: "forward", QuantizerFault: "quantize_qkv", BackwardFault: "backward"}


@cache
def _table() -> dict[str, dict[str, dict[str, Any]]]:
    return tomllib.loads(Path(__file__).with_name("faults.toml").read_text(encoding="utf-8"))


def description(fault: AnyFault) -> str:
    """Return in words what goes wrong."""
    return _table()[type(fault).__name__][fault]["what"]


def rewrite(fault: AnyFault) -> Rewrite:
    """Return the change of the twin's source that plants the mistake."""
    row = _table()[type(fault).__name__][fault]
    # one edit stands in the row itself, several in its list "edits"
    return Rewrite(row["module"], *((edit["before"], edit["after"]) for edit in row.get("edits", [row])))


def planted(fault: AnyFault) -> str:
    """Return the name of a changed copy of the twin that has this mistake; it becomes importable on first use.

    Raises
    ------
    ValueError
        If a text that the rewrite replaces does not stand in the twin exactly once.
    """
    return _loaded(type(fault), str(fault))


@cache
def _loaded(kind: type[AnyFault], name: str) -> str:
    """Load a mistake once.

    The kind is part of the key: members of two enumerations may share a name, and as strings they then are equal.
    """
    return load(f"fa3_twin_with_{kind.__name__.lower()}_{name}", rewrite(kind(name)))


def faulty(fault: AnyFault) -> Callable[..., Any]:
    """Return the function of the changed twin that computes with this mistake: forward, quantize_qkv or backward.

    It takes what the sound function takes. ValueError as :func:`planted` says.
    """
    function = _FUNCTIONS[type(fault)]
    return getattr(import_module(f"{planted(fault)}.{function.removesuffix('_qkv')}"), function)
