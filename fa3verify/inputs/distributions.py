"""Distributions: the table of named ways to draw Q, K and V, with their parameters, formulas and reasons.

Guarantee: for a distribution marked ``prefix_stable``, row r of head h of sequence b does not depend on the
batch, the number of kv heads, the lengths or the mask: a problem with fewer rows, kv heads or sequences draws
the leading part of the same data (``head_dim`` and the group size must be equal).

Sources: ``fa3_outliers`` is the accuracy experiment of the FlashAttention-3 paper; the channel outliers
follow measured activations of small language models, whose large channels are steady over tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fa3_reference.problem import AttentionProblem, Dtype
from fa3verify.inputs import activations, captures
from fa3verify.inputs.activations import Captured
from fa3verify.inputs.streams import HeadGroup, Purpose, Tensor, integer_exp2, portable

Value = float | int | str
Arrays = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]
MAX_LEVEL = 30000.0  # of one channel of Q and K, within fp16
MAX_GAIN = 256.0  # planted keys and sinks stay below fp16's range whatever softmax_scale says

# Largest |q| and |k|, and largest |v|, that keep fp32 scores and sums finite.
LARGEST: dict[Dtype, tuple[float, float]] = {
    "fp16": (65504.0, 65504.0),
    "bf16": (2.0**58, 2.0**100),
    "e4m3": (65504.0, 65504.0),  # of the fp16 tensor that is quantised
}
MIN_NORMAL: dict[Dtype, float] = {"fp16": 2.0**-14, "bf16": 2.0**-126, "e4m3": 2.0**-6}


def _each(draw: Callable[..., np.ndarray]) -> Callable[..., Arrays]:
    """Return what draws Q, K and V by one rule, which is told for which of them."""

    def all_three(group: HeadGroup, **settings: Value) -> Arrays:
        return draw(group, "q", **settings), draw(group, "k", **settings), draw(group, "v", **settings)

    return all_three


_normals = _each(HeadGroup.normal)


@_each
def _normal(group: HeadGroup, t: Tensor, std: float) -> np.ndarray:
    return std * group.normal(t)


@_each
def _fa3_outliers(group: HeadGroup, t: Tensor, outlier_variance: float, rate: float) -> np.ndarray:
    x = group.normal(t)
    for member, head in enumerate(x):
        hit = group.rng(t, Purpose.MASK, member).random(head.shape, np.float32) < rate
        extra = group.rng(t, Purpose.EXTRA, member).standard_normal(np.count_nonzero(hit))
        head[hit] += math.sqrt(outlier_variance) * portable(extra)
    return x


def _outliers(place: Callable[[HeadGroup, int], Sequence[np.ndarray]]) -> Callable[..., Arrays]:
    """Return what draws N(0, 1), but some channels of Q and K ``ratio`` times larger, mostly as an offset steady over
    tokens; ``place`` says which.
    """

    def draw(group: HeadGroup, channels: int, ratio: float, mean_share: float) -> Arrays:
        q, k, v = _normals(group)
        for t, arrays, chosen in zip(("q", "k"), (q, k), place(group, channels)):
            for member, head in enumerate(arrays):
                signs = np.where(group.rng(t, Purpose.SCALE, member).random(len(chosen)) < 0.5, -1.0, 1.0)
                noise = math.sqrt(1 - mean_share) * head[:, chosen]
                head[:, chosen] = ratio * (math.sqrt(mean_share) * signs + noise)
        return q, k, v

    return draw


def _shuffled(group: HeadGroup, tensor: Tensor | Literal["shared"]) -> np.ndarray:
    return group.rng(tensor, Purpose.CHANNELS).permutation(group.problem.head_dim)


def _apart(group: HeadGroup, channels: int) -> Sequence[np.ndarray]:
    return _shuffled(group, "q")[:channels], _shuffled(group, "k")[:channels]


def _aligned(group: HeadGroup, channels: int) -> Sequence[np.ndarray]:
    return (_shuffled(group, "shared")[:channels],) * 2


def _disjoint(group: HeadGroup, channels: int) -> Sequence[np.ndarray]:
    order = _shuffled(group, "shared")
    count = min(channels, len(order) // 2)
    return order[:count], order[count : 2 * count]


@_each
def _block_scaled(group: HeadGroup, t: Tensor, tile: int, octaves: int, power_of_two: int) -> np.ndarray:
    x = group.normal(t)
    blocks = group.blocks(t, tile)
    for member, head in enumerate(x):
        u = group.rng(t, Purpose.SCALE, member).random(int(blocks[-1]) + 1 if len(blocks) else 0)
        if power_of_two:
            magnitude = integer_exp2(np.floor(u * (2 * octaves + 1)) - octaves)
        else:
            magnitude = portable(np.exp2((2 * u - 1) * octaves))
        head *= magnitude[blocks][:, None]
    return x


@_each
def _ramp(group: HeadGroup, t: Tensor, tile: int, steps: int) -> np.ndarray:
    return group.normal(t) * integer_exp2(group.blocks(t, tile) % steps - steps // 2)[:, None]


def _peaky(group: HeadGroup, gain: float) -> Arrays:
    q, k, v = _normals(group)
    return gain * q, gain * k, v


def _needle(group: HeadGroup, margin: float) -> Arrays:
    q, k, v = _normals(group)
    first, stop = group.problem.visible_keys(np.arange(q.shape[1]), group.seq.seqlen_q, group.seq.seqlen_k)
    gain = min(margin / (group.problem.softmax_scale * group.problem.head_dim), MAX_GAIN)
    u = group.uniform("q", Purpose.EXTRA, channels=1)[..., 0]  # (group, seqlen_q)
    seen = stop > first
    target = np.minimum(first + np.floor(u * (stop - first)).astype(np.int64), stop - 1)
    q[:, seen] += gain * k[0, target[:, seen]]
    return q, k, v


def _ties(group: HeadGroup, distinct: int) -> Arrays:
    k = group.normal("k", rows=distinct)[:, np.arange(group.seq.seqlen_k) % distinct]
    return group.normal("q"), k, group.normal("v")


@_each
def _constant_rows(group: HeadGroup, t: Tensor, std: float) -> np.ndarray:
    heads, rows, channels = group.shape(t)
    levels = [portable(group.rng(t, Purpose.VALUES, m).standard_normal(rows)) for m in range(heads)]
    return np.repeat(std * np.stack(levels)[..., None], channels, axis=2)


def _huge(group: HeadGroup, fraction: float) -> Arrays:
    largest_q, largest_v = (fraction * x for x in LARGEST[group.problem.dtype])

    def near(t: Tensor, largest: float) -> np.ndarray:
        return group.signs(t) * (0.5 + 0.5 * group.uniform(t)) * largest

    k = group.normal("k") * integer_exp2(
        -np.round(np.log2(largest_q * group.problem.softmax_scale * group.problem.head_dim**0.5))
    )
    return near("q", largest_q), 2 * k, near("v", largest_v)


@_each
def _tiny(group: HeadGroup, t: Tensor, octaves: int) -> np.ndarray:
    exponent = np.floor(group.uniform(t, Purpose.SCALE) * (octaves + 1))
    least = MIN_NORMAL["fp16" if group.problem.dtype == "e4m3" else group.problem.dtype]
    return group.signs(t) * (1 + group.uniform(t)) * integer_exp2(exponent) * least


@_each
def _subnormals(group: HeadGroup, t: Tensor, fraction: float) -> np.ndarray:
    x = group.signs(t) * group.uniform(t) * fraction * MIN_NORMAL[group.problem.dtype]
    if group.problem.dtype == "e4m3":  # 448 in one channel pins the scale at 1; Q's and K's do not meet
        x[..., int(t == "k") % x.shape[2]] = 448.0
    return x


def _offset_v(group: HeadGroup, mean: float, std: float) -> Arrays:
    q, k, v = _normals(group)
    return q, k, mean + std * v


@_each
def _positive(group: HeadGroup, t: Tensor, low: float, width: float) -> np.ndarray:
    return low + width * group.uniform(t)


def _sink(group: HeadGroup, strength: float, v_factor: float) -> Arrays:
    q, k, v = _normals(group)
    direction = np.where(group.rng("shared", Purpose.EXTRA).random(q.shape[2]) < 0.5, -1.0, 1.0)
    q += direction
    k[:, :1] = direction * min(strength / (group.problem.softmax_scale * q.shape[2]), MAX_GAIN)
    v[:, :1] *= v_factor
    return q, k, v


def _cancelling_v(group: HeadGroup, magnitude: float, residue: float) -> Arrays:
    rows = np.arange(group.seq.seqlen_k)
    pairs = -(-len(rows) // 2)
    k = group.normal("k", rows=pairs)[:, rows // 2]
    weights = (0.5 + 0.5 * group.uniform("v", Purpose.EXTRA))[:, rows // 2]
    signs = np.where(rows % 2 == 0, 1.0, -1.0)[None, :, None]
    return group.normal("q"), k, signs * magnitude * weights + residue * group.normal("v")


def _level(group: HeadGroup, nats: float) -> Arrays:
    q, k, v = _normals(group)
    size = min(math.sqrt(abs(nats) / group.problem.softmax_scale), MAX_LEVEL)
    q[..., 0] = math.copysign(size, nats)
    k[..., 0] = size
    return q, k, v


def _shelf(group: HeadGroup, depth_log2: float) -> Arrays:
    q, k = (np.zeros(group.shape(t)) for t in ("q", "k"))
    size = min(math.sqrt(depth_log2 * math.log(2) / group.problem.softmax_scale), MAX_LEVEL)
    q[..., 0] = size
    k[:, 1:, 0] = -size
    return q, k, group.normal("v")


def _first_tokens(find: Callable[..., Captured]) -> Callable[..., Arrays]:
    """Return what takes the first tokens of a file: the kv head of a group, and as many of its query heads as the
    problem has.
    """

    def draw(group: HeadGroup, tokens: int, **file: str) -> Arrays:
        capture, q, k, v = find(**file)
        rows = capture.rows(tokens)
        first = group.kv_head * capture.whole.group
        q = q[first : first + group.problem.group, rows - group.seq.seqlen_q : rows]
        k, v = (x[group.kv_head : group.kv_head + 1, :rows] for x in (k, v))
        return q.astype(np.float64), k.astype(np.float64), v.astype(np.float64)

    return draw


def _fits(find: Callable[..., Captured]) -> Callable[..., None]:
    """Return what raises ValueError unless a problem is of the first tokens of a file."""

    def check(problem: AttentionProblem, tokens: int, **file: str) -> None:
        capture = find(**file).capture
        whole = capture.whole
        rows = capture.rows(tokens)
        for what, got, ok, rule in (
            ("batch", problem.batch, problem.batch == 1 and not problem.is_varlen, "1 and not varlen"),
            ("head_dim", problem.head_dim, problem.head_dim == whole.head_dim, f"{whole.head_dim}"),
            ("head_dim_v", problem.head_dim_v, problem.head_dim_v == whole.head_dim_v, f"{whole.head_dim_v}"),
            ("seqlen_k", problem.seqlen_k, problem.seqlen_k == rows, f"{rows}"),
            ("seqlen_q", problem.seqlen_q, problem.seqlen_q <= rows, f"at most {rows}"),
            ("nheads_kv", problem.nheads_kv, problem.nheads_kv <= whole.nheads_kv, f"at most {whole.nheads_kv}"),
            ("nheads / nheads_kv", problem.group, problem.group <= whole.group, f"at most {whole.group}"),
        ):
            if not ok:
                raise ValueError(f"activations {capture.file} with tokens = {tokens}: {what} must be {rule}, got {got}")

    return check


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a distribution: default and legal range; for a text, what lists its options, or any text."""

    name: str
    default: Value
    low: float = 0.0
    high: float = 0.0
    options: Callable[[], tuple[str, ...]] | None = None

    @property
    def is_integer(self) -> bool:
        return isinstance(self.default, int)

    def check(self, owner: str, value: object) -> Value:
        """Return the value in the parameter's type; ValueError if it is illegal."""
        if isinstance(self.default, str):
            legal = self.options() if self.options else None
            if not isinstance(value, str) or (legal is not None and value not in legal):
                rule = f"one of {', '.join(legal)}" if legal is not None else "a text"
                raise ValueError(f"{owner}: {self.name} must be {rule}, got {value!r}")
            return value
        kind = "an integer" if self.is_integer else "a number"
        rule = f"{owner}: {self.name} must be {kind} in [{self.low:g}, {self.high:g}], got {value!r}"
        is_number = isinstance(value, int if self.is_integer else int | float)
        if isinstance(value, bool) or not is_number or not self.low <= value <= self.high:
            raise ValueError(rule)
        return value if self.is_integer else float(value)


@dataclass(frozen=True, slots=True)
class Distribution:
    """One row of the table: how Q, K and V are drawn, the formula for reports, and why it is there.

    ``kind`` is the class of inputs that it is of in :mod:`fa3verify.cases.space`.
    """

    name: str
    draw: Callable[..., Arrays] = field(repr=False)
    formula: str
    why: str
    parameters: tuple[Parameter, ...] = ()
    prefix_stable: bool = True
    kind: str = "even"
    check: Callable[..., None] | None = field(default=None, repr=False)

    def settings(self, given: Mapping[str, object]) -> dict[str, Value]:
        """Return all parameters in declared order, defaults filled in; ValueError if unknown or illegal."""
        legal = [p.name for p in self.parameters]
        for name in given:
            if name not in legal:
                known = ", ".join(legal) or "none"
                raise ValueError(f"{self.name}: unknown parameter {name!r} (legal: {known})")
        return {p.name: p.check(self.name, given.get(p.name, p.default)) for p in self.parameters}


_CHANNEL_PARAMETERS = (
    Parameter("channels", 4, 1, 16),
    Parameter("ratio", 8.0, 1, 100),
    Parameter("mean_share", 0.64, 0, 1),
)
_TABLE = (
    Distribution("normal", _normal, "N(0, std^2)", "the usual smoke test", (Parameter("std", 1.0, 2**-100, 100),)),
    Distribution(
        "fa3_outliers",
        _fa3_outliers,
        "N(0, 1) + N(0, outlier_variance) Bernoulli(rate)",
        "the FlashAttention-3 paper's accuracy experiment",
        (Parameter("outlier_variance", 100.0, 0, 1e6), Parameter("rate", 0.001, 0, 0.1)),
        kind="outliers",
    ),
    Distribution(
        "outlier_channels",
        _outliers(_apart),
        "N(0, 1), but ratio (+-sqrt(mean_share) + sqrt(1 - mean_share) N(0, 1)) in some channels of Q and K",
        "large channels, chosen independently for Q and K",
        (
            Parameter("channels", 2, 1, 16),
            Parameter("ratio", 30.0, 1, 1000),
            Parameter("mean_share", 0.64, 0, 1),
        ),
        kind="outliers",
    ),
    Distribution(
        "block_scaled",
        _block_scaled,
        "N(0, 1) 2^e, e uniform in [-octaves, octaves] per tile of rows (integer e if power_of_two)",
        "a scale taken from the wrong block shows",
        (Parameter("tile", 64, 16, 256), Parameter("octaves", 2, 0, 6), Parameter("power_of_two", 1, 0, 1)),
        kind="uneven blocks",
    ),
    Distribution(
        "peaky",
        _peaky,
        "Q, K: gain N(0, 1); V: N(0, 1)",
        "large logits, few keys per row",
        (Parameter("gain", 3.0, 0.1, 32),),
        kind="large scores",
    ),
    Distribution(
        "aligned_outliers",
        _outliers(_aligned),
        "as outlier_channels, the same channels in Q and K",
        "as decoder models have them; rotation helps",
        _CHANNEL_PARAMETERS,
        kind="outliers",
    ),
    Distribution(
        "antialigned_outliers",
        _outliers(_disjoint),
        "as outlier_channels, disjoint channels in Q and K",
        "rotation hurts",
        _CHANNEL_PARAMETERS,
        kind="outliers",
    ),
    Distribution(
        "ramp",
        _ramp,
        "N(0, 1) 2^(b mod steps - floor(steps / 2)), b the row's tile",
        "neighbouring blocks always differ by a factor of two or more",
        (Parameter("tile", 64, 16, 256), Parameter("steps", 4, 1, 8)),
        kind="uneven blocks",
    ),
    Distribution(
        "needle",
        _needle,
        "Q_i = N(0, 1) + margin / (softmax_scale head_dim) K_t(i), t(i) uniform over the keys row i sees",
        "one key decides each row: a lost or misplaced key shows",
        (Parameter("margin", 20.0, 0, 100),),
        prefix_stable=False,
        kind="large scores",
    ),
    Distribution(
        "ties",
        _ties,
        "N(0, 1); K_j = K_(j mod distinct)",
        "equal scores inside and across tiles",
        (Parameter("distinct", 4, 1, 256),),
        kind="ties",
    ),
    Distribution(
        "constant_rows",
        _constant_rows,
        "every row std N(0, 1) times (1, ..., 1)",
        "a Hadamard rotation turns each row into one spike",
        (Parameter("std", 1.0, 0.001, 100),),
    ),
    Distribution(
        "huge",
        _huge,
        "Q, V: +-U[1/2, 1) fraction L, L the largest magnitude whose fp32 scores and sums stay finite; "
        "K so small that scores are near N(0, 2)",
        "overflow of anything but the scores; subnormal K",
        (Parameter("fraction", 1.0, 2**-6, 1),),
        kind="extremes",
    ),
    Distribution(
        "tiny",
        _tiny,
        "+-U[1, 2) 2^e m, m the format's least normal number, e uniform in 0..octaves",
        "the bottom of the normal range; uniform softmax",
        (Parameter("octaves", 0, 0, 8),),
        kind="extremes",
    ),
    Distribution(
        "subnormals",
        _subnormals,
        "+-U[0, 1) fraction m, m the least normal number; e4m3: one channel of 448 pins the scale at 1",
        "flushed subnormals show in V",
        (Parameter("fraction", 1.0, 2**-4, 1),),
        kind="extremes",
    ),
    Distribution(
        "offset_v",
        _offset_v,
        "Q, K: N(0, 1); V: N(mean, std^2)",
        "accumulator loss",
        (Parameter("mean", 1.0, -100, 100), Parameter("std", 1.0, 0, 10)),
    ),
    Distribution(
        "sink",
        _sink,
        "N(0, 1); Q += u, K_0 = strength / (softmax_scale head_dim) u, u in {-1, 1}^d; V_0 *= v_factor",
        "the attention sink of decoder models",
        (Parameter("strength", 7.0, 0, 50), Parameter("v_factor", 0.05, 0, 1)),
        kind="large scores",
    ),
    Distribution(
        "cancelling_v",
        _cancelling_v,
        "K_2j = K_2j+1; V_j = (-1)^j magnitude U[1/2, 1)_floor(j/2) + residue N(0, 1)",
        "sums near zero of large terms",
        (Parameter("magnitude", 1024.0, 1, 30000), Parameter("residue", 1.0, 0, 10)),
        kind="cancelling",
    ),
    Distribution(
        "positive",
        _positive,
        "U[low, low + width)",
        "every rounding error has one sign: accumulator loss",
        (Parameter("low", 0.0, 0, 100), Parameter("width", 1.0, 0, 100)),
    ),
    Distribution(
        "level",
        _level,
        "N(0, 1); Q_0 = sign(nats) c, K_0 = c, c = sqrt(|nats| / softmax_scale)",
        "scores and lse far from zero: exp of an lse overflows, scores pass for sentinels",
        (Parameter("nats", -120.0, -6e4, 6e4),),
        kind="far scores",
    ),
    Distribution(
        "shelf",
        _shelf,
        "Q = (c, 0, ...), K_0 = 0, K_j = (-c, 0, ...), c = sqrt(depth_log2 ln 2 / softmax_scale); V: N(0, 1)",
        "every key but one weighs 2^-depth_log2: lost in a sum that adds them singly, or subnormal in P",
        (Parameter("depth_log2", 24.0, 0, 200),),
        kind="far scores",
    ),
    Distribution(
        "activations",
        _first_tokens(activations.stored),
        "Q, K, V of a real pretrained head, the first `tokens` tokens (0: all); the seed is ignored",
        "what kernels meet in practice",
        (
            Parameter(
                "name",
                "smollm2_dev-prose2_n129_L08_kv2",
                options=lambda: tuple(case.name for case in activations.list_activations()),
            ),
            Parameter("tokens", 0, 0, 512),
        ),
        prefix_stable=False,
        check=_fits(activations.stored),
    ),
    Distribution(
        "captured",
        _first_tokens(captures.pinned),
        "Q, K, V of a file of one's own, the first `tokens` tokens (0: all); the seed is ignored",
        "what a kernel will meet in one's own model",
        (Parameter("file", ""), Parameter("sha256", ""), Parameter("tokens", 0, 0, 2**31)),
        prefix_stable=False,
        check=_fits(captures.pinned),
    ),
)
DISTRIBUTIONS: dict[str, Distribution] = {row.name: row for row in _TABLE}
