"""What the sizes and the masks of an attention problem say of its tensors: their shapes, the rows of each sequence in
them, and the keys that a row sees.

:class:`fa3_reference.problem.AttentionProblem`, which checks the sizes, is the one class that inherits it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Element = TypeVar("Element", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence of a problem: its number and the rows it owns in packed or batched tensors.

    Parameters
    ----------
    index : int
        Number of the sequence in the batch.
    seqlen_q, seqlen_k : int
        Its queries and keys.
    q_start, k_start : int
        First row in a packed (total, ...) tensor; 0 when batched.
    """

    index: int
    seqlen_q: int
    seqlen_k: int
    q_start: int
    k_start: int


class Shapes:
    """Shapes of the tensors of a problem, and the rows and the visible keys of its sequences."""

    __slots__ = ()

    batch: int
    nheads: int
    nheads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    causal: bool
    window: tuple[int, int]
    seqlens_q: tuple[int, ...] | None
    seqlens_k: tuple[int, ...] | None
    top_left: bool
    attention_chunk: int

    @property
    def is_varlen(self) -> bool:
        """Tell whether sequences of their own lengths are packed."""
        return self.seqlens_q is not None

    @property
    def has_equal_queries(self) -> bool:
        """Tell whether all sequences have equally many queries, so that a call with a cache has them batched."""
        return len(set(self.seqlens_q or ())) <= 1

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
        """Shape of Q: (batch, seqlen_q, nheads, head_dim), or packed (total_q, nheads, head_dim)."""
        return self._shape("q", self.nheads, self.head_dim)

    @property
    def k_shape(self) -> tuple[int, ...]:
        """Shape of K: (batch, seqlen_k, nheads_kv, head_dim), or packed (total_k, nheads_kv, head_dim)."""
        return self._shape("k", self.nheads_kv, self.head_dim)

    @property
    def v_shape(self) -> tuple[int, ...]:
        """Shape of V: like K, with ``head_dim_v`` channels."""
        return self._shape("k", self.nheads_kv, self.head_dim_v)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the output: like Q, with ``head_dim_v`` channels."""
        return self._shape("q", self.nheads, self.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of lse: (batch, nheads, seqlen_q), or packed (nheads, total_q)."""
        if self.seqlens_q is not None:
            return (self.nheads, sum(self.seqlens_q))
        return (self.batch, self.nheads, self.seqlen_q)

    @property
    def cu_seqlens_q(self) -> NDArray[np.int32]:
        """Start of each packed query sequence, and their end, int32 (batch + 1,)."""
        return np.concatenate([[0], np.cumsum(self.seqlens_q or ())]).astype(np.int32)

    @property
    def cu_seqlens_k(self) -> NDArray[np.int32]:
        """Start of each packed key sequence, and their end, int32 (batch + 1,)."""
        return np.concatenate([[0], np.cumsum(self.seqlens_k or ())]).astype(np.int32)

    def sequences(self) -> Iterator[Sequence]:
        """Yield every sequence, empty ones included.

        Yields
        ------
        Sequence
            Its number, lengths and first rows.
        """
        if self.seqlens_q is None or self.seqlens_k is None:
            for b in range(self.batch):
                yield Sequence(b, self.seqlen_q, self.seqlen_k, 0, 0)
            return
        q_start = k_start = 0
        for b, (nq, nk) in enumerate(zip(self.seqlens_q, self.seqlens_k, strict=True)):
            yield Sequence(b, nq, nk, q_start, k_start)
            q_start = q_start + nq
            k_start = k_start + nk

    def rows_q(self, x: NDArray[Element], seq: Sequence) -> NDArray[Element]:
        """Return the query-side rows of one sequence.

        Parameters
        ----------
        x : array of shape ``q_shape`` or ``out_shape``
            Q, the output, or any array with one row per query in their layout.
        seq : Sequence
            One of :meth:`sequences`.

        Returns
        -------
        array (seqlen_q, nheads, dim)
            A view.
        """
        return x[seq.q_start : seq.q_start + seq.seqlen_q] if self.is_varlen else x[seq.index]

    def rows_k(self, x: NDArray[Element], seq: Sequence) -> NDArray[Element]:
        """Return the key-side rows of one sequence.

        Parameters
        ----------
        x : array of shape ``k_shape`` or ``v_shape``
            K, V, or any array with one row per key in their layout.
        seq : Sequence
            One of :meth:`sequences`.

        Returns
        -------
        array (seqlen_k, nheads_kv, dim)
            A view.
        """
        return x[seq.k_start : seq.k_start + seq.seqlen_k] if self.is_varlen else x[seq.index]

    def rows_lse(self, lse: NDArray[Element], seq: Sequence) -> NDArray[Element]:
        """Return the lse of one sequence.

        Parameters
        ----------
        lse : array of shape ``lse_shape``
            lse, or any array in its layout.
        seq : Sequence
            One of :meth:`sequences`.

        Returns
        -------
        array (nheads, seqlen_q)
            A view.
        """
        return lse[:, seq.q_start : seq.q_start + seq.seqlen_q] if self.is_varlen else lse[seq.index]

    def offset(self, seqlen_q: int, seqlen_k: int) -> int:
        """Return the key on the diagonal of a sequence's first query, which may lie outside the keys.

        Parameters
        ----------
        seqlen_q, seqlen_k : int
            Lengths of the sequence.

        Returns
        -------
        int
            0 for a top-left diagonal; otherwise seqlen_k - seqlen_q, negative where there are more queries than keys.
        """
        return 0 if self.top_left else seqlen_k - seqlen_q

    @property
    def is_windowed(self) -> bool:
        """Tell whether a window or a chunk may hide keys on either side of the diagonal."""
        return self.window != (-1, -1) or self.attention_chunk > 0

    def visible_keys(
        self, rows: NDArray[np.int64], seqlen_q: int, seqlen_k: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the half-open range [first, stop) of keys each query row sees.

        Parameters
        ----------
        rows : int64 array
            Query positions inside the sequence.
        seqlen_q, seqlen_k : int
            Lengths of the sequence.

        Returns
        -------
        first : int64 array like ``rows``
            First key that a row sees.
        stop : int64 array like ``rows``
            The key after the last one that it sees; ``stop <= first`` means that the row sees no key. Exact.
        """
        diagonal = np.asarray(rows, np.int64) + self.offset(seqlen_q, seqlen_k)
        left, right = self.window
        if self.causal:
            right = 0 if right < 0 else min(right, 0)
        first = np.zeros_like(diagonal) if left < 0 else np.clip(diagonal - left, 0, seqlen_k)
        stop = np.full_like(diagonal, seqlen_k) if right < 0 else np.clip(diagonal + right + 1, 0, seqlen_k)
        if self.attention_chunk:
            chunk = diagonal // self.attention_chunk * self.attention_chunk
            first = np.maximum(first, chunk)
            stop = np.minimum(stop, chunk + self.attention_chunk)
        return first, stop
