"""Legal orders of attention in plain numpy: kernels that are correct, each in another way, for a judge that knows none.

Each adds, scales, rounds and splits as some real kernel does, in binary32 or in a tensor core that cuts. Nothing here
is shared with the bounds or the twins but number formats: the tensor core is written once more, from its description.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from fa3_reference.formats import FORMATS
from fa3_reference.problem import DTYPES, AttentionProblem, Operands
from tests.quality.term_orders import WAYS, plus_term, term_of

F = np.float32
LOG2_E = 1.4426950408889634
# Products a step, and bits kept; of operands cut to tf32, what tensor cores may do at worst.
TENSOR_CORE = {"fp16": (16, 25, 23), "bf16": (16, 25, 23), "e4m3": (32, 13, 13), "fp32": (4, 23, 23)}


@dataclass(frozen=True)
class Order:
    """One legal order of operations; the defaults are the plainest kernel.

    ``products`` and ``sums`` say how Q K^T and P V add: "serial", "reverse", "pairs", "toward zero", "flushed" (to
    nearest, results below 2^-126 are zero), or the tensor core "chained", "promoted" (to binary32 in every step) or
    "halves" (chained, half of a step at a time, from the last to the first). ``scale`` multiplies scores "after" their
    sum, or goes into Q ("query") or by its root into Q and K ("root"); with log2(e) it is "log2", and "fused" where the
    maximum is taken off in the same operation; so it is "in_turn", where scores are rounded with the scale alone first;
    "folded" is Q rounded again with the scale in it.
    """

    products: str = "serial"
    sums: str = "serial"
    scale: str = (
        "after"  # or into Q: "query", "root" of it into Q and K; with log2(e): "log2", "fused" with the maximum
    )
    exp_ulp: float = 0.0
    tanh: str = "exact"
    tile: int = 0
    keys: str = "forward"
    lazy: bool = False
    normalised: bool = False
    weights: str = ""
    row_sum: str = "serial"
    of_rounded: bool = False
    splits: int = 1
    combine: str = "sum"
    p_scale: float = 1.0
    tf32: str = ""  # how both factors of a product lose all but 10 fraction bits: "cut" or "nearest"
    dtypes: tuple[str, ...] = (*DTYPES, "fp32")

    @property
    def accumulator(self) -> Literal["fp32", "either", "tf32"]:
        """What a judge must assume of the machine that runs it."""
        if self.tf32:
            return "tf32"
        cuts = ("chained", "promoted", "halves")
        return "either" if self.products in cuts or self.sums in cuts else "fp32"


_16_BITS = ("fp16", "bf16", "fp32")
# How a kernel takes a sink: as one more key, which may be of any tile; as the first maximum; in the finished row sum,
# in the scale of the largest key; or with the finished O and lse, as a part that was split off.
SINKS = ("key", "first", "end", "after")
ORDERS = {
    "plain": Order(),
    "sums from the last to the first": Order("reverse", "reverse", keys="reverse", tile=1),
    "sums in pairs": Order("pairs", "pairs", row_sum="pairs"),
    "sums toward zero": Order("toward zero", "toward zero"),
    "sums toward zero, tiles of 16": Order("toward zero", "toward zero", tile=16, scale="fused"),
    "flush to zero": Order("flushed", "flushed"),
    "flush to zero, tiles of 16": Order("flushed", "flushed", tile=16),
    "exponential of 2 ulp": Order(exp_ulp=2),
    "exponential of 2 ulp, tiles of 16": Order(exp_ulp=2, tile=16),
    "scale in Q in binary32": Order(scale="query"),
    "root of scale in Q and K": Order(scale="root"),
    "log2 units": Order(scale="log2", tile=32),
    "fused exponent": Order(scale="fused", tile=32),
    "fused exponent, keys from the right": Order(scale="fused", tile=32, keys="reverse"),
    "fused exponent of scaled scores": Order(scale="in_turn", tile=32),
    "normalised P": Order(normalised=True),
    "normalised P, sums in pairs": Order("pairs", "pairs", normalised=True, row_sum="pairs"),
    "P in binary32": Order(weights="fp32"),
    "Kahan row sum": Order(row_sum="exact"),
    "tiles of 64": Order(tile=64),
    "tiles of 16, shuffled": Order(tile=16, keys="shuffled"),
    "lazy": Order(tile=16, lazy=True),
    "lazy, fused": Order(tile=16, lazy=True, scale="fused"),
    "splits": Order(tile=16, splits=4),
    "splits by lse": Order(tile=16, splits=4, combine="lse"),
    "splits, normalised": Order(splits=4, normalised=True),
    "row sum of rounded P": Order(of_rounded=True),
    "row sum of rounded P, tiles of 32": Order(of_rounded=True, tile=32, scale="fused"),
    "row sum of rounded P, splits": Order(of_rounded=True, tile=16, splits=4),
    "tanh.approx": Order(tanh="approx", scale="fused", tile=32),
    "tanh of ex2 and rcp": Order(tanh="ex2", scale="fused", tile=32),
    "tensor core": Order("chained", "chained", scale="fused", tile=64),
    "tensor core, scaled scores": Order("chained", "chained", scale="in_turn", tile=64),
    "tensor core, promoted": Order("promoted", "promoted", scale="fused", tile=64),
    "tensor core, halves of steps": Order("halves", "halves", scale="fused", tile=32, keys="reverse"),
    "tensor core for scores alone": Order("chained", "serial", tile=32),
    "tensor core for P V alone": Order("serial", "chained", tile=32),
    "tensor core, row sum of rounded P": Order("chained", "chained", scale="fused", tile=64, of_rounded=True),
    "tensor core, tanh.approx, lazy": Order("chained", "promoted", scale="fused", tile=32, tanh="approx", lazy=True),
    "tensor core, splits": Order("chained", "chained", scale="fused", tile=32, splits=3, keys="reverse"),
    "P times 256": Order(p_scale=256.0, tile=32, scale="fused", dtypes=("e4m3",)),
    "P times 448": Order(p_scale=448.0, tile=32, dtypes=("e4m3",)),
    "tensor core, P times 256": Order("chained", "promoted", p_scale=256.0, tile=64, scale="fused", dtypes=("e4m3",)),
    "tensor core, P times 448": Order("chained", "chained", p_scale=448.0, tile=64, dtypes=("e4m3",)),
    "one key at a time": Order(tile=1, dtypes=_16_BITS),
    "one key at a time, exponential of 2 ulp": Order(tile=1, exp_ulp=2, dtypes=_16_BITS),
    "splits of one key": Order(tile=1, splits=64, dtypes=_16_BITS),
    "tf32": Order(tf32="cut", dtypes=("fp32",)),
    "tf32 to nearest": Order("toward zero", "toward zero", tf32="nearest", tile=16, dtypes=("fp32",)),
    "tf32, tensor core": Order("chained", "chained", scale="fused", tile=64, tf32="cut", dtypes=("fp32",)),
    "tf32, scale in Q": Order("chained", "promoted", scale="query", tile=32, tf32="cut", dtypes=("fp32",)),
    "tf32, root of scale in Q and K": Order("pairs", "pairs", scale="root", tf32="cut", dtypes=("fp32",)),
    "tf32, normalised P": Order(normalised=True, tf32="cut", dtypes=("fp32",)),
}


class Result(NamedTuple):
    """``out`` in the output's format and a natural ``lse`` in binary32, shaped as the problem's."""

    out: np.ndarray
    lse: np.ndarray


def orders_of(dtype: str) -> dict[str, Order]:
    """Return the orders of a dtype by name; binary32 operands meet no tensor core but that of tf32."""
    either = "" if dtype == "fp32" else "either"
    taken = {name: order for name, order in ORDERS.items() if dtype in order.dtypes}
    return {name: order for name, order in taken.items() if order.accumulator in ("fp32", "tf32", either)}


def attend(
    order: Order,
    problem: AttentionProblem,
    x: Operands,
    rng: np.random.Generator,
    out: str = "",
    head_of: type[Head] | None = None,
) -> Result:
    """Run one order on a dense problem; ``rng`` draws what the order leaves free, ``out`` is the output's format."""
    fmt = FORMATS[out or ("bf16" if problem.dtype == "e4m3" else problem.dtype)]
    result = Result(np.zeros(problem.out_shape, fmt.dtype), np.full(problem.lse_shape, -np.inf, F))
    (seq,) = problem.sequences()
    first, stop = problem.visible_keys(np.arange(seq.seqlen_q), seq.seqlen_q, seq.seqlen_k)
    keys = np.arange(seq.seqlen_k)
    hidden = (keys < first[:, None]) | (keys >= stop[:, None])
    for head in range(problem.nheads):
        kv = head // problem.group
        descales = ((x.q_descale, head), (x.k_descale, kv), (x.v_descale, kv))
        scales = [1.0 if d is None else float(d.values[0, h, 0]) for d, h in descales]
        factor = F(F(F(problem.softmax_scale) * F(scales[0])) * F(scales[1]))
        arrays = (a[0, :, h].astype(F) for a, h in ((x.q, head), (x.k, kv), (x.v, kv)))
        with np.errstate(all="ignore"):
            sink = None if x.sinks is None else x.sinks[head]
            term, shift = (None, 0.0) if x.term is None or not x.term.size else term_of(problem, x.term, head, rng)
            o, lse = (head_of or Head)(order, problem, factor, rng)(*arrays, hidden, sink, term)
            result.out[0, :, head] = (o * F(scales[2])).astype(fmt.dtype)
        result.lse[0, head] = lse - shift
    return result


def rounded(x: np.ndarray, name: str) -> np.ndarray:
    """Return x in a format; e4m3 saturates."""
    fmt = FORMATS[name]
    if name == "e4m3":
        x = np.clip(x, -fmt.max_finite, fmt.max_finite)
    return x.astype(fmt.dtype).astype(F)


def in_tf32(x: np.ndarray, how: str) -> np.ndarray:
    """Return the numbers with 10 fraction bits, "cut" or rounded to the "nearest", ties away from zero."""
    bits = np.ascontiguousarray(x).view(np.uint32) + np.uint32(0x1000 if how == "nearest" else 0)
    return np.where(np.isfinite(x), (bits & np.uint32(0xFFFFE000)).view(F), x)


class Head:
    """One head of one order."""

    def __init__(self, order: Order, problem: AttentionProblem, factor: np.float32, rng: np.random.Generator) -> None:
        self.order, self.problem, self.factor, self.rng = order, problem, factor, rng
        self.dtype = problem.dtype
        self.in_log2 = order.scale in ("log2", "fused", "in_turn")
        self.way, self.sink = "", F(-np.inf)
        self.lift = 1 + rng.choice([-1, 1]) * order.exp_ulp * 2.0**-23 * 0.99

    def __call__(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        hidden: np.ndarray,
        sink: np.float32 | None = None,
        term: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        x, unit = self.scores(q, k)
        if term is not None:
            x, unit = plus_term(x, unit, self.to_nats, self.in_log2, term, str(self.rng.choice(WAYS)))
        x = np.where(hidden, F(-np.inf), x)
        if sink is not None:
            self.way = str(self.rng.choice(SINKS))
            if self.way == "end" and self.order.splits > 1:  # it may overflow next to the largest key of one part
                self.way = "after"
            self.sink = F(sink * F(LOG2_E)) if self.in_log2 else sink
            if self.way == "key":
                x = np.concatenate([x, np.full((len(x), 1), self.sink / unit, F)], axis=1)
                v = np.concatenate([v, np.zeros((1, v.shape[1]), F)])
        step = self.order.tile or max(len(v), 1)
        blocks = [np.arange(a, min(a + step, len(v))) for a in range(0, len(v), step)]
        if self.order.keys == "reverse":
            blocks = blocks[::-1]
        if self.order.keys == "shuffled":
            self.rng.shuffle(blocks)
        parts = [
            blocks[len(blocks) * i // self.order.splits : len(blocks) * (i + 1) // self.order.splits]
            for i in range(self.order.splits)
        ]
        run = self.normalised if self.order.normalised else self.running
        results = []
        for part in (part for part in parts if part):
            results.append(run(x, v, part, unit))
            self.way = "" if self.way in ("first", "end") else self.way  # the first part has it
        o, lse = results[0] if len(results) == 1 else self.combined(*map(np.stack, zip(*results, strict=True)))
        if self.way == "after":
            top = np.maximum(lse, self.sink)
            base = np.where(np.isneginf(top), F(0), top)
            together = base + self.log(self.exp(lse - base) + self.exp(self.sink - base))
            o, lse = o * self.exp(np.where(np.isneginf(lse), lse, lse - together))[:, None], together
        return o, lse * F(1 / LOG2_E) if self.in_log2 else lse

    @property
    def to_nats(self) -> np.float32:
        """What takes the scores to nats where they are still to be multiplied."""
        if self.problem.softcap:
            return F(self.problem.softcap)
        return F(1) if self.order.scale == "in_turn" else self.factor

    def scores(self, q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.float32]:
        """Scores, and the factor that takes them to the units of exponents."""
        c, scale = self.factor, self.order.scale
        if self.problem.softcap:
            return self.capped(self.added(self.order.products, q, k.T) * c)
        if scale == "fused":
            return self.added(self.order.products, q, k.T), F(c * F(LOG2_E))
        if scale == "in_turn":
            return self.added(self.order.products, q, k.T) * c, F(LOG2_E)
        if scale == "query":
            q = q * c
            c = F(1)
        if scale == "folded":
            q = rounded(q * c, self.dtype)
            c = F(1)
        if scale == "root":
            q = q * np.sqrt(c)
            k = k * np.sqrt(c)
            c = F(1)
        s = self.added(self.order.products, q, k.T)
        return s * (F(c * F(LOG2_E)) if scale == "log2" else c), F(1)

    def capped(self, x: np.ndarray) -> tuple[np.ndarray, np.float32]:
        cap = F(self.problem.softcap)
        y = x / cap
        if self.order.tanh == "ex2":
            t = F(1) - F(2) / (np.exp2((y * F(2 * LOG2_E)).astype(float)).astype(F) + F(1))
        else:
            t = np.tanh(y.astype(float))
            if self.order.tanh == "approx":
                t = np.clip(t * (1 + self.rng.choice([-1, 1]) * 2.0**-16.456), -1, 1)
            t = t.astype(F)
        if self.order.scale in ("fused", "in_turn"):
            return t, F(cap * F(LOG2_E))
        return t * (F(cap * F(LOG2_E)) if self.in_log2 else cap), F(1)

    def added(self, how: str, a: np.ndarray, b: np.ndarray, c: np.ndarray | None = None) -> np.ndarray:
        """The product of two matrices, added to a third; where the order has tf32 both lose their last bits first."""
        if self.order.tf32:
            a, b = (in_tf32(x, self.order.tf32) for x in (a, b))
        return added(how, a, b, self.dtype, c)

    def exp(self, x: np.ndarray) -> np.ndarray:
        if not self.in_log2:
            x = x * F(LOG2_E)
        return np.where(x == 0, F(1), (np.exp2(x.astype(float)) * self.lift).astype(F))

    def log(self, x: np.ndarray) -> np.ndarray:
        return (np.log2 if self.in_log2 else np.log)(x.astype(float)).astype(F)

    def stored(self, p: np.ndarray) -> np.ndarray:
        return p if self.order.weights == "fp32" else rounded(p, self.dtype)

    def total(self, p: np.ndarray, start: np.ndarray) -> np.ndarray:
        if self.order.row_sum == "exact":
            return (start.astype(float) + p.astype(float).sum(1)).astype(F)
        if self.order.row_sum == "pairs":
            return start + added("pairs", p, np.ones((p.shape[1], 1), F), self.dtype)[:, 0]
        for column in p.T:
            start = start + column
        return start

    def normalised(
        self, x: np.ndarray, v: np.ndarray, part: list[np.ndarray], unit: np.float32
    ) -> tuple[np.ndarray, np.ndarray]:
        keys = np.concatenate(part)
        x = x[:, keys] * unit
        top = np.maximum(x.max(1), self.sink) if self.way == "first" else x.max(1)
        base = np.where(np.isneginf(top), F(0), top)
        p = self.exp(x - base[:, None])
        of_sink = self.exp(self.sink - base) if self.way in ("first", "end") else np.zeros(len(x), F)
        row_sum = self.total(p, of_sink)
        p = np.where(row_sum[:, None] > 0, p / row_sum[:, None], F(0))
        return self.added(self.order.sums, self.stored(p), v[keys]), base + self.log(row_sum)

    def running(
        self, x: np.ndarray, v: np.ndarray, part: list[np.ndarray], unit: np.float32
    ) -> tuple[np.ndarray, np.ndarray]:
        order, rows = self.order, len(x)
        top, row_sum, o = np.full(rows, -np.inf, F), np.zeros(rows, F), np.zeros((rows, v.shape[1]), F)
        if self.way == "first" and np.isfinite(self.sink):
            top, row_sum = np.full(rows, self.sink / unit, F), np.ones(rows, F)
        slack = F(8 / LOG2_E if not self.in_log2 else 8)
        for keys in part:
            y = x[:, keys]
            new = np.maximum(top, y.max(1))
            if order.lazy:
                new = np.where(new * unit > top * unit + slack, new, top)
            base = np.where(np.isneginf(new), F(0), new)
            alpha = np.where(np.isneginf(top), F(0), self.exp((top - base) * unit))
            if order.scale in ("fused", "in_turn"):
                p = self.exp(_fma(y, unit, -(base * unit)[:, None]))
            else:
                p = self.exp(y - base[:, None])
            kept = self.stored(p * F(order.p_scale))
            row_sum = self.total(kept / F(order.p_scale) if order.of_rounded else p, row_sum * alpha)
            o = self.added(order.sums, kept, v[keys], o * alpha[:, None])
            top = new
        if self.way == "end":
            row_sum = row_sum + self.exp(self.sink - np.where(np.isneginf(top), F(0), top) * unit)
        inverse = np.where(row_sum > 0, F(1) / (row_sum * F(order.p_scale)), F(0))
        base = np.where(np.isneginf(top), F(0), top)
        return o * inverse[:, None], base * unit + self.log(row_sum)

    def combined(self, o: np.ndarray, lse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        top = lse.max(0)
        base = np.where(np.isneginf(top), F(0), top)
        w = self.exp(lse - base)
        total = np.zeros_like(base)
        for one in w:
            total = total + one
        together = base + self.log(total)
        if self.order.combine == "lse":
            w = np.where(np.isneginf(together), F(0), self.exp(lse - together))
        else:
            w = np.where(total > 0, w / total, F(0))
        result = np.zeros_like(o[0])
        for weight, part in zip(w, o, strict=True):
            result = result + weight[:, None] * part
        return result, together


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(float) * float(b) + c).astype(F)


def added(how: str, a: np.ndarray, b: np.ndarray, dtype: str, c: np.ndarray | None = None) -> np.ndarray:
    """Return a b + c in binary32, a (rows, depth) and b (depth, columns), in the order of that name."""
    c = np.zeros((len(a), b.shape[1]), F) if c is None else c
    if how in ("chained", "promoted", "halves"):
        return _by_tensor_core(how, a, b, dtype, c)
    if how == "pairs":
        return c + _in_pairs([a[:, i : i + 1] * b[i] for i in range(len(b))], c)
    for i in range(len(b))[:: -1 if how == "reverse" else 1]:
        column, row = a[:, i : i + 1], b[i]
        if how == "toward zero":
            c = _toward_zero(c.astype(float) + column.astype(float) * row)
        else:
            c = c + column * row
        if how == "flushed":
            c = np.where(np.abs(c) < 2.0**-126, F(0), c)
    return c


def _in_pairs(terms: list[np.ndarray], zero: np.ndarray) -> np.ndarray:
    while len(terms) > 1:
        terms = [terms[i] + terms[i + 1] if i + 1 < len(terms) else terms[i] for i in range(0, len(terms), 2)]
    return terms[0] if terms else np.zeros_like(zero)


def _toward_zero(x: np.ndarray) -> np.ndarray:
    y = x.astype(F)
    return np.where(np.abs(y) > np.abs(x), np.nextafter(y, F(0)), y)


def _by_tensor_core(how: str, a: np.ndarray, b: np.ndarray, dtype: str, c: np.ndarray) -> np.ndarray:
    size, align, out = TENSOR_CORE[dtype]
    size = size // 2 if how == "halves" else size
    for start in range(0, len(b), size)[:: -1 if how == "halves" else 1]:
        ks = slice(start, start + size)
        before = np.zeros_like(c) if how == "promoted" else c
        step = _step(a[:, ks].astype(float), b[ks].astype(float), before.astype(float), dtype, (align, out)).astype(F)
        c = c + step if how == "promoted" else step
    return c


def _step(a: np.ndarray, b: np.ndarray, c: np.ndarray, dtype: str, bits: tuple[int, int]) -> np.ndarray:
    """One step: products and C are cut to the largest power of any, and their sum to its own."""
    least = FORMATS[dtype].min_exponent
    products = a[:, :, None] * b
    powers = np.maximum(_exponent(a), least)[:, :, None] + np.maximum(_exponent(b), least)
    top = np.where(products != 0, powers, -4000).max(1, initial=-4000)
    top = np.maximum(top, np.where(c != 0, np.maximum(_exponent(c), -126), -133))
    unit = np.ldexp(1.0, top - bits[0])
    total = (np.trunc(products / unit[:, None]).sum(1) + np.trunc(c / unit)) * unit
    last = np.ldexp(1.0, np.maximum(_exponent(total), -126) - bits[1])
    return np.trunc(total / last) * last


def _exponent(x: np.ndarray) -> np.ndarray:
    return np.frexp(x)[1] - 1
