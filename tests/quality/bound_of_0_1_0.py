"""The error bound of version 0.1.0, as it was: what the search of :mod:`fa3verify.search` must break again.

Its mistakes are those of reports/findings/0001: nothing here is to be mended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from fa3_reference.formats import FORMATS, Format
from fa3_reference.problem import AttentionProblem, Descale, Operands, Sequence

U_FP32 = 2.0**-24  # unit roundoff of fp32 add, mul and fma, round to nearest even
FP32_MAX = float.fromhex("0x1.fffffep127")
FP32_MIN_NORMAL = 2.0**-126  # MUFU results below are flushed to zero
EX2_REL = 2.0**-22.70  # ex2.approx.ftz against 2^x, all x with a normal result
RCP_REL = 2.0**-23.27  # rcp.approx.ftz against 1/x, normal x and result
LG2_ABS, LG2_REL = 2.0**-22.66, 2.0**-23  # lg2.approx.ftz: |error| <= LG2_ABS + LG2_REL |log2 x|


@dataclass(frozen=True, slots=True)
class TensorCore:
    """Accumulation of one wgmma input format into f32."""

    k_step: int  # products per instruction
    align_bits: int
    out_bits: int
    operand: Format

    @property
    def align(self) -> float:
        return 2.0**-self.align_bits

    @property
    def out(self) -> float:
        return 2.0**-self.out_bits

    @property
    def exact_binades(self) -> int:
        """A product this many binades below emax, or fewer, still lies on the grid: it loses nothing."""
        return self.align_bits - 2 * self.operand.fraction_bits

    @property
    def tiny(self) -> float:
        """Largest truncation of one step when the result is subnormal."""
        return 2.0 ** -(126 + self.out_bits)


TENSOR_CORE = {
    "fp16": TensorCore(16, 25, 23, FORMATS["fp16"]),
    "bf16": TensorCore(16, 25, 23, FORMATS["bf16"]),
    "e4m3": TensorCore(32, 13, 13, FORMATS["e4m3"]),
}


LN2 = float(np.log(2.0))
LOG2_E = 1.0 / LN2
OUTWARD = 1 + 2.0**-30  # float64 sums of <= 2^17 terms are off by less than 2^-35, relative to sums of absolute values


def score_error(q: np.ndarray, k: np.ndarray, core: TensorCore) -> tuple[np.ndarray, np.ndarray]:
    """Exact products of rows, and the bound on the error of their wgmma chain."""
    s = np.zeros((q.shape[0], k.shape[0]))
    ds = np.zeros_like(s)
    q_exponent, k_exponent = _exponents(q, core).T.copy(), _exponents(k, core).T.copy()
    for start in range(0, q.shape[1], core.k_step):
        step = slice(start, start + core.k_step)
        top, inexact = _step_exponents(q_exponent[step], k_exponent[step], _floor_log2(np.abs(s) + ds), core)
        product_top = top[0]
        unit = np.ldexp(core.align, top[1])
        lost = np.minimum(inexact * unit, np.abs(q[:, step]) @ np.abs(k[:, step]).T)
        c_low = _floor_log2(np.maximum(np.abs(s) - ds, 0.0))
        if start:  # C loses bits only where the largest product sets an alignment grid coarser than C's own last bit
            lost += np.where(
                product_top > c_low + core.align_bits - core.out_bits, np.ldexp(core.align, product_top), 0.0
            )
        s = s + q[:, step] @ k[:, step].T
        result = _floor_log2(np.abs(s) + ds + lost)
        # The sum is cut to the output's bits only where it outgrew the alignment grid; elsewhere the grid is coarser.
        carries = result > np.maximum(product_top, c_low) + core.out_bits - core.align_bits
        ds = (ds + lost + np.where(carries, np.ldexp(core.out, result), 0.0)) * OUTWARD + core.tiny
    return s, ds


_NO_EXPONENT = -4000  # exponent of zero; sums of two stay inside int16


def _exponents(x: np.ndarray, core: TensorCore) -> np.ndarray:
    """Exponent of each operand as the tensor core reads it, int16."""
    return np.where(x == 0, _NO_EXPONENT, np.maximum(np.frexp(x)[1] - 1, core.operand.min_exponent)).astype(np.int16)


def _floor_log2(x: np.ndarray) -> np.ndarray:
    """floor(log2 x) of finite x >= 0, int16."""
    return np.where(x > 0, np.frexp(x)[1] - 1, _NO_EXPONENT).astype(np.int16)


def _step_exponents(
    q: np.ndarray, k: np.ndarray, c: np.ndarray, core: TensorCore
) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Largest product exponent, emax including C, and the number of products that may lose bits; each (rows, keys)."""
    top = np.full(c.shape, 2 * _NO_EXPONENT, np.int16)
    for i in range(q.shape[0]):
        np.maximum(top, q[i][:, None] + k[i][None, :], out=top)
    emax = np.maximum(top, c)
    floor = emax - np.int16(core.exact_binades)
    inexact = np.zeros(c.shape, np.int16)
    for i in range(q.shape[0]):
        exponent = q[i][:, None] + k[i][None, :]
        inexact += (exponent < floor) & (exponent > _NO_EXPONENT)
    return (top, emax), inexact


def softcap_error(x: np.ndarray, dx: np.ndarray, softcap: float) -> tuple[np.ndarray, np.ndarray]:
    """Scores c tanh(x / c) through ex2 and rcp: 1 - 2 / (2^(2x/c) + 1)."""
    c = softcap * LOG2_E
    tanh = np.tanh(x / c)
    carried = np.maximum(np.tanh((x + dx) / c) - tanh, tanh - np.tanh((x - dx) / c))
    own = EX2_REL / 2 + 2 * (U_FP32 + RCP_REL) + U_FP32
    return c * tanh, c * (carried + own * OUTWARD)


def rounding_error(low: np.ndarray, high: np.ndarray, fmt: Format) -> np.ndarray:
    """Largest error of rounding any number of [low, high] (>= 0) to nearest."""
    _, exponent = np.frexp(high)
    least = 1 - fmt.bias - fmt.fraction_bits - 1
    half_ulp = np.ldexp(1.0, np.maximum(exponent - 2 - fmt.fraction_bits, least))
    half_ulp = np.where(high > 0, np.minimum(half_ulp, high), 0.0)
    down, up = (np.minimum(z, fmt.max_finite).astype(fmt.dtype).astype(np.float64) for z in (low, high))
    inside = np.maximum(np.abs(low - down), np.abs(high - up))
    return np.where(high > fmt.max_finite, np.inf, np.where(down == up, np.minimum(inside, half_ulp), half_ulp))


def _p_offset_log2(model: Any) -> int:
    return 8 if model.dtype == "e4m3" else 0


class ErrorBound(NamedTuple):
    """Bounds of |computed - exact|, float64; inf where nothing is promised."""

    out: np.ndarray
    lse: np.ndarray


def forward_bound(problem: AttentionProblem, operands: Operands, model: Any) -> ErrorBound:
    """Bound the rounding error of every element of O and LSE."""
    out = np.zeros(problem.out_shape)
    lse = np.zeros(problem.lse_shape)
    with np.errstate(all="ignore"):
        for seq in problem.sequences():
            for head in range(problem.nheads):
                side = _Head.of(problem, operands, seq, head)
                for rows, blocks in _row_tiles(problem, seq, head % problem.group, model):
                    o_bound, lse_bound = _tile_bound(side, rows, blocks, model)
                    problem.rows_q(out, seq)[rows, head] = o_bound
                    problem.rows_lse(lse, seq)[head, rows] = lse_bound
    return ErrorBound(_or_inf(out), _or_inf(lse))


def _or_inf(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), np.inf, x)


def _row_tiles(problem: AttentionProblem, seq: Sequence, head: int, model: Any) -> Iterator[tuple[np.ndarray, range]]:
    """Rows of one head that share a kernel tile, and the key blocks that tile visits."""
    group = 1 << (problem.group - 1).bit_length() if model.pack_gqa else 1  # the kernel pads it to a power of two
    rows = np.arange(seq.seqlen_q)
    tile = (rows * group + (head if model.pack_gqa else 0)) // model.tile_m
    for t in np.unique(tile):
        ends = np.array([t * model.tile_m // group, min((t + 1) * model.tile_m - 1, seq.seqlen_q * group - 1) // group])
        first, stop = problem.visible_keys(ends, seq.seqlen_q, seq.seqlen_k)
        n_min, n_max = int(first[0]) // model.tile_n, -(-int(stop[1]) // model.tile_n)
        yield rows[tile == t], range(n_min, max(n_min, n_max))


@dataclass(frozen=True, slots=True)
class _Head:
    """Exact values of one head of one sequence."""

    problem: AttentionProblem
    seq: Sequence
    q: np.ndarray  # stored values, float64 (seqlen_q, head_dim)
    k: np.ndarray
    v: np.ndarray  # dequantised
    q_factor: np.ndarray  # descale per row, ones without
    k_factor: np.ndarray
    v_varies: bool  # V descales differ between key tiles
    roundings_of_c: int
    v_scaled: bool

    @classmethod
    def of(cls, problem: AttentionProblem, operands: Operands, seq: Sequence, head: int) -> _Head:
        kv_head = head // problem.group

        def factor(descale: Descale | None, h: int, seqlen: int) -> np.ndarray:
            return np.ones(seqlen) if descale is None else descale.rows(seq.index, h, seqlen).astype(np.float64)

        v_factor = factor(operands.v_descale, kv_head, seq.seqlen_k)
        return cls(
            problem,
            seq,
            problem.rows_q(operands.q, seq)[:, head].astype(np.float64),
            problem.rows_k(operands.k, seq)[:, kv_head].astype(np.float64),
            problem.rows_k(operands.v, seq)[:, kv_head].astype(np.float64) * v_factor[:, None],
            factor(operands.q_descale, head, seq.seqlen_q),
            factor(operands.k_descale, kv_head, seq.seqlen_k),
            bool(v_factor.size and (v_factor != v_factor[0]).any()),
            1 + (operands.q_descale is not None) + (operands.k_descale is not None),
            operands.v_descale is not None,
        )

    def scores(self, rows: np.ndarray, keys: slice, core: TensorCore) -> tuple[np.ndarray, np.ndarray]:
        """Exact log2 scores (-inf where hidden) and the bound dx on their error before the last fma."""
        s, ds = score_error(self.q[rows], self.k[keys], core)
        row_factor = self.problem.softmax_scale * LOG2_E * self.q_factor[rows][:, None]
        c = row_factor * self.k_factor[keys][None, :]
        # a factor that underflows before the last product, or scores that overflow, promise nothing
        c = np.where((row_factor >= FP32_MIN_NORMAL) & (c <= FP32_MAX), c, np.nan)
        eta = self.roundings_of_c * U_FP32 * OUTWARD
        x, dx = s * c, ds * c + (np.abs(s) + ds) * FP32_MIN_NORMAL  # c is at least the least normal number
        x = np.where(np.abs(x) + dx < FP32_MAX, x, np.nan)
        if self.problem.softcap:
            x, dx = softcap_error(x, dx + (eta + 3 * U_FP32) * np.abs(x), self.problem.softcap)
            eta = U_FP32
        first, stop = self.problem.visible_keys(rows, self.seq.seqlen_q, self.seq.seqlen_k)
        columns = np.arange(keys.start, keys.stop)
        hidden = (columns[None, :] < first[:, None]) | (columns[None, :] >= stop[:, None])
        return np.where(hidden, -np.inf, x), np.where(hidden, 0.0, dx + eta * np.abs(x)) * OUTWARD


class _State:
    """Exact sums of a row tile in the scale of its running maximum, and bounds carried beside them."""

    def __init__(self, rows: int, channels: int) -> None:
        self.max = self.max_low = self.max_high = np.full(rows, -np.inf)
        # rows: sum p, sum p B, sum p (1 - e^-r), |error of l - sum p^|
        self.l, self.l_up, self.l_down, self.l_error = (np.zeros(rows) for _ in range(4))
        # rows x channels: sum p v, sum p v^2, sum p |v|, the same three with weight B, |error of O - sum p^ v|
        self.o, self.o2, self.oa, self.bo, self.bo2, self.boa, self.o_error = (
            np.zeros((rows, channels)) for _ in range(7)
        )
        self.v_min, self.v_max = np.full((rows, channels), np.inf), np.full((rows, channels), -np.inf)

    def rescale(self, new_max: np.ndarray, a: np.ndarray) -> None:
        """Move every sum to a new maximum; alpha carries a relative error of at most ``a``."""
        alpha = np.where(np.isneginf(self.max), 0.0, np.exp2(self.max - np.where(np.isneginf(new_max), 0.0, new_max)))
        grow, grown = alpha * np.exp(a), alpha * np.expm1(a)
        wide, widened, narrow = grow[:, None], grown[:, None], alpha[:, None]
        self.l_up = grow * self.l_up + grown * self.l
        self.l_down = alpha * (self.l - (self.l - self.l_down) * np.exp(-a))
        self.bo, self.bo2, self.boa = (
            wide * b + widened * e for b, e in ((self.bo, self.o), (self.bo2, self.o2), (self.boa, self.oa))
        )
        self.l, self.l_error = alpha * self.l, grow * self.l_error
        self.o, self.o2, self.oa = (narrow * x for x in (self.o, self.o2, self.oa))
        self.o_error = wide * self.o_error
        self.max = new_max


def _tile_bound(side: _Head, rows: np.ndarray, blocks: range, model: Any) -> tuple[np.ndarray, np.ndarray]:
    size = -(-len(blocks) // model.num_splits) if len(blocks) else 0
    cuts = [min(blocks.start + i * size, blocks.stop) for i in range(model.num_splits + 1)]
    parts = []
    for start, stop in pairwise(cuts):
        state = _State(rows.size, side.v.shape[1])
        for block in range(stop - 1, start - 1, -1):
            _add_block(state, side, rows, block, model)
        parts.append(_finish(state, side, model))
    o, error, lse_log2, lse_error = parts[0] if len(parts) == 1 else _combine(parts)
    fmt = FORMATS[model.out_dtype]
    largest = np.abs(o) + error
    error = error + rounding_error(np.zeros_like(largest), largest, fmt)
    lse = np.abs(lse_log2) * LN2
    lse_error = (LN2 * lse_error + 2 * U_FP32 * (lse + LN2 * lse_error)) * OUTWARD
    empty = np.isneginf(lse_log2)
    return np.where(empty[:, None], 0.0, error), np.where(empty, 0.0, lse_error)


def _add_block(state: _State, side: _Head, rows: np.ndarray, block: int, model: Any) -> None:
    """Advance the exact sums and every carried bound by one key block."""
    core, keys = (
        TENSOR_CORE[model.dtype],
        slice(block * model.tile_n, min((block + 1) * model.tile_n, side.seq.seqlen_k)),
    )
    x, dx = side.scores(rows, keys, core)
    x_max = x.max(1)
    new_max = np.maximum(state.max, x_max)
    high, low = np.maximum(state.max_high, (x + dx).max(1)), np.maximum(state.max_low, (x - dx).max(1))
    moved = ((x + dx).max(1) > state.max_low) & ~np.isneginf(state.max)  # else alpha is exactly 1
    with np.errstate(invalid="ignore"):
        a = np.where(moved, EX2_REL + LN2 * U_FP32 * (high - state.max_low), 0.0)
    started = ~np.isneginf(state.max)
    state.rescale(new_max, a)
    state.max_low, state.max_high = low, high
    base = np.where(np.isneginf(new_max), 0.0, new_max)
    offset = _p_offset_log2(model)
    tau = np.where(np.isneginf(new_max), 0.0, np.maximum(high - base, base - low) + U_FP32 * (np.abs(base) + offset))
    y = x - base[:, None]
    p = np.exp2(y)
    r = LN2 * (dx + U_FP32 * (np.abs(y + offset) + dx + tau[:, None])) + EX2_REL
    visible = p > 0
    r = np.where(visible, r, 0.0)
    flushed = y + offset - dx - tau[:, None] < -125.0  # the result may be subnormal: flushed to zero
    cap = np.exp2(2 * U_FP32 * (np.abs(base) + offset + tau)) * (1 + 2 * EX2_REL)  # largest p^ in the scale of M^
    b_up = np.minimum(np.expm1(r) * OUTWARD, (np.exp2(tau) * cap)[:, None] / np.where(visible, p, 1.0) - 1.0)
    b_down = np.where(flushed, 1.0, -np.expm1(-r) * OUTWARD)
    b = np.where(visible, np.maximum(b_up, b_down), 0.0)
    delta = _p_rounding(np.where(flushed, 0.0, p * np.exp(-r)), p * np.exp(r), tau, cap, model)
    _accumulate(state, side.v[keys], (p, b, b_down, delta), started & moved, side, model)


def _p_rounding(low: np.ndarray, high: np.ndarray, tau: np.ndarray, cap: np.ndarray, model: Any) -> np.ndarray:
    """Bound on |round(p^) - p^| in the scale of the exact maximum, for p^ in [low, high] there."""
    unit, shift = 2.0 ** _p_offset_log2(model), np.exp2(tau)[:, None]
    low, high = unit * low / shift, unit * np.minimum(high * shift, cap[:, None])
    return rounding_error(low, high, FORMATS[model.dtype]) * shift / unit * OUTWARD


def _accumulate(state: _State, v: np.ndarray, weights: tuple, moved: np.ndarray, side: _Head, model: Any) -> None:
    """P V of one block and its share of the row sum."""
    core = TENSOR_CORE[model.dtype]
    p, b, b_down, delta = weights
    n, v_abs = p.shape[0], np.abs(v)
    seen = (p > 0).any(1)[:, None]
    state.v_min = np.where(seen, np.minimum(state.v_min, v.min(0)), state.v_min)
    state.v_max = np.where(seen, np.maximum(state.v_max, v.max(0)), state.v_max)
    sums = np.concatenate([p, p * b]) @ np.concatenate([v, v * v], axis=1)
    absolute = np.concatenate([p, p * b, delta]) @ v_abs
    d = v.shape[1]
    pa, ba, da = absolute[:n], absolute[n : 2 * n], absolute[2 * n :]
    carried = np.abs(state.o) + state.boa + state.o_error  # |C| at most, after rescaling
    added = (pa + ba + da) * OUTWARD  # sum of |P^ v|
    top = carried + added
    steps = model.tile_n // core.k_step
    keys = (p > 0).sum(1)[:, None]
    chunks = model.tile_n // model.promotion_interval if model.promotion_interval else 0
    # inside a promoted chain |C| is at most the products so far
    chain_top = added if chunks else top
    lost = np.minimum(keys * core.align * chain_top, added) + steps * core.align * added
    lost += np.minimum(steps * core.out * chain_top, 8 * added) + steps * core.tiny
    ratio = 2 * U_FP32 if side.v_varies else 0.0
    rescaled = moved[:, None] * U_FP32 + ratio
    lost += carried * rescaled * OUTWARD
    if chunks:
        lost += np.where(added > 0, chunks * U_FP32 * top, 0.0)
    elif core.out_bits < 23:
        lost += np.where(moved[:, None] | side.v_varies, core.out * carried, 0.0)
    state.o_error = (state.o_error + da + lost) * OUTWARD
    state.o, state.o2, state.oa = state.o + sums[:n, :d], state.o2 + sums[:n, d:], state.oa + pa
    state.bo, state.bo2, state.boa = state.bo + sums[n:, :d], state.bo2 + sums[n:, d:], state.boa + ba
    block_sum, block_up = p.sum(1), (p * b).sum(1)
    state.l, state.l_up = state.l + block_sum, state.l_up + block_up
    state.l_down = state.l_down + (p * b_down).sum(1)
    depth = model.tile_n // 8
    state.l_error = (
        state.l_error
        + depth * U_FP32 * (block_sum + block_up)
        + U_FP32 * np.where(block_sum > 0, state.l + state.l_up, 0.0)
    ) * OUTWARD


def _finish(state: _State, side: _Head, model: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Exact O and base-2 lse of a part, with bounds before the final rounding."""
    row_sum, least = state.l, state.l - state.l_down
    o = np.where(row_sum[:, None] > 0, state.o / row_sum[:, None], 0.0)
    up = state.l_up[:, None]
    spread = state.bo2 - 2 * o * state.bo + o * o * up
    noise = 2.0**-40 * (state.bo2 + 2 * np.abs(o * state.bo) + o * o * up)
    correlated = np.minimum(np.sqrt(up * (np.maximum(spread, 0.0) + noise)), state.boa + np.abs(o) * up)
    drift = np.maximum(state.max_high - state.max, state.max - state.max_low) + U_FP32 * np.abs(state.max)
    floor = np.exp2(-drift - 2 * U_FP32 * (np.abs(state.max) + _p_offset_log2(model) + drift)) * (1 - EX2_REL)
    least = np.maximum(least, floor)[:, None]
    l_error = state.l_error + 2 * U_FP32 * (row_sum + state.l_up)
    sigma = l_error[:, None] / least
    shift = np.minimum(correlated / least, state.v_max - state.v_min)
    error = shift + (state.o_error / least + (np.abs(o) + shift) * sigma) / np.where(sigma < 1, 1 - sigma, np.nan)
    epilogue = RCP_REL + (1 + side.v_scaled) * U_FP32
    error = (error + epilogue * OUTWARD * (np.abs(o) + error)) * OUTWARD + FP32_MIN_NORMAL
    lse_log2 = state.max + np.log2(row_sum)
    sigma, least = sigma[:, 0], least[:, 0]
    log_l = np.maximum(np.log1p(state.l_up / row_sum), -np.log(least / row_sum)) + sigma / np.where(
        sigma < 1, 1 - sigma, np.nan
    )
    magnitude = np.abs(np.log2(row_sum)) + _p_offset_log2(model) + (state.max_high - state.max_low) + log_l * LOG2_E
    lse_error = log_l * LOG2_E + LG2_ABS + LG2_REL * magnitude
    lse_error = (lse_error + U_FP32 * (np.abs(lse_log2) + lse_error)) * OUTWARD
    empty = row_sum == 0
    return (
        np.where(empty[:, None], 0.0, o),
        np.where(empty[:, None], 0.0, error),
        lse_log2,
        np.where(empty, 0.0, lse_error),
    )


def _combine(parts: list) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Bound of the split-KV combine."""
    o, error, lse, lse_error = (np.stack(x) for x in zip(*parts, strict=True))
    top = lse.max(0)
    base = np.where(np.isneginf(top), 0.0, top)
    w = np.exp2(lse - base)  # (splits, rows)
    distance = np.where(w > 0, np.abs(lse - base) + 2 * lse_error.max(0), 0.0)
    omega = np.where(w > 0, LN2 * (lse_error + U_FP32 * distance) + EX2_REL, 0.0)
    total, least = w.sum(0), (w * np.exp(-omega)).sum(0)
    merged = np.where(total[:, None] > 0, (w[..., None] * o).sum(0) / total[:, None], 0.0)
    least = np.where(least > 0, least, np.nan)[:, None]
    grow = (w * np.expm1(omega))[..., None] * np.abs(o - merged) + (w * np.exp(omega))[..., None] * error
    size = ((w * np.exp(omega))[..., None] * (np.abs(o) + error)).sum(0) / least
    shift = grow.sum(0) / least
    roundings = (2 * len(parts) + 1) * U_FP32 + RCP_REL
    merged_error = (shift + roundings * OUTWARD * size) * OUTWARD
    merged_lse = base + np.log2(total)
    relative = np.log((w * np.exp(omega)).sum(0) / total) * LOG2_E
    relative = np.maximum(relative, -np.log2(least[:, 0] / total)) + len(parts) * U_FP32 * LOG2_E
    base_error = lse_error.max(0)  # the maximum of the computed lse; it cancels but for its rounding
    lse_out = relative + LG2_ABS + LG2_REL * np.abs(np.log2(total)) + U_FP32 * (np.abs(merged_lse) + base_error)
    return merged, np.where(total[:, None] > 0, merged_error, 0.0), merged_lse, lse_out * OUTWARD
