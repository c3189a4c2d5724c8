"""The operands that a kernel sees: arrays in their storage format, with the descales of FP8.

:mod:`fa3_reference.quantize` makes those of a problem.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa3_reference.problem.record import AttentionProblem
from fa3_reference.rules import require

Array = NDArray[Any]  # its dtype is that of the problem's format
Floats = NDArray[np.generic]  # of any floating dtype, those of ml_dtypes included


@dataclass(frozen=True, slots=True)
class Descale:
    """Dequantisation factors of one operand: one per sequence, head and block of rows.

    Parameters
    ----------
    values : float32 (batch, heads, blocks)
        Finite and > 0; ``heads`` is nheads for Q, nheads_kv for K and V. Multiplying the stored operand gives its
        value.
    block_rows : int
        Rows per block, counted from the start of each sequence; 0 means one block for the whole sequence.

    Raises
    ------
    ValueError
        If the values have another shape or dtype, are not finite or not positive, or do not fit ``block_rows``.
    """

    values: NDArray[np.float32]
    block_rows: int = 0

    def __post_init__(self) -> None:
        v = self.values
        require(
            v.ndim == 3 and v.dtype == np.float32,
            f"descale must be float32 (batch, heads, blocks), got {v.dtype} {v.shape}",
        )
        require(bool(np.all(np.isfinite(v) & (v > 0))), "descale values must be finite and > 0")
        require(self.block_rows >= 0, f"block_rows must be >= 0, got {self.block_rows}")
        require(self.block_rows > 0 or v.shape[2] == 1, f"one block per sequence needs one value, got {v.shape[2]}")

    def rows(self, index: int, head: int, seqlen: int) -> NDArray[np.float32]:
        """Return the factor of each row of one sequence and head.

        Parameters
        ----------
        index, head : int
            Number of the sequence, and of the head.
        seqlen : int
            Rows of the sequence.

        Returns
        -------
        float32 array (seqlen,)
            The number that each row is multiplied with. Exact.
        """
        values = self.values[index, head]
        return values[np.arange(seqlen) // self.block_rows] if self.block_rows else np.repeat(values, seqlen)

    def by_kv_head(self, nheads_kv: int) -> NDArray[np.float32]:
        """Return one factor for each sequence and kv head, as FlashAttention-3 takes them, also for Q.

        Parameters
        ----------
        nheads_kv : int
            Heads of K and V; or the number of query heads where each of them has a factor of its own.

        Returns
        -------
        float32 array (batch, nheads_kv)
            The factor that the query heads of a group share. Exact.

        Raises
        ------
        ValueError
            If the heads of a group, or the blocks of a sequence, have different factors.
        """
        of_group = self.values.reshape(len(self.values), nheads_kv, -1)  # a group's heads and blocks
        shared = of_group[:, :, :1]
        require(bool(np.all(of_group == shared)), "descales must be one for each (sequence, kv head) here")
        return shared[..., 0]


@dataclass(frozen=True, slots=True)
class Operands:
    """The arrays a kernel sees, in their storage format, with descales for FP8.

    Parameters
    ----------
    q, k, v : arrays of the problem's shapes
        Their numpy dtype is float16, float32, or bfloat16 or float8_e4m3fn of ml_dtypes.
    q_descale, k_descale, v_descale : Descale, optional
        Factors that dequantise e4m3 operands; None is 1.
    sinks : float32 (nheads,), optional
        Score of every head's sink, in nats; None where the problem has no sinks.
    term : array of shape ``problem.term_shape``, optional
        What is added to scores, or hides them; None where the problem has no term.
    """

    q: Array
    k: Array
    v: Array
    q_descale: Descale | None = None
    k_descale: Descale | None = None
    v_descale: Descale | None = None
    sinks: NDArray[np.float32] | None = field(default=None, kw_only=True)
    term: Floats | None = field(default=None, kw_only=True)

    def check(self, problem: AttentionProblem) -> None:
        """Check that shapes, dtypes and descales fit a problem.

        Parameters
        ----------
        problem : AttentionProblem
            What the operands are for.

        Raises
        ------
        ValueError
            If one of them does not fit; the message names it.
        """
        from fa3_reference.formats import FORMATS  # late: who only names operands needs no ml_dtypes

        want = FORMATS[problem.dtype].dtype
        for name, shape in (("q", problem.q_shape), ("k", problem.k_shape), ("v", problem.v_shape)):
            x = getattr(self, name)
            require(x.shape == shape, f"{name} must have shape {shape}, got {x.shape}")
            require(x.dtype == want, f"{name} must have dtype {want}, got {x.dtype}")
        for name, heads, seqlen in (
            ("q", problem.nheads, problem.seqlen_q),
            ("k", problem.nheads_kv, problem.seqlen_k),
            ("v", problem.nheads_kv, problem.seqlen_k),
        ):
            descale: Descale | None = getattr(self, f"{name}_descale")
            if descale is None:
                continue
            require(problem.dtype == "e4m3", f"{name}_descale is for e4m3 operands, got dtype {problem.dtype}")
            blocks = max(1, -(-seqlen // descale.block_rows)) if descale.block_rows else 1
            shape = (problem.batch, heads, blocks)
            require(
                descale.values.shape == shape, f"{name}_descale must have shape {shape}, got {descale.values.shape}"
            )

    def dequantized(self, problem: AttentionProblem) -> tuple[NDArray[np.float64], ...]:
        """Return the values of q, k and v, descales applied, and of sinks and a term where there are any.

        Parameters
        ----------
        problem : AttentionProblem
            What the operands are for.

        Returns
        -------
        q, k, v, sinks, term : float64 arrays of the problem's shapes
            Exact: 24 + 4 significand bits fit. NaN and infinities pass.
        """
        return (
            _dequantize(self.q, self.q_descale, problem, "q"),
            _dequantize(self.k, self.k_descale, problem, "k"),
            _dequantize(self.v, self.v_descale, problem, "k"),
            *(x.astype(np.float64) for x in (self.sinks, self.term) if x is not None),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardOperands(Operands):
    """Holds what a backward kernel sees: q, k and v in 16 or 32 bits, the gradient of the output, and what the forward
    returned.

    ``dout`` and ``out`` have the problem's out_shape and the dtype of q. ``lse`` is float32 of the problem's lse_shape,
    and so is ``dlse``, the gradient of lse; None stands for no such gradient.
    """

    dout: Array
    out: Array
    lse: NDArray[np.float32]
    dlse: NDArray[np.float32] | None = None

    def check(self, problem: AttentionProblem) -> None:
        """Raise ValueError unless shapes and dtypes fit the problem."""
        Operands.check(self, problem)
        for name, x, shape, dtype in (
            ("dout", self.dout, problem.out_shape, self.q.dtype),
            ("out", self.out, problem.out_shape, self.q.dtype),
            ("lse", self.lse, problem.lse_shape, np.dtype(np.float32)),
            ("dlse", self.lse if self.dlse is None else self.dlse, problem.lse_shape, np.dtype(np.float32)),
        ):
            require(x.shape == shape, f"{name} must have shape {shape}, got {x.shape}")
            require(x.dtype == dtype, f"{name} must have dtype {dtype}, got {x.dtype}")

    def dequantized(self, problem: AttentionProblem) -> tuple[NDArray[np.float64], ...]:  # type: ignore[override]
        """Return q, k, v, dout, out, lse and, where there are any, dlse, sinks and a term, exactly, in float64."""
        given = (self.q, self.k, self.v, self.dout, self.out, self.lse, self.dlse, self.sinks, self.term)
        return tuple(x.astype(np.float64) for x in given if x is not None)


def _dequantize(x: Array, descale: Descale | None, problem: AttentionProblem, side: str) -> NDArray[np.float64]:
    # float64 values of an operand; ``side`` is "q" or "k", whose rows its descale is for
    values = x.astype(np.float64)
    if descale is None:
        return values
    for seq in problem.sequences():
        rows = problem.rows_q(values, seq) if side == "q" else problem.rows_k(values, seq)  # (seqlen, heads, dim)
        for head in range(rows.shape[1]):
            rows[:, head] *= descale.rows(seq.index, head, rows.shape[0])[:, None].astype(np.float64)
    return values
