"""Launches of the kernel that is learned, on chosen arrays, and the answer of a hypothesis's twin to the same.

Probes launch chosen score rows. A query that is one-hot in channel r has the r-th channel of all keys as its scores. So
one head can hold as many rows of arbitrary scores as it has channels. V has a column for each row, and row r reads
column r of its output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa3_kernels.plan.config import Config
from fa3_kernels.plan.families import OURS, traits_of
from fa3_kernels.plan.order import Order
from fa3_kernels.twin.forward import forward
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, Descale, Dtype, Operands
from fa3verify.judging.metrics import bits_differing
from fa3verify.kernels import calls
from fa3verify.kernels.record import Kernel
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


LOG2_E = math.log2(math.e)
MOST_TILES = 216  # row tiles that leave no multiprocessor of a Hopper GPU idle, so that no kernel splits keys


@dataclass(frozen=True, slots=True)
class Question:
    """Holds the inputs of one launch: arrays (1, seqlen, nheads, head_dim) in float64, not yet rounded, and options.

    ``descales`` are those of Q, K and V in e4m3, the same for every head; other formats ignore them.
    """

    q: NDArray[np.float64]
    k: NDArray[np.float64]
    v: NDArray[np.float64]
    causal: bool = False
    softmax_scale: float | None = None
    softcap: float = 0.0
    descales: tuple[float, float, float] = (1.0, 1.0, 1.0)

    def problem(self, dtype: Dtype) -> AttentionProblem:
        """Return the problem of the launch in a dtype."""
        batch, seqlen_q, nheads, head_dim = self.q.shape
        return AttentionProblem(
            batch,
            nheads,
            self.k.shape[2],
            seqlen_q,
            self.k.shape[1],
            head_dim,
            head_dim_v=self.v.shape[3],
            dtype=dtype,
            causal=self.causal,
            softmax_scale=self.softmax_scale,
            softcap=self.softcap,
        )

    def operands(self, dtype: Dtype) -> Operands:
        """Return its arrays rounded to a dtype, for e4m3 with descales."""
        with np.errstate(over="ignore"):
            q, k, v = (x.astype(np.float32).astype(FORMATS[dtype].dtype) for x in (self.q, self.k, self.v))
        if dtype != "e4m3":
            return Operands(q, k, v)
        heads = (self.q.shape[2], self.k.shape[2], self.k.shape[2])
        each = (Descale(np.full((len(self.q), n, 1), x, np.float32)) for n, x in zip(heads, self.descales, strict=True))
        return Operands(q, k, v, *each)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Says how a kernel may work: keys of a tile, dense and causal, keys after which P V is promoted, and the order."""

    tile_n: int
    tile_causal: int
    promotion_interval: int
    order: Order

    def answer(self, question: Question, dtype: Dtype, out_dtype: str, twin: Any = forward) -> Result:
        """Return the outputs of this hypothesis's twin, or of ``twin``, one with a planted mistake."""
        problem = question.problem(dtype)
        tile_n = self.tile_causal if question.causal else self.tile_n
        head_dim, _ = traits_of(OURS).compiled_head_dims(problem)
        config = Config(
            dtype,
            head_dim,
            128,
            tile_n,
            out_dtype,  # type: ignore[arg-type]
            min(self.promotion_interval, tile_n),
        )
        return Result(*twin(problem, question.operands(dtype), config, order=self.order))


class Launcher:
    """Launches a kernel and counts how often.

    Parameters
    ----------
    kernel : Kernel
        A forward kernel.
    head_dim : int
        Head dim of every launch.
    """

    def __init__(self, kernel: Kernel, head_dim: int) -> None:
        self.kernel = kernel
        self.head_dim = head_dim
        self.launches = 0
        self.is_filled = False  # whether every launch has sequences of zeros behind the one in question

    @property
    def dtype(self) -> Dtype:
        """Return the format of the operands."""
        return self.kernel.dtype

    @cached_property
    def out_dtype(self) -> str:
        """Return the format of the output, as the kernel declares it."""
        of = self.kernel.sizes
        q, k = (np.zeros((1, n, 1, self.head_dim)) for n in (of.queries(64), of.keys(64)))
        config = self.kernel.config_for(Question(q, k, k).problem(self.dtype))
        return str(getattr(config, "out_dtype", self.dtype))

    def takes(self, question: Question) -> bool:
        """Tell whether the kernel takes a launch, by making it."""
        if not self.kernel.supports(question.problem(self.dtype)):
            return False
        try:
            self(question)
        except calls.KernelError:
            return False
        return True

    def __call__(self, question: Question) -> Result:
        """Launch the kernel, and return its out and lse; lse is None if it returns none.

        Raises
        ------
        fa3verify.kernels.calls.KernelError
            If it raises, or returns what it does not declare.
        ValueError
            If it has no configuration for the launch.
        """
        if self.is_filled:
            question = _filled(question)
        problem = question.problem(self.dtype)
        self.launches += 1
        config = self.kernel.config_for(problem)
        got = calls.run(self.kernel, problem, question.operands(self.dtype), config)
        lse = got.get("lse")
        return Result(got["out"][:1], None if lse is None else lse[:1])

    def fill(self, question: Question) -> None:
        """Fill every launch from now on with sequences of zeros, if that changes a bit of this one.

        It does if a kernel splits the keys of a launch with too few row tiles.
        """
        plain = self(question)
        self.is_filled = True
        self.is_filled = differing(plain, self(question)) > 0


def _filled(question: Question) -> Question:
    """Return a launch with so many sequences of zeros behind it that every multiprocessor has row tiles."""
    rows = -(-question.q.shape[1] // 128) * question.q.shape[2]
    idle = -(-MOST_TILES // rows) - 1
    arrays = question.q, question.k, question.v
    q, k, v = (np.concatenate([x, np.zeros((idle, *x.shape[1:]))]) for x in arrays)
    return replace(question, q=q, k=k, v=v)


def differing(a: Result, b: Result) -> int:
    """Count the values of two answers that differ in any bit; NaN equals NaN, and an lse that one lacks counts none."""
    return bits_differing(a.outputs, b.outputs, equal_nans=True)
