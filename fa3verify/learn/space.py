"""What is certain of a kernel that is learned, as :mod:`fa3verify.learn.probes` find; and the space of hypotheses,
which is all orders of operations that agree with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from fa3_kernels.plan.order import Order
from fa3verify.kernels.record import Kernel
from fa3verify.learn.launcher import KEYS


@dataclass(frozen=True, slots=True)
class Structure:
    """Holds what is certain of a kernel; a field is 0 or empty if no probe could tell.

    Parameters
    ----------
    folding : str
        Whether Q takes the scale before the product: "folded", "folded_log2" or empty.
    scores : str
        Format of 16 bits in which S is kept between the two products, or empty.
    score_step, value_step : int
        Channels of Q K^T and keys of P V that are added at once; 1 where they are at most 4.
    promotion_interval : int
        Keys after which sums of P V begin anew.
    probabilities, p_rounding : str
        Format of P and how it is rounded to it.
    row_sum_of : str
        What the row sum adds: "weights" or "rounded".
    threshold_log2 : float
        How far the maximum may grow before O is rescaled, in log2 units.
    keys : str
        Direction of the key tiles.
    tile_n, tile_causal : int
        Keys of a tile, dense and causal.
    edges : tuple of int
        Where tiles end, if their sizes are not equal.
    row_sums : tuple of (str, str)
        The orders of the row sum that agree with the kernel.
    value_bits, sum_bits : int
        Bits that sums of P V over several tiles keep, and the row sum.
    weight_error : float
        Largest error of weights beside one of 1, where the lse shows it.
    lost : tuple of int
        For each pair of keys that cancel, how many units of P V went into a sum that they swallowed.
    """

    folding: str = ""
    scores: str = ""
    score_step: int = 0
    value_step: int = 0
    promotion_interval: int = 0
    probabilities: str = ""
    p_rounding: str = ""
    row_sum_of: str = ""
    threshold_log2: float = 0.0
    keys: str = ""
    tile_n: int = 0
    tile_causal: int = 0
    edges: tuple[int, ...] = ()
    row_sums: tuple[tuple[str, str], ...] = ()
    value_bits: int = 0
    sum_bits: int = 0
    weight_error: float = 0.0
    lost: tuple[int, ...] = ()

    @property
    def declaration(self) -> str:
        """Return what declares those steps that a kernel which states no order may not have; empty without any."""
        steps = {
            f'scores="{self.scores}"': self.scores,
            'order=replace(any_order.order, scale="folded")': self.folding,
            'accumulator="fp16"': 9 < self.value_bits < 12,
        }
        said = ", ".join(name for name, is_found in steps.items() if is_found)
        return said and f"order=lambda config: replace(any_order, {said})"

    def words(self) -> list[str]:
        """Return what is certain, a sentence each."""
        times = " times log2(e)" if self.folding == "folded_log2" else ""
        visited = f"visited {self.keys.replace('_', ' ')}"
        chains = (("Q K^T", self.score_step), ("P V", self.value_step))
        kept = (("sums of P V keep", self.value_bits), ("the row sum keeps", self.sum_bits))
        facts = (
            (self.folding, f"Q takes the scale{times} and is rounded again"),
            (self.scores, f"S is kept in {self.scores} between the two products"),
            *(
                (step, f"{name} adds {f'{step} products' if step > 1 else 'at most 4'} at once")
                for name, step in chains
            ),
            (self.promotion_interval, f"sums of P V begin anew every {self.promotion_interval} keys"),
            (self.probabilities, f"P is {self.probabilities}, rounded {self.p_rounding.replace('_', ' ')}"),
            (
                self.row_sum_of,
                f"the row sum adds {'P once it is rounded' if self.row_sum_of == 'rounded' else 'P unrounded'}",
            ),
            (self.threshold_log2, f"O is rescaled where the maximum grew by more than {self.threshold_log2:g} in log2"),
            (self.tile_n, f"tiles of {self.tile_n} keys are {visited}"),
            (
                self.tile_n and self.tile_causal not in (0, self.tile_n),
                f"tiles have {self.tile_causal} keys under a causal mask",
            ),
            (not self.tile_n and self.edges, f"tiles end at keys {', '.join(map(str, self.edges[:8]))}, {visited}"),
            (not (self.tile_n or self.edges or self.keys), f"no maximum steps within {KEYS} keys"),
            *((bits, f"{name} {bits} bits") for name, bits in kept),
            (self.weight_error > 2.0**-18, f"weights are off by up to {self.weight_error:.1e} of the largest"),
            (self.row_sums, f"the row sum is one of {', '.join(' '.join(pair) for pair in self.row_sums)}"),
        )
        return [words for is_known, words in facts if is_known]


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
