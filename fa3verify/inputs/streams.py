"""Random streams for inputs: each kv head of a sequence, with its query heads, draws the same on every platform.

Streams are Philox4x64 generators with the key (seed, tensor and purpose) and the counter (head, sequence). Numbers that
pass through libm are rounded to 24 bits, so that no bit depends on a libm or a SIMD width. The distributions of
:mod:`fa3verify.inputs.draws` draw from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np
from numpy.random import Generator, Philox

from fa3_reference.problem import AttentionProblem, Sequence

Tensor = Literal["q", "k", "v"]


class Purpose(IntEnum):
    """What numbers are drawn for: each purpose has a stream of its own."""

    VALUES = 0
    MASK = 1
    EXTRA = 2
    SCALE = 3
    CHANNELS = 4


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """One kv head of one sequence with the query heads that share it: the unit a distribution draws."""

    seed: int
    problem: AttentionProblem
    seq: Sequence
    kv_head: int

    def shape(self, tensor: Tensor) -> tuple[int, int, int]:
        """Return (heads, rows, channels) of a tensor; K and V have one head."""
        if tensor == "q":
            return self.problem.group, self.seq.seqlen_q, self.problem.head_dim
        return 1, self.seq.seqlen_k, self.problem.head_dim if tensor == "k" else self.problem.head_dim_v

    def rng(self, tensor: Tensor | Literal["shared"], purpose: Purpose, member: int = 0) -> Generator:
        """Return the generator of one head.

        ``member`` is the query head within the group, 0 for K and V; "shared" is a stream of the kv head that belongs
        to no tensor.
        """
        head = self.kv_head * self.problem.group + member if tensor == "q" else self.kv_head
        key = np.array([self.seed, ("q", "k", "v", "shared").index(tensor) | purpose << 8], np.uint64)
        return Generator(Philox(key=key, counter=np.array([0, 0, head, self.seq.index], np.uint64)))

    def _stack(self, tensor: Tensor, purpose: Purpose, draw: Callable[[Generator], np.ndarray]) -> np.ndarray:
        return np.stack([draw(self.rng(tensor, purpose, m)) for m in range(self.shape(tensor)[0])])

    def normal(self, tensor: Tensor, purpose: Purpose = Purpose.VALUES, rows: int | None = None) -> np.ndarray:
        """Draw N(0, 1) rounded to 24 bits, float64 (heads, rows, channels); ``rows`` None for all of the tensor."""
        shape = (self.shape(tensor)[1] if rows is None else rows, self.shape(tensor)[2])
        return self._stack(tensor, purpose, lambda rng: portable(rng.standard_normal(shape)))

    def uniform(self, tensor: Tensor, purpose: Purpose = Purpose.VALUES, channels: int = 0) -> np.ndarray:
        """Draw U[0, 1), multiples of 2^-53, float64 (heads, rows, channels); ``channels`` 0 for all of the tensor."""
        shape = (self.shape(tensor)[1], self.shape(tensor)[2] if channels == 0 else channels)
        return self._stack(tensor, purpose, lambda rng: rng.random(shape))

    def signs(self, tensor: Tensor) -> np.ndarray:
        """Draw +-1, float64 (heads, rows, channels)."""
        return np.where(self.uniform(tensor, Purpose.MASK) < 0.5, -1.0, 1.0)

    def blocks(self, tensor: Tensor, tile: int) -> np.ndarray:
        """Return the number of the block of ``tile`` rows in which each row lies, int64 (rows,)."""
        return np.arange(self.shape(tensor)[1]) // tile


def portable(x: np.ndarray) -> np.ndarray:
    """Round to 24 bits: hides last-bit differences between libm versions."""
    return x.astype(np.float32).astype(np.float64)


def integer_exp2(exponent: np.ndarray) -> np.ndarray:
    return np.ldexp(1.0, exponent.astype(np.int32))
