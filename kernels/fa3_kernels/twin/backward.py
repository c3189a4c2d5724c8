"""Backward twin: the gradients of FlashAttention-3's backward on a CPU, bit for bit.

Its callers compare gradients of a GPU with it, and plant mistakes in it; the forward has
:mod:`fa3_kernels.twin.forward`. The order of FlashAttention-3 follows. :class:`fa3_kernels.plan.order.BackwardOrder`
names where other families differ, ours among them.

1. D = rowsum(dO * O) in binary32: a thread takes 8 neighbouring channels of every 128 (every 64 where head_dim is no
   multiple of 128; ours pads it with zeros to a power of two), the first product rounded, the others added by fma; then
   a butterfly over the threads of a row, the longest distance first. Families that take a gradient of lse subtract it
   from D.
2. For every key block, over its row blocks in ascending order: S = Q K^T and dP = dO V^T by wgmma, k ascending;
   P = ex2(fma(S, c, -fp32(lse * log2 e))), hidden keys and rows beyond the sequence 0, the lse of a row without keys
   taken as 0; dS = P * fp32(dP - D). With a softcap b: t = tanh.approx of s * (softmax_scale / b) in place of S, b *
   log2(e) in place of c, and dS times fma(-t, t, 1), which is taken before the mask.
3. P and dS rounded to 16 bits; dV = P^T dO and dK = dS^T Q, each one chain of wgmma over all rows.
4. dQ: a part dS K per key block, added in memory to binary32 zeros, then times softmax_scale. dK times softmax_scale.
   dK and dV of a group of heads: a part per head, added likewise, then times 1, which flushes subnormal numbers. The
   bulk reductions of TMA keep them; atomics of single elements, which add dQ at head_dim 256, do not.
5. Everything rounded once to 16 bits.

The reductions of step 4 happen in any order, so the library's own dQ differs from run to run where three or more parts
meet. :func:`backward` adds in ascending order, which is one of the possible ones, or as its caller wants.
Sources: FlashAttention-3 (arXiv 2407.08608, section B.1) and upstream's hopper/mainloop_bwd_sm90_tma_gmma_ws.hpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fa3_kernels.plan.backward import BackwardConfig, check_reproduced
from fa3_kernels.plan.key_tiles import Walk, walk_of
from fa3_kernels.plan.order import BackwardOrder
from fa3_kernels.plan.plan import softmax_factors
from fa3_kernels.plan.tiles import Mask, mask_of
from fa3_kernels.twin import convert, float32, mufu, softmax
from fa3_kernels.twin.wgmma import Operand, OperandB, operand, operand_b, wgmma
from fa3_reference.problem import AttentionProblem, BackwardOperands, Sequence

LOG2_E = 1.4426950408889634
_F32 = np.float32
Add = Callable[[np.ndarray, bool], np.ndarray]


class Gradients(NamedTuple):
    """Gradients in the operands' format and in the layout of q, k and v."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


@dataclass(frozen=True, slots=True)
class _Gradient:
    """One launch: what all of its tiles share."""

    config: BackwardConfig
    order: BackwardOrder
    softmax_scale: float
    softcap: float
    walk: Walk  # of one sequence

    def of_sequence(self, problem: AttentionProblem, seq: Sequence) -> _Gradient:
        """Return this launch with the walk of one sequence: walks depend on its lengths."""
        c = self.config
        walk = walk_of(problem, c.tile_m, c.tile_n, c.num_ctas, seq.seqlen_q, seq.seqlen_k)
        return replace(self, walk=walk)

    @property
    def dtype(self) -> str:
        return self.config.dtype

    @property
    def flushes_dq(self) -> bool:
        return self.config.head_dim in self.config.backward.atomics

    @property
    def scale(self) -> np.float32:
        return _F32(self.softmax_scale)

    def flushed(self, x: np.ndarray) -> np.ndarray:
        """Return operands or results of arithmetic as the build takes them: subnormal numbers kept, or as zeros."""
        return x if self.order.keeps_subnormals else float32.flushed(x)

    def product(self, x: np.ndarray, factor: np.float32 | np.ndarray) -> np.ndarray:
        """Multiply as the build does."""
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            return self.flushed(self.flushed(x) * factor)

    def encoded(self, x: np.ndarray) -> np.ndarray:
        """Round to the 16 bits of the operands."""
        return convert.encode_f32(x, self.dtype)


class _Rows(NamedTuple):
    """The query side of one head, zero-padded to whole row blocks: as rows and as columns of products."""

    q: Operand
    dout: Operand
    q_columns: OperandB
    dout_columns: OperandB
    lse: np.ndarray  # float32 (rows,), +Inf beyond the sequence
    dots: np.ndarray  # D, float32 (rows,)


class _Parts(NamedTuple):
    """Holds what one query head adds: to dQ per key block, unscaled, and to dK and dV of its kv head."""

    dq: np.ndarray  # float32 (blocks, seqlen_q, head_dim)
    dk: np.ndarray  # float32 (seqlen_k, head_dim)
    dv: np.ndarray


def backward(
    problem: AttentionProblem,
    operands: BackwardOperands,
    config: BackwardConfig,
    *,
    order: BackwardOrder | None = None,
    add: Add | None = None,
) -> Gradients:
    """Run the arithmetic of a backward kernel.

    Parameters
    ----------
    problem : AttentionProblem
    operands : BackwardOperands
        q, k, v, the gradient of the output, and out and lse as the forward returned them; the gradient of lse where
        the family takes one. That of rows without a key is not read.
    config : BackwardConfig
        See :func:`fa3_kernels.plan.backward.backward_config`.
    order : BackwardOrder, optional
        Another order than that of the configuration's family, to see what a switch changes.
    add : callable, optional
        Takes float32 parts (parts, rows, channels) of step 4 and whether subnormal numbers are added as zeros, and
        returns their sum (rows, channels); by default the order adds them.

    Returns
    -------
    Gradients
        The bits of the device, with key blocks and heads added in ascending order: of dQ exact where at most two key
        blocks, of dK and dV where at most two heads add to an element, otherwise one of what the device may return.
        Rows without a visible key have dq 0, keys that no row sees dk and dv 0. NaN and Inf spread as far as the
        products of the visited tiles carry them: 0 times them is NaN, so that a NaN in a row of dO reaches every key of
        a visited block. The last tile of a packed sequence reads into the next one, whose NaN and Inf it takes over.

    Raises
    ------
    ValueError
        For operands that do not fit the problem or the family, or a problem whose bits are not known.
    """
    _check(problem, operands, config)
    kernel = _Gradient(config, order or config.backward.order, problem.softmax_scale, problem.softcap, Walk(1))
    found = _empty(problem, operands)
    for seq, kv_head, heads, parts in _kv_heads(problem, operands, kernel):
        for head, x in zip(heads, parts, strict=True):
            dq = add(x.dq, kernel.flushes_dq) if add else _dq_sum(x.dq, kernel.of_sequence(problem, seq))
            problem.rows_q(found.dq, seq)[:, head] = _rounded(_dq_scaled(dq, kernel), kernel)
        for name in ("dk", "dv"):
            stack = _head_parts(parts, name, kernel)
            if len(stack) == 1:
                total = stack[0]
            else:
                total = add(stack, False) if add else _sum(stack, kernel)
            rows = problem.rows_k(getattr(found, name), seq)
            rows[:, kv_head] = _rounded(_group_scaled(total, name, len(stack), kernel), kernel)
    return found


def _check(problem: AttentionProblem, operands: BackwardOperands, config: BackwardConfig) -> None:
    """Raise ValueError for operands that do not fit, a problem whose bits are not known, and an unsupported dlse."""
    operands.check(problem)
    check_reproduced(problem, config)
    if operands.dlse is not None and "lse_gradient" not in config.backward.features:
        raise ValueError(f"the backward of {config.family} does not take the gradient of lse, and its lse has none")


def _empty(problem: AttentionProblem, operands: BackwardOperands) -> Gradients:
    """Return zeros like q, k and v."""
    return Gradients(*(np.zeros(x.shape, x.dtype) for x in (operands.q, operands.k, operands.v)))


def _kv_heads(
    problem: AttentionProblem, operands: BackwardOperands, kernel: _Gradient
) -> Iterator[tuple[Sequence, int, np.ndarray, list[_Parts]]]:
    """Yield every sequence and kv head, with its query heads and what they add."""
    for seq in problem.sequences():
        mask = mask_of(problem, seq.seqlen_q, seq.seqlen_k)
        q, dout = (
            _with_tail(problem.rows_q(x, seq), x, seq.q_start, kernel, kernel.config.tile_m)
            for x in (operands.q, operands.dout)
        )
        k, v = (
            _with_tail(problem.rows_k(x, seq), x, seq.k_start, kernel, kernel.config.tile_n)
            for x in (operands.k, operands.v)
        )
        out = problem.rows_q(operands.out, seq)
        lse = problem.rows_lse(operands.lse, seq)
        dlse = None if operands.dlse is None else problem.rows_lse(operands.dlse, seq)
        for kv_head in range(problem.nheads_kv):
            heads = np.arange(problem.group) + kv_head * problem.group
            parts: list[_Parts] = []
            for h in heads:
                rows = _rows(q[:, h], dout[:, h], out[:, h], lse[h], None if dlse is None else dlse[h], kernel)
                before = parts[-1] if parts and kernel.order.heads == "chained" else None
                of_sequence = kernel.of_sequence(problem, seq)
                parts.append(_head(rows, k[:, kv_head], v[:, kv_head], mask, of_sequence, before))
            yield seq, kv_head, heads, [_cut(x, seq, problem, kernel) for x in parts]


def _head_parts(parts: list[_Parts], name: str, kernel: _Gradient) -> np.ndarray:
    """Return what is added to dK or dV of a kv head, (parts, keys, channels).

    That is a part of every query head; or one part where the heads are chained, which is the last head's.
    """
    return np.stack([getattr(x, name) for x in (parts[-1:] if kernel.order.heads == "chained" else parts)])


def _cut(parts: _Parts, seq: Sequence, problem: AttentionProblem, kernel: _Gradient) -> _Parts:
    """Return what a head adds, without padding, and with dK scaled in families that scale it for each head."""
    dk = parts.dk[: seq.seqlen_k, : problem.head_dim]
    if not (kernel.order.scales_ds or kernel.order.scales_sums):
        dk = kernel.product(dk, kernel.scale)
    return _Parts(parts.dq[:, : seq.seqlen_q, : problem.head_dim], dk, parts.dv[: seq.seqlen_k, : problem.head_dim_v])


def _with_tail(rows: np.ndarray, packed: np.ndarray, start: int, kernel: _Gradient, tile: int) -> np.ndarray:
    """Return rows of one sequence up to whole tiles: filled with zeros, or with what follows in memory.

    The latter holds for packed sequences in families whose loads do not stop at the sequence's end.
    """
    length = -(-len(rows) // tile) * tile
    rows = packed[start : start + length] if packed.ndim == 3 and kernel.order.reads_past else rows
    return np.concatenate([rows, np.zeros((length - len(rows), *rows.shape[1:]), rows.dtype)])


def _widened(x: np.ndarray, columns: int) -> np.ndarray:
    """Return rows with their channels padded with zeros to the kernel's size."""
    return np.concatenate([x, np.zeros((len(x), columns - x.shape[1]), x.dtype)], axis=1)


def _rows(
    q: np.ndarray, dout: np.ndarray, out: np.ndarray, lse: np.ndarray, dlse: np.ndarray | None, kernel: _Gradient
) -> _Rows:
    """Prepare the query side of one head.

    Rows beyond the sequence get D = 0 and lse = +Inf, so that their P is 0.
    """
    length = len(lse)
    dtype = kernel.dtype
    q = _widened(q, kernel.config.head_dim)
    dout, out = (_widened(x, kernel.config.dots_channels) for x in (dout, out))
    padded = np.full(len(q), np.inf, _F32)
    dots = np.zeros(len(q), _F32)
    padded[:length] = np.where(np.isneginf(lse), _F32(0), lse)
    dots[:length] = row_dots(out, dout[:length], kernel.order)
    dout = dout[:, : kernel.config.head_dim]
    if dlse is not None:
        dots[:length] = kernel.flushed(dots[:length] - kernel.flushed(np.where(np.isneginf(lse), _F32(0), dlse)))
    columns = [operand_b(np.ascontiguousarray(x.T), dtype) for x in (q, dout)]
    return _Rows(operand(q, dtype), operand(dout, dtype), columns[0], columns[1], padded, dots)


def scale_log2(softmax_scale: float, softcap: float, order: BackwardOrder) -> np.float32:
    """Return the factor that takes scores to log2 units, as the family rounds it.

    Without a softcap that is softmax_scale * log2(e); with one it multiplies the tanh and is softcap * log2(e).
    """
    if order.factor == "float64":
        return _F32(softmax_factors(softmax_scale, softcap)[0])
    factor = _F32(softcap or softmax_scale)
    return _F32(float(factor) * LOG2_E) if order.factor == "of_float32" else factor * _F32(LOG2_E)


def capped(s: np.ndarray, softmax_scale: float, softcap: float, order: BackwardOrder) -> tuple[np.ndarray, np.ndarray]:
    """Return t, the tanh of scores over the softcap, and its slope 1 - t^2.

    Parameters
    ----------
    s : float32 (rows, keys)
        Products of Q and K.
    softmax_scale, softcap : float
        The softcap > 0.
    order : BackwardOrder

    Returns
    -------
    t, slope : float32 (rows, keys)
        In [-1, 1] and in [0, 1]; NaN where s is NaN.
    """
    flushed = (lambda x: x) if order.keeps_subnormals else float32.flushed
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        if order.softcap == "tanh":
            t = mufu.tanh(flushed(flushed(s) * (_F32(softmax_scale) / _F32(softcap))))
        else:
            t = softmax.capped(s, _F32(softmax_factors(softmax_scale, softcap)[1]), mufu.ex2)
        return t, float32.fma(-t, t, np.ones_like(t))


def row_dots(out: np.ndarray, dout: np.ndarray, order: BackwardOrder) -> np.ndarray:
    """Return D = rowsum(dO * O) of every row in the order of the family, float32 (rows,).

    Parameters
    ----------
    out, dout : float16 or bfloat16 (rows, channels)
        ``channels`` is a multiple of 64.
    order : BackwardOrder

    Returns
    -------
    float32 (rows,)
        NaN and Inf as IEEE additions and multiplications give them.
    """
    rows, channels = out.shape
    width = 128 if channels % 128 == 0 else 64
    threads = width // order.dots_run
    flushed = (lambda x: x) if order.keeps_subnormals else float32.flushed
    x, y = (flushed(a.astype(_F32)).reshape(rows, channels // width, threads, order.dots_run) for a in (out, dout))
    total = np.zeros((rows, threads), _F32)
    with np.errstate(all="ignore"):
        for piece, channel in np.ndindex(x.shape[1], order.dots_run):
            a = x[:, piece, :, channel]
            b = y[:, piece, :, channel]
            total = flushed(float32.fma(a, b, total))
        distances = 1 << np.arange(threads.bit_length() - 1)
        for distance in distances[::-1] if order.dots_far_first else distances:
            total = flushed(total + total[:, np.arange(threads) ^ distance])
    return total[:, 0]


def _head(rows: _Rows, k: np.ndarray, v: np.ndarray, mask: Mask, kernel: _Gradient, before: _Parts | None) -> _Parts:
    """Run all key blocks of one query head; dK and dV continue the chains of ``before``, if that is not None."""
    config = kernel.config
    blocks = len(k) // kernel.config.tile_n
    dq = np.zeros((blocks, len(rows.lse), config.head_dim), _F32)
    dk, dv = (
        np.zeros((len(k), config.head_dim), _F32) if before is None else getattr(before, name).copy()
        for name in ("dk", "dv")
    )
    k, v = (_widened(x, config.head_dim) for x in (k, v))
    for block in range(blocks):
        columns = np.arange(block * config.tile_n, (block + 1) * config.tile_n)
        start, stop = _visited(mask, int(columns[0]), len(rows.lse), kernel)
        if start < stop:
            dk[columns], dv[columns] = _block(
                rows,
                slice(start, stop),
                (k[columns], v[columns]),
                columns,
                mask,
                kernel,
                _Parts(dq[block], dk[columns], dv[columns]),
            )
    return _Parts(dq, dk, dv)


def _visited(mask: Mask, first_key: int, rows: int, kernel: _Gradient) -> tuple[int, int]:
    """Return the rows of the row blocks that see some key of a block, half-open."""
    tile_m = kernel.config.tile_m
    tile_n = kernel.config.tile_n
    start = 0
    stop = rows
    if mask.right >= 0:
        start = max(0, first_key - mask.offset - mask.right) // tile_m * tile_m
    if mask.left >= 0:
        stop = min(stop, -(-(first_key + tile_n - mask.offset + mask.left) // tile_m) * tile_m)
    return start, stop


def _block(
    rows: _Rows,
    part: slice,
    keys: tuple[np.ndarray, np.ndarray],
    columns: np.ndarray,
    mask: Mask,
    kernel: _Gradient,
    sums: _Parts,
) -> tuple[np.ndarray, np.ndarray]:
    """Fill this key block's part of dQ and return the block's dK and dV behind those in ``sums``, unscaled."""
    dtype = kernel.dtype
    (k, v) = keys
    s, slope = _scores(wgmma(rows.q.rows(part.start, part.stop), operand_b(k, dtype)), kernel)
    hidden = mask.hidden(np.arange(part.start, part.stop), columns)
    if hidden is not None:
        s[hidden] = -np.inf
    p = _weights(s, rows.lse[part], kernel)
    dp = wgmma(rows.dout.rows(part.start, part.stop), operand_b(v, dtype))
    p16 = kernel.encoded(p)
    ds = _ds(p, dp, rows.dots[part], kernel)
    if slope is not None:
        ds = kernel.product(ds, slope)
    ds16 = kernel.encoded(ds)
    sums.dq[part] = wgmma(operand(ds16, dtype), operand_b(np.ascontiguousarray(k.T), dtype))
    order = np.arange(part.stop - part.start)  # in which the chains of dK and dV take the rows
    if kernel.order.rows != "ascending":
        tile_m = kernel.config.tile_m
        blocks = range(part.start // tile_m, part.stop // tile_m)
        visits = list(reversed(blocks))
        if kernel.order.rows == "walk":
            visits = kernel.walk.rows(blocks, int(columns[0]) // kernel.config.tile_n)
        order = order.reshape(-1, tile_m)[np.array(visits, int) - blocks.start].reshape(-1)
    q_columns, dout_columns = (_taken(x.k_slice(part.start, part.stop), order) for x in rows[2:4])
    dk = wgmma(operand(np.ascontiguousarray(ds16[order].T), dtype), q_columns, sums.dk)
    return dk, wgmma(operand(np.ascontiguousarray(p16[order].T), dtype), dout_columns, sums.dv)


def _taken(x: OperandB, rows: np.ndarray) -> OperandB:
    """Return an operand with its rows of k in another order."""
    return OperandB(x.fmt, x.bits[rows], x.value[rows], x.power[rows], x.special, x.least)


def _scores(s: np.ndarray, kernel: _Gradient) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the scores of a tile and None; with a softcap their tanh and its slope, a factor of dS."""
    if not kernel.softcap:
        return s, None
    return capped(s, kernel.softmax_scale, kernel.softcap, kernel.order)


def _weights(s: np.ndarray, lse: np.ndarray, kernel: _Gradient) -> np.ndarray:
    """P of one tile, float32 (rows, keys)."""
    order = kernel.order
    if order.exponent == "log2":
        factor = scale_log2(kernel.softmax_scale, kernel.softcap, order)
        after = None
        unit = _F32(LOG2_E)
    else:
        factor = _F32(kernel.softcap or kernel.softmax_scale)
        unit = _F32(1)
        after = _F32(LOG2_E)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        minus = kernel.flushed(kernel.flushed(lse) * unit)
        factor = kernel.flushed(np.array([factor]))
        if after is None and order.contracts_exponent:
            return float32.exp2_scaled(s, np.repeat(factor, len(s)), minus)
        x = float32.fma(s, factor, -minus[:, None]) if order.contracts_exponent else s * factor - minus[:, None]
        return mufu.ex2(x if after is None else x * after)


def _ds(p: np.ndarray, dp: np.ndarray, dots: np.ndarray, kernel: _Gradient) -> np.ndarray:
    """dS of one tile before it is rounded to 16 bits, float32 (rows, keys)."""
    flushed = kernel.flushed
    dp = flushed(dp)
    dots = dots[:, None]
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        if kernel.order.contracts_ds:
            ds = flushed(float32.fma(p, dp, -flushed(p * dots)))
        else:
            ds = flushed(p * flushed(dp - dots))
    return kernel.product(ds, kernel.scale) if kernel.order.scales_ds else ds


def _sum(parts: np.ndarray, kernel: _Gradient, *, flushes: bool = False) -> np.ndarray:
    """Add parts (parts, rows, channels) one after the other to zeros, as reductions in memory do."""
    flushed = float32.flushed if flushes else np.asarray
    total = np.zeros(parts.shape[1:], _F32)
    with np.errstate(invalid="ignore", over="ignore"):
        for part in parts if kernel.order.keys == "ascending" else parts[::-1]:
            total = flushed(total + flushed(part))
    return total


def _dq_sum(parts: np.ndarray, kernel: _Gradient) -> np.ndarray:
    """Add the key blocks' parts of dQ, (blocks, rows, channels), in the order of the family."""
    if kernel.order.keys != "in_turn" or not parts.size:
        return _sum(parts, kernel, flushes=kernel.flushes_dq)
    rows = np.arange(parts.shape[1])
    blocks = range(-(-len(rows) // kernel.config.tile_m))
    turns = np.array([kernel.walk.parts(len(parts), b) for b in blocks])
    turns = np.repeat(turns, kernel.config.tile_m, axis=0)[: len(rows)]
    in_turn = np.stack([parts[of_row, rows] for of_row in turns.T])
    return _sum(in_turn, replace(kernel, order=replace(kernel.order, keys="ascending")))


def _dq_scaled(dq: np.ndarray, kernel: _Gradient) -> np.ndarray:
    """Return dQ with softmax_scale, after its parts were added; families that scale dS multiply by 1, which flushes."""
    return kernel.product(dq, _F32(1) if kernel.order.scales_ds else kernel.scale)


def _group_scaled(total: np.ndarray, name: str, heads: int, kernel: _Gradient) -> np.ndarray:
    """Return dK or dV of a kv head after its heads were added, scaled where the family does that here.

    A single head's dV meets no further arithmetic; that of several heads is multiplied by 1, which flushes.
    """
    if name == "dk" and kernel.order.scales_sums:
        return kernel.product(total, kernel.scale)
    return total if heads == 1 else kernel.product(total, _F32(1))


def _rounded(x: np.ndarray, kernel: _Gradient) -> np.ndarray:
    """Round a gradient to the operands' format."""
    return kernel.encoded(x)
