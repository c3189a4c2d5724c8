"""Quantiser twin: q, k and v in fp16 or bf16 to e4m3 with float32 descales, bit for bit what the GPU kernel stores.

The GPU kernel is :mod:`fa3_kernels.gluon.quantize_kernel`. Everything is computed in binary32, every operation rounded
to nearest even, nothing fused:

1. K mean (optional). Rows in chunks of 128; a chunk is added up in slices of 32 rows, ascending, starting from +0,
   giving 32 sums, which a tree folds: the upper half onto the lower one until one is left. The sums of the chunks are
   added up and folded likewise, 64 at a time. Missing rows count as +0. mean = sum / seqlen_k, an IEEE division.
2. x and mean change sign where the rotation says so; y = x - mean for K.
3. Rotation (optional): butterflies (a + b, a - b) at distances 1, 2, 4, ..., head_dim / 2, not normalised.
4. amax = max |y| of all that shares a descale. NaN is passed over.
5. descale = (amax * norm) / 448, clamped to [2^-126, 2^126], then rounded up to a power of two if asked; 1 if amax is 0
   or nothing but NaN.
6. stored = cvt.rn.satfinite.e4m3x2(y * (norm * (1 / descale))), the inner product once per descale.
7. lse_correction = (sum of x * mean over the channels of a query) * softmax_scale, as a tree: neighbours first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from fa3_kernels.plan.quantizer import (
    E4M3_MAX,
    MAX_DESCALE,
    MEAN_CHUNK_ROWS,
    MEAN_FINAL_ROWS,
    MEAN_TREE_ROWS,
    MIN_DESCALE,
    QuantizeOptions,
    Scale,
    Scope,
    check_shapes,
    lse_factor,
    padded_head_dim,
)
from fa3_kernels.twin.convert import encode_f32
from fa3_reference.problem import Descale, Operands


@dataclass(frozen=True, slots=True)
class QuantizedQKV:
    """e4m3 operands and what an attention kernel needs to undo the scaling.

    ``q``, ``k``, ``v`` are float8_e4m3fn like the inputs; ``*_descale`` float32 (batch, heads, blocks) with
    ``block_rows`` rows each (0: the whole sequence). ``lse_correction`` is float32 (batch, nheads, seqlen_q) or
    (nheads, total_q), to be added to the kernel's lse, or None. ``k_mean`` is float32 (batch, nheads_kv, head_dim) or
    None.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    q_descale: np.ndarray
    k_descale: np.ndarray
    v_descale: np.ndarray
    block_rows: tuple[int, int, int]
    lse_correction: np.ndarray | None = None
    k_mean: np.ndarray | None = None

    def operands(self) -> Operands:
        """Return the operands the attention twin takes."""
        descales = [Descale(x, n) for x, n in zip((self.q_descale, self.k_descale, self.v_descale), self.block_rows)]
        return Operands(self.q, self.k, self.v, *descales)


def quantize_qkv(  # noqa: PLR0913
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    block_rows: int | tuple[int, int, int] = 128,
    scope: Scope = "block",
    scale: Scale = "amax",
    rotate: bool = False,
    subtract_k_mean: bool = False,
    seed: int = 0,
    softmax_scale: float | None = None,
    cu_seqlens_q: np.ndarray | None = None,
    cu_seqlens_k: np.ndarray | None = None,
) -> QuantizedQKV:
    """Quantise q, k and v to e4m3 in the kernel's order.

    Parameters
    ----------
    q : float16 or bfloat16 (batch, seqlen_q, nheads, head_dim) or packed (total_q, nheads, head_dim)
        head_dim a multiple of 16, at most 256; 32, 64, 128 or 256 for a rotation.
    k, v : same dtype (batch, seqlen_k, nheads_kv, head_dim or head_dim_v) or packed
    block_rows, scope, scale, rotate, subtract_k_mean, seed
        See :class:`fa3_kernels.plan.quantizer.QuantizeOptions`.
    softmax_scale : float, optional
        Factor of the LSE correction, rounded to binary32; 1 / sqrt(head_dim) by default.
    cu_seqlens_q, cu_seqlens_k : int32 (batch + 1,), optional
        First row of each packed sequence, and the end.

    Returns
    -------
    QuantizedQKV
        The device's bits. A finite element of the conditioned operand y is off by at most max(2^-4 |y|, 2^-10 descale),
        plus 2^-22 |y| for the scaling in binary32; rotating and centring add a few 2^-24 of a row's 2-norm. NaN stays
        NaN and spreads to its row under a rotation, to its channel of K under a mean. Inf becomes 448 with descale
        2^126, which is Inf again in binary32, and makes the rest of what shares its descale 0.

    Raises
    ------
    ValueError
        For options, shapes or dtypes the quantiser does not take.
    """
    options = QuantizeOptions(block_rows, scope, scale, rotate, subtract_k_mean, seed)
    check_shapes(q.shape, k.shape, v.shape, options)
    factor = lse_factor(softmax_scale, q.shape[-1])
    _check_arrays(q, k, v, cu_seqlens_q, cu_seqlens_k)
    signs = options.signs(q.shape[-1]) if rotate else np.ones(q.shape[-1], np.float32)
    mean = _k_mean(k, cu_seqlens_k) * signs if subtract_k_mean else None
    rows = options.descale_rows
    group = q.shape[-2] // k.shape[-2] if scope == "head" else 1
    with np.errstate(all="ignore"):
        q8, q_descale = _quantize(_Job(q, cu_seqlens_q, rows[0], group, scale), signs, None, rotate)
        k8, k_descale = _quantize(_Job(k, cu_seqlens_k, rows[1], 1, scale), signs, mean, rotate)
        v8, v_descale = _quantize(_Job(v, cu_seqlens_k, rows[2], 1, scale), None, None, False)
        lse = None
        if mean is not None:
            lse = _lse_correction(q, cu_seqlens_q, mean * signs, factor)
    k_mean = None if mean is None else mean * signs
    return QuantizedQKV(q8, k8, v8, q_descale, k_descale, v_descale, rows, lse, k_mean)


def _check_arrays(q: np.ndarray, k: np.ndarray, v: np.ndarray, *cu_seqlens: np.ndarray | None) -> None:
    """Raise ValueError for operands of several dtypes, or starts that do not go with the rank of q."""
    if q.dtype.name not in ("float16", "bfloat16") or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must all be fp16 or all bf16, got {q.dtype}, {k.dtype} and {v.dtype}")
    if any((x is None) != (q.ndim == 4) for x in cu_seqlens):
        raise ValueError("cu_seqlens_q and cu_seqlens_k must be given for packed tensors and only for them")


@dataclass(frozen=True, slots=True)
class _Job:
    """One operand, and how many rows and heads of it share a descale."""

    x: np.ndarray
    cu_seqlens: np.ndarray | None
    block_rows: int
    group: int  # heads that share a descale
    scale: Scale

    @property
    def max_seqlen(self) -> int:
        return self.x.shape[1] if self.cu_seqlens is None else int(np.diff(self.cu_seqlens).max(initial=0))


def _sequences(x: np.ndarray, cu_seqlens: np.ndarray | None) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number and a view (seqlen, heads, dim) of every sequence."""
    if cu_seqlens is None:
        yield from enumerate(x)
        return
    for i in range(len(cu_seqlens) - 1):
        yield i, x[cu_seqlens[i] : cu_seqlens[i + 1]]


def butterflies(y: np.ndarray) -> np.ndarray:
    """Return y H of float32 (..., n), Sylvester's H, by log2(n) rounds of rounded sums and differences."""
    half = 1
    n = y.shape[-1]
    while half < n:
        pairs = y.reshape(*y.shape[:-1], n // (2 * half), 2, half)
        a = pairs[..., 0, :]
        b = pairs[..., 1, :]
        y = np.stack([a + b, a - b], axis=-2).reshape(y.shape)
        half *= 2
    return y


def descale_of(amax: np.ndarray, norm: float, scale: Scale) -> np.ndarray:
    """Return the descale of float32 maxima, float32; NaN and 0 give 1."""
    exact = (amax * np.float32(norm)) / np.float32(E4M3_MAX)
    descale = np.clip(exact, np.float32(MIN_DESCALE), np.float32(MAX_DESCALE))
    if scale == "power_of_two":
        bits = (np.ascontiguousarray(descale).view(np.int32) + 0x7FFFFF) & 0x7F800000
        descale = bits.view(np.float32)
    return np.where(amax > 0, descale, np.float32(1)).astype(np.float32)


def _quantize(
    job: _Job, signs: np.ndarray | None, mean: np.ndarray | None, rotate: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the stored operand, and its descales float32 (batch, heads, blocks).

    ``signs`` and ``mean`` are None where the operand is not rotated or not centred. Blocks of rows that a sequence does
    not have get the descale 1.
    """
    norm = np.float32(1 / np.sqrt(job.x.shape[-1])) if rotate else np.float32(1)
    heads = job.x.shape[-2]
    batch = len(job.x) if job.cu_seqlens is None else len(job.cu_seqlens) - 1
    blocks = max(1, -(-job.max_seqlen // job.block_rows)) if job.block_rows else 1
    stored = np.zeros(job.x.shape, ml_dtypes.float8_e4m3fn)
    descale = np.ones((batch, heads, blocks), np.float32)
    targets = _sequences(stored, job.cu_seqlens)
    for (index, x), (_, target) in zip(_sequences(job.x, job.cu_seqlens), targets, strict=True):
        y = x.astype(np.float32)  # (seqlen, heads, dim)
        if signs is not None:
            y = y * signs
        if mean is not None:
            y = y - mean[index]
        if rotate:
            y = butterflies(y)
        for block in range(blocks):
            rows = slice(block * job.block_rows, (block + 1) * job.block_rows) if job.block_rows else slice(None)
            amax = np.fmax.reduce(np.abs(y[rows]), axis=(0, 2), initial=np.float32(0))  # (heads,)
            groups = amax.reshape(-1, job.group)
            amax = np.repeat(groups.max(1), job.group)
            descale[index, :, block] = descale_of(amax, float(norm), job.scale)
            factor = norm * (np.float32(1) / descale[index, :, block])
            target[rows] = encode_f32(y[rows] * factor[:, None], "e4m3")
    return stored, descale


def _fold(x: np.ndarray) -> np.ndarray:
    """Add the upper half of the first axis onto the lower half until one row is left."""
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


def _slices_sum(x: np.ndarray, rows: int) -> np.ndarray:
    """Add slices of ``rows`` rows in ascending order, starting from +0, and fold the result; missing rows count as
    +0.
    """
    padded = np.zeros((-(-len(x) // rows) * rows, *x.shape[1:]), np.float32)
    padded[: len(x)] = x
    total = np.zeros((rows, *x.shape[1:]), np.float32)
    for i in range(0, len(padded), rows):
        total = total + padded[i : i + rows]
    return _fold(total)


def _k_mean(k: np.ndarray, cu_seqlens: np.ndarray | None) -> np.ndarray:
    """Return the mean of k over the tokens of each sequence, float32 (batch, nheads_kv, head_dim); 0 without a
    token.
    """
    batch = len(k) if cu_seqlens is None else len(cu_seqlens) - 1
    mean = np.zeros((batch, *k.shape[-2:]), np.float32)
    with np.errstate(all="ignore"):
        for index, x in _sequences(k, cu_seqlens):
            if len(x) == 0:
                continue
            rows = x.astype(np.float32)
            chunks = [
                _slices_sum(rows[i : i + MEAN_CHUNK_ROWS], MEAN_TREE_ROWS) for i in range(0, len(rows), MEAN_CHUNK_ROWS)
            ]
            mean[index] = _slices_sum(np.stack(chunks), MEAN_FINAL_ROWS) / np.float32(len(rows))
    return mean


def _lse_correction(
    q: np.ndarray, cu_seqlens: np.ndarray | None, mean: np.ndarray, softmax_scale: np.float32
) -> np.ndarray:
    """Return softmax_scale * (q . mean), in the shape of lse: float32 (batch, nheads, seqlen_q) or (nheads,
    total_q).
    """
    group = q.shape[-2] // mean.shape[1]
    shape = (q.shape[0], q.shape[2], q.shape[1]) if cu_seqlens is None else (q.shape[1], q.shape[0])
    result = np.zeros(shape, np.float32)
    for index, x in _sequences(q, cu_seqlens):
        terms = x.astype(np.float32) * np.repeat(mean[index], group, axis=0)  # (seqlen, nheads, head_dim)
        padded = np.zeros((*terms.shape[:-1], padded_head_dim(terms.shape[-1])), np.float32)
        padded[..., : terms.shape[-1]] = terms
        while padded.shape[-1] > 1:
            padded = padded[..., 0::2] + padded[..., 1::2]
        rows = (padded[..., 0] * softmax_scale).T  # (nheads, seqlen)
        if cu_seqlens is None:
            result[index] = rows
        else:
            result[:, cu_seqlens[index] : cu_seqlens[index + 1]] = rows
    return result
