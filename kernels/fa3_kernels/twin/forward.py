"""Forward twin: the FlashAttention-3 forward kernel on a CPU, bit for bit.

The production order, which the GPU kernels must follow:

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
   (:func:`combine`).

With intra-warpgroup overlap P V of block j runs after S of block j + 1: the same operations on the same values.
Sources: FlashAttention-3 (arXiv 2407.08608, algorithms 1 and 2); instruction semantics in the modules imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import numpy as np

from fa3_kernels.plan.config import Config, default_config, kernel_head_dim
from fa3_kernels.plan.tiles import Mask, RowTile, mask_of, row_tiles, split_ranges
from fa3_kernels.twin import float32, mufu, softmax
from fa3_kernels.twin.arithmetic import Arithmetic, Source
from fa3_kernels.twin.faults import Fault
from fa3_kernels.twin.wgmma import Operand, OperandB, operand, operand_b
from fa3_kernels.twin.wgmma_exact import tensor_format
from fa3_reference.problem import AttentionProblem, Descale, Operands, Sequence

LOG2_E = 1.4426950408889634
MIN_NORMAL = np.float32(2.0**-126)


class Forward(NamedTuple):
    """``out`` in the output format, (batch, seqlen_q, nheads, head_dim_v) or packed; ``lse`` float32, natural log."""

    out: np.ndarray
    lse: np.ndarray


@dataclass(frozen=True, slots=True)
class _KeySide:
    """K and V of one sequence and kv head, padded to whole tiles, with one descale per key tile."""

    k: OperandB
    v: OperandB
    k_descale: np.ndarray  # float32 (blocks,)
    v_descale: np.ndarray


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Everything that is the same for all tiles of a launch."""

    config: Config
    arithmetic: Arithmetic
    scale_log2: np.float32
    softcap: float

    @property
    def fault(self) -> Fault | None:
        return self.arithmetic.fault

    @property
    def p_offset_log2(self) -> int:
        return 0 if self.fault is Fault.NO_P_OFFSET else self.config.p_offset_log2

    @property
    def promotion_interval(self) -> int:
        return 0 if self.fault is Fault.NO_PROMOTION else self.config.promotion_interval


def forward(
    problem: AttentionProblem,
    operands: Operands,
    config: Config | None = None,
    *,
    ideal: frozenset[Source] = frozenset(),
    fault: Fault | None = None,
) -> Forward:
    """Run the forward kernel's arithmetic.

    Parameters
    ----------
    problem : AttentionProblem
    operands : Operands
        Arrays in the problem's dtype; K and V descale blocks must be whole key tiles.
    config : Config, optional
        The shipped one by default.
    ideal : frozenset of Source
        Sources of error to switch off (no device computes this); without "output" rounded, ``out`` is float32.
    fault : Fault, optional
        A planted mistake.

    Returns
    -------
    Forward
        The bits of the device. Rows without a visible key: out 0, lse -inf. NaN in a row's scores gives NaN in that
        row; NaN or Inf in V gives NaN or Inf wherever a tile that holds it is visited.

    Raises
    ------
    ValueError
        For operands that do not fit the problem, or a problem the configuration cannot run.
    """
    config = config or default_config(problem)
    operands.check(problem)
    _check_supported(problem, operands, config)
    scale = problem.softmax_scale
    if fault is Fault.WRONG_SOFTMAX_SCALE:
        scale *= np.sqrt(problem.head_dim / (problem.head_dim + 1))
    arithmetic = Arithmetic(problem.dtype, ideal, fault)
    kernel = _Kernel(config, arithmetic, np.float32(scale * LOG2_E), problem.softcap)
    out_format = np.float32 if "output" in ideal else tensor_format(config.out_dtype).dtype
    out = np.zeros(problem.out_shape, dtype=out_format)
    lse = np.full(problem.lse_shape, -np.inf, np.float32)
    for seq in problem.sequences():
        for kv_head in range(problem.nheads_kv if seq.seqlen_q else 0):
            _run_kv_head(problem, operands, kernel, seq, kv_head, out, lse)
    return Forward(out, lse)


def _check_supported(problem: AttentionProblem, operands: Operands, config: Config) -> None:
    rules = [
        (config.traits.is_built_here, f"the twin is of our kernels, got a configuration of {config.family}"),
        (config.dtype == problem.dtype, f"config is for {config.dtype}, the problem is {problem.dtype}"),
        (
            max(problem.head_dim, problem.head_dim_v) <= config.head_dim,
            f"config head_dim {config.head_dim} is smaller than {max(problem.head_dim, problem.head_dim_v)}",
        ),
    ]
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
    kernel: _Kernel,
    seq: Sequence,
    kv_head: int,
    out: np.ndarray,
    lse: np.ndarray,
) -> None:
    """All row tiles of the query heads that read one kv head."""
    config, group = kernel.config, problem.group
    k = problem.rows_k(operands.k, seq)[:, kv_head]  # (seqlen_k, head_dim)
    v = problem.rows_k(operands.v, seq)[:, kv_head]
    keys = _key_side(k, v, operands, seq, kv_head, kernel)
    heads = np.arange(group) + kv_head * group
    if kernel.fault is Fault.KV_HEAD_MODULO:
        heads = np.arange(group) * problem.nheads_kv + kv_head
    q = problem.rows_q(operands.q, seq)  # (seqlen_q, nheads, head_dim)
    out_rows, lse_rows = problem.rows_q(out, seq), problem.rows_lse(lse, seq)
    mask = _mask(problem, seq, kernel.fault)
    for tile in row_tiles(seq.seqlen_q, group, tile_m=config.tile_m, pack_gqa=config.pack_gqa):
        tile_heads = heads[tile.heads]
        q_rows = _padded(q[tile.positions, tile_heads], columns=kernel_head_dim(problem.head_dim))
        q_tile = operand(q_rows, config.dtype)
        c = kernel.scale_log2 * _q_descale(operands.q_descale, seq, tile, tile_heads, kernel.fault)  # float32 (rows,)
        o, lse_log2 = _run_tile(q_tile, keys, tile, mask, c, kernel)
        out_rows[tile.positions, tile_heads] = kernel.arithmetic.encode_output(o, config.out_dtype)
        unit = np.float32(1) if kernel.fault is Fault.LSE_BASE_2 else softmax.LN2
        lse_rows[tile_heads, tile.positions] = lse_log2 * unit


def _mask(problem: AttentionProblem, seq: Sequence, fault: Fault | None) -> Mask:
    mask = mask_of(problem, seq.seqlen_q, seq.seqlen_k)
    if fault is Fault.CAUSAL_TOP_LEFT:
        return Mask(mask.seqlen_k, 0, mask.left, mask.right)
    if fault is Fault.WINDOW_OFF_BY_ONE and mask.left >= 0:
        return Mask(mask.seqlen_k, mask.offset, mask.left + 1, mask.right)
    return mask


def _padded(x: np.ndarray, *, rows: int = 0, columns: int = 0, fill: float = 0.0) -> np.ndarray:
    """Copy of a 2-D array grown with zeros on the right and ``fill`` below."""
    rows, columns = max(rows, x.shape[0]), max(columns, x.shape[1])
    if (rows, columns) == x.shape:
        return x
    grown = np.zeros((rows, columns), x.dtype)
    grown[x.shape[0] :] = fill
    grown[: x.shape[0], : x.shape[1]] = x
    return grown


def _key_side(
    k: np.ndarray, v: np.ndarray, operands: Operands, seq: Sequence, kv_head: int, kernel: _Kernel
) -> _KeySide:
    config, fault = kernel.config, kernel.fault
    blocks = max(1, -(-seq.seqlen_k // config.tile_n))
    rows = blocks * config.tile_n
    k = _padded(k, rows=rows, columns=kernel_head_dim(k.shape[1]))
    v = _padded(v, rows=rows, fill=np.nan if fault is Fault.UNCLEARED_V_TAIL else 0.0)
    if fault is Fault.SWAPPED_V_ROWS:
        order = np.arange(rows).reshape(-1, 16)
        order[:, [2, 3]] = order[:, [3, 2]]
        v = v[order.ravel()]
    wrong_k, wrong_v = fault is Fault.NEIGHBOUR_K_DESCALE, fault is Fault.NEIGHBOUR_V_DESCALE
    return _KeySide(
        operand_b(k, config.dtype),
        operand_b(np.ascontiguousarray(v.T), config.dtype),
        _tile_descale(operands.k_descale, seq, kv_head, blocks, config.tile_n, fault, wrong_k),
        _tile_descale(operands.v_descale, seq, kv_head, blocks, config.tile_n, fault, wrong_v),
    )


def _tile_descale(
    descale: Descale | None, seq: Sequence, head: int, blocks: int, tile_n: int, fault: Fault | None, wrong: bool
) -> np.ndarray:
    """Descale of every key tile, float32 (blocks,); ``wrong`` takes the block before."""
    if descale is None or fault is Fault.DESCALES_IGNORED:
        return np.ones(blocks, np.float32)
    values = descale.values[seq.index, head]
    if not descale.block_rows:
        return np.repeat(values, blocks)
    index = np.minimum(np.arange(blocks) * tile_n // descale.block_rows, values.size - 1)
    return values[np.maximum(index - 1, 0) if wrong else index]


def _q_descale(
    descale: Descale | None, seq: Sequence, tile: RowTile, heads: np.ndarray, fault: Fault | None
) -> np.ndarray:
    """Descale of every row of a tile, float32 (rows,)."""
    if descale is None or fault is Fault.DESCALES_IGNORED:
        return np.ones(heads.size, np.float32)
    block = tile.positions // descale.block_rows if descale.block_rows else np.zeros_like(tile.positions)
    if fault is Fault.NEIGHBOUR_Q_DESCALE:
        block = np.maximum(block - 1, 0)
    return descale.values[seq.index, heads, block]


def _run_tile(
    q: Operand, keys: _KeySide, tile: RowTile, mask: Mask, c: np.ndarray, kernel: _Kernel
) -> tuple[np.ndarray, np.ndarray]:
    """One row tile over all its key blocks: fp32 output and base-2 lse."""
    blocks = mask.blocks(tile.positions, kernel.config.tile_n)
    if kernel.fault is Fault.DROPPED_LAST_TILE:
        blocks = range(blocks.start, max(blocks.start, blocks.stop - 1))
    if kernel.config.num_splits == 1:
        return _run_blocks(q, keys, tile, mask, c, kernel, blocks)
    parts = [
        _run_blocks(q, keys, tile, mask, c, kernel, part) for part in split_ranges(blocks, kernel.config.num_splits)
    ]
    return combine(np.stack([o for o, _ in parts]), np.stack([lse for _, lse in parts]), kernel.arithmetic)


def _run_blocks(
    q: Operand, keys: _KeySide, tile: RowTile, mask: Mask, c: np.ndarray, kernel: _Kernel, blocks: range
) -> tuple[np.ndarray, np.ndarray]:
    """The main loop over key blocks, right to left, and its epilogue."""
    arithmetic, config = kernel.arithmetic, kernel.config
    state = softmax.RowState.start(tile.positions.size, kernel.fault)
    o = np.zeros((tile.positions.size, keys.v.value.shape[1]), np.float32)
    previous: int | None = None  # the block visited before
    pending: tuple[np.ndarray, np.ndarray, int] | None = None  # its P and rescale, when P V waits for the next S
    for block in reversed(blocks):
        s, unit = _scores(q, keys, block, c, kernel)
        if pending is not None:
            o = _accumulate(o, keys, *pending, kernel)
            pending = None
        s = _masked(s, tile, mask, block, kernel)
        p, alpha = softmax.update(state, s, unit, kernel.p_offset_log2, arithmetic)
        before = blocks.stop - 1 if kernel.fault is Fault.FROZEN_V_RATIO else previous
        ratio = np.float32(1) if previous is None else keys.v_descale[before] / keys.v_descale[block]
        second = block == blocks.stop - 2
        rescale = np.ones_like(alpha) if second and kernel.fault is Fault.MISSED_RESCALE else alpha * ratio
        pending = (p, rescale, block + 1 if second and kernel.fault is Fault.STALE_V else block)
        if not config.intra_wg_overlap:
            o = _accumulate(o, keys, *pending, kernel)
            pending = None
        previous = block
    if pending is not None:
        o = _accumulate(o, keys, *pending, kernel)
    inverse, lse_log2 = softmax.finalize(state)
    if kernel.fault is Fault.LSE_KEEPS_OFFSET:
        lse_log2 = lse_log2 + np.float32(kernel.p_offset_log2)
    last = keys.v_descale[previous] if previous is not None else np.float32(1)
    with np.errstate(invalid="ignore", over="ignore"):
        return o * (inverse * last)[:, None], lse_log2


def _scores(q: Operand, keys: _KeySide, block: int, c: np.ndarray, kernel: _Kernel) -> tuple[np.ndarray, np.ndarray]:
    """Scores of one tile and the factor per row that takes them to log2 units."""
    tile_n, arithmetic = kernel.config.tile_n, kernel.arithmetic
    s = arithmetic.scores(q, keys.k.n_slice(block * tile_n, (block + 1) * tile_n))
    c = c * keys.k_descale[block]
    if kernel.fault is not Fault.UNCLAMPED_SCALE:
        c = np.maximum(c, MIN_NORMAL)
    if kernel.softcap == 0:
        return s, c
    with np.errstate(invalid="ignore", over="ignore"):
        grown = arithmetic.ex2(s * (c * np.float32(2 / kernel.softcap))[:, None])
        half = mufu.rcp(grown + np.float32(1))
        tanh = float32.fma(half, np.full_like(half, -2), np.ones_like(half))
    return tanh, np.full_like(c, max(kernel.softcap * LOG2_E, MIN_NORMAL))


def _masked(s: np.ndarray, tile: RowTile, mask: Mask, block: int, kernel: _Kernel) -> np.ndarray:
    tile_n = kernel.config.tile_n
    if kernel.fault is Fault.UNMASKED_TAIL:
        mask = Mask(mask.seqlen_k + tile_n, mask.offset, mask.left, mask.right)
    hidden = mask.hidden(tile.positions, np.arange(block * tile_n, (block + 1) * tile_n))
    if hidden is None:
        return s
    revived = np.float32(-1) if kernel.softcap and kernel.fault is Fault.SOFTCAP_AFTER_MASK else softmax.NEG_INF
    return np.where(hidden, revived, s)


def _accumulate(
    o: np.ndarray, keys: _KeySide, p: np.ndarray, rescale: np.ndarray, block: int, kernel: _Kernel
) -> np.ndarray:
    """O of the block before plus P V of this one."""
    arithmetic, tile_n = kernel.arithmetic, kernel.config.tile_n
    encoded = arithmetic.encode_p(p)
    interval = kernel.promotion_interval or tile_n
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, tile_n, interval):
            stop = start + interval
            v = keys.v.k_slice(block * tile_n + start, block * tile_n + stop)
            part_p, part = p[:, start:stop], encoded[:, start:stop]
            if not kernel.promotion_interval:
                o = arithmetic.accumulate(part_p, part, v, o * rescale[:, None])
            else:
                chain = arithmetic.accumulate(part_p, part, v, None)
                o = float32.fma(o, rescale[:, None], chain) if start == 0 else o + chain
        return o.astype(np.float16).astype(np.float32) if kernel.fault is Fault.FP16_ACCUMULATOR else o


def combine(o: np.ndarray, lse_log2: np.ndarray, arithmetic: Arithmetic) -> tuple[np.ndarray, np.ndarray]:
    """Merge split-KV partials, splits in ascending order.

    Parameters
    ----------
    o : float32 (splits, rows, channels)
        Normalised partial outputs.
    lse_log2 : float32 (splits, rows)
        Base-2 lse of each; -inf for a split without a visible key.

    Returns
    -------
    o, lse_log2 : float32
        w_i = ex2(lse_i - max lse); o = sum of fma(o_i, w_i * rcp(sum w), .). A row empty in every split gives (0,
        -inf); NaN in one gives NaN.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        top = reduce(
            float32.fmax, lse_log2, np.full_like(lse_log2[0], softmax.NEG_INF)
        )  # passes over NaN; the sum does not
        base = top if arithmetic.fault is Fault.UNGUARDED_COMBINE else np.where(top == -np.inf, np.float32(0), top)
        weights = arithmetic.ex2(lse_log2 - base)
        total = weights[0]
        for w in weights[1:]:
            total = total + w
        inverse = np.where(total == 0, np.float32(0), mufu.rcp(total))
        merged = np.zeros_like(o[0])
        for part, w in zip(o, weights, strict=True):
            merged = float32.fma(part, (w * inverse)[:, None], merged)
        return merged, np.where(total == 0, softmax.NEG_INF, base + mufu.lg2(total))
