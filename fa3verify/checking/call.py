"""A call of attention that was made: its tensors, of any library, and what they mean.

:mod:`fa3verify.checking.check` asks it for parts: some rows of some heads of one sequence, as an attention problem of
their own. Only these parts are copied to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from fa3_reference.formats import BY_DTYPE, FORMATS
from fa3_reference.problem import Array, AttentionProblem, Descale, Operands
from fa3_reference.rules import require
from fa3_reference.score_term import Kind, ScoreTerm

CallLayout = Literal["", "bshd", "bhsd"]
TERMS = ("bias", "attn_mask", "key_padding_mask", "alibi_slopes")


class CallPart(NamedTuple):
    """Some rows of some heads of one sequence: the problem, and what the kernel returned for these rows.

    The problem has all queries of the sequence, of which only those of ``rows`` have values. ``out`` is (rows, heads,
    head_dim_v), and ``lse`` is (heads, rows), a natural logarithm, or None.
    """

    problem: AttentionProblem
    operands: Operands
    rows: np.ndarray
    out: Array
    lse: Array | None


def on_host(x: Any) -> np.ndarray:
    """Return an array of numpy, torch or JAX, or what numpy makes of other values, as numpy's, bit for bit."""
    if type(x).__module__.split(".")[0] == "torch":
        from fa3verify.tensors.convert import to_numpy

        return to_numpy(x)
    return np.asarray(x)


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The tensors of a call, by the names that FlashAttention-3 gives them.

    Parameters
    ----------
    out, q, k, v : arrays
        Of numpy, torch or JAX. Batched ones have four dimensions in the order of ``layout``; packed ones, with
        ``cu_seqlens_q``, are (tokens, heads, head_dim).
    layout : {"bshd", "bhsd"}
        Order of the axes of arrays of four dimensions, which nothing else can tell: FlashAttention's (batch, seqlen,
        heads, head_dim), or that of torch's SDPA, (batch, heads, seqlen, head_dim).
    lse : array, optional
        Float32 (batch, heads, seqlen_q), or packed (heads, tokens); with ``lse_base=2`` it is a logarithm to base 2.
    softmax_scale : float, optional
        1 / sqrt(head_dim) by default.
    causal, top_left : bool
        A causal mask is aligned at the last query and key, or with ``top_left`` at the first ones.
    window : (int, int)
        Keys to the left and right of the diagonal; -1 is unlimited.
    softcap : float
        0 switches it off.
    bias : array, optional
        Is added to the scores, and broadcasts to (batch, heads, seqlen_q, seqlen_k).
    attn_mask : bool array, optional
        True where a key is visible; broadcasts as a bias does. One of floats is a bias.
    key_padding_mask : bool array (batch, seqlen_k), optional
        True for keys that count.
    alibi_slopes : float32 array (heads,) or (batch, heads), optional
    sinks : float32 array (heads,), optional
    q_descale, k_descale, v_descale : float32 array (batch, kv heads), optional
        Of e4m3 operands; 1 by default.
    cu_seqlens_q, cu_seqlens_k : int32 array (batch + 1,), optional
        Starts of packed sequences.
    cache_seqlens : int32 array (batch,), optional
        Keys of each sequence in a cache that may be longer, those included that the call appended.
    page_table : int32 array (batch, pages), optional
        Pages of each sequence, where k and v are (pages, page_size, kv heads, head_dim).
    dout : array of the shape of out, optional
        The gradient of out, which gradients need.
    dq, dk, dv : arrays of the shapes of q, k and v, optional
        Gradients that the backward returned; those of k and v are sums over the query heads of a group.

    Raises
    ------
    ValueError
        For arrays that do not fit each other, with the rule; for formats that attention does not have.
    """

    out: Any
    q: Any
    k: Any
    v: Any
    layout: CallLayout = ""
    lse: Any = None
    softmax_scale: float | None = None
    causal: bool = False
    top_left: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    bias: Any = None
    attn_mask: Any = None
    key_padding_mask: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    q_descale: Any = None
    k_descale: Any = None
    v_descale: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    cache_seqlens: Any = None
    page_table: Any = None
    lse_base: Literal["e", 2] = "e"
    dout: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", tuple(int(x) for x in self.window))
        require(
            self.out.ndim == self.q.ndim,
            f"out must have the dimensions of q, got shapes {self.out.shape} and {self.q.shape}",
        )
        require(
            self.q.ndim != 3 or self.cu_seqlens_q is not None,
            "q of three dimensions is packed and needs cu_seqlens_q; a batch has four",
        )
        require(self.q.ndim in (3, 4), f"q must have three or four dimensions, got shape {self.q.shape}")
        require(
            self.q.ndim != 4 or self.layout in ("bshd", "bhsd"),
            'layout must be "bshd" (FlashAttention: batch, seqlen, heads, head_dim) or "bhsd" (torch SDPA), '
            f"got {self.layout!r}: nothing else can tell them apart",
        )
        if len(given := [name for name in TERMS if getattr(self, name) is not None]) > 1:
            raise ValueError(f"one of {', '.join(TERMS)} may be given, got {' and '.join(given)}")
        require(
            self.nheads % self.nheads_kv == 0,
            f"heads must be a multiple of kv heads, got {self.nheads} and {self.nheads_kv}",
        )
        require(
            len(self.lengths_k) == len(self.lengths_q),
            f"k must have as many sequences as q, got {len(self.lengths_k)} and {len(self.lengths_q)}",
        )
        out_shape = (*self.q.shape[:-1], self.v.shape[-1])
        shapes = {"out": out_shape} | {f"d{name}": tuple(getattr(self, name).shape) for name in ("out", "q", "k", "v")}
        for name, shape in shapes.items():
            got = shape if getattr(self, name) is None else tuple(getattr(self, name).shape)
            require(got == shape, f"{name} must have shape {shape}, got {got}")
        require(
            not self.has_gradients or (self.dout is not None and self.formats[0] != "e4m3"),
            "gradients need dout, and operands of fp16, bf16 or fp32",
        )
        require(
            not self.has_gradients or (self.cache_seqlens is None and self.alibi_slopes is None),
            "gradients with a cache or alibi_slopes are not checked",
        )
        self.problem(0, 1)

    @property
    def has_gradients(self) -> bool:
        """Whether the call has a gradient that can be checked."""
        return not (self.dq is None and self.dk is None and self.dv is None)

    def heads_of(self, head_kv: int) -> slice:
        """Return the query heads that read a kv head."""
        return slice(head_kv * self.group, (head_kv + 1) * self.group)

    @property
    def _axis_of_heads(self) -> int:
        return 1 if self.layout == "bhsd" and self.q.ndim == 4 else -2

    @property
    def nheads(self) -> int:
        """Number of query heads."""
        return self.q.shape[self._axis_of_heads]

    @property
    def nheads_kv(self) -> int:
        """Number of kv heads."""
        return self.k.shape[-2 if self.page_table is not None or self.k.ndim == 3 else self._axis_of_heads]

    @property
    def group(self) -> int:
        """Number of query heads that share a kv head."""
        return self.nheads // self.nheads_kv

    @property
    def is_on_gpu(self) -> bool:
        """Whether out is a tensor of torch on a GPU."""
        return bool(getattr(self.out, "is_cuda", False))

    @cached_property
    def asked(self) -> list[int]:
        """Sequences that have queries, those with fewest keys first."""
        return sorted((i for i, n in enumerate(self.lengths_q) if n), key=lambda i: self.lengths_k[i])

    @cached_property
    def lengths_q(self) -> tuple[int, ...]:
        """Queries of each sequence."""
        if self.q.ndim == 3:
            return tuple(np.diff(on_host(self.cu_seqlens_q)).tolist())
        return (self.q.shape[2 if self.layout == "bhsd" else 1],) * self.q.shape[0]

    @cached_property
    def lengths_k(self) -> tuple[int, ...]:
        """Keys of each sequence."""
        if self.cache_seqlens is not None:
            return tuple(on_host(self.cache_seqlens).tolist())
        require(self.page_table is None, "a page_table needs cache_seqlens, the keys of each sequence")
        if self.k.ndim == 3:
            require(self.cu_seqlens_k is not None, "packed k needs cu_seqlens_k, the starts of its sequences")
            return tuple(np.diff(on_host(self.cu_seqlens_k)).tolist())
        return (self.k.shape[2 if self.layout == "bhsd" else 1],) * self.k.shape[0]

    @property
    def formats(self) -> tuple[str, str]:
        """Names of the formats of the operands and of the output."""
        of_q, of_out = (fmt.name if (fmt := BY_DTYPE.get(on_host(x[:0]).dtype)) else "" for x in (self.q, self.out))
        if of_q not in ("fp16", "bf16", "e4m3", "fp32") or of_out not in ("fp16", "bf16", "fp32"):
            kinds = [x.dtype for x in (self.q, self.out)]
            raise ValueError(f"q must be of fp16, bf16, e4m3 or fp32, and out of fp16, bf16 or fp32, got {kinds}")
        return of_q, of_out

    def problem(self, sequence: int, heads: int) -> AttentionProblem:
        """Return the problem of some query heads of one kv head in one sequence."""
        term = self._term
        return AttentionProblem(
            batch=1,
            nheads=heads,
            nheads_kv=1,
            seqlen_q=max(self.lengths_q[sequence], 1),
            seqlen_k=self.lengths_k[sequence],
            head_dim=self.q.shape[-1],
            head_dim_v=self.v.shape[-1],
            dtype=self.formats[0],  # type: ignore[arg-type]
            causal=self.causal,
            window=self.window,
            softcap=self.softcap,
            softmax_scale=self.softmax_scale,
            top_left=self.top_left,
            sinks=self.sinks is not None,
            term=None if term is None else term[0],
        )

    def part(self, sequence: int, heads: slice, rows: np.ndarray) -> CallPart:
        """Copy some rows of some heads of one kv head to the host; ``rows`` are positions in the sequence."""
        problem = self.problem(sequence, heads.stop - heads.start)
        head_kv = heads.start * self.nheads_kv // self.nheads
        q = np.zeros(problem.q_shape, FORMATS[problem.dtype].dtype)
        q[0, rows] = on_host(self.queries(self.q, sequence)[:, heads][rows])
        k, v = (on_host(self.keys(x, sequence, head_kv))[None, :, None] for x in (self.k, self.v))
        descales = {
            f"{name}_descale": Descale(np.full((1, n, 1), self.descale(name, sequence, head_kv), np.float32))
            for name, n in (("q", problem.nheads), ("k", 1), ("v", 1))
            if getattr(self, f"{name}_descale") is not None
        }
        sinks = None if self.sinks is None else on_host(self.sinks)[heads].astype(np.float32)
        term = None if self._term is None else self._term_of(sequence, heads, problem)
        operands = Operands(q, k, v, **descales, sinks=sinks, term=term)
        out = on_host(self.queries(self.out, sequence)[:, heads][rows])
        lse = None if self.lse is None else on_host(self.lse_of(sequence, heads)[:, rows]) * self.lse_unit
        return CallPart(problem, operands, rows, out, lse)

    def queries(self, x: Any, sequence: int) -> Any:
        """Return rows of Q or out of a sequence, (seqlen_q, heads, channels)."""
        if x.ndim == 3:
            start = int(on_host(self.cu_seqlens_q)[sequence])
            return x[start : start + self.lengths_q[sequence]]
        return x[sequence].swapaxes(0, 1) if self.layout == "bhsd" else x[sequence]

    def keys(self, x: Any, sequence: int, head: int) -> Any:
        """Return rows of K or V of one head of a sequence, (seqlen_k, channels), where they are."""
        n = self.lengths_k[sequence]
        if self.page_table is not None:
            pages = on_host(self.page_table)[sequence][: -(-n // x.shape[1])]
            return x[pages][:, :, head].reshape(-1, x.shape[-1])[:n]
        if x.ndim == 3:
            start = int(on_host(self.cu_seqlens_k)[sequence])
            return x[start : start + n, head]
        return x[sequence, head, :n] if self.layout == "bhsd" else x[sequence, :n, head]

    def descale(self, name: str, sequence: int, head_kv: int) -> float:
        """Return the factor of q, k or v, by that name; 1 without one."""
        given = getattr(self, f"{name}_descale")
        return 1.0 if given is None else float(on_host(given)[sequence, head_kv])

    def lse_of(self, sequence: int, heads: slice) -> Any:
        """Return the lse of some heads of a sequence as the call has it, (heads, seqlen_q), where it is."""
        if self.q.ndim == 4:
            return self.lse[sequence, heads]
        start = int(on_host(self.cu_seqlens_q)[sequence])
        return self.lse[heads, start : start + self.lengths_q[sequence]]

    @property
    def lse_unit(self) -> float:
        """What the lse of the call is multiplied with to be in nats; float64, so that nothing is rounded."""
        return np.log(2) if self.lse_base == 2 else 1.0

    @cached_property
    def _term(self) -> tuple[ScoreTerm, Any] | None:
        """Return the term of the scores of one sequence, and the operand of the whole call; None without one."""
        if self.alibi_slopes is not None:
            return ScoreTerm("alibi"), self.alibi_slopes
        if self.key_padding_mask is not None:
            return ScoreTerm("key_padding"), self.key_padding_mask
        given = self.attn_mask if self.bias is None else self.bias
        if given is None:
            return None
        given = given[(None,) * (4 - given.ndim)]
        dtype = on_host(given[:0]).dtype.name
        kind: Kind = "attn_mask" if dtype == "bool" else "bias_fp32" if dtype == "float32" else "bias"
        shared = "".join(axis for axis, n in zip("hqk", given.shape[1:], strict=True) if n == 1)
        return ScoreTerm(kind, shared), given

    def _term_of(self, sequence: int, heads: slice, problem: AttentionProblem) -> np.ndarray:
        """Return the operand of the term of a part."""
        assert self._term is not None
        term, given = self._term
        own = given[heads] if term.kind == "alibi" and given.ndim == 1 else given[sequence % len(given)]
        if term.kind == "alibi":
            return on_host(own if given.ndim == 1 else own[heads])[None]
        if term.kind == "key_padding":
            return on_host(own)[None, : problem.seqlen_k]
        return on_host(own if "h" in term.shared else own[heads])[None, :, :, : problem.seqlen_k]
