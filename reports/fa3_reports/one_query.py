"""cuDNN's kernel for one query on a CPU, bit for bit; its order was found from outputs, as its source is closed.

cuDNN's kernel for more queries is the family cudnn of :mod:`fa3_kernels.twin.forward`. The one for a single query
differs in these steps:

1. x = fp32(fp32(s * softmax_scale) * log2 e), with M the running maximum of x; p = ex2(x - M), alpha = ex2(M_old - M).
2. Up to 256 keys: blocks of 64, one chain of products; a thread adds its weights one by one.
3. More: blocks of 128, 32 neighbouring keys for each of four warps w. Each chains its own products, and O is
   (w0 + w2) + (w1 + w3). A thread adds its eight weights in a tree of neighbours; warp r then takes
   ((w_r + w_(r-1)) + w_(r-2)) + w_(r-3).
4. l = fma(l, alpha, block sum); at the end (t0 + t1) + (t2 + t3) over the four threads of a row.
5. More than 512 keys: as many splits as there are whole blocks, rounded down to a power of two. Split i visits the
   blocks i, i + splits, ... The next split j joins the others in turn, with m = M * ln2, n = max(m, m_j),
   e = ex2((m - n) log2 e) and f = ex2((m_j - n) log2 e): l = fma(l_j, f, l * e), O = fma(O, e, O_j * f).
6. O * rcp(l); lse = fma(lg2 l, ln2, M * ln2), of warp 0's sums.

Recorded launches have up to 4,096 keys (901 and 1,025 lie between powers of two), head_dims from 32 to 256, and 2 to 16
heads. Of 149 later launches beyond these sizes 20 differ, so such problems are refused: 128 heads and more, and 20,000
keys, are cut into other parts. The recorded launches leave open whether the four warps' sums are a chain, as here, or a
tree of neighbours, and whether a chain is rescaled by one fma. It is assumed that a warp scales a quarter of the
channels by its own sums; one recorded value shows that the sums of warp 0 are not taken for all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fa3_kernels.plan.families import traits_of
from fa3_kernels.twin import convert, float32, mufu
from fa3_kernels.twin.forward import Forward
from fa3_kernels.twin.wgmma import operand, operand_b, wgmma
from fa3_kernels.twin.wgmma_exact import tensor_format
from fa3_reference.problem import AttentionProblem, Operands

LN2 = np.float32(0.6931471805599453)
LOG2_E = np.float32(1.4426950408889634)
# the most keys with small blocks, and the most with one split
SHORT = 256
UNSPLIT = 512
# the largest launches whose bits are known; heads are counted over all sequences
MOST_KEYS = 4096
MOST_HEADS = 16


class _KeyCut(NamedTuple):
    """How keys are cut: the keys of a block, and how many warps share them."""

    tile_n: int
    warps: int


class _Part(NamedTuple):
    """Holds the result of a split: ``top`` is M, float32 (rows,), ``total`` the row sums of each warp (warps, rows).

    ``out`` is O (rows, channels), not yet divided by the sums.
    """

    top: np.ndarray
    total: np.ndarray
    out: np.ndarray


def refusal(problem: AttentionProblem) -> str:
    """Return the rules that a problem breaks, in words: what the kernel does not take, or what was not recorded; else
    empty.
    """
    rules = (
        (problem.seqlen_q != 1 or problem.is_varlen, "it takes one query, and no packed sequences"),
        (problem.seqlen_k == 0, "it takes no sequence without keys"),
        (problem.dtype == "e4m3", "dtype must be fp16 or bf16"),
        (problem.window != (-1, -1) or problem.softcap > 0, "it takes neither window nor softcap"),
        (problem.head_dim_v != problem.head_dim, "head_dim_v must be head_dim"),
        (problem.seqlen_k > MOST_KEYS, f"of more than {MOST_KEYS} keys the order is not known"),
        (problem.batch * problem.nheads > MOST_HEADS, f"of more than {MOST_HEADS} heads the splits are not known"),
    )
    return "; ".join(rule for is_broken, rule in rules if is_broken)


def splits(seqlen_k: int) -> int:
    """Parts into which the keys are cut.

    >>> [splits(n) for n in (512, 901, 1025, 4096)]
    [1, 4, 8, 32]
    """
    return 1 if seqlen_k <= UNSPLIT else 1 << (seqlen_k // 128).bit_length() - 1


def _kernel(keys: int) -> _KeyCut:
    """Return how the keys of a launch are cut."""
    return _KeyCut(64, 1) if keys <= SHORT else _KeyCut(128, 4)


def one_query(problem: AttentionProblem, operands: Operands) -> Forward:
    """Run cuDNN's kernel for one query.

    Parameters
    ----------
    problem : AttentionProblem
        With one query in every sequence, of fp16 or bf16. A causal mask is aligned top-left: key 0 alone is visible.
    operands : Operands

    Returns
    -------
    Forward
        ``out`` (batch, 1, nheads, head_dim) in the operands' format, ``lse`` float32 (batch, nheads, 1), natural: the
        bits of cuDNN 9.19. What NaN and Inf give is not recorded.

    Raises
    ------
    ValueError
        For a problem that breaks a rule of :func:`refusal`, and operands that do not fit it.
    """
    operands.check(problem)
    if rule := refusal(problem):
        raise ValueError(f"cuDNN's kernel for one query: {rule}")
    out = np.zeros(problem.out_shape, tensor_format(problem.dtype).dtype)
    lse = np.zeros(problem.lse_shape, np.float32)
    keys = 1 if problem.causal else problem.seqlen_k
    for b in range(problem.batch):
        for kv_head in range(problem.nheads_kv):
            heads = slice(kv_head * problem.group, (kv_head + 1) * problem.group)
            k = operands.k[b, :keys, kv_head]
            v = operands.v[b, :keys, kv_head]
            out[b, 0, heads], lse[b, heads, 0] = _rows(operands.q[b, 0, heads], k, v, problem)
    return Forward(out, lse)


def _rows(q: np.ndarray, k: np.ndarray, v: np.ndarray, problem: AttentionProblem) -> tuple[np.ndarray, np.ndarray]:
    """Compute the query heads that share a kv head: out (rows, head_dim) and lse (rows,)."""
    keys = len(k)
    kernel = _kernel(len(k))
    channels = traits_of("cudnn").compiled_head_dim(problem.head_dim)
    blocks = -(-keys // kernel.tile_n)
    k, v = (_padded(x, blocks * kernel.tile_n, channels) for x in (k, v))
    s = wgmma(operand(_padded(q, len(q), channels), problem.dtype), operand_b(k, problem.dtype))
    x = float32.flushed(float32.flushed(float32.flushed(s) * np.float32(problem.softmax_scale)) * LOG2_E)
    x[:, keys:] = -np.inf
    count = splits(keys)
    parts = [_visited(x, v, range(i, blocks, count), kernel, problem.dtype) for i in range(count)]
    top, total, o = _joined(parts)
    lse = float32.fma(mufu.lg2(total[0]), np.full_like(top, LN2), top)
    inverse = np.repeat(mufu.rcp(total), channels // kernel.warps, axis=0).T  # (rows, channels)
    return convert.encode_f32(_product(o, inverse), problem.dtype)[:, : problem.head_dim], lse


def _padded(x: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Return a copy grown with zeros on the right and below."""
    grown = np.zeros((rows, columns), x.dtype)
    grown[: x.shape[0], : x.shape[1]] = x
    return grown


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Multiply as the build does, with subnormal numbers as zeros."""
    return float32.flushed(float32.flushed(a) * float32.flushed(b))


def _sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Add as the build does, with subnormal numbers as zeros."""
    return float32.flushed(float32.flushed(a) + float32.flushed(b))


def _visited(x: np.ndarray, v: np.ndarray, blocks: range, kernel: _KeyCut, dtype: str) -> _Part:
    """Run one split over its blocks, from left to right."""
    rows = len(x)
    (tile_n, warps) = kernel
    top = np.full(rows, -np.inf, np.float32)
    total = np.zeros((warps, rows, 4), np.float32)
    out = np.zeros((warps, rows, v.shape[1]), np.float32)
    own = tile_n // warps
    for block in blocks:
        tile = x[:, block * tile_n : (block + 1) * tile_n]
        new = float32.fmax(top, float32.row_max(tile))
        alpha = mufu.ex2(top - new)
        p = mufu.ex2(tile - new[:, None])
        total = float32.fma(total, np.broadcast_to(alpha[:, None], total.shape), _block_sums(p, warps))
        weights = convert.encode_f32(p, dtype)
        top = new
        for w in range(warps):
            first = block * tile_n + w * own
            values = operand_b(np.ascontiguousarray(v[first : first + own].T), dtype)
            mine = operand(np.ascontiguousarray(weights[:, w * own : (w + 1) * own]), dtype)
            out[w] = wgmma(mine, values, _product(out[w], alpha[:, None]))
    return _Part(top, np.stack([float32.quad_sum(t, far_first=False) for t in total]), _over_warps(out))


def _block_sums(p: np.ndarray, warps: int) -> np.ndarray:
    """Return the sums of a block's weights by threads, as each warp has them: float32 (warps, rows, 4)."""
    if warps == 1:
        return float32.serial_row_sums(p, float32.first_columns(p))[None]
    pairs = p.reshape(len(p), warps, -1, 4, 2)
    pairs = pairs[..., 0] + pairs[..., 1]  # (rows, warps, groups of 8 columns, threads)
    sums = (pairs[:, :, 0] + pairs[:, :, 1]) + (pairs[:, :, 2] + pairs[:, :, 3])
    turns = [np.roll(sums, turn, axis=1) for turn in range(warps)]  # of warp r: w_r, w_(r-1), ...
    return np.moveaxis(((turns[0] + turns[1]) + turns[2]) + turns[3], 1, 0)


def _over_warps(out: np.ndarray) -> np.ndarray:
    """Return O of all warps together: (w0 + w2) + (w1 + w3)."""
    if len(out) == 1:
        return out[0]
    return _sum(_sum(out[0], out[2]), _sum(out[1], out[3]))


def _joined(parts: list[_Part]) -> _Part:
    """Join the splits one after the other; return them as one, with ``top`` in natural units."""
    (first, total, out), *others = parts
    top = first * LN2
    for part in others:
        of_part = part.top * LN2
        new = float32.fmax(top, of_part)
        e = mufu.ex2((top - new) * LOG2_E)
        f = mufu.ex2((of_part - new) * LOG2_E)
        total = float32.fma(part.total, np.broadcast_to(f, total.shape), total * e)
        kept = np.broadcast_to(e[:, None], out.shape)
        out = float32.flushed(float32.fma(float32.flushed(out), kept, _product(part.out, f[:, None])))
        top = new
    return _Part(top, total, out)
