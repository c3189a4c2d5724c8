"""Launches with chosen score rows, for the probes.

A query that is one-hot in channel r has the r-th channel of all keys as its scores. So one head can hold as many rows
of arbitrary scores as it has channels. V has a column for each row, and row r reads column r of its output.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fa3_reference.formats import FORMATS
from fa3_reference.problem import Dtype
from fa3verify.learn.launcher import LOG2_E, Question
from fa3verify.operations.forward import Result

KEYS = 768  # of structure probes: at least three tiles of up to 256, and a multiple of 64
HIDDEN = {"fp16": -4000.0, "bf16": -4000.0, "e4m3": -448.0}  # entry of K that gives a key a weight of 0
# Values of the query. e4m3 has several, so that their products with K reach more scores.
UNITS = {"fp16": (1.0,), "bf16": (1.0,), "e4m3": (16.0, 18.0, 20.0, 22.0, 24.0, 26.0, 28.0, 30.0)}


@dataclass(frozen=True, slots=True)
class Form:
    """Holds what a probe must know to write scores: the operands' format, the channels, and ``folding``.

    That says whether the kernel multiplies Q by the scale first, as :attr:`fa3_kernels.plan.order.Order.factor` does.
    """

    dtype: Dtype
    head_dim: int
    folding: str = ""

    @property
    def factor(self) -> float:
        """Return the factor from a raw score to log2 units, with the default scale; rounded if Q takes the scale."""
        scale = 1 / np.sqrt(self.head_dim)
        if self.folding == "folded":
            return float(self.rounded(scale)) * LOG2_E
        return float(self.rounded(scale * LOG2_E)) if self.folding else scale * LOG2_E

    @property
    def rows(self) -> int:
        """Return how many rows one head holds."""
        return min(64, self.head_dim)

    @property
    def fraction_bits(self) -> int:
        """Return the stored bits of the operands' significand."""
        return FORMATS[self.dtype].fraction_bits

    def rounded(self, x: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Round to the operands' format, float64."""
        return np.asarray(x, np.float32).astype(FORMATS[self.dtype].dtype).astype(np.float64)

    def keys(self, exponents: NDArray[np.float64] | float, unit: float) -> NDArray[np.float64]:
        """Return the entries of K that give scores nearest to ``exponents``, log2 units, with a query of ``unit``."""
        return self.rounded(np.asarray(exponents) / (self.factor * unit))

    def level(self, low: float, high: float) -> tuple[float, float]:
        """Return a query and an entry of K whose score lies between two numbers, in log2 units, nearest their middle.

        Raises
        ------
        ValueError
            If the format has no such pair.
        """
        middle = (low + high) / 2
        pairs = [(unit, float(self.keys(middle, unit))) for unit in UNITS[self.dtype]]
        unit, key = min(pairs, key=lambda x: abs(x[0] * x[1] * self.factor - middle))
        if not low < unit * key * self.factor < high:
            raise ValueError(f"{self.dtype} has no score between {low} and {high} at head_dim {self.head_dim}")
        return unit, key


@dataclass(frozen=True, slots=True)
class Rows:
    """Holds a launch of ``count`` chosen score rows, which stand in each head from row ``first`` on."""

    question: Question
    count: int
    form: Form
    first: int = 0

    def out(self, answer: Result) -> NDArray[np.float64]:
        """Return the output of every row in its own column of V, float64 (rows,)."""
        x = np.arange(self.count)
        per = self.form.rows
        return answer.out[0, self.first + x % per, x // per, x % per].astype(np.float64)

    def lse(self, answer: Result) -> NDArray[np.float64]:
        """Return the lse of every row, float64 (rows,); NaN where the kernel returns none."""
        x = np.arange(self.count)
        if answer.lse is None:
            return np.full(self.count, np.nan)
        return answer.lse[0, x // self.form.rows, self.first + x % self.form.rows].astype(np.float64)


def written(
    form: Form,
    scores: NDArray[np.float64],
    values: NDArray[np.float64],
    unit: float,
    *,
    queries: int = 64,
    first: int = 0,
    causal: bool = False,
) -> Rows:
    """Return the launch in which row x has ``scores[x]`` times ``unit`` as its scores and ``values[x]`` as its V.

    Parameters
    ----------
    scores, values : float64 (rows, keys)
        Entries of K, and of V, for each row.
    unit : float
        Value of the query.
    queries, first : int
        Rows of Q, and the first of them that is used.
    """
    count, keys = scores.shape
    heads = -(-count // form.rows)
    q = np.zeros((1, queries, heads, form.head_dim))
    k = np.zeros((1, keys, heads, form.head_dim))
    v = np.zeros_like(k)
    for x in range(count):
        head, row = divmod(x, form.rows)
        q[0, first + row, head, row] = unit
        k[0, :, head, row] = scores[x]
        v[0, :, head, row] = values[x]
    return Rows(Question(q, k, v, causal), count, form, first)


def sparse(count: int, keys: int, form: Form, *entries: tuple[NDArray[np.int64], NDArray[np.float64] | float]):
    """Return scores, float64 (rows, keys), that hide every key except those of ``entries``.

    Each entry has a key for each row, and the score of that key, one for all rows or one for each.
    """
    scores = np.full((count, keys), HIDDEN[form.dtype])
    for where, entry in entries:
        scores[np.arange(count), where] = entry
    return scores
