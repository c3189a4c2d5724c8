"""What is to be computed: shapes and semantics of one attention problem.

Every other package reads this record. :mod:`fa3_reference.attention` computes the result of a problem in float64,
:mod:`fa3_reference.quantize` makes its operands, which are records of :mod:`fa3_reference.problem.operands`, and
:mod:`fa3_reference.cache` calls a kernel whose keys are in a cache.

Conventions are FlashAttention-3's: tensors (batch, seqlen, nheads, head_dim), or (total, nheads, head_dim)
when the lengths vary; causal and windows aligned to the bottom right; query head h reads kv head
h // (nheads / nheads_kv); lse is the natural logarithm, (batch, nheads, seqlen_q) or (nheads, total_q).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from fa3_reference.layout import Cache
from fa3_reference.problem.shapes import Shapes
from fa3_reference.rules import Filled, is_integer, require
from fa3_reference.score_term import ScoreTerm

Dtype = Literal["fp16", "bf16", "e4m3", "fp32"]
DTYPES: tuple[Dtype, ...] = ("fp16", "bf16", "e4m3")  # those of kernels on a tensor core of Hopper
MAX_HEAD_DIM = 576  # absorbed MLA: 64 rotated channels beside a latent of 512
MAX_HEAD_DIM_V = 512
# Fields that JSON and repr leave out where they are not set.
SERVING = ("sinks", "attention_chunk", "qv", "cache", "term")


@dataclass(frozen=True, slots=True)
class AttentionProblem(Shapes):
    """Shapes and semantics of softmax(scale * Q K^T + mask) V.

    Parameters
    ----------
    batch, nheads, nheads_kv, seqlen_q, seqlen_k, head_dim : int
        Sizes. ``nheads`` is a multiple of ``nheads_kv``; ``head_dim`` at most 576.
        ``seqlen_k`` may be 0 (every row is then empty); ``seqlen_q`` may not.
    head_dim_v : int
        Channels of V and of the output, at most 512; 0 stands for ``head_dim``.
    dtype : {"fp16", "bf16", "e4m3", "fp32"}
        Format of the operands a kernel sees.
    causal : bool
        Key j is visible to query i iff j <= i + seqlen_k - seqlen_q.
    window : (int, int)
        Keys visible to the left and right of the bottom-right aligned diagonal, both inclusive; -1 is unlimited.
    softcap : float
        c > 0 replaces scores x by c * tanh(x / c); 0 switches it off.
    softmax_scale : float, optional
        Positive; None stands for 1 / sqrt(head_dim), which the problem then holds.
    seqlens_q, seqlens_k : tuple of int, optional
        Lengths of packed sequences (varlen). ``batch``, ``seqlen_q`` and ``seqlen_k`` must then be their
        number and their maxima; :meth:`varlen` fills these in. Zero lengths are legal.
    top_left : bool
        Whether masks are aligned to the top left, so that query i stands on the diagonal at key i, as PyTorch's
        ``is_causal`` has it. Of the kernels of this package only the twin of cuDNN supports that.
    sinks : bool
        Whether every query head has a sink: one more score in the sum of its softmax, after scale and softcap, that
        every row sees and that has no value. It acts as a key with that score and V = 0, and lse includes it.
    attention_chunk : int
        c > 0 cuts the keys into runs of c keys, and hides the keys of all runs but the one in which the query stands on
        the bottom-right aligned diagonal, as FlashAttention-3 does: one in front of the first key sees none. 0 switches
        it off.
    qv : bool
        Whether the last ``head_dim_v`` channels of K are V, as in absorbed MLA. A kernel is then given the last
        channels of Q separately, as qv, and adds qv V^T to its scores.
    cache : Cache, optional
        Where packed keys and values are stored when a kernel is called; None where they are packed or batched arrays.
    term : ScoreTerm, optional
        What is added to the scores after scale and softcap, or hides keys beside the masks above; None for nothing.

    Raises
    ------
    ValueError
        Whenever a value breaks its rule; the message states both.

    Examples
    --------
    >>> problem = AttentionProblem(2, nheads=4, nheads_kv=2, seqlen_q=100, seqlen_k=300, head_dim=64, causal=True)
    >>> problem.softmax_scale, problem.q_shape, problem.lse_shape
    (0.125, (2, 100, 4, 64), (2, 4, 100))
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
    softmax_scale: Filled[float | None, float] = None  # type: ignore[assignment]
    seqlens_q: tuple[int, ...] | None = None
    seqlens_k: tuple[int, ...] | None = None
    top_left: bool = False
    sinks: bool = False
    attention_chunk: int = 0
    qv: bool = False
    cache: Cache | None = None
    term: ScoreTerm | None = None

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
            require(is_integer(value, 1), f"{name} must be a positive integer, got {value!r}")
        for name, least in (("seqlen_q", 1), ("seqlen_k", 0)):
            value = getattr(self, name)
            ok = is_integer(value, 0 if self.seqlens_q is not None else least)
            require(ok, f"{name} must be an integer >= {least}, got {value!r}")
        for name, most in (("head_dim", MAX_HEAD_DIM), ("head_dim_v", MAX_HEAD_DIM_V)):
            require(getattr(self, name) <= most, f"{name} must be at most {most}, got {getattr(self, name)}")
        require(
            self.nheads % self.nheads_kv == 0,
            f"nheads must be a multiple of nheads_kv, got {self.nheads} and {self.nheads_kv}",
        )
        dtypes = get_args(Dtype)
        require(self.dtype in dtypes, f"dtype must be one of {', '.join(dtypes)}, got {self.dtype!r}")
        require(
            len(self.window) == 2 and all(is_integer(w, -1) for w in self.window),
            f"window must be two integers >= -1 (left, right), got {self.window!r}",
        )
        require(
            math.isfinite(self.softcap) and self.softcap >= 0, f"softcap must be finite and >= 0, got {self.softcap!r}"
        )
        require(
            self.softmax_scale is None or (math.isfinite(self.softmax_scale) and self.softmax_scale > 0),
            f"softmax_scale must be finite and > 0, got {self.softmax_scale!r}",
        )
        self._check_varlen()
        if any(getattr(self, name) for name in SERVING):
            self._check_serving()

    def _check_serving(self) -> None:
        for name in ("sinks", "qv"):
            require(isinstance(getattr(self, name), bool), f"{name} must be a bool, got {getattr(self, name)!r}")
        chunk = self.attention_chunk
        require(is_integer(chunk, 0), f"attention_chunk must be an integer >= 0, got {chunk!r}")
        require(
            not self.qv or (self.head_dim > self.head_dim_v and self.dtype != "e4m3"),
            "qv needs 16 bits and a head_dim of more than head_dim_v, which it holds, "
            f"got {self.dtype}, {self.head_dim} and {self.head_dim_v}",
        )
        require(self.cache is None or isinstance(self.cache, Cache), f"cache must be a Cache, got {self.cache!r}")
        if self.cache is not None:
            self.cache.check_fits(
                self.seqlens_k,
                self.head_dim - (self.head_dim_v if self.qv else 0),
                is_fp8=self.dtype == "e4m3",
                qv=self.qv,
            )
        require(self.term is None or isinstance(self.term, ScoreTerm), f"term must be a ScoreTerm, got {self.term!r}")
        if self.term is not None:
            self.term.check_fits(dtype=self.dtype, is_varlen=self.is_varlen, has_cache=self.cache is not None)

    @property
    def further(self) -> tuple[str, ...]:
        """Names of the operands beside q, k and v, in the order in which functions take them."""
        return tuple(name for name in ("sinks", "term") if getattr(self, name))

    @property
    def serving(self) -> frozenset[str]:
        """Names of the features that a kernel must have to serve this problem; empty for a plain one.

        They are ``sinks``, ``attention_chunk``, ``qv``, the kind of a term, and for caches ``seqused_k``, ``paged``,
        ``append``, ``rotary``, ``leftpad``, ``batch_idx``, ``fp8_cache`` and ``fp8_rows``. A feature counts where its
        argument is handed over, even if that is about no keys: a kernel without the feature has no such argument.
        """
        needs = {"sinks": self.sinks, "attention_chunk": self.attention_chunk > 0, "qv": self.qv}
        if (cache := self.cache) is not None:
            needs |= {
                "seqused_k": not cache.page_size,
                "paged": cache.page_size > 0,
                "append": bool(cache.new),
                "rotary": cache.rotary_dim > 0,
                "leftpad": bool(cache.leftpad),
                "batch_idx": cache.indexed,
                "fp8_cache": cache.fp8 in ("tensor", "head"),
                "fp8_rows": cache.fp8 == "row",
            }
        of_term = frozenset() if self.term is None else frozenset({self.term.kind})
        return of_term | {name for name, needed in needs.items() if needed}

    def check_plain(self, who: str, knows: frozenset[str] = frozenset()) -> None:
        """Check that a problem needs only features that its caller supports.

        Parameters
        ----------
        who : str
            The caller's name in the message.
        knows : frozenset of str
            The names of :attr:`serving` that the caller supports, ``top_left`` if it supports that alignment, and
            ``leftpad in pages``, as kernels may take each of the two alone.

        Raises
        ------
        ValueError
            If the problem needs another feature, or a diagonal of the top left that differs from the bottom-right one.
        """
        is_apart = self.top_left and any(seq.seqlen_q != seq.seqlen_k for seq in self.sequences())
        is_padded = self.cache is not None and self.cache.page_size > 0 and bool(self.cache.leftpad)
        beside = {"top_left": is_apart, "leftpad in pages": is_padded}
        unknown = sorted((self.serving | {name for name, is_on in beside.items() if is_on}) - knows)
        require(not unknown, f"{who} does not know {', '.join(unknown)}")

    def _check_varlen(self) -> None:
        if self.seqlens_q is None and self.seqlens_k is None:
            return
        require(
            self.seqlens_q is not None and self.seqlens_k is not None,
            "seqlens_q and seqlens_k must be given together",
        )
        for name, maximum in (("seqlens_q", self.seqlen_q), ("seqlens_k", self.seqlen_k)):
            lengths = getattr(self, name)
            require(
                len(lengths) == self.batch and all(is_integer(n, 0) for n in lengths),
                f"{name} must hold batch = {self.batch} integers >= 0, got {lengths!r}",
            )
            require(
                max(lengths) == maximum, f"max({name}) must be {name[:6]}{name[7:]} = {maximum}, got {max(lengths)}"
            )
        require(sum(self.seqlens_q or ()) >= 1, f"seqlens_q must hold at least one query, got {self.seqlens_q!r}")

    @classmethod
    def varlen(  # noqa: PLR0913 (the fields of the record)
        cls,
        seqlens_q: Iterable[int],
        seqlens_k: Iterable[int],
        *,
        nheads: int,
        nheads_kv: int,
        head_dim: int,
        head_dim_v: int = 0,
        dtype: Dtype = "fp16",
        causal: bool = False,
        window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        softmax_scale: float | None = None,
        sinks: bool = False,
        attention_chunk: int = 0,
        qv: bool = False,
        cache: Cache | None = None,
        term: ScoreTerm | None = None,
    ) -> AttentionProblem:
        """Build a packed problem from its lengths.

        Parameters
        ----------
        seqlens_q, seqlens_k : iterable of int
            Queries and keys of each sequence; zeros are legal, as long as there is one query in all.
        nheads, nheads_kv, head_dim, head_dim_v : int
            Sizes, as :class:`AttentionProblem` describes them.
        dtype : {"fp16", "bf16", "e4m3", "fp32"}
            Format of the operands a kernel sees.
        causal : bool
            Key j is visible to query i iff j <= i + seqlen_k - seqlen_q, with the lengths of its sequence.
        window : (int, int)
            Keys visible to the left and right of the diagonal; -1 is unlimited.
        softcap : float
            0 switches it off.
        softmax_scale : float, optional
            None stands for 1 / sqrt(head_dim).
        sinks : bool
            Whether every query head has a sink.
        attention_chunk : int
            0 switches it off.
        qv : bool
            Whether the last channels of K are V.
        cache : Cache, optional
            Where keys are stored when a kernel is called; None for packed arrays.
        term : ScoreTerm, optional
            One of slopes alone.

        Returns
        -------
        AttentionProblem
            The problem, whose ``batch``, ``seqlen_q`` and ``seqlen_k`` are the number and the maxima of the lengths.

        Raises
        ------
        ValueError
            Whenever a value breaks its rule; the message states both.

        Examples
        --------
        >>> AttentionProblem.varlen((3, 5), (4, 0), nheads=2, nheads_kv=1, head_dim=64).q_shape
        (8, 2, 64)
        """
        queries = tuple(seqlens_q)
        keys = tuple(seqlens_k)
        return cls(
            batch=len(queries),
            nheads=nheads,
            nheads_kv=nheads_kv,
            seqlen_q=max(queries, default=0),
            seqlen_k=max(keys, default=0),
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=dtype,
            causal=causal,
            window=window,
            softcap=softcap,
            softmax_scale=softmax_scale,
            seqlens_q=queries,
            seqlens_k=keys,
            sinks=sinks,
            attention_chunk=attention_chunk,
            qv=qv,
            cache=cache,
            term=term,
        )

    def _said(self) -> list[tuple[str, Any]]:
        """Return the fields with their values; ``top_left`` and those of SERVING only where they are set."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return [(name, value) for name, value in values if value or name not in ("top_left", *SERVING)]

    def __repr__(self) -> str:
        return f"AttentionProblem({', '.join(f'{name}={value!r}' for name, value in self._said())})"

    def to_json(self) -> dict[str, object]:
        """Return the problem as JSON values; :meth:`from_json` reads it back exactly.

        Returns
        -------
        dict of str to object
            Every field by its name; ``top_left`` and those of SERVING only where they are set.
        """
        values = ((name, list(v) if isinstance(v, tuple) else v) for name, v in self._said())
        said = ((name, v.to_json() if isinstance(v, ScoreTerm) else v) for name, v in values)
        return {name: asdict(v) if isinstance(v, Cache) else v for name, v in said}

    @classmethod
    def from_json(cls, values: object) -> AttentionProblem:
        """Build a problem from a JSON object.

        Parameters
        ----------
        values : object
            What :meth:`to_json` returns. A softmax_scale of 0 stands for the default one, as in files of version 0.1.0.

        Returns
        -------
        AttentionProblem
            An equal problem.

        Raises
        ------
        ValueError
            If a field is unknown, missing or has an illegal value, or ``values`` is no JSON object.
        """
        if not isinstance(values, dict):
            raise ValueError(f"a problem must be a JSON object, got {type(values).__name__}")
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise ValueError(f"problem has unknown keys {unknown}")
        tuples: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        tuples["softmax_scale"] = tuples.get("softmax_scale") or None
        try:
            if isinstance(cache := tuples.get("cache"), dict):
                tuples["cache"] = Cache(**cache)
            if isinstance(term := tuples.get("term"), dict):
                tuples["term"] = ScoreTerm(**term)
            return cls(**tuples)
        except TypeError as error:
            raise ValueError(f"problem is incomplete or has a value of the wrong type: {error}") from None

    @property
    def changes_operands(self) -> bool:
        """Tell whether the call attends to other operands than it is given: rotated, or dequantised to 16 bits."""
        return self.is_rotated or (self.cache is not None and self.cache.fp8 != "")

    @property
    def is_rotated(self) -> bool:
        """Tell whether the call rotates Q and the keys that it appends."""
        return self.cache is not None and self.cache.rotary_dim > 0

    @property
    def term_shape(self) -> tuple[int, ...]:
        """Shape of the operand of its term; ValueError without a term."""
        if self.term is None:
            raise ValueError("a problem without a term of scores has no operand of it")
        return self.term.operand_shape((self.batch, self.nheads, self.seqlen_q, self.seqlen_k))
