"""The sums of a row tile that the bound of a forward carries from key block to key block, and its result for a split.

:mod:`fa3_reference.bounds.forward` moves the state along, ``forward_weights`` and ``forward_sums`` add to it, and
``epilogue`` turns it into a :class:`SplitResult`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

VANISHES = 120.0  # binary orders below 1 from which on a weight may be flushed to zero: 126 less room for its error


class SplitResult(NamedTuple):
    """Exact O and base-2 lse of one split, and bounds of their errors before the last rounding.

    O, its error and ``noise`` are (rows, channels), lse and its error (rows,). ``noise`` is the float64 error of ``o``
    and of the truth that it stands for.
    """

    o: np.ndarray
    error: np.ndarray
    noise: np.ndarray
    lse: np.ndarray
    lse_error: np.ndarray


class State:
    """Exact sums of a row tile in the scale of its running maximum, and bounds carried beside them.

    In the comments p is a weight, r the largest |ln of its error|, B = e^r - 1 or 1 where p may vanish, and hats are
    what the kernel computes, as in reference/README.md.
    """

    def __init__(self, rows: int, channels: int) -> None:
        self.max = self.max_low = self.max_high = np.full(rows, -np.inf)
        self.tau = np.zeros(rows)  # |M^ - M| at most
        self.largest_score = np.zeros(rows)  # |x| at most, of any maximum on the way
        # rows: sum p, sum p B, sum p (1 - e^-r), |error of l - sum p^|
        self.l, self.l_up, self.l_down, self.l_error = (np.zeros(rows) for _ in range(4))
        # rows x channels: sum p v, sum p v^2, sum p |v|, the same three with weight B, |error of O - sum p^ v|
        self.o, self.o2, self.oa, self.bo, self.bo2, self.boa, self.o_error = (
            np.zeros((rows, channels)) for _ in range(7)
        )
        self.v_min, self.v_max = np.full((rows, channels), np.inf), np.full((rows, channels), -np.inf)
        self.v_factor: float | None = None  # of the block before
        self.noise = np.full(rows, 2.0**-46)  # relative error of float64 weights
        self.keys_max = np.full(rows, -np.inf)  # exact, of keys alone, which a sink may be far above
        self.lse_lost = np.zeros(rows, bool)  # whether nothing is promised of lse
        self.outside = np.zeros((rows, channels), bool)  # whether outside the domain, where nothing is promised
        self.unknown = np.zeros(rows, bool)  # whether some weight is next to unknown
        self.worst = np.zeros(rows)  # |ln of any weight's error| at most
        self.keys = 0
        # In units of the kernel: powers of two of which the row sum (rows,) and O (rows, channels) are multiples
        self.l_grid, self.o_grid = np.full(rows, np.inf), np.full((rows, channels), np.inf)
        self.weights = np.zeros(rows, int)  # how many may differ from zero
        self.moves = np.zeros(rows, int)  # how often the maximum moved, at most
        self.share = 0.0  # what roundings of P and cuts of P V lose at most, relative to the largest |v|

    def rescale(self, new_max: np.ndarray, a: np.ndarray, vanishes: np.ndarray) -> None:
        """Move every sum to a new maximum, (rows,), by the factor alpha = 2^(old maximum - new maximum).

        The kernel's alpha has a relative error of at most e^a - 1; where ``vanishes`` it may be flushed to 0.
        """
        alpha = np.exp2(self.max - np.where(np.isneginf(new_max), 0.0, new_max))
        grow = alpha * np.exp(a)
        grown = alpha * (np.expm1(a) + vanishes)
        wide = grow[:, None]
        widened = grown[:, None]
        narrow = alpha[:, None]
        self.l_up = grow * self.l_up + grown * self.l
        self.l_down = alpha * np.where(vanishes, self.l, self.l - (self.l - self.l_down) * np.exp(-a))
        self.bo, self.bo2, self.boa = (
            wide * b + widened * e for b, e in ((self.bo, self.o), (self.bo2, self.o2), (self.boa, self.oa))
        )
        self.l = alpha * self.l
        self.l_error = grow * self.l_error
        self.o, self.o2, self.oa = (narrow * x for x in (self.o, self.o2, self.oa))
        self.o_error = wide * self.o_error
        self.worst = self.worst + a
        self.max = new_max
