"""Launches of the kernel that is learned, on chosen arrays, and the answer of a hypothesis's twin to the same."""

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
        interval = min(self.promotion_interval, tile_n)
        config = Config(dtype, head_dim, 128, tile_n, out_dtype, interval)  # type: ignore[arg-type]
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
