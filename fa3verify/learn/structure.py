"""The record of what is certain of a kernel that is learned; :mod:`fa3verify.learn.probes` fills it in."""

from __future__ import annotations

from dataclasses import dataclass

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
