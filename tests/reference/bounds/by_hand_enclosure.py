"""The enclosure of one query: its program in pairs of numbers, one number at a time, binary32 by exact rationals.

Scores and P V are the tensor core's, whose definition has tests of its own; everything else is worked out here from
the section on the enclosure in reference/README.md and steps 1 to 8.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from fa3_reference.bounds.model import KernelModel
from fa3_reference.bounds.tensor_core import multiply, multiply_between
from fa3_reference.formats import FORMATS
from tests.reference.bounds.by_hand import EX2, LARGEST, LEAST, LOG2_E, RCP, g, nearest
from tests.reference.bounds.by_hand_forward import LG2_ABS, LG2_REL, LN2, Part, Query, combine, offset_of, single, tiny

Ends = tuple[float, float]


def fma(a: float, b: float, c: float) -> float:
    """a b + c, rounded once to binary32, to nearest even."""
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    near = np.float32(float(exact))
    around = (np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf)))
    return float(min(around, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1)))


def ex2(x: Ends) -> Ends:
    """Exact at 0, flushed below the least normal number, off by its largest relative error elsewhere."""
    low = 1.0 if x[0] == 0 else 2.0 ** x[0] * (1 - EX2)
    high = 1.0 if x[1] == 0 else 2.0 ** x[1] * (1 + EX2)
    return single(low if low >= LEAST else 0.0), single(high)


def times(x: Ends, factor: Ends) -> Ends:
    """A range times one of numbers >= 0."""
    return x[0] * factor[x[0] < 0], x[1] * factor[x[1] >= 0]


def flushed(x: Ends) -> Ends:
    return (0.0 if 0 < x[0] < LEAST else x[0]), (0.0 if -LEAST < x[1] < 0 else x[1])


def factor(r: Query, first: int, m: KernelModel) -> Ends:
    """c, which is one number where the order of its roundings is stated."""
    in_turn = m.order.scale == "in_turn"
    c = single(single(LOG2_E if in_turn else r.scale * LOG2_E) * (r.q_factor or 1.0))
    c = max(single(c * r.factor_k(first)), LEAST)
    if m.order.maxima == "scaled" and m.order.scale in ("float64", "in_turn"):
        return c, c
    roundings = 1 + (r.q_factor is not None) + (r.k_factor is not None)
    width = g(2 * roundings + 2 * (m.order.scale == "float32"))
    return single(c * (1 - width)), single(c * (1 + width))


def capped(s: float, c: Ends, cap: float, m: KernelModel) -> Ends:
    """tanh of a score over the softcap."""
    if m.tanh_error:
        steep = (c[0] / (cap * LOG2_E) * (1 - g(4)), c[1] / (cap * LOG2_E) * (1 + g(4)))
    else:
        steep = (single(c[0] * single(2 / cap)), single(c[1] * single(2 / cap)))
    x = (single(s * steep[s <= 0]), single(s * steep[s > 0]))
    if m.tanh_error:
        x = x if m.keeps_subnormals else flushed(x)
        low = math.tanh(x[0]) * (1 - np.sign(x[0]) * m.tanh_error)
        high = math.tanh(x[1]) * (1 + np.sign(x[1]) * m.tanh_error)
        return max(single(low), -1.0), min(single(high), 1.0)
    grown = ex2(x)
    halves = [single(1 / single(end + 1) * (1 + sign * RCP)) for end, sign in zip(grown, (1, -1), strict=True)]
    return single(1 - 2 * halves[0]), single(1 - 2 * halves[1])


def scores(r: Query, block: range, m: KernelModel) -> tuple[list[Ends], Ends]:
    """Scores of a block, and the factor that takes them to log2 units."""
    raw = multiply(np.array([r.q]), np.array([r.k[j] for j in block]).T, m.core)[0].tolist()
    if m.order.scale == "in_turn":
        raw = [single(s * single(r.scale)) for s in raw]
    c = factor(r, block.start, m)
    if not r.softcap:
        return [(s, s) for s in raw], c
    width = g(2) if m.tanh_error else 0.0
    unit = max(single(r.softcap * LOG2_E), LEAST)
    return [capped(s, c, r.softcap, m) for s in raw], (unit * (1 - width), unit * (1 + width))


class State:
    def __init__(self, channels: int) -> None:
        self.max = (-math.inf, -math.inf)
        self.sum = (0.0, 0.0)
        self.o: list[Ends] = [(0.0, 0.0)] * channels
        self.v_factor: float | None = None


def exponents(t: State, ss: list[Ends], c: Ends, m: KernelModel) -> tuple[list[Ends], Ends]:
    """Take a block into the running maximum; the exponents of its weights and of the factor of what came before."""
    offset = float(offset_of(m))
    low, high = max(s[0] for s in ss), max(s[1] for s in ss)
    ends = (fma(low, c[low <= 0], -offset), fma(high, c[high > 0], -offset))
    width = 0.0 if m.order.maxima == "scaled" else g(2) * (max(abs(ends[0]), abs(ends[1])) + offset)
    old = t.max
    t.max = (max(old[0], single(ends[0] - width)), max(old[1], single(ends[1] + width)))
    found = []
    for s in ss:
        a = c[s[0] <= 0]
        b = c[s[1] > 0]
        if m.order.exponent == "contracted":
            found.append((fma(s[0], a, -t.max[1]), fma(s[1], b, -t.max[0])))
        else:
            found.append((single(single(s[0] * a) - t.max[1]), single(single(s[1] * b) - t.max[0])))
    apart = (single(old[0] - t.max[1]), min(single(old[1] - t.max[0]), 0.0))
    if m.order.maxima == "unscaled":
        apart = (apart[0] * (1 + g(3)), apart[1] * (1 - g(3)))
        if m.order.rescale == "contracted":
            width = g(2) * max(abs(t.max[0]), abs(t.max[1]))
            apart = (apart[0] - width, apart[1] + width)
    return found, apart


def add_block(t: State, r: Query, block: range, m: KernelModel) -> None:
    ss, c = scores(r, block, m)
    found, apart = exponents(t, ss, c, m)
    ps = [ex2(x) for x in found]
    alpha = ex2(apart)
    v_factor = r.factor_v(block.start)
    ratio = 1.0 if t.v_factor is None else single(t.v_factor / v_factor)
    t.v_factor = v_factor
    rescale = (single(alpha[0] * ratio), single(alpha[1] * ratio))
    codes = [[[nearest(min(p[end], m.p_format.max_finite), m.p_format) for p in ps]] for end in (0, 1)]
    low, high = (np.array(x) for x in codes)
    v = np.array([r.v[j] for j in block])
    moved = [times(o, rescale) for o in t.o]
    if not m.keeps_subnormals:
        moved = [flushed(x) for x in moved]
    if not m.promotion_interval:
        carried = (np.array([[single(x[end]) for x in moved]]) for end in (0, 1))
        a, b = multiply_between(low, high, v, m.core, *carried)
        t.o = list(zip(a[0].tolist(), b[0].tolist(), strict=True))
    for start in range(0, len(block) if m.promotion_interval else 0, m.promotion_interval or 1):
        ks = slice(start, start + m.promotion_interval)
        a, b = multiply_between(low[:, ks], high[:, ks], v[ks], m.core)
        moved = [(fma(x[0], 1.0, y), fma(x[1], 1.0, z)) for x, y, z in zip(moved, a[0], b[0], strict=True)]
        t.o = moved
    depth = m.tile_n // 8 if m.order.row_sum == "pairs" else m.tile_n // 4 + 2
    least = t.sum[0] * alpha[0] + sum(p[0] for p in ps)
    most = t.sum[1] * alpha[1] + sum(p[1] for p in ps)
    t.sum = (single(least * (1 - g(depth + 1))), single(most * (1 + g(depth + 1))))


def finish(t: State, m: KernelModel) -> Part:
    """Centre and radius of O and of the base-2 lse."""
    low = t.sum[0] * (1 - g(2))
    high = t.sum[1] * (1 + g(2))
    v_factor = t.v_factor or 1.0
    inverse = (v_factor / high * (1 - RCP), v_factor / low * (1 + RCP))
    os = []
    radii = []
    for end in t.o:
        a, b = times(end, inverse)
        largest = max(abs(a), abs(b))
        radius = (b - a) / 2 + g(3) * largest + 4 * tiny(m) * max(1.0, v_factor) * (1 + 1 / low)
        os.append((a + b) / 2)
        radii.append(radius if largest + radius < LARGEST * (1 - 2.0**-10) else math.inf)
    logs = (math.log2(low), math.log2(high))
    log = max(abs(logs[0]), abs(logs[1]))
    roundings = 4 if m.order.maxima == "unscaled" or m.order.lse == "apart" else 2
    slack = LG2_ABS + LG2_REL * log + g(roundings) * (max(abs(t.max[0]), abs(t.max[1])) + log + 1)
    least = t.max[0] + logs[0] - slack
    most = t.max[1] + logs[1] + slack
    return Part(os, radii, [0.0] * len(os), (least + most) / 2, (most - least) / 2)


def enclosure(r: Query, splits: list[list[range]], m: KernelModel) -> tuple[list[Ends], Ends]:
    """Ends of O and of LSE of one query."""
    parts = []
    for blocks in splits:
        t = State(len(r.v[0]))
        for block in blocks:
            add_block(t, r, block, m)
        parts.append(finish(t, m))
    part = parts[0] if len(parts) == 1 else combine(parts, m)
    fmt = FORMATS[m.out_dtype]
    out = [(nearest(o - x, fmt), nearest(o + x, fmt)) for o, x in zip(part.o, part.error, strict=True)]
    width = LN2 * part.lse_error + g(2) * (abs(part.lse) + part.lse_error)
    return out, (LN2 * part.lse - width, LN2 * part.lse + width)
