"""Forward twin: FlashAttention's forward kernel on a CPU, bit for bit, in the order of any family that is known.

Its callers compare outputs of a GPU with it, and plant mistakes in it; gradients have
:mod:`fa3_kernels.twin.backward`. The order of our own family follows, which our GPU kernels must keep.
:class:`fa3_kernels.plan.order.Order` names where other families differ.

1. Row tiles of tile_m; key blocks right to left (:mod:`fa3_kernels.plan.tiles`). Operands are zero-padded to the
   kernel's head_dim and to whole key tiles; V rows beyond seqlen_k are cleared.
2. S = Q K^T: one chain of wgmma over head_dim, k ascending, C = 0.
3. c = max(scale_log2 * q_descale * k_descale, 2^-126), rounded in that order: a factor that underflowed to 0 would turn
   the -inf of masked keys into NaN. With softcap: u = fma(-2, rcp(ex2(s * t) + 1), 1) = tanh, and scores in units of
   softcap afterwards.
4. Mask to -inf, then :mod:`fa3_kernels.twin.softmax`.
5. rescale = alpha * (v_descale of the block before / v_descale of this block); 1 * alpha when the two are equal.
6. P rounded to the operand format (e4m3: saturating).
7. Chained: O = wgmma chain of P V over the block's keys, k ascending, C = O * rescale.
   Promoted (e4m3): for each promotion_interval keys a zero-initialised chain; O = fma(O, rescale, part) for the first
   part of a block, O = O + part for the others.
8. Epilogue: O * (inverse * v_descale of the last block), rounded once to the output format;
   lse = (M + lg2(row_sum)) * ln2.
9. Split-KV keeps step 8 in fp32 with lse in base 2; the combine adds splits in ascending order
   (:mod:`fa3_kernels.twin.combine`).

With intra-warpgroup overlap P V of block j runs after S of block j + 1. The operations and their values are the same.
Sources: FlashAttention-3 (arXiv 2407.08608, algorithms 1 and 2); instruction semantics in the modules imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fa3_kernels.plan.config import Config, default_config
from fa3_kernels.plan.order import Order
from fa3_kernels.plan.tiles import Mask, RowTile, mask_of, row_tiles, split_ranges
from fa3_kernels.twin import convert, float32, mufu, softmax
from fa3_kernels.twin.append import rotated
from fa3_kernels.twin.arithmetic import Arithmetic, Source
from fa3_kernels.twin.combine import combine
from fa3_kernels.twin.wgmma import Operand, OperandB, operand, operand_b
from fa3_kernels.twin.wgmma_exact import tensor_format
from fa3_reference.cache import query_positions, rotary_tables
from fa3_reference.problem import AttentionProblem, Descale, Operands, Sequence

LOG2_E = 1.4426950408889634
MIN_NORMAL = np.float32(2.0**-126)


class Forward(NamedTuple):
    """Result of a forward: ``out`` in the output format, (batch, seqlen_q, nheads, head_dim_v) or packed; ``lse``
    float32.

    lse is a natural logarithm, (batch, nheads, seqlen_q), or (nheads, total_q) for packed sequences.
    """

    out: np.ndarray
    lse: np.ndarray


@dataclass(frozen=True, slots=True)
class _KeySide:
    """K and V of one sequence and kv head, padded to whole tiles, with one descale per key tile."""

    k: OperandB
    v: OperandB
    k_descale: np.ndarray  # float32 (blocks,)
    v_descale: np.ndarray


class _Queries(NamedTuple):
    """Rows of a tile: Q, and for each row its descale and the score of its sink, float32 (rows,)."""

    q: Operand
    descale: np.ndarray
    sink: np.ndarray | None


@dataclass(frozen=True, slots=True)
class _Attention:
    """One launch: what all of its tiles share."""

    config: Config
    arithmetic: Arithmetic
    softmax_scale: float
    softcap: float

    @property
    def order(self) -> Order:
        return self.arithmetic.order

    @property
    def takes_tanh(self) -> bool:
        return self.softcap > 0 and self.order.softcap == "tanh"

    @property
    def natural(self) -> float:
        """Return the factor that the softmax puts on scores to take them to natural units.

        Orders that scale scores or Q before put 1, or 1 / log2(e) where that scale has log2(e) as well.
        """
        done = {"in_turn": 1.0, "folded": 1.0, "folded_log2": 1 / LOG2_E}
        return done.get(self.order.factor, self.softmax_scale)

    @property
    def scale(self) -> np.float32:
        """Return what scores are multiplied by first: softmax_scale * log2(e), or softmax_scale / softcap."""
        if self.takes_tanh:
            return np.float32(self.natural) / np.float32(self.softcap)
        if self.order.factor == "of_float32":
            return np.float32(float(np.float32(self.softmax_scale)) * LOG2_E)
        if self.order.factor == "float32":
            return np.float32(self.softmax_scale) * np.float32(LOG2_E)
        return np.float32(self.natural * LOG2_E)

    @property
    def p_offset_log2(self) -> int:
        return self.config.p_offset_log2

    @property
    def promotion_interval(self) -> int:
        return self.config.promotion_interval


def forward(
    problem: AttentionProblem,
    operands: Operands,
    config: Config | None = None,
    *,
    ideal: frozenset[Source] = frozenset(),
    order: Order | None = None,
) -> Forward:
    """Run the arithmetic of a forward kernel.

    Parameters
    ----------
    problem : AttentionProblem
    operands : Operands
        Arrays in the problem's dtype; K and V descale blocks must be whole key tiles.
    config : Config, optional
        The shipped one by default.
    ideal : frozenset of Source
        Sources of error to switch off (no device computes this); without "output" rounded, ``out`` is float32.
    order : Order, optional
        Another order than that of the configuration's family, to see what a switch changes.

    Returns
    -------
    Forward
        The bits of the device. Rows without a visible key: out 0, lse -inf, see :attr:`Order.lse_empty`. NaN in
        a row's scores gives NaN in that row; NaN or Inf in V gives NaN or Inf wherever a tile that holds it is visited.

    Raises
    ------
    ValueError
        For operands that do not fit the problem, or a problem the configuration cannot run.
    """
    config = config or default_config(problem)
    operands.check(problem)
    _check_supported(problem, operands, config)
    operands = _rotated(problem, operands)
    arithmetic = Arithmetic(problem.dtype, ideal, order or config.traits.order)
    kernel = _Attention(config, arithmetic, problem.softmax_scale, problem.softcap)
    out_format = np.float32 if "output" in ideal else tensor_format(config.out_dtype).dtype
    out = np.zeros(problem.out_shape, dtype=out_format)
    lse = np.full(problem.lse_shape, -np.inf, np.float32)
    sees_sinks = operands.sinks is not None and kernel.order.sinks_without_keys
    if not sees_sinks and not any(seq.seqlen_k for seq in problem.sequences()):
        lse[...] = kernel.order.lse_without_keys
        return Forward(out, lse)
    splits = config.traits.sequence_splits(problem, config)
    for seq in problem.sequences():
        one = replace(kernel, config=replace(config, num_splits=splits[seq.index]))
        for kv_head in range(problem.nheads_kv if seq.seqlen_q else 0):
            _run_kv_head(problem, operands, one, seq, kv_head, out, lse)
    return Forward(out, lse)


def _rotated(problem: AttentionProblem, operands: Operands) -> Operands:
    """Return Q and appended keys as the call rotates them, by position, before it attends to the cache."""
    cache = problem.cache
    if cache is None or not cache.rotary_dim:
        return operands
    q, k = operands.q.copy(), operands.k.copy()
    cos, sin = rotary_tables(problem)
    for seq, before, first in zip(problem.sequences(), cache.before(problem), cache.seqlens(problem), strict=True):
        for rows, positions in (
            (problem.rows_q(q, seq), query_positions(problem, seq, first)),
            (problem.rows_k(k, seq)[before:], first + np.arange(seq.seqlen_k - before)),
        ):
            tables = (table[positions][:, None] for table in (cos, sin))
            rows[...] = rotated(rows, *tables, is_interleaved=cache.interleaved)
    return replace(operands, q=q, k=k)


def _check_supported(problem: AttentionProblem, operands: Operands, config: Config) -> None:
    """Raise ValueError for a problem that the family's twin does not reproduce, or the configuration does not fit."""
    config.traits.check_reproduced(problem)
    rules = [
        (config.dtype == problem.dtype, f"config is for {config.dtype}, the problem is {problem.dtype}"),
        (
            max(problem.head_dim, problem.head_dim_v) <= config.head_dim,
            f"config head_dim {config.head_dim} is smaller than {max(problem.head_dim, problem.head_dim_v)}",
        ),
    ]
    lazy = config.is_fp8 and config.traits.order.rescale_threshold_log2 > 0
    rules.append((not lazy, "e4m3 weights have an offset, and no room for maxima that stay"))
    for name, descale in (("k_descale", operands.k_descale), ("v_descale", operands.v_descale)):
        rows = descale.block_rows if descale else 0
        rule = f"{name} blocks must be whole key tiles of {config.tile_n} rows, got {rows}"
        rules.append((rows % config.tile_n == 0, rule))
    for ok, rule in rules:
        if not ok:
            raise ValueError(rule)


def _run_kv_head(
    problem: AttentionProblem,
    operands: Operands,
    kernel: _Attention,
    seq: Sequence,
    kv_head: int,
    out: np.ndarray,
    lse: np.ndarray,
) -> None:
    """Run all row tiles of the query heads that read one kv head."""
    config = kernel.config
    group = problem.group
    k = problem.rows_k(operands.k, seq)[:, kv_head]  # (seqlen_k, head_dim)
    v = problem.rows_k(operands.v, seq)[:, kv_head]
    whole = _key_side(k, v, operands, seq, kv_head, kernel)
    heads = np.arange(group) + kv_head * group
    q = problem.rows_q(operands.q, seq)  # (seqlen_q, nheads, head_dim)
    out_rows = problem.rows_q(out, seq)
    lse_rows = problem.rows_lse(lse, seq)
    mask = _mask(problem, seq, kernel)
    packing = {"tile_m": config.tile_m, "pack_gqa": config.pack_gqa, "pads_group": config.traits.pads_group}
    for tile in row_tiles(seq.seqlen_q, group, **packing):
        tile_heads = heads[tile.heads]
        q_rows = _padded(_folded(q[tile.positions, tile_heads], kernel), columns=_compiled(problem.head_dim, kernel))
        q_descale = _q_descale(operands.q_descale, seq, tile, tile_heads)
        sink = None if operands.sinks is None else operands.sinks[tile_heads]
        queries = _Queries(operand(q_rows, config.dtype), q_descale, sink)
        # some families count key tiles from the first key that the window leaves
        start = mask.first_key(tile.positions) if kernel.order.key_tiles == "from_window" else 0
        keys = _key_side(k[start:], v[start:], operands, seq, kv_head, kernel) if start else whole
        o, tile_lse = _run_tile(queries, keys, tile, mask.from_key(start), kernel)
        out_rows[tile.positions, tile_heads] = kernel.arithmetic.encode_output(o, config.out_dtype)
        unit = softmax.lse_unit(kernel.order)
        lse_rows[tile_heads, tile.positions] = tile_lse * unit


def _folded(q: np.ndarray, kernel: _Attention) -> np.ndarray:
    """Return the rows of Q as they enter the product, in their format.

    Some orders multiply Q by the scale and round it again; all others take Q as it is.
    """
    if not kernel.order.folds_scale:
        return q
    scale = kernel.softmax_scale * (LOG2_E if kernel.order.factor == "folded_log2" else 1)
    return convert.encode_f32(q.astype(np.float32) * np.float32(scale), kernel.config.dtype)


def _compiled(head_dim: int, kernel: _Attention) -> int:
    """Return the channels of Q and K as the kernel pads them with zeros."""
    return kernel.config.traits.compiled_head_dim(head_dim, kernel.config.is_fp8)


def _mask(problem: AttentionProblem, seq: Sequence, kernel: _Attention) -> Mask:
    """Return the mask of one sequence, with the diagonal where the family aligns it."""
    mask = mask_of(problem, seq.seqlen_q, seq.seqlen_k)
    if kernel.order.diagonal == "top_left":
        mask = Mask(mask.seqlen_k, 0, mask.left, mask.right)
    return mask


def _padded(x: np.ndarray, *, rows: int = 0, columns: int = 0) -> np.ndarray:
    """Return a copy of a 2-D array grown with zeros on the right and below."""
    rows = max(rows, x.shape[0])
    columns = max(columns, x.shape[1])
    if (rows, columns) == x.shape:
        return x
    grown = np.zeros((rows, columns), x.dtype)
    grown[: x.shape[0], : x.shape[1]] = x
    return grown


def _key_side(
    k: np.ndarray, v: np.ndarray, operands: Operands, seq: Sequence, kv_head: int, kernel: _Attention
) -> _KeySide:
    """Return K and V of one sequence and kv head, padded with zeros to whole key tiles, and their descales."""
    config = kernel.config
    blocks = max(1, -(-len(k) // config.tile_n))
    rows = blocks * config.tile_n
    k = _padded(k, rows=rows, columns=_compiled(k.shape[1], kernel))
    v = _padded(v, rows=rows)
    return _KeySide(
        operand_b(k, config.dtype),
        operand_b(np.ascontiguousarray(v.T), config.dtype),
        _tile_descale(operands.k_descale, seq, kv_head, blocks, config.tile_n),
        _tile_descale(operands.v_descale, seq, kv_head, blocks, config.tile_n),
    )


def _tile_descale(descale: Descale | None, seq: Sequence, head: int, blocks: int, tile_n: int) -> np.ndarray:
    """Return the descale of every key tile, float32 (blocks,); ones without a descale."""
    if descale is None:
        return np.ones(blocks, np.float32)
    values = descale.values[seq.index, head]
    if not descale.block_rows:
        return np.repeat(values, blocks)
    index = np.minimum(np.arange(blocks) * tile_n // descale.block_rows, values.size - 1)
    return values[index]


def _q_descale(descale: Descale | None, seq: Sequence, tile: RowTile, heads: np.ndarray) -> np.ndarray:
    """Return the descale of every row of a tile, float32 (rows,); ones without a descale."""
    if descale is None:
        return np.ones(heads.size, np.float32)
    block = tile.positions // descale.block_rows if descale.block_rows else np.zeros_like(tile.positions)
    return descale.values[seq.index, heads, block]


def _run_tile(
    queries: _Queries, keys: _KeySide, tile: RowTile, mask: Mask, kernel: _Attention
) -> tuple[np.ndarray, np.ndarray]:
    """Run one row tile over all its key blocks; return fp32 output, and lse in the units of :func:`softmax.lse_unit`.

    With splits each part of the blocks is run by itself, and the parts are combined. The first part takes the sinks.
    """
    blocks = mask.blocks(tile.positions, kernel.config.tile_n)
    if kernel.config.num_splits == 1:
        return _run_blocks(queries, keys, tile, mask, kernel, blocks)
    if kernel.order.splits_visible:
        parts = split_ranges(blocks, kernel.config.num_splits)
    else:
        every = split_ranges(range(keys.k_descale.size), kernel.config.num_splits)
        parts = [range(max(p.start, blocks.start), min(p.stop, blocks.stop)) for p in every]
    each = [queries, *[queries._replace(sink=None)] * (len(parts) - 1)]
    found = (_run_blocks(x, keys, tile, mask, kernel, part) for x, part in zip(each, parts, strict=True))
    o, lse = zip(*found, strict=True)
    return combine(np.stack(o), np.stack(lse), kernel.arithmetic, kernel.config.head_dim)


def _run_blocks(
    queries: _Queries, keys: _KeySide, tile: RowTile, mask: Mask, kernel: _Attention, blocks: range
) -> tuple[np.ndarray, np.ndarray]:
    """Run the main loop over some key blocks, and the epilogue; return what :func:`_run_tile` returns, of these blocks.

    No block at all gives output 0 and the lse of an empty row.
    """
    arithmetic = kernel.arithmetic
    config = kernel.config
    state = softmax.RowState.start(tile.positions.size)
    o = np.zeros((tile.positions.size, keys.v.value.shape[1]), np.float32)
    previous: int | None = None  # the block visited before
    pending: tuple[np.ndarray, np.ndarray, int] | None = None  # its P and rescale, when P V waits for the next S
    unit = np.ones_like(queries.descale)  # of the block visited last
    for block in reversed(blocks) if kernel.order.keys == "right_to_left" else blocks:
        c = _factor(queries.descale, keys, block, kernel)
        s, unit = _scores(queries.q, keys, block, c, kernel)
        if pending is not None:
            o = _accumulate(o, keys, *pending, kernel)
            pending = None
        masked = _masked(s, tile, mask, block, kernel)
        is_guarded = not kernel.order.compiles_masked_apart or previous is None or masked is not s
        p, alpha = softmax.update(state, masked, unit, kernel.p_offset_log2, arithmetic, is_guarded)
        ratio = np.float32(1) if previous is None else keys.v_descale[previous] / keys.v_descale[block]
        pending = (p, alpha * ratio, block)
        if not config.intra_wg_overlap:
            o = _accumulate(o, keys, *pending, kernel)
            pending = None
        previous = block
    if pending is not None:
        o = _accumulate(o, keys, *pending, kernel)
    if queries.sink is not None and (previous is not None or kernel.order.sinks_without_keys):
        softmax.take_sink(state, queries.sink, unit, kernel.p_offset_log2, arithmetic)
    empty = kernel.order.lse_empty if config.num_splits == 1 else softmax.NEG_INF
    inverse, lse = softmax.finalize(state, _lse_factor(unit, kernel), kernel.p_offset_log2, arithmetic, float(empty))
    last = keys.v_descale[previous] if previous is not None else np.float32(1)
    with np.errstate(invalid="ignore", over="ignore"):
        inverse = arithmetic.flushed(inverse * last)
        return arithmetic.flushed(arithmetic.flushed(o) * inverse[:, None]), lse


def _factor(q_descale: np.ndarray, keys: _KeySide, block: int, kernel: _Attention) -> np.ndarray:
    """Return the factor that takes raw scores to log2 units, or to the argument of tanh, float32 (rows,)."""
    with np.errstate(over="ignore"):
        if kernel.order.descales == "product_first":
            product = kernel.arithmetic.flushed(q_descale * keys.k_descale[block])
            return kernel.arithmetic.flushed(kernel.scale * product)
        c = kernel.scale * q_descale * keys.k_descale[block]
    return np.maximum(c, MIN_NORMAL)


def _lse_factor(c: np.ndarray, kernel: _Attention) -> np.ndarray:
    """Return the factor that takes the maximum of a row to the units of its lse, float32 (rows,)."""
    if kernel.order.lse == "natural_by_scale":
        return np.full_like(c, kernel.softcap or kernel.natural)
    if kernel.order.lse == "natural" and kernel.order.maxima == "scaled":
        return np.full_like(c, softmax.LN2)
    return kernel.arithmetic.flushed(c * softmax.LN2) if kernel.order.lse == "natural" else c


def _scores(q: Operand, keys: _KeySide, block: int, c: np.ndarray, kernel: _Attention) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores of one tile, and the factor per row that takes them to log2 units.

    With a softcap they are the tanh of the scores, and the factor is the cap times log2(e).
    """
    tile_n = kernel.config.tile_n
    arithmetic = kernel.arithmetic
    s = arithmetic.flushed(arithmetic.scores(q, keys.k.n_slice(block * tile_n, (block + 1) * tile_n)))
    if kernel.order.factor == "in_turn":
        s = arithmetic.flushed(s * np.float32(kernel.softmax_scale))
    if kernel.softcap == 0:
        return s, c
    with np.errstate(invalid="ignore", over="ignore"):
        if kernel.takes_tanh:
            unit = np.float32(float(np.float32(kernel.softcap)) * LOG2_E)
            return mufu.tanh(arithmetic.flushed(s * c[:, None])), np.full_like(c, unit)
        tanh = softmax.capped(s, (c * np.float32(2 / kernel.softcap))[:, None], arithmetic.ex2)
    return tanh, np.full_like(c, max(kernel.softcap * LOG2_E, MIN_NORMAL))


def _masked(s: np.ndarray, tile: RowTile, mask: Mask, block: int, kernel: _Attention) -> np.ndarray:
    """Return scores with -inf where keys are hidden; the same array where none is."""
    tile_n = kernel.config.tile_n
    hidden = mask.hidden(tile.positions, np.arange(block * tile_n, (block + 1) * tile_n))
    return s if hidden is None else np.where(hidden, softmax.NEG_INF, s)


def _accumulate(
    o: np.ndarray, keys: _KeySide, p: np.ndarray, rescale: np.ndarray, block: int, kernel: _Attention
) -> np.ndarray:
    """Return O after one more block: O of the blocks before times ``rescale``, plus P V of this block."""
    arithmetic = kernel.arithmetic
    tile_n = kernel.config.tile_n
    encoded = arithmetic.encode_p(p)
    interval = kernel.promotion_interval or tile_n
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, tile_n, interval):
            stop = start + interval
            v = keys.v.k_slice(block * tile_n + start, block * tile_n + stop)
            part_p = p[:, start:stop]
            part = encoded[:, start:stop]
            if not kernel.promotion_interval:
                o = arithmetic.accumulate(part_p, part, v, arithmetic.flushed(o * rescale[:, None]))
                continue
            chain = arithmetic.accumulate(part_p, part, v, None)
            if start == 0 and kernel.order.contracts_promotion:
                o = float32.fma(o, rescale[:, None], chain)
            else:
                o = arithmetic.flushed((arithmetic.flushed(o * rescale[:, None]) if start == 0 else o) + chain)
        return o
