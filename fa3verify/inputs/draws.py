"""How Q, K and V are drawn: a function for each named distribution.

Each takes a group of heads (:class:`fa3verify.inputs.streams.HeadGroup`) and the distribution's parameters, and returns
Q (query heads of the group, rows, channels), and K and V (1, rows, channels), in float64. The table of
:mod:`fa3verify.inputs.distributions` has their formulas and reasons. ``fa3_outliers`` is the accuracy experiment of the
FlashAttention-3 paper; the channel outliers follow measured activations of small language models, whose large channels
are steady over tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fa3_reference.problem import AttentionProblem, Dtype
from fa3verify.inputs.activations import Captured
from fa3verify.inputs.streams import HeadGroup, Purpose, Tensor, integer_exp2, portable

Value = float | int | str
Arrays = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]
MAX_LEVEL = 30000.0  # magnitude of one channel of Q and K at most, so that fp16 holds it
MAX_GAIN = 256.0  # factor of planted keys and sinks at most, so that fp16 holds them under any softmax_scale

# Largest |q| and |k|, and largest |v|, that keep fp32 scores and sums finite.
LARGEST: dict[Dtype, tuple[float, float]] = {
    "fp16": (65504.0, 65504.0),
    "bf16": (2.0**58, 2.0**100),
    "e4m3": (65504.0, 65504.0),  # those of the fp16 tensor that is quantised
    "fp32": (2.0**58, 2.0**100),
}
MIN_NORMAL: dict[Dtype, float] = {"fp16": 2.0**-14, "bf16": 2.0**-126, "e4m3": 2.0**-6, "fp32": 2.0**-126}


def _each(draw: Callable[..., np.ndarray]) -> Callable[..., Arrays]:
    """Return a function that draws Q, K and V by one rule; the rule gets "q", "k" or "v"."""

    return lambda group, **settings: (
        draw(group, "q", **settings),
        draw(group, "k", **settings),
        draw(group, "v", **settings),
    )


_normals = _each(HeadGroup.normal)


@_each
def normal(group: HeadGroup, t: Tensor, std: float) -> np.ndarray:
    return std * group.normal(t)


@_each
def fa3_outliers(group: HeadGroup, t: Tensor, outlier_variance: float, rate: float) -> np.ndarray:
    x = group.normal(t)
    for member, head in enumerate(x):
        hit = group.rng(t, Purpose.MASK, member).random(head.shape, np.float32) < rate
        extra = group.rng(t, Purpose.EXTRA, member).standard_normal(np.count_nonzero(hit))
        head[hit] += math.sqrt(outlier_variance) * portable(extra)
    return x


def outliers(place: Callable[[HeadGroup, int], Sequence[np.ndarray]]) -> Callable[..., Arrays]:
    """Return a function that draws N(0, 1) with some channels of Q and K ``ratio`` times larger.

    ``mean_share`` of their second moment is an offset that is the same for all tokens. ``place`` returns the channels,
    those of Q and those of K.
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


def apart(group: HeadGroup, channels: int) -> Sequence[np.ndarray]:
    return _shuffled(group, "q")[:channels], _shuffled(group, "k")[:channels]


def aligned(group: HeadGroup, channels: int) -> Sequence[np.ndarray]:
    return (_shuffled(group, "shared")[:channels],) * 2


def disjoint(group: HeadGroup, channels: int) -> Sequence[np.ndarray]:
    order = _shuffled(group, "shared")
    count = min(channels, len(order) // 2)
    return order[:count], order[count : 2 * count]


@_each
def block_scaled(group: HeadGroup, t: Tensor, tile: int, octaves: int, power_of_two: int) -> np.ndarray:
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
def ramp(group: HeadGroup, t: Tensor, tile: int, steps: int) -> np.ndarray:
    return group.normal(t) * integer_exp2(group.blocks(t, tile) % steps - steps // 2)[:, None]


def peaky(group: HeadGroup, gain: float) -> Arrays:
    q, k, v = _normals(group)
    return gain * q, gain * k, v


def needle(group: HeadGroup, margin: float) -> Arrays:
    q, k, v = _normals(group)
    first, stop = group.problem.visible_keys(np.arange(q.shape[1]), group.seq.seqlen_q, group.seq.seqlen_k)
    gain = min(margin / (group.problem.softmax_scale * group.problem.head_dim), MAX_GAIN)
    u = group.uniform("q", Purpose.EXTRA, channels=1)[..., 0]  # (group, seqlen_q)
    seen = stop > first
    target = np.minimum(first + np.floor(u * (stop - first)).astype(np.int64), stop - 1)
    q[:, seen] += gain * k[0, target[:, seen]]
    return q, k, v


def ties(group: HeadGroup, distinct: int) -> Arrays:
    k = group.normal("k", rows=distinct)[:, np.arange(group.seq.seqlen_k) % distinct]
    return group.normal("q"), k, group.normal("v")


@_each
def constant_rows(group: HeadGroup, t: Tensor, std: float) -> np.ndarray:
    heads, rows, channels = group.shape(t)
    levels = [portable(group.rng(t, Purpose.VALUES, m).standard_normal(rows)) for m in range(heads)]
    return np.repeat(std * np.stack(levels)[..., None], channels, axis=2)


def huge(large: Tensor, small: Tensor) -> Callable[..., Arrays]:
    """Return a function that draws V and one of Q and K as large as they may be, and the other so small that scores
    are near N(0, 2)."""

    def draw(group: HeadGroup, fraction: float) -> Arrays:
        largest, largest_v = (fraction * x for x in LARGEST[group.problem.dtype])

        def near(t: Tensor, largest: float) -> np.ndarray:
            return group.signs(t) * (0.5 + 0.5 * group.uniform(t)) * largest

        least = integer_exp2(-np.round(np.log2(largest * group.problem.softmax_scale * group.problem.head_dim**0.5)))
        drawn = {large: near(large, largest), small: 2 * (group.normal(small) * least)}
        return drawn["q"], drawn["k"], near("v", largest_v)

    return draw


@_each
def tiny(group: HeadGroup, t: Tensor, octaves: int) -> np.ndarray:
    exponent = np.floor(group.uniform(t, Purpose.SCALE) * (octaves + 1))
    least = MIN_NORMAL["fp16" if group.problem.dtype == "e4m3" else group.problem.dtype]
    return group.signs(t) * (1 + group.uniform(t)) * integer_exp2(exponent) * least


@_each
def subnormals(group: HeadGroup, t: Tensor, fraction: float) -> np.ndarray:
    x = group.signs(t) * group.uniform(t) * fraction * MIN_NORMAL[group.problem.dtype]
    # 448 in one channel pins the scale of quantisation at 1; K has it in another channel than Q, so scores stay small.
    if group.problem.dtype == "e4m3":
        x[..., int(t == "k") % x.shape[2]] = 448.0
    return x


def offset_v(group: HeadGroup, mean: float, std: float) -> Arrays:
    q, k, v = _normals(group)
    return q, k, mean + std * v


@_each
def positive(group: HeadGroup, t: Tensor, low: float, width: float) -> np.ndarray:
    return low + width * group.uniform(t)


def sink(group: HeadGroup, strength: float, v_factor: float) -> Arrays:
    q, k, v = _normals(group)
    direction = np.where(group.rng("shared", Purpose.EXTRA).random(q.shape[2]) < 0.5, -1.0, 1.0)
    q += direction
    k[:, :1] = direction * min(strength / (group.problem.softmax_scale * q.shape[2]), MAX_GAIN)
    v[:, :1] *= v_factor
    return q, k, v


def cancelling_v(group: HeadGroup, magnitude: float, residue: float) -> Arrays:
    rows = np.arange(group.seq.seqlen_k)
    pairs = -(-len(rows) // 2)
    k = group.normal("k", rows=pairs)[:, rows // 2]
    weights = (0.5 + 0.5 * group.uniform("v", Purpose.EXTRA))[:, rows // 2]
    signs = np.where(rows % 2 == 0, 1.0, -1.0)[None, :, None]
    return group.normal("q"), k, signs * magnitude * weights + residue * group.normal("v")


def level(group: HeadGroup, nats: float) -> Arrays:
    q, k, v = _normals(group)
    size = min(math.sqrt(abs(nats) / group.problem.softmax_scale), MAX_LEVEL)
    q[..., 0] = math.copysign(size, nats)
    k[..., 0] = size
    return q, k, v


def shelf(group: HeadGroup, depth_log2: float) -> Arrays:
    q, k = (np.zeros(group.shape(t)) for t in ("q", "k"))
    size = min(math.sqrt(depth_log2 * math.log(2) / group.problem.softmax_scale), MAX_LEVEL)
    q[..., 0] = size
    k[:, 1:, 0] = -size
    return q, k, group.normal("v")


def vanishing(group: HeadGroup, nats: float, magnitude: float) -> Arrays:
    q, k, v = _normals(group)
    keys = group.seq.seqlen_k
    tile = 128 if keys > 128 else 32  # a block of a merge has large values alone
    heavy = (np.arange(keys) >= -(-keys // (2 * tile)) * tile) == (nats > 0)
    size = min(math.sqrt(abs(nats) / group.problem.softmax_scale), MAX_LEVEL)
    q[..., 0] = size
    k[..., 0] = np.where(heavy, size, 0.0)
    large = np.where(v < 0, -magnitude, magnitude) * (0.5 + 0.5 * group.uniform("v", Purpose.EXTRA))
    return q, k, np.where(heavy[:, None], v / 1024, large)


def first_tokens(find: Callable[..., Captured]) -> Callable[..., Arrays]:
    """Return a function that takes the first tokens of a file, which ``find`` loads.

    It takes the kv head of the group, and as many of its query heads as the problem has; queries are the last of these
    tokens.
    """

    def draw(group: HeadGroup, tokens: int, **file: str) -> Arrays:
        capture, q, k, v = find(**file)
        rows = capture.rows(tokens)
        first = group.kv_head * capture.whole.group
        q = q[first : first + group.problem.group, rows - group.seq.seqlen_q : rows]
        k, v = (x[group.kv_head : group.kv_head + 1, :rows] for x in (k, v))
        return q.astype(np.float64), k.astype(np.float64), v.astype(np.float64)

    return draw


def fits(find: Callable[..., Captured]) -> Callable[..., None]:
    """Return a function that raises ValueError unless a problem has the sizes of the first tokens of a file."""

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
