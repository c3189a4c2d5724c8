"""The a-priori bound of one query, one number at a time, from steps 1 to 9 of reference/README.md.

Nothing here is outside the domain; every key of a block is visible. ``p`` is exact in the scale of the exact running
maximum, hats of the notation are computed values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fa3_reference.bounds.model import KernelModel
from fa3_reference.formats import FORMATS, Format
from tests.reference.bounds.by_hand import (
    EX2,
    FLOAT64_ROOM,
    LEAST,
    LOG2_E,
    RCP,
    U,
    chain_error,
    dot,
    g,
    grouped_error,
    last_bit,
    nearest,
    rounding_of_ends,
    size_of_dot,
    tanh_error,
)

LN2 = math.log(2)
FP32 = FORMATS["fp32"]
VANISHES = 120.0
LG2_ABS = 2.0**-22.64
LG2_REL = 2.0**-23


def e(relative: float) -> float:
    """Largest |ln(1 + r)| of |r| up to this."""
    return -math.log1p(-relative)


def tiny(m: KernelModel) -> float:
    """Largest error of a binary32 result below the normal range: half of its last bit, rounded up, or all of it."""
    return 2.0**-149 if m.keeps_subnormals else LEAST


def addition(m: KernelModel) -> float:
    """Relative error of an addition that may cut toward zero."""
    return 2.0**-10 if m.accumulator == "fp16" else 2.0**-23


def offset_of(m: KernelModel) -> int:
    """Power of two that e4m3 P is multiplied with, where its order says that it is: P then spans 0 to 256."""
    is_shifted = m.probabilities == "e4m3" and m.order.weights == "running" and m.order.rescale != "lazy"
    return 8 if is_shifted else 0


def most_offset(m: KernelModel) -> int:
    """The same at most: of an order that does not say, up to 448, which is below 2^9."""
    if m.probabilities != "e4m3" or m.order.weights == "normalised":
        return 0
    return 8 if offset_of(m) else 9


def single(x: float) -> float:
    return nearest(x, FP32)


def single_error(low: float, high: float) -> float:
    """Rounding to binary32 of a number between two: known where both ends round alike, else half an ulp."""
    size = max(abs(low), abs(high))
    half = math.ldexp(1.0, max(math.frexp(size)[1] - 25, -150))
    if single(low) != single(high):
        return half
    return min(max(abs(low - single(low)), abs(high - single(high))), half)


def format_error(low: float, high: float, fmt: Format) -> float:
    """Rounding to a format of a number between two, 0 <= low <= high."""
    if high == 0:
        return 0.0
    least = fmt.min_exponent - fmt.fraction_bits - 1
    half = min(math.ldexp(1.0, max(math.frexp(high)[1] - 2 - fmt.fraction_bits, least)), high)
    if nearest(low, fmt) != nearest(high, fmt):
        return half
    return min(max(abs(low - nearest(low, fmt)), abs(high - nearest(high, fmt))), half)


def unit_of(low: float, high: float, fmt: Format) -> float:
    """A power of two of which every number of a format between the two is a multiple."""
    a = nearest(low, fmt)
    b = nearest(high, fmt)
    if a == b:
        return math.inf if b == 0 else 2.0 ** last_bit(b)
    if a == 0:
        return fmt.min_subnormal
    return math.ldexp(1.0, max(math.frexp(a)[1] - 1, fmt.min_exponent) - fmt.fraction_bits)


@dataclass
class Query:
    """One query and its keys, as stored, with the factors that dequantise them."""

    q: list[float]
    k: list[list[float]]
    v: list[list[float]]
    scale: float
    softcap: float = 0.0
    q_factor: float | None = None
    k_factor: list[float] | None = None
    v_factor: list[float] | None = None

    def factor_k(self, j: int) -> float:
        return self.k_factor[j] if self.k_factor else 1.0

    def factor_v(self, j: int) -> float:
        return self.v_factor[j] if self.v_factor else 1.0


class Score(NamedTuple):
    """A score in log2 units, the bound of its error, and what float64 may lose of it."""

    x: float
    dx: float
    noise: float


def raw_error(r: Query, j: int, m: KernelModel) -> float:
    """Step 1: error of q k as it is kept, in its own units."""
    k = r.k[j]
    s = dot(r.q, k)
    size = size_of_dot(r.q, k)
    fmt = FORMATS[m.dtype]
    folded = m.order.scale == "folded"
    if m.accumulator == "wgmma" and not folded:
        ds = chain_error(r.q, k, m.core)
    else:
        tensor = grouped_error(r.q, k, m.core, not folded) if m.accumulator in ("wgmma", "either") else 0.0
        tree = g(len(r.q) + 1, 2.0**-23) * size + len(r.q) * LEAST
        ds = tensor if m.accumulator == "wgmma" else max(tensor, tree)
    if m.accumulator in ("wgmma", "either") and not m.keeps_subnormals and abs(s) - ds < LEAST:
        ds += LEAST
    ds += 2.0**-48 * size
    if folded:
        relative = fmt.unit_roundoff + 2 * U
        lost = relative * size + fmt.min_subnormal / 2 / r.scale * sum(abs(x) for x in k)
        ds = (ds * (1 + relative) + lost) * FLOAT64_ROOM
    if m.order.scale == "in_turn":
        ds += tiny(m) / r.scale
    if m.scores != "fp32":
        kept = FORMATS[m.scores]
        ds += 2 * kept.unit_roundoff * (1 + kept.epsilon) * (abs(s) + ds)
        ds += kept.min_subnormal * max(1.0, 1 / r.scale)
    return ds


def factor(r: Query, j: int, m: KernelModel) -> tuple[float, float]:
    """Step 1: c and its relative error h."""
    c = r.scale * LOG2_E * (r.q_factor or 1.0) * r.factor_k(j)
    roundings = 1 + (r.q_factor is not None) + (r.k_factor is not None)
    unsaid = 0 if m.is_blocked and m.order.scale == "float64" else 2
    h = g(roundings + unsaid)
    if m.is_stated and c >= LEAST:
        kept = np.float32(r.scale * LOG2_E) * np.float32(r.q_factor or 1.0) * np.float32(r.factor_k(j))
        h = abs(float(kept) / c - 1) + 2.0**-50
    return c, h * FLOAT64_ROOM


def score(r: Query, j: int, m: KernelModel) -> Score:
    s = dot(r.q, r.k[j])
    ds = raw_error(r, j, m)
    c, h = factor(r, j, m)
    x = s * c
    lifted = LEAST * (abs(s) + ds) if c < LEAST else 0.0
    dx = (c * ((1 + h) * ds + h * abs(s)) + lifted) * FLOAT64_ROOM
    noise = 2.0**-48 * size_of_dot(r.q, r.k[j]) * c
    if r.softcap:
        unit = r.softcap * LOG2_E
        found = []
        for tanh in {m.tanh_error, 0.0} if m.order.keys == "any" else {m.tanh_error}:
            off = unit * tanh_error(x, dx + g(3) * (abs(x) + dx), unit, tanh)
            capped = unit * math.tanh(x / unit)
            found.append((off + (g(2) if tanh else U) * (abs(capped) + off)) * FLOAT64_ROOM)
        x = unit * math.tanh(x / unit)
        dx = max(found)
    return Score(x, dx, noise)


@dataclass
class Weight:
    """A weight, its errors down and to either side, what rounding adds, and the powers of two that it is made of."""

    p: float
    down: float
    either: float
    rounding: float
    counts: bool = False
    grid: float = 0.0
    p_grid: float = 0.0


@dataclass
class State:
    """Sums so far in the scale of the running maximum, per channel where a list."""

    channels: int
    max: float = -math.inf
    low: float = -math.inf
    high: float = -math.inf
    tau: float = 0.0
    largest: float = 0.0
    l: float = 0.0  # noqa: E741  # sum p, as in the notation
    l_up: float = 0.0
    l_down: float = 0.0
    l_error: float = 0.0
    v_factor: float | None = None
    noise: float = 2.0**-46
    unknown: bool = False
    worst: float = 0.0
    keys: int = 0
    l_grid: float = math.inf
    weights: int = 0
    moves: int = 0
    share: float = 0.0
    o: list[float] = field(default_factory=list)
    o2: list[float] = field(default_factory=list)
    oa: list[float] = field(default_factory=list)
    bo: list[float] = field(default_factory=list)
    bo2: list[float] = field(default_factory=list)
    boa: list[float] = field(default_factory=list)
    o_error: list[float] = field(default_factory=list)
    o_grid: list[float] = field(default_factory=list)
    v_min: list[float] = field(default_factory=list)
    v_max: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("o", "o2", "oa", "bo", "bo2", "boa", "o_error"):
            setattr(self, name, [0.0] * self.channels)
        self.o_grid = [math.inf] * self.channels
        self.v_min = [math.inf] * self.channels
        self.v_max = [-math.inf] * self.channels


def move(t: State, scores: list[Score], log_ratio: float, m: KernelModel) -> bool:
    """Steps 2 and 3: the maximum of a block, and what its factor does to all sums; whether alpha may not be 1."""
    offset = most_offset(m)
    new = max(t.max, *(s.x for s in scores))
    high = max(t.high, *(s.x + s.dx for s in scores))
    low = max(t.low, *(s.x - s.dx for s in scores))
    stays = max(s.x + s.dx for s in scores) <= t.low
    moved = t.max > -math.inf and (not stays or m.order.rescale == "contracted")
    off = max(high - new, new - low)
    if m.is_stated:
        tau = off + single_error(new - offset - off, new - offset + off)
    else:
        tau = off + U * (abs(new) + offset + off)
    a = 0.0
    vanishes = False
    if moved:
        reach = abs(high) + abs(t.low) + 2 * offset
        span = high - t.low + g(2) * reach
        if m.is_stated:
            distance = t.max - new
            exponent = single_error(distance - t.tau - tau, distance + t.tau + tau)
        elif m.order.maxima == "scaled":
            exponent = U * span
        else:
            exponent = U * (reach / 2 + span) if stays else g(2) * (span + reach)
        a = e(m.exp_error) + LN2 * exponent
        vanishes = span + abs(log_ratio) > VANISHES
        t.l_grid = 0.0
    alpha = 0.0 if t.max == -math.inf else 2.0 ** (t.max - new)
    grow = alpha * math.exp(a)
    grown = alpha * (math.expm1(a) + vanishes)
    t.l_up = grow * t.l_up + grown * t.l
    t.l_down = alpha * (t.l if vanishes else t.l - (t.l - t.l_down) * math.exp(-a))
    for d in range(t.channels):
        t.bo[d] = grow * t.bo[d] + grown * t.o[d]
        t.bo2[d] = grow * t.bo2[d] + grown * t.o2[d]
        t.boa[d] = grow * t.boa[d] + grown * t.oa[d]
        t.o[d] *= alpha
        t.o2[d] *= alpha
        t.oa[d] *= alpha
        t.o_error[d] *= grow
    t.l *= alpha
    t.l_error *= grow
    t.worst += a
    t.max = new
    t.low = low
    t.high = high
    t.tau = tau
    t.moves += moved
    t.largest = max(t.largest, *(abs(s.x) + s.dx for s in scores))
    return moved


def log_errors(t: State, scores: list[Score], m: KernelModel) -> list[float]:
    """Step 3: r of every key of a block."""
    found = []
    most = most_offset(m)
    for s in scores:
        y = s.x - t.max
        dx = s.dx
        if m.order.exponent == "rounded":
            dx += U * (abs(s.x) + dx)
        within = dx + t.tau
        exponent = max(abs(y + offset_of(m)), abs(y + most))
        if m.is_stated:
            at = y + offset_of(m)
            r = LN2 * (dx + single_error(at - within, at + within)) + e(m.exp_error)
            if abs(y) + within < 2.0**-23 and m.exp_error <= EX2:
                r = min(r, LN2 * (abs(y) + t.tau))
        else:
            r = LN2 * (dx + U * (exponent + within)) + e(m.exp_error)
        if not m.is_blocked:  # factors of moved maxima telescope, and an exponential counts for every 8 keys
            times = 0 if m.order.weights == "normalised" else -(-len(scores) // 8)
            largest = t.largest if m.order.maxima == "unscaled" else 0.0
            r += times * e(m.exp_error) + g(3) * LN2 * (exponent + dx + t.tau + 2 * largest)
        found.append(r)
    return found


def weights(t: State, scores: list[Score], m: KernelModel) -> tuple[list[Weight], float]:
    """Steps 3 and 4: the weights of a block, and what P is in units of p."""
    rs = log_errors(t, scores, m)
    rounded_x = U if m.order.exponent == "rounded" else 0.0
    dxs = [s.dx + rounded_x * (abs(s.x) + s.dx) for s in scores]
    t.unknown = t.unknown or max(rs) > 50
    t.worst = max(t.worst, *rs)
    cap = 2 ** (2 * U * (abs(t.max) + most_offset(m) + t.tau)) * (1 + 2 * m.exp_error)
    if not m.is_blocked or m.order.rescale == "lazy":
        cap = math.inf
    ps = [2.0 ** (s.x - t.max) for s in scores]
    flushed = [s.x - t.max + offset_of(m) - dx - t.tau < -VANISHES for s, dx in zip(scores, dxs, strict=True)]
    lows = [0.0 if f else p * math.exp(-r) for p, r, f in zip(ps, rs, flushed, strict=True)]
    highs = [p * math.exp(r) for p, r in zip(ps, rs, strict=True)]
    roundings, unit = p_roundings(t, lows, highs, cap, m)
    if not m.is_blocked and m.order.weights == "running":
        near = distance_of_p([s.x for s in scores], dxs, m)
        roundings = [min(rounding, high * near) for rounding, high in zip(roundings, highs, strict=True)]
    found = []
    for p, r, f, low, high, rounding in zip(ps, rs, flushed, lows, highs, roundings, strict=True):
        up = min(math.expm1(r) * FLOAT64_ROOM, 2.0**t.tau * cap / (p or 1.0) - 1)
        down = 1.0 if f else -math.expm1(-r) * FLOAT64_ROOM
        w = Weight(p, down, max(up, down), rounding)
        if m.is_stated:
            offset = 2.0 ** offset_of(m)
            top = high * offset * 2.0**t.tau
            top = top if top >= LEAST else 0.0
            bottom = min(low * offset / 2.0**t.tau, top)
            w.counts = top > 0
            w.grid = unit_of(bottom, top, FP32)
            w.p_grid = unit_of(bottom, top, m.p_format)
        if m.order.row_sum_of == "rounded":
            relative = rounding / (p or 1.0)
            w.either += relative
            w.down = min(w.down + relative, 1.0)
            w.rounding = 0.0
        found.append(w)
    return found, unit


def distance_of_p(xs: list[float], dxs: list[float], m: KernelModel) -> float:
    """Step 4: how far P lies from what it is multiplied with at most, relative to it."""
    low = min(x - dx for x, dx in zip(xs, dxs, strict=True))
    high = max(x + dx for x, dx in zip(xs, dxs, strict=True))
    spread = high - low if len(xs) > 1 else 0.0
    largest = max(abs(low), abs(high)) + most_offset(m)
    distance = LN2 * (spread + g(6) * largest) + e(m.exp_error)
    return math.expm1(min(distance, 700)) * FLOAT64_ROOM + (2.0**-12 if m.probabilities == "e4m3" else 0.0)


def p_roundings(
    t: State, lows: list[float], highs: list[float], cap: float, m: KernelModel
) -> tuple[list[float], float]:
    """Step 4: rounding of P where its scale is known, normalised, or unknown."""
    fmt = m.p_format
    if m.is_blocked and m.order.rescale != "lazy":
        unit = 2.0 ** offset_of(m)
        shift = 2.0**t.tau
        ends = [(unit * low / shift, unit * min(high * shift, cap)) for low, high in zip(lows, highs, strict=True)]
        return [format_error(a, b, fmt) * shift / unit * FLOAT64_ROOM for a, b in ends], unit
    if m.order.weights == "normalised":
        least = sum(lows)
        most = sum(highs)
        own = 1 + g(len(lows) + 4) + RCP
        ends = [(low / most / own, high / least * own) for low, high in zip(lows, highs, strict=True)]
        return [format_error(a, b, fmt) * most * FLOAT64_ROOM for a, b in ends], 1 / most
    unit = 1 / sum(highs) if m.order.weights == "any" else 2.0**-t.tau
    subnormal = fmt.min_subnormal / 2 / unit
    return [min(fmt.unit_roundoff * high + subnormal, high) * FLOAT64_ROOM for high in highs], unit


class Sizes(NamedTuple):
    """|C|, the sum of |P^ v|, the largest power of a product or that sum, and |O| at most unless more is lost."""

    carried: float
    added: float
    aligned: float
    reached: float


def accumulate(
    t: State, r: Query, block: range, ws: list[Weight], unit: float, rescaled: float, m: KernelModel
) -> None:
    """Step 5: P V of one block."""
    fmt = m.core.operand
    n = len(block)
    half = 2 if m.accumulator == "either" else 1
    steps = -(-max(m.tile_n, n) // (m.core.k_step // half))
    t.keys += n
    subnormal = n * m.p_format.min_subnormal / 2.0 ** offset_of(m)
    tree = 0.0 if m.accumulator == "wgmma" else g(n + 2, addition(m))
    cuts = 2 * ((n + steps) * m.core.align + steps * m.core.out + 4 * U) if m.accumulator in ("wgmma", "either") else 0
    t.share += subnormal + tree + cuts
    for d in range(t.channels):
        v = [r.v[j][d] * r.factor_v(j) for j in block]
        t.v_min[d] = min(t.v_min[d], *v)
        t.v_max[d] = max(t.v_max[d], *v)
        pa = sum(w.p * abs(x) for w, x in zip(ws, v, strict=True))
        ba = sum(w.p * w.either * abs(x) for w, x in zip(ws, v, strict=True))
        da = sum(w.rounding * abs(x) for w, x in zip(ws, v, strict=True))
        carried = abs(t.o[d]) + t.boa[d] + t.o_error[d]
        added = (pa + ba + da) * FLOAT64_ROOM
        tops = [w.p * (1 + w.either) + w.rounding for w in ws]
        tops = [max(x, fmt.min_normal / unit) if x > 0 else 0.0 for x in tops]
        sides = [max(abs(x), fmt.min_normal * r.factor_v(j)) if x else 0.0 for x, j in zip(v, block, strict=True)]
        largest = min(sum(a * b for a, b in zip(tops, sides, strict=True)), max(tops) * max(sides)) * FLOAT64_ROOM
        pv = sum(w.p * x for w, x in zip(ws, v, strict=True))
        sizes = Sizes(carried, added, max(largest, added), abs(t.o[d] + pv) + t.boa[d] + t.o_error[d] + ba + da)
        own = Block([r.v[j][d] for j in block], ws, unit, steps, rescaled > 0, largest)
        exact = what_is_exact(t, d, own, sizes, m)
        lost = cut(sizes, n, steps, rescaled > 0, exact, m)
        lost += carried * rescaled * FLOAT64_ROOM
        vanished = 3 if m.accumulator == "wgmma" else 3 + 2 * n  # products and sums
        lost += (vanished * tiny(m) + steps * m.core.tiny) * max(r.factor_v(j) for j in block) / unit
        t.o_error[d] = (t.o_error[d] + da + lost) * FLOAT64_ROOM
        t.o[d] += pv
        t.o2[d] += sum(w.p * x * x for w, x in zip(ws, v, strict=True))
        t.oa[d] += pa
        t.bo[d] += sum(w.p * w.either * x for w, x in zip(ws, v, strict=True))
        t.bo2[d] += sum(w.p * w.either * x * x for w, x in zip(ws, v, strict=True))
        t.boa[d] += ba


class Block(NamedTuple):
    """What a block is to one channel: V as stored, weights, P in units of p, steps, and whether C was rescaled."""

    v: list[float]
    ws: list[Weight]
    unit: float
    steps: int
    rescaled: bool
    largest: float  # product


def what_is_exact(t: State, d: int, b: Block, sizes: Sizes, m: KernelModel) -> tuple[bool, bool, bool]:
    """Step 5, what is exact: products and C, the cut of the sum, binary32 sums; of one channel."""
    if not m.is_stated:
        return False, False, False
    promoted = m.promotion_interval > 0
    scale = b.unit / (t.v_factor or 1.0) * 2.0**t.tau
    carried = sizes.carried * scale
    added = sizes.added * scale
    least = max(abs(t.o[d]) - t.boa[d] - t.o_error[d], 0.0) * scale * 2.0 ** (-2 * t.tau)
    ulp = math.ldexp(1.0, max(math.frexp(least)[1] - 24, -149)) if least > 0 else 2.0**-149
    if b.rescaled:
        t.o_grid[d] = 0.0 if promoted else ulp
    bits = min(2.0 ** last_bit(x) if x else math.inf for x in b.v)
    products = min(w.p_grid for w in b.ws) * bits
    t.o_grid[d] = min(t.o_grid[d], products)
    chain = products if promoted else t.o_grid[d]
    before = 0.0 if promoted else carried
    total = before + added
    on_grid = chain >= m.core.align * max(b.largest * scale, total if b.steps > 1 else before)
    return on_grid, total < 2 * chain / m.core.out, carried + added < t.o_grid[d] / U


def cut(sizes: Sizes, keys: int, steps: int, rescaled: bool, exact: tuple[bool, bool, bool], m: KernelModel) -> float:
    """Step 5: what an accumulator loses."""
    carried, added, aligned, reached = sizes
    core = m.core
    if m.accumulator != "wgmma":
        unit = g(1, addition(m))
        tree = g(keys + 1, unit) * (added + carried) if added else 0.0
        if m.accumulator != "either":
            return tree
        top = max(carried + added, aligned)
        products = min(keys * core.align * top, added) + steps * core.align * top
        sums = steps * core.out * top + (g(steps, addition(m)) * (carried + added) if added else 0.0)
        return max(tree, min(products, carried + added) + min(sums, carried + added))
    chunks = m.tile_n // m.promotion_interval if m.promotion_interval else 0
    inside = added if chunks else carried + added  # C of a promoted chain is what was added so far
    products = min(keys * core.align * max(inside, aligned), added) + steps * core.align * aligned
    if not chunks and core.out_bits < 23 and rescaled:
        products += core.out * carried
    lost = 0.0 if exact[0] else products
    lost += 0.0 if exact[1] else min(steps * core.out * inside, 8 * added)
    if chunks and added and not exact[2]:
        total = min(carried + added, reached) if chunks == 1 else carried + added
        lost += chunks * U * (total + lost)
    return lost


def add_to_row_sum(t: State, ws: list[Weight], m: KernelModel) -> None:
    """Step 6: a block's share of the row sum."""
    added = sum(w.p for w in ws)
    up = sum(w.p * w.either for w in ws)
    t.l += added
    t.l_up += up
    t.l_down += sum(w.p * w.down for w in ws)
    t.weights += sum(w.counts for w in ws)
    t.l_grid = min(t.l_grid, *(w.grid for w in ws))
    depth = len(ws)
    if m.is_blocked:
        depth = m.tile_n // 8 if m.order.row_sum == "pairs" else m.tile_n // 4 + 2
    total = t.l + t.l_up + t.l_error if added else 0.0
    chain = total if m.order.row_sum == "any" else added + up
    t.l_error = (t.l_error + g(depth) * chain + U * total * (1 + g(depth))) * FLOAT64_ROOM


@dataclass
class Part:
    """O and base-2 lse of one split, and bounds of their errors; ``noise`` of float64."""

    o: list[float]
    error: list[float]
    noise: list[float]
    lse: float
    lse_error: float


def row_sum_error(t: State, m: KernelModel) -> float:
    """Step 6: with the two additions of a quad; of a stated sum no more than one for each weight and each move."""
    total = t.l + t.l_up
    error = t.l_error + g(2) * (total + t.l_error)
    if not m.is_stated:
        return error
    count = (max(t.weights - 1, 0) + t.moves) * U
    error = min(error, count / (1 - count) * total)
    return 0.0 if total * 2.0 ** (t.tau + offset_of(m)) < t.l_grid / U else error


def finish(t: State, r: Query, m: KernelModel) -> Part:
    """Steps 3, 7 and 9: O, of a mean of rows whose weights are off, and lse."""
    least = t.l - t.l_down
    off = max(t.high - t.max, t.max - t.low)
    if m.is_blocked:  # the row sum holds the largest weight
        exponent = off + g(3) * (abs(t.max) + offset_of(m) + off)
        least = max(least, 2.0**-exponent * (1 - m.exp_error))
    l_error = row_sum_error(t, m)
    sigma = l_error / least if least > 0 else math.inf  # errors may take more than the row sum
    is_power = False
    if m.is_stated:
        shift = 2.0 ** offset_of(m)
        low = single((t.l - t.l_down - l_error) * 2.0**-t.tau * shift)
        high = single((t.l + t.l_up + l_error) * 2.0**t.tau * shift)
        is_power = low == high and math.frexp(low)[0] == 0.5 and low >= 1
    errors = []
    noises = []
    v_scaled = r.v_factor is not None
    v_factor = t.v_factor or 1.0
    for d in range(t.channels):
        o = t.o[d] / t.l
        spread = t.bo2[d] - 2 * o * t.bo[d] + o * o * t.l_up
        allowed = 2.0**-40 * (t.bo2[d] + 2 * abs(o * t.bo[d]) + o * o * t.l_up)
        weighed = min(math.sqrt(t.l_up * (max(spread, 0.0) + allowed)), t.boa[d] + abs(o) * t.l_up)
        mean = min(weighed / least if least > 0 else math.inf, t.v_max[d] - t.v_min[d])
        error = mean + (t.o_error[d] / least + (abs(o) + mean) * sigma) / (1 - sigma) if sigma < 1 else math.inf
        largest = max(abs(t.v_min[d]), abs(t.v_max[d]), m.core.operand.min_normal * v_factor)
        relative = m.p_format.unit_roundoff + t.share + g(len(r.k) + 4)
        coarse = t.v_max[d] - t.v_min[d] + largest * relative * 1.01 if relative < 0.5 else math.inf
        error = coarse if t.unknown else min(error, coarse)
        last = (RCP + (1 + v_scaled) * U) * (1 + 2.0**-20)
        if is_power:
            last = U if v_scaled and math.frexp(v_factor)[0] != 0.5 else 0.0
        if v_scaled:
            last += tiny(m) * 2.0 ** offset_of(m) / v_factor * (t.l + l_error)
        error = (error + last * (abs(o) + error)) * FLOAT64_ROOM + 2 * tiny(m) * max(1.0, v_factor)
        noise = 2 * (t.noise + 2.0**-52 * t.keys) / t.l * t.oa[d]
        errors.append(error + noise)
        noises.append(noise)
    lse, lse_error = logarithm(t, least, sigma, is_power, m)
    return Part([o / t.l for o in t.o], errors, noises, lse, lse_error)


def logarithm(t: State, least: float, sigma: float, is_exact: bool, m: KernelModel) -> tuple[float, float]:
    """Step 7: the base-2 lse of a part."""
    lse = t.max + math.log2(t.l)
    if sigma >= 1:
        return lse, math.inf
    logs = max(math.log1p(t.l_up / t.l), -math.log(least / t.l))
    worst = t.worst + 2.0**-80
    if m.order.row_sum_of == "rounded":
        worst -= math.log1p(-(m.p_format.unit_roundoff + t.keys * m.p_format.min_subnormal / 2))
    logs = worst if t.unknown else min(logs, worst)
    logs += sigma / (1 - sigma)
    offset = most_offset(m)
    size = abs(math.log2(t.l)) + offset + (t.high - t.low) + logs * LOG2_E + U * (abs(t.max) + offset)
    error = logs * LOG2_E + (0.0 if is_exact else LG2_ABS + LG2_REL * size)
    if m.order.maxima == "unscaled" or m.order.lse == "apart":
        error += g(3) * t.largest
    rounding = U * (abs(lse) + error)
    if m.is_stated:
        adds_zero = t.tau == 0 and t.max == offset_of(m)
        rounding = 0.0 if adds_zero else single_error(lse - error, lse + error)
    return lse, (error + rounding) * FLOAT64_ROOM


def combine(parts: list[Part], m: KernelModel) -> Part:
    """Step 8: parts that are weighed by their lse."""
    top = max(part.lse for part in parts)
    n = len(parts)
    ws = [2.0 ** (part.lse - top) for part in parts]
    farthest = max(part.lse_error for part in parts)
    distances = [abs(part.lse - top) + part.lse_error + farthest for part in parts]
    exp = e(EX2)
    weighed = []
    for part, distance in zip(parts, distances, strict=True):
        others = [other.lse + other.lse_error for other in parts if other is not part]
        is_top = part.lse - part.lse_error > max(others) and m.is_stated
        weighed.append(0.0 if is_top else LN2 * U * distance + exp)
    omegas = [LN2 * part.lse_error + x for part, x in zip(parts, weighed, strict=True)]
    vanishes = [distance + math.log2(n) > VANISHES for distance in distances]
    ups = [max(math.expm1(omega), float(v)) for omega, v in zip(omegas, vanishes, strict=True)]
    total = sum(ws)
    least = sum(w * (0.0 if v else math.exp(-omega)) for w, v, omega in zip(ws, vanishes, omegas, strict=True))
    roundings = (g(2 * n + (not m.is_stated)) + RCP) * (1 + 2.0**-20)
    aparts = by_lse(weighed, distances, top * LN2, math.log(total)) if m.order.combine == "lse" else [0.0] * n
    os = []
    errors = []
    noises = []
    for d in range(len(parts[0].o)):
        o = sum(w * part.o[d] for w, part in zip(ws, parts, strict=True)) / total
        grow = size = apart = noise = 0.0
        for w, up, omega, own, part in zip(ws, ups, omegas, aparts, parts, strict=True):
            heavy = w * math.exp(omega)
            grow += w * up * abs(part.o[d] - o) + heavy * part.error[d]
            size += heavy * (abs(part.o[d]) + part.error[d])
            apart += heavy * own * (abs(part.o[d]) + part.error[d])
            noise += w * (part.noise[d] + 2.0**-46 * abs(part.o[d]))
        error = (grow / least + roundings * size / least) * FLOAT64_ROOM + apart / least
        os.append(o)
        errors.append(error + (n + 1) * tiny(m) * (1 + max(abs(part.o[d]) for part in parts)))
        noises.append(noise / total)
    lse = top + math.log2(total)
    more = math.log(sum(w * math.exp(omega) for w, omega in zip(ws, omegas, strict=True)) / total) * LOG2_E
    relative = max(more, -math.log2(least / total)) + g(n - 1) * LOG2_E
    error = relative + LG2_ABS + LG2_REL * (abs(math.log2(total)) + relative)
    error += single_error(lse - error, lse + error)
    return Part(os, errors, noises, lse, error * FLOAT64_ROOM)


def by_lse(weighed: list[float], distances: list[float], base: float, log_total: float) -> list[float]:
    """Step 8 where weights are exponentials of lse_i - lse and not divided by their sum."""
    sums = max(weighed) + g(len(weighed) - 1)
    shift = sums + LN2 * (LG2_ABS + LG2_REL * (log_total * LOG2_E + sums))
    shift += U * (1 + U) * (abs(base + log_total) + shift)
    agains = [LN2 * U * (x + math.log2(len(weighed)) + shift * LOG2_E) + e(EX2) for x in distances]
    return [math.expm1(again + shift) * FLOAT64_ROOM for again in agains]


def bound(r: Query, splits: list[list[range]], m: KernelModel) -> tuple[list[float], float]:
    """The bound of one query's O and LSE; ``splits`` are the blocks of each part, in the order of their visits."""
    parts = []
    for blocks in splits:
        t = State(len(r.v[0]))
        for block in blocks:
            scores = [score(r, j, m) for j in block]
            t.noise = max(t.noise, 2 * max(s.noise for s in scores))
            v_factor = min(r.factor_v(j) for j in block)
            ratio = 1.0 if t.v_factor is None else t.v_factor / v_factor
            t.v_factor = v_factor
            moved = move(t, scores, math.log2(ratio), m)
            ws, unit = weights(t, scores, m)
            accumulate(t, r, block, ws, unit, moved * U + (2 * U if ratio != 1 else 0.0), m)
            add_to_row_sum(t, ws, m)
        parts.append(finish(t, r, m))
    part = parts[0] if len(parts) == 1 else combine(parts, m)
    fmt = FORMATS[m.out_dtype]
    errors = [x if fmt is FP32 else rounding_of_ends(o, x, fmt) for o, x in zip(part.o, part.error, strict=True)]
    return [x + noise for x, noise in zip(errors, part.noise, strict=True)], in_nats(part, len(r.k), m)


def in_nats(part: Part, keys: int, m: KernelModel) -> float:
    """Step 7: times ln 2, a constant that is rounded itself, and the float64 of the truth."""
    if math.isinf(part.lse_error):
        return math.inf
    lse = abs(part.lse) * LN2
    error = LN2 * part.lse_error
    if m.is_stated:
        error += abs(single(LN2) / LN2 - 1) * FLOAT64_ROOM * (lse + error)
        error += single_error(lse - error, lse + error)
    else:
        error += g(2) * (lse + error)
    error *= FLOAT64_ROOM
    return error + 2.0**-52 * (keys + 8 + 2 * abs(part.lse)) if error else 0.0
