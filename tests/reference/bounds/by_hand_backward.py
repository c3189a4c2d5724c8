"""The bound of gradients, one number at a time, from steps B1 to B10 of reference/README.md.

``L`` is an lse in log2 units, ``c`` softmax_scale log2(e); everything else is named as there. One kv head, every key
visible unless ``visible`` says otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fa3_reference.bounds.model import BackwardModel
from fa3_reference.formats import FORMATS, Format
from tests.reference.bounds.by_hand import (
    FLOAT64_ROOM,
    LARGEST,
    LEAST,
    LOG2_E,
    U,
    chain_error,
    dot,
    g,
    grouped_error,
    nearest,
    rounding_of_ends,
    size_of_dot,
    tanh_error,
)

MET_BEFORE = 6  # roundings of softmax_scale, or a root of it, in the factors of a product
CUT = 2.0**-23  # a binary32 addition of the tensor core may cut


@dataclass
class Rows:
    """One query head: lists of rows."""

    q: list[list[float]]
    k: list[list[float]]
    v: list[list[float]]
    dout: list[list[float]]
    out: list[list[float]]
    lse: list[float]
    dlse: list[float]
    scale: float
    softcap: float = 0.0
    visible: list[list[bool]] = field(default_factory=list)

    def sees(self, i: int, j: int) -> bool:
        return self.visible[i][j] if self.visible else True


@dataclass
class Pair:
    """P and dS of one query and key: exact, and how far off they enter a product; and what P needs on the way."""

    p: float
    low: float
    high: float
    p_off: float
    slope: float = 1.0
    slope_off: float = 0.0
    ds: float = 0.0
    ds_off: float = 0.0


def product_error(a: list[float], b: list[float], model: BackwardModel) -> float:
    """B1: error of S or dP as the sum leaves it."""
    size = size_of_dot(a, b)
    if model.accumulator == "wgmma":
        error = chain_error(a, b, model.core)
    else:
        error = g(len(a) + MET_BEFORE, CUT) * size * FLOAT64_ROOM
        if model.accumulator == "either":
            error = max(error, grouped_error(a, b, model.core))
        error += 2 * len(a) * LEAST if size else 0.0
    return error + len(a) * 2.0**-52 * size


def kept_error(x: float, dx: float, fmt: Format, roundings: int, tiny: float) -> float:
    """B1: S rounded before and after its scaling, dP once, where they are kept in 16 bits."""
    if fmt.name == "fp32":
        return dx
    return (dx + g(roundings, fmt.unit_roundoff) * (abs(x) + dx) + fmt.min_subnormal * tiny) * FLOAT64_ROOM


def exponents(r: Rows, i: int, j: int, m: BackwardModel) -> tuple[float, float, float, float]:
    """B1, B2 and B10: x, dx before any lse of the kernel's own, the slope and its error."""
    c = r.scale * LOG2_E
    s = dot(r.q[i], r.k[j])
    ds = product_error(r.q[i], r.k[j], m)
    ds = kept_error(s, ds, FORMATS[m.scores], 2, 1 + 1 / r.scale)
    x = c * s
    dx = c * (ds + LEAST)
    slope = 1.0
    slope_off = 0.0
    if r.softcap:
        unit = r.softcap * LOG2_E
        dx = (dx + g(6) * (abs(x) + dx) + LEAST) * FLOAT64_ROOM
        kinds = {m.tanh_error, 0.0} if m.scales == "any" else {m.tanh_error}
        dy = max(tanh_error(x, dx, unit, kind) for kind in kinds)
        y = abs(math.tanh(x / unit))
        near = min(y + dy, 1.0)
        far = max(y - dy, 0.0)
        slope = 1 / math.cosh(x / unit) ** 2
        slope_off = max((near - y) * (near + y), (y - far) * (y + far))
        slope_off = (slope_off + U * near**2 + g(3) * (slope + slope_off) + 2.0**-50) * FLOAT64_ROOM
        x = unit * math.tanh(x / unit)
        dx = unit * dy
    log = r.lse[i] * LOG2_E
    roundings = 4 if m.exponent == "rounded" else 3
    dx = dx + g(roundings) * (abs(x) + dx) + g(2) * abs(log)
    x -= log
    dx = (dx + U * (abs(x) + dx) + LEAST * (abs(s) + ds)) * FLOAT64_ROOM
    return x, dx, slope, slope_off


def own_lse(xs: list[float], dxs: list[float], keys: int, m: BackwardModel) -> list[float]:
    """B9: errors of one row's exponents where the row sum is the kernel's own; of the visible keys."""
    dxs = [(dx + 4 * U * (abs(x) + dx + math.log2(max(len(xs), 1)))) * FLOAT64_ROOM for x, dx in zip(xs, dxs)]
    more = sum(2 ** (x + dx) for x, dx in zip(xs, dxs, strict=True))
    less = sum(2 ** (x - dx) for x, dx in zip(xs, dxs, strict=True))
    of_sum = max(math.log2(more), -math.log2(less)) + 2.0**-44 if xs else 0.0
    own = -math.log2(1 - m.exp_error) - LOG2_E * math.log1p(-g(keys + 8))
    return [(dx + of_sum + own) * FLOAT64_ROOM for dx in dxs]


def weight(x: float, dx: float, slope: float, slope_off: float, m: BackwardModel) -> Pair:
    """B2 and B9: P between its ends, and how far off it enters products."""
    fmt = FORMATS[m.weights or m.dtype]
    p = 2.0**x
    low = 0.0 if x - dx < -126 else 2.0 ** (x - dx) * (1 - m.exp_error) / FLOAT64_ROOM
    high = 0.0 if x + dx < -126 else 2.0 ** (x + dx) * (1 + m.exp_error) * FLOAT64_ROOM
    off = max(nearest(high, fmt) - p, p - nearest(low, fmt))
    if m.accumulator != "wgmma":
        off = max(off, high - p, p - low)
    if m.forward == "own":
        off = max(off, high - p + fmt.unit_roundoff * high + fmt.min_subnormal)
    return Pair(p, low, high, off, slope, slope_off)


def row_of_weights(r: Rows, i: int, m: BackwardModel) -> list[Pair | None]:
    """P of one query and every key; None where it is hidden."""
    seen = [j for j in range(len(r.k)) if r.sees(i, j)]
    found = [exponents(r, i, j, m) for j in seen]
    dxs = [dx for _, dx, _, _ in found]
    if m.forward == "own":
        dxs = own_lse([x for x, *_ in found], dxs, len(r.k), m)
    pairs = {j: weight(x, dx, a, b, m) for j, (x, _, a, b), dx in zip(seen, found, dxs, strict=True)}
    return [pairs.get(j) for j in range(len(r.k))]


def dot_error(r: Rows, i: int, pairs: list[Pair | None], dps: list[tuple[float, float]], m: BackwardModel) -> float:
    """B3 and B9: the error of D."""
    n = len(r.dout[i])
    size = size_of_dot(r.dout[i], r.out[i])
    flushed = LEAST * (sum(abs(x) + abs(y) for x, y in zip(r.out[i], r.dout[i], strict=True)) + 2 * n)
    of_out = g(m.dots_depth or n) * size * FLOAT64_ROOM + flushed
    if m.forward == "given" and m.dots == "out":
        return of_out
    tree = 0.0  # of sum P dP, hidden pairs adding zeros
    for pair, (dp, ddp) in zip(pairs, dps, strict=True):
        p, off = (pair.p, pair.p_off) if pair else (0.0, 0.0)
        dp, ddp = (abs(dp), ddp) if pair else (0.0, 0.0)
        tree += off * (dp + ddp) + p * ddp + g(len(r.k) + 2) * (p + off) * (dp + ddp) + 2 * LEAST
    tree *= FLOAT64_ROOM
    if m.forward == "given":
        own = sum(pair.p * dp for pair, (dp, _) in zip(pairs, dps, strict=True) if pair)
        return tree + abs(own - dot(r.dout[i], r.out[i])) + 2.0**-44 * size
    if m.weights == "fp32":
        return tree
    return max(tree, own_out_error(r, i, pairs, m) + of_out)


def own_out_error(r: Rows, i: int, pairs: list[Pair | None], m: BackwardModel) -> float:
    """B9: what an O of the kernel's own, rounded as gradients are, does to D."""
    n = len(r.dout[i])
    total = 0.0
    for d in range(n):
        carried = rounded = exact = 0.0
        for pair, v in zip(pairs, r.v, strict=True):
            if pair:
                carried += pair.p_off * abs(v[d])
                rounded += (pair.p + pair.p_off) * abs(v[d])
                exact += pair.p * abs(v[d])
        off = (carried + g(len(r.k) + 8) * rounded) * FLOAT64_ROOM + 2.0**-44 * exact + LEAST
        off = max(off, rounding_of_ends(r.out[i][d], off, FORMATS[m.dtype]))
        total += abs(r.dout[i][d]) * off
    return total * (1 + g(n)) * FLOAT64_ROOM


def differences(r: Rows, i: int, pairs: list[Pair | None], m: BackwardModel) -> list[tuple[float, float]]:
    """B3 and B4: dP - D + dlse of every key, and its error."""
    fmt = FORMATS[m.dp]
    dps = [dot(r.dout[i], v) for v in r.v]
    dps = [(dp, kept_error(dp, product_error(r.dout[i], v, m), fmt, 1, 1.0)) for dp, v in zip(dps, r.v, strict=True)]
    d_off = dot_error(r, i, pairs, dps, m)
    d = dot(r.dout[i], r.out[i])
    size = size_of_dot(r.dout[i], r.out[i])
    found = []
    for dp, ddp in dps:
        error = ddp + d_off
        t = dp - d + r.dlse[i]
        base = d
        own = abs(dp) + size
        if any(r.dlse):  # one rounding more, whichever two of the three meet first
            sums = abs(t) + abs(d) + abs(r.dlse[i])
            error += (U * (sums + error) + 2 * LEAST) * FLOAT64_ROOM
            base = d - r.dlse[i]
            own += abs(r.dlse[i])
        larger = max(abs(t), abs(base))
        found.append((t, (error + U * (larger + error) + own * 2.0**-44 + 2 * LEAST) * FLOAT64_ROOM))
    return found


def with_ds(r: Rows, pair: Pair, t: float, dt: float, m: BackwardModel) -> None:
    """B5 and B10: dS and how far off it enters products."""
    fmt = FORMATS[m.weights or m.dtype]
    p_off = max(pair.high - pair.p, pair.p - pair.low)
    high = pair.high
    if m.forward == "own" or m.ds_of == "rounded":
        p_off = max(p_off, pair.p_off)
        high = pair.p + p_off
    ds = pair.p * t
    error = (p_off * abs(t) + high * dt) * FLOAT64_ROOM
    error += U * (abs(ds) + error) + (LEAST if high > 0 else 0.0)
    if r.softcap:
        around = max(r.softcap, 1 / r.softcap) if m.forward == "own" else 1.0
        error = abs(ds) * pair.slope_off + error * (pair.slope + pair.slope_off)
        ds *= pair.slope
        error = (error + g(3) * (abs(ds) + error) + LEAST * (around + abs(t) + dt)) * FLOAT64_ROOM
    plain = rounding_of_ends(ds, error, fmt)
    choices = {
        "sums": [plain],
        "weights": [rounded_in_scale(r.scale, ds, error, fmt)],
        "any": [
            plain,
            rounded_in_scale(r.scale, ds, error, fmt),
            error,
            rounded_in_scale(r.scale, ds, plain, fmt),
        ],
    }
    pair.ds = ds
    pair.ds_off = max(choices[m.scales])


def rounded_in_scale(scale: float, ds: float, error: float, fmt: Format) -> float:
    error = error * scale + g(2) * (abs(ds) + error) * scale + LEAST
    return rounding_of_ends(ds * scale, error * FLOAT64_ROOM, fmt) / scale * FLOAT64_ROOM


@dataclass
class Total:
    """A sum: exact, off by at most, and the sum of absolute values."""

    exact: float
    off: float
    size: float


def product(w: list[tuple[float, float]], x: list[float], m: BackwardModel, powers: tuple[float, float]) -> Total:
    """B6: sum of w x with w off by so much; ``powers`` are the largest of the whole row and column."""
    n = len(x)
    size = sum((abs(a) + off) * abs(b) for (a, off), b in zip(w, x, strict=True))
    least = m.core.operand.min_normal
    cut = 0.0
    if m.accumulator != "wgmma":
        cut = g(n + MET_BEFORE, CUT) * size + (2 * n * LEAST if size else 0.0)
    if m.accumulator != "fp32" and size:
        k_step = m.core.k_step
        steps = -(-n // k_step) if m.accumulator == "wgmma" else -(-n // (k_step // 2))
        promoted = g(steps, CUT) * size if m.accumulator == "either" else 0.0
        top = max(powers[0], least) * max(powers[1], least)
        one = (k_step + 1) * 2.0**-m.core.align_bits * max(top, size) + 2.0**-m.core.out_bits * size + m.core.tiny
        cut = max(cut, steps * one * (1 + steps * 2.0**-19) + promoted)
    carried = sum(off * abs(b) for (_, off), b in zip(w, x, strict=True))
    exact = sum(a * b for (a, _), b in zip(w, x, strict=True))
    return Total(exact, (carried + cut + size * n * 2.0**-52) * FLOAT64_ROOM, size)


def added(parts: list[Total], m: BackwardModel, count: int = 0) -> Total:
    """B7: additions of parts, of which there may be ``count``."""
    count = count or len(parts)
    if count == 1 and len(parts) == 1:
        return parts[0]
    total = Total(sum(x.exact for x in parts), sum(x.off for x in parts), sum(x.size for x in parts))
    fmt = FORMATS[m.parts]
    if m.parts == "fp32":
        total.off += g(count) * (total.size + total.off) + (2 * count * LEAST if total.size else 0.0)
    else:
        total.off += g(count + 1, fmt.unit_roundoff) * (total.size + total.off)
        total.off += 2 * count * fmt.min_subnormal if total.size else 0.0
    total.off = total.off * FLOAT64_ROOM if total.size + total.off <= fmt.max_finite else math.inf
    return total


def scaled(x: Total, scale: float) -> Total:
    """B8: times softmax_scale."""
    off = (x.off + g(2) * (abs(x.exact) + x.off)) * scale * FLOAT64_ROOM
    off += LEAST * (1 + scale) if x.size else 0.0
    size = x.size * scale
    return Total(x.exact * scale, off if size + off <= LARGEST else math.inf, size)


def stored(x: Total, m: BackwardModel) -> float:
    """B8: the last rounding, and twice 2^-20 of the error for float64."""
    fmt = FORMATS[m.out_dtype or m.dtype]
    error = x.off + (LEAST if x.size else 0.0)
    own = error * 2.0**-20
    return (error if fmt.name == "fp32" else rounding_of_ends(x.exact, error + own, fmt)) + own


def pairs_of(r: Rows, m: BackwardModel) -> list[list[Pair]]:
    """B1 to B5 and B10 of one query head."""
    least = 2.0**-500  # products of a weight that vanished may be lost in float64 or kept
    found = []
    for i in range(len(r.q)):
        row = row_of_weights(r, i, m)
        for pair, (t, dt) in zip(row, differences(r, i, row, m), strict=True):
            if pair:
                with_ds(r, pair, t, dt, m)
                pair.p_off = max(pair.p_off, least)
                pair.ds_off = max(pair.ds_off, least)
        found.append([pair or Pair(0.0, 0.0, 0.0, 0.0) for pair in row])
    return found


def largest_power(values: list[float]) -> float:
    return max(abs(x) for x in values)


def dq_bound(r: Rows, pairs: list[list[Pair]], m: BackwardModel) -> list[list[float]]:
    """B6 to B8 of dQ."""
    n = len(r.k)
    tile = m.tile_n or n
    cuts = range(0, n, tile)
    blocks = len(cuts) if m.tile_n or m.parts != "fp32" else -(-n // m.core.k_step)
    result = []
    for row in pairs:
        w = [(pair.ds, pair.ds_off) for pair in row]
        channels = []
        for d in range(len(r.k[0])):
            column = [k[d] for k in r.k]
            parts = []
            for a in cuts:
                x = column[a : a + tile]
                part = w[a : a + tile]
                parts.append(product(part, x, m, (max(abs(y) + off for y, off in part), largest_power(x))))
            if m.parts == "fp32":
                total = scaled(added(parts, m, blocks), r.scale)
            else:
                total = added([scaled(part, r.scale) for part in parts], m, blocks)
            channels.append(stored(total, m))
        result.append(channels)
    return result


def keys_bound(heads: list[Rows], pairs: list[list[list[Pair]]], m: BackwardModel, which: str) -> list[list[float]]:
    """B6 to B8 of dK ("k") or dV ("v") of one kv head; ``pairs`` of each query head."""
    others = [r.q if which == "k" else r.dout for r in heads]
    parts = len(heads) if m.heads == "any" else 0
    if m.heads != "added":
        pairs = [[row for head in pairs for row in head]]
        others = [[row for head in others for row in head]]
    rows = len(others[0])
    blocks = -(-rows // m.tile_m) if m.tile_m else 1
    result = []
    for j in range(len(heads[0].k)):
        channels = []
        for d in range(len(others[0][0])):
            found = []
            for head, x in zip(pairs, others, strict=True):
                w = [(row[j].ds, row[j].ds_off) if which == "k" else (row[j].p, row[j].p_off) for row in head]
                column = [row[d] for row in x]
                powers = (max(abs(y) + off for y, off in w), largest_power(column))
                total = product(w, column, m, powers)
                found.append(added([scaled(total, heads[0].scale) if which == "k" else total], m, blocks))
            channels.append(stored(added(found, m, parts), m))
        result.append(channels)
    return result
