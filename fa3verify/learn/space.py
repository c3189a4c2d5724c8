"""The space of hypotheses: all orders of operations that agree with what a structure decides."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from fa3_kernels.plan.order import Order
from fa3verify.kernels.record import Kernel
from fa3verify.learn.structure import Structure

_INF = float("inf")
# Maxima in log2 units share their rounding with exponents and lse; raw ones are scaled for each.
_MAXIMA: tuple[dict[str, Any], ...] = (
    *({"maxima": "scaled", "lse": lse} for lse in ("log2", "natural", "log2_polynomial")),
    *(
        {"maxima": "unscaled", "rescale": rescale, "lse": lse}
        for rescale in ("of_difference", "contracted")
        for lse in ("natural", "natural_by_scale", "log2_polynomial")
    ),
)
_ARITHMETIC: dict[str, tuple[Any, ...]] = {
    "contracts_exponent": (True, False),
    "contracts_row_sum": (True, False),
    "inverse": ("reciprocal", "division"),
    "gradual_exp2": (False, True),
    "compiles_masked_apart": (False, True),
    "keeps_subnormals": (True, False),
}
_SPECIAL: dict[str, tuple[Any, ...]] = {
    "diagonal": ("bottom_right", "top_left"),
    "lse_empty": (-_INF, _INF),
    "lse_without_keys": (-_INF, _INF),
    "hides_nan": (False, True),
}
FACTORS = ("float64", "of_float32", "float32", "in_turn", "folded", "folded_log2")
# Fields on which the outputs of a row with one key depend. It has no sums; where raw maxima are scaled twice its weight
# is not exactly 1.
OF_ONE_KEY = (
    *("factor", "maxima", "lse", "keeps_subnormals", "descales"),
    *("contracts_exponent", "inverse", "compiles_masked_apart"),
)
UNREAD = ("combine", "splits_visible")  # fields that no launch here depends on, as none splits keys


def certain(known: Structure, dtype: str) -> Order:
    """Return an order with the fields that a structure decides; all others, and undecided ones, have defaults."""
    decided: dict[str, Any] = {
        "keys": known.keys or "left_to_right",
        "row_sum_of": known.row_sum_of or "weights",
        "rescale_threshold_log2": known.threshold_log2,
        "accumulator": "fp32" if 1 in (known.value_step, known.score_step) else "wgmma",
        "p_rounding": known.p_rounding or "nearest",
        "probabilities": "" if known.probabilities == dtype else known.probabilities,
    }
    return replace(Order(), **decided)


def arithmetic(known: Structure, kernel: Kernel) -> Iterator[Order]:
    """Yield every order of the arithmetic that agrees with a structure; treatments of special values stay defaults."""
    base = certain(known, kernel.dtype)
    descales = ("in_turn", "product_first") if kernel.dtype == "e4m3" else ("in_turn",)
    switches = list(_options(_ARITHMETIC))
    maxima_of = [of for of in _MAXIMA if kernel.dtype != "e4m3" or of.get("rescale") != "contracted"]
    factors = (known.folding,) if known.folding else FACTORS[: 3 if kernel.dtype == "e4m3" else 4]
    for factor, descale, maxima, sums, rest in itertools.product(
        factors, descales, maxima_of, known.row_sums or (("block_pairs", "far_first"),), switches
    ):
        row_sum, quad = sums
        changed = {"factor": factor, "descales": descale, "row_sum": row_sum, "quad": quad, **maxima, **rest}
        yield replace(base, **changed)


def special(orders: Sequence[Order], kernel: Kernel) -> Iterator[Order]:
    """Yield orders with every treatment of empty rows, NaN and, where it is claimed, softcaps."""
    capped = ("ex2", "tanh") if "softcap" in kernel.features else ("ex2",)
    for order, rest, softcap in itertools.product(orders, _options(_SPECIAL), capped):
        yield replace(order, softcap=softcap, **rest)


def _options(switches: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    return (dict(zip(switches, values, strict=True)) for values in itertools.product(*switches.values()))


def part(order: Order, names: Sequence[str]) -> tuple[Any, ...]:
    """Return the values of some fields of an order."""
    return tuple(getattr(order, name) for name in names)


def free(orders: Sequence[Order]) -> dict[str, tuple[Any, ...]]:
    """Return the fields in which orders differ, with their values, without those of :data:`UNREAD`."""
    values = {f.name: dict.fromkeys(getattr(order, f.name) for order in orders) for f in fields(Order)}
    return {name: tuple(of) for name, of in values.items() if len(of) > 1 and name not in UNREAD}
