"""What is to be computed: shapes and semantics of one attention problem, and the operands a kernel sees.

Conventions are FlashAttention-3's: tensors (batch, seqlen, nheads, head_dim), or (total, nheads, head_dim)
when the lengths vary; causal and windows aligned to the bottom right; query head h reads kv head
h // (nheads / nheads_kv); lse is the natural logarithm, (batch, nheads, seqlen_q) or (nheads, total_q).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

Dtype = Literal["fp16", "bf16", "e4m3"]
DTYPES: tuple[Dtype, ...] = ("fp16", "bf16", "e4m3")
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence of a problem: its number and the rows it owns in packed or batched tensors."""

    index: int
    seqlen_q: int
    seqlen_k: int
    q_start: int  # first row in a packed (total_q, ...) tensor; 0 when batched
    k_start: int


def _check(ok: bool, rule: str) -> None:
    if not ok:
        raise ValueError(rule)


def _is_integer(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """Shapes and semantics of softmax(scale * Q K^T + mask) V.

    Parameters
    ----------
    batch, nheads, nheads_kv, seqlen_q, seqlen_k, head_dim : int
        Sizes. ``nheads`` is a multiple of ``nheads_kv``; ``head_dim`` at most 256.
        ``seqlen_k`` may be 0 (every row is then empty); ``seqlen_q`` may not.
    head_dim_v : int, optional
        Channels of V and of the output; ``head_dim`` by default.
    dtype : {"fp16", "bf16", "e4m3"}
        Format of the operands a kernel sees.
    causal : bool
        Key j is visible to query i iff j <= i + seqlen_k - seqlen_q.
    window : (int, int)
        Keys visible to the left and right of the bottom-right aligned diagonal, both inclusive; -1 is unlimited.
    softcap : float
        c > 0 replaces scores x by c * tanh(x / c); 0 switches it off.
    softmax_scale : float, optional
        Positive; None stands for 1 / sqrt(head_dim).
    seqlens_q, seqlens_k : tuple of int, optional
        Lengths of packed sequences (varlen). ``batch``, ``seqlen_q`` and ``seqlen_k`` must then be their
        number and their maxima; :meth:`varlen` fills these in. Zero lengths are legal.

    Raises
    ------
    ValueError
        Whenever a value breaks its rule; the message states both.
    """

    batch: int
    nheads: int
    nheads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int = 0
    dtype: Dtype = "fp16"
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    softmax_scale: float = None  # type: ignore[assignment]  # a number once the problem is made
    seqlens_q: tuple[int, ...] | None = None
    seqlens_k: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("window", "seqlens_q", "seqlens_k"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.head_dim_v == 0:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        if self.softmax_scale is None and self.head_dim > 0:
            object.__setattr__(self, "softmax_scale", 1.0 / math.sqrt(self.head_dim))
        for name in ("batch", "nheads", "nheads_kv", "head_dim", "head_dim_v"):
            value = getattr(self, name)
            _check(_is_integer(value, 1), f"{name} must be a positive integer, got {value!r}")
        for name, least in (("seqlen_q", 1), ("seqlen_k", 0)):
            value = getattr(self, name)
            ok = _is_integer(value, 0 if self.seqlens_q is not None else least)
            _check(ok, f"{name} must be an integer >= {least}, got {value!r}")
        for name in ("head_dim", "head_dim_v"):
            _check(
                getattr(self, name) <= MAX_HEAD_DIM, f"{name} must be at most {MAX_HEAD_DIM}, got {getattr(self, name)}"
            )
        _check(
            self.nheads % self.nheads_kv == 0,
            f"nheads must be a multiple of nheads_kv, got {self.nheads} and {self.nheads_kv}",
        )
        _check(self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        _check(
            len(self.window) == 2 and all(_is_integer(w, -1) for w in self.window),
            f"window must be two integers >= -1 (left, right), got {self.window!r}",
        )
        _check(
            math.isfinite(self.softcap) and self.softcap >= 0, f"softcap must be finite and >= 0, got {self.softcap!r}"
        )
        _check(
            self.softmax_scale is None or (math.isfinite(self.softmax_scale) and self.softmax_scale > 0),
            f"softmax_scale must be finite and > 0, got {self.softmax_scale!r}",
        )
        self._check_varlen()

    def _check_varlen(self) -> None:
        if self.seqlens_q is None and self.seqlens_k is None:
            return
        _check(
            self.seqlens_q is not None and self.seqlens_k is not None,
            "seqlens_q and seqlens_k must be given together",
        )
        for name, maximum in (("seqlens_q", self.seqlen_q), ("seqlens_k", self.seqlen_k)):
            lengths = getattr(self, name)
            _check(
                len(lengths) == self.batch and all(_is_integer(n, 0) for n in lengths),
                f"{name} must hold batch = {self.batch} integers >= 0, got {lengths!r}",
            )
            _check(max(lengths) == maximum, f"max({name}) must be {name[:6]}{name[7:]} = {maximum}, got {max(lengths)}")
        _check(sum(self.seqlens_q or ()) >= 1, f"seqlens_q must hold at least one query, got {self.seqlens_q!r}")

    @classmethod
    def varlen(cls, seqlens_q: tuple[int, ...], seqlens_k: tuple[int, ...], **rest: Any) -> AttentionProblem:
        """Build a packed problem from its lengths.

        >>> AttentionProblem.varlen((3, 5), (4, 0), nheads=2, nheads_kv=1, head_dim=64).q_shape
        (8, 2, 64)
        """
        seqlens_q, seqlens_k = tuple(seqlens_q), tuple(seqlens_k)
        sizes: dict[str, Any] = {
            "batch": len(seqlens_q),
            "seqlen_q": max(seqlens_q, default=0),
            "seqlen_k": max(seqlens_k, default=0),
            "seqlens_q": seqlens_q,
            "seqlens_k": seqlens_k,
        }
        return cls(**sizes, **rest)

    def to_json(self) -> dict[str, object]:
        """Return the problem as JSON values; :meth:`from_json` reads it back exactly."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}

    @classmethod
    def from_json(cls, values: dict) -> AttentionProblem:
        """Build a problem from a JSON object; ValueError on unknown, missing or illegal values.

        A softmax_scale of 0 stands for the default one, as files of version 0.1.0 have it.
        """
        if not isinstance(values, dict):
            raise ValueError(f"a problem must be a JSON object, got {type(values).__name__}")
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise ValueError(f"problem has unknown keys {unknown}")
        tuples: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        tuples["softmax_scale"] = tuples.get("softmax_scale") or None
        try:
            return cls(**tuples)
        except TypeError as error:
            raise ValueError(f"problem is incomplete or has a value of the wrong type: {error}") from None

    @property
    def is_varlen(self) -> bool:
        return self.seqlens_q is not None

    @property
    def group(self) -> int:
        """Query heads that share one kv head."""
        return self.nheads // self.nheads_kv

    def _shape(self, which: str, heads: int, dim: int) -> tuple[int, ...]:
        lengths = self.seqlens_q if which == "q" else self.seqlens_k
        if lengths is not None:
            return (sum(lengths), heads, dim)
        return (self.batch, self.seqlen_q if which == "q" else self.seqlen_k, heads, dim)

    @property
    def q_shape(self) -> tuple[int, ...]:
        return self._shape("q", self.nheads, self.head_dim)

    @property
    def k_shape(self) -> tuple[int, ...]:
        return self._shape("k", self.nheads_kv, self.head_dim)

    @property
    def v_shape(self) -> tuple[int, ...]:
        return self._shape("k", self.nheads_kv, self.head_dim_v)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self._shape("q", self.nheads, self.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        if self.seqlens_q is not None:
            return (self.nheads, sum(self.seqlens_q))
        return (self.batch, self.nheads, self.seqlen_q)

    @property
    def cu_seqlens_q(self) -> np.ndarray:
        """Start of each packed query sequence, int32 (batch + 1,)."""
        return np.concatenate([[0], np.cumsum(self.seqlens_q or ())]).astype(np.int32)

    @property
    def cu_seqlens_k(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.seqlens_k or ())]).astype(np.int32)

    def sequences(self) -> Iterator[Sequence]:
        """Yield every sequence, empty ones included."""
        if self.seqlens_q is None or self.seqlens_k is None:
            for b in range(self.batch):
                yield Sequence(b, self.seqlen_q, self.seqlen_k, 0, 0)
            return
        q_start = k_start = 0
        for b, (nq, nk) in enumerate(zip(self.seqlens_q, self.seqlens_k, strict=True)):
            yield Sequence(b, nq, nk, q_start, k_start)
            q_start, k_start = q_start + nq, k_start + nk

    def rows_q(self, x: np.ndarray, seq: Sequence) -> np.ndarray:
        """View of one sequence's query-side rows, (seqlen_q, nheads, dim)."""
        return x[seq.q_start : seq.q_start + seq.seqlen_q] if self.is_varlen else x[seq.index]

    def rows_k(self, x: np.ndarray, seq: Sequence) -> np.ndarray:
        """View of one sequence's key-side rows, (seqlen_k, nheads_kv, dim)."""
        return x[seq.k_start : seq.k_start + seq.seqlen_k] if self.is_varlen else x[seq.index]

    def rows_lse(self, lse: np.ndarray, seq: Sequence) -> np.ndarray:
        """View of one sequence's lse, (nheads, seqlen_q)."""
        return lse[:, seq.q_start : seq.q_start + seq.seqlen_q] if self.is_varlen else lse[seq.index]

    def visible_keys(self, rows: np.ndarray, seqlen_q: int, seqlen_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the half-open range [first, stop) of keys each query row sees.

        Parameters
        ----------
        rows : int array
            Query positions inside the sequence.

        Returns
        -------
        first, stop : int64 arrays like ``rows``
            ``stop <= first`` means the row sees no key. Exact.
        """
        diagonal = np.asarray(rows, np.int64) + (seqlen_k - seqlen_q)
        left, right = self.window
        if self.causal:
            right = 0 if right < 0 else min(right, 0)
        first = np.zeros_like(diagonal) if left < 0 else np.clip(diagonal - left, 0, seqlen_k)
        stop = np.full_like(diagonal, seqlen_k) if right < 0 else np.clip(diagonal + right + 1, 0, seqlen_k)
        return first, stop


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
    """

    values: np.ndarray
    block_rows: int = 0

    def __post_init__(self) -> None:
        v = self.values
        _check(
            v.ndim == 3 and v.dtype == np.float32,
            f"descale must be float32 (batch, heads, blocks), got {v.dtype} {v.shape}",
        )
        _check(bool(np.all(np.isfinite(v) & (v > 0))), "descale values must be finite and > 0")
        _check(self.block_rows >= 0, f"block_rows must be >= 0, got {self.block_rows}")
        _check(self.block_rows > 0 or v.shape[2] == 1, f"one block per sequence needs one value, got {v.shape[2]}")

    def rows(self, index: int, head: int, seqlen: int) -> np.ndarray:
        """Factor of each row of one sequence and head, float32 (seqlen,)."""
        values = self.values[index, head]
        return values[np.arange(seqlen) // self.block_rows] if self.block_rows else np.repeat(values, seqlen)

    def by_kv_head(self, nheads_kv: int) -> np.ndarray:
        """Factor of each sequence and kv head, float32 (batch, nheads_kv), where the query heads of a group share one.

        FlashAttention-3 takes them like this, also for Q; ValueError if they share none.
        """
        of_group = self.values.reshape(len(self.values), nheads_kv, -1)  # a group's heads and blocks
        shared = of_group[:, :, :1]
        _check(bool(np.all(of_group == shared)), "descales must be one for each (sequence, kv head) here")
        return shared[..., 0]


@dataclass(frozen=True, slots=True)
class Operands:
    """The arrays a kernel sees, in their storage format, with descales for FP8.

    ``q``, ``k`` and ``v`` have the shapes of the problem and one of the numpy dtypes float16, bfloat16, float8_e4m3fn.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    q_descale: Descale | None = None
    k_descale: Descale | None = None
    v_descale: Descale | None = None

    def check(self, problem: AttentionProblem) -> None:
        """Raise ValueError unless shapes, dtypes and descales fit the problem."""
        from fa3_reference.formats import FORMATS

        want = FORMATS[problem.dtype].dtype
        for name, shape in (("q", problem.q_shape), ("k", problem.k_shape), ("v", problem.v_shape)):
            x = getattr(self, name)
            _check(x.shape == shape, f"{name} must have shape {shape}, got {x.shape}")
            _check(x.dtype == want, f"{name} must have dtype {want}, got {x.dtype}")
        for name, heads, seqlen in (
            ("q", problem.nheads, problem.seqlen_q),
            ("k", problem.nheads_kv, problem.seqlen_k),
            ("v", problem.nheads_kv, problem.seqlen_k),
        ):
            descale: Descale | None = getattr(self, f"{name}_descale")
            if descale is None:
                continue
            _check(problem.dtype == "e4m3", f"{name}_descale is for e4m3 operands, got dtype {problem.dtype}")
            blocks = max(1, -(-seqlen // descale.block_rows)) if descale.block_rows else 1
            shape = (problem.batch, heads, blocks)
            _check(descale.values.shape == shape, f"{name}_descale must have shape {shape}, got {descale.values.shape}")

    def dequantized(self, problem: AttentionProblem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return q, k, v as float64 values, descales applied (exact: 24 + 4 significand bits fit)."""
        return (
            _dequantize(self.q, self.q_descale, problem, "q"),
            _dequantize(self.k, self.k_descale, problem, "k"),
            _dequantize(self.v, self.v_descale, problem, "k"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardOperands(Operands):
    """What a backward kernel sees: q, k and v in 16 bits, the gradient of the output, and what the forward returned.

    ``dout`` and ``out`` have the problem's out_shape and the dtype of q, ``lse`` is float32 of its lse_shape, and so is
    ``dlse``, the gradient of lse, where there is one.
    """

    dout: np.ndarray
    out: np.ndarray
    lse: np.ndarray
    dlse: np.ndarray | None = None

    def check(self, problem: AttentionProblem) -> None:
        """Raise ValueError unless shapes and dtypes fit the problem."""
        Operands.check(self, problem)
        for name, x, shape, dtype in (
            ("dout", self.dout, problem.out_shape, self.q.dtype),
            ("out", self.out, problem.out_shape, self.q.dtype),
            ("lse", self.lse, problem.lse_shape, np.dtype(np.float32)),
            ("dlse", self.lse if self.dlse is None else self.dlse, problem.lse_shape, np.dtype(np.float32)),
        ):
            _check(x.shape == shape, f"{name} must have shape {shape}, got {x.shape}")
            _check(x.dtype == dtype, f"{name} must have dtype {dtype}, got {x.dtype}")

    def dequantized(self, problem: AttentionProblem) -> tuple[np.ndarray, ...]:  # type: ignore[override]
        """Return q, k, v, dout, out, lse and, where there is one, dlse as float64 values, exactly."""
        given = (self.q, self.k, self.v, self.dout, self.out, self.lse, self.dlse)
        return tuple(x.astype(np.float64) for x in given if x is not None)


def _dequantize(x: np.ndarray, descale: Descale | None, problem: AttentionProblem, side: str) -> np.ndarray:
    values = x.astype(np.float64)
    if descale is None:
        return values
    for seq in problem.sequences():
        rows = problem.rows_q(values, seq) if side == "q" else problem.rows_k(values, seq)  # (seqlen, heads, dim)
        for head in range(rows.shape[1]):
            rows[:, head] *= descale.rows(seq.index, head, rows.shape[0])[:, None].astype(np.float64)
    return values
