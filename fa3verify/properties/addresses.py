"""Operands whose right output names the place that it was read from, so that no truth has to be computed.

Keys are of classes: key j of a sequence is of class j modulo their number. K holds the code of its class, +1 or -1 in
each channel, and Q that of one key which the row sees: the row attends to the visible keys of that class alone, to all
alike. V holds small whole numbers, drawn for each sequence, head and key. An output is their mean over a few keys, so
that another sequence, head, key or row that was read moves it by more than any rounding does. Where keys are many, each
channel of V is that of every so many of them, and 0 in between: a row then checks hundreds of keys.

A row differs from its neighbours in its class, and in the size of Q, which lse shows. All this costs a few passes over
the operands, so that sizes are limited by the kernel alone. Gradients have operands of their own
(:mod:`fa3verify.properties.addressed_calls`).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fa3_reference.cache import rotated
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, Descale, Dtype, Operands
from fa3verify.files import Json
from fa3verify.operations import Outputs
from fa3verify.properties.law import Violation

Integers = NDArray[np.int64]
TABLE = 4096  # rows of whole numbers, of which every key has one
_NATS = 16.0  # by which scores of other classes lie below a row's own, at least
_MOST_CLASSES = 61  # unless keys are so many that a row would add too many of them
_SIZES = (4, 5, 6, 7)  # of rows of Q, in quarters
_LSE_NATS = 0.2  # by which an lse may be off: sizes of Q move it by four nats and more
_UNIT = 0.45  # of a whole number, by which a sum over V may be off
_EDGES = 16  # one in so many rows attends to its first visible key, and one to its last


class Addressed:
    """A call whose outputs name addresses: what is due, and the largest error that is allowed, by output.

    ``allowed`` is infinite in rows that see no key.
    """

    def __init__(self, problem: AttentionProblem, operands: Operands, due: Outputs, allowed: Outputs) -> None:
        self.problem, self.operands = problem, operands
        self.due, self.allowed = due, allowed

    def violation(self, what: str, got: Outputs) -> Violation | None:
        """Return the first place where outputs are not due; None if there is none."""
        for name, due in self.due.items():
            if name not in got:
                continue
            x = got[name].astype(np.float32)
            with np.errstate(invalid="ignore"):
                wrong = ~((np.abs(x - due) <= self.allowed[name]) | (x == due) | (np.isnan(x) & np.isnan(due)))
            if wrong.any():
                at = tuple(int(i) for i in np.argwhere(wrong)[0])
                words = f"{what}: {name}{list(at)}: got {float(x[at])!r}, expected {float(due[at])!r}"
                return Violation(f"{words}; {int(wrong.sum()):,} of {wrong.size:,} values differ")
        return None


def positions(lengths: Integers) -> tuple[Integers, Integers]:
    """Return the sequence of every token, and its place in there, for sequences of such lengths behind each other."""
    of = np.repeat(np.arange(len(lengths)), lengths)
    return of, np.arange(len(of)) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def lengths_of(problem: AttentionProblem) -> tuple[Integers, Integers]:
    """Return the number of queries and of keys of every sequence."""
    queries, keys = (
        np.array((n,) * problem.batch if of is None else of, np.int64)
        for of, n in ((problem.seqlens_q, problem.seqlen_q), (problem.seqlens_k, problem.seqlen_k))
    )
    return queries, keys


def seen_by_rows(problem: AttentionProblem) -> tuple[Integers, Integers, Integers, Integers]:
    """Return the sequence of every query and its place there, (queries,), and the first key that it sees and how many
    it sees, (queries, 1).
    """
    queries, keys = lengths_of(problem)
    of, row = positions(queries)
    first, stop = problem.visible_keys(row, queries[of], keys[of])  # type: ignore[arg-type]
    return of, row, first[:, None], np.maximum(stop - first, 0)[:, None]


def mixed(seed: int, *numbers: Integers) -> Integers:
    """Return numbers below 2^31 that look random, one for each combination of whole numbers."""
    x = np.full(np.broadcast_shapes(*(n.shape for n in numbers)), seed + 1, np.uint64)
    for n in numbers:
        x = (x ^ n.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        x ^= x >> np.uint64(29)
    return (x >> np.uint64(33)).astype(np.int64)


def codebook(classes: int, channels: int) -> NDArray[np.float32]:
    """Return the code of each class, +1 or -1 in every channel; two differ in channels // bits of them at least."""
    bits = max(1, (classes - 1).bit_length())
    return (2.0 * (np.arange(classes)[:, None] >> np.arange(channels) % bits & 1) - 1).astype(np.float32)


def loudness(problem: AttentionProblem, classes: int, channels: int) -> float:
    """Return the power of two by which Q is multiplied, so that keys of other classes have no weight."""
    repeats = channels // max(1, (classes - 1).bit_length())
    return 2.0 ** math.ceil(math.log2(_NATS / (2 * repeats * problem.softmax_scale)))


def as_lse(problem: AttentionProblem, x: np.ndarray) -> np.ndarray:
    """Return one number for each row and head, (queries, nheads), in the layout of lse."""
    return x.T if problem.is_varlen else x.reshape(problem.batch, problem.seqlen_q, -1).swapaxes(1, 2)


@lru_cache(8)
def _tables(seed: int, levels: int, width: int, dtype: Dtype) -> tuple[NDArray[np.uint8], np.ndarray]:
    """Return rows of whole numbers from 1 to ``levels``, as integers and in a format."""
    table = np.random.default_rng(seed).integers(1, levels, (TABLE, width), np.uint8, endpoint=True)
    return table, table.astype(FORMATS[dtype].dtype)


class _Keys:
    """The keys of a call, as packed tensors have them: starts of sequences, number of classes, the turn of classes in
    each sequence and head, V, and its sums over a key and those of its class in front of it.

    V has whole numbers from 1 to ``levels``, and a sum at most ``most`` of them in a channel.
    """

    def __init__(self, problem: AttentionProblem, seed: int, alike: str, levels: int, most: int) -> None:
        queries, keys = lengths_of(problem)
        longest, rows, width = int(keys.max()), int(queries.max()) * problem.group, problem.head_dim_v
        fewest = math.ceil(longest / (most * width))
        classes = max(1, min(longest, max(min(rows, _MOST_CLASSES), fewest)))
        of, place = positions(keys)
        heads = np.arange(problem.nheads_kv) * ("heads" not in alike)
        table, stored = _tables(seed, levels, width, stored_in(problem))
        which = mixed(seed, (of * ("batch" not in alike))[:, None], place[:, None], heads) % TABLE
        shares = math.ceil(math.ceil(longest / classes) / most)
        turn = place // classes % shares
        own = np.arange(shares)[:, None] == np.arange(width) % shares  # the channels of every key, by its turn

        def laid(rows: np.ndarray) -> np.ndarray:
            x = np.take(rows, which, axis=0)
            return np.multiply(x, np.take(own, turn, axis=0)[:, None], out=x) if shares > 1 else x

        sums = laid(table)
        v = laid(stored.view(f"u{stored.itemsize}")).view(stored.dtype)
        starts = np.cumsum(keys) - keys
        for start, n in zip(starts, keys, strict=True):
            for first in range(start + classes, start + n, classes):
                stop = min(first + classes, start + n)
                sums[first:stop] += sums[first - classes : stop - classes]
        turned = (np.arange(problem.batch) * ("batch" not in alike))[:, None], heads
        turns = mixed(seed, *(x * ("queries" not in alike) for x in turned)) % classes
        self.starts, self.classes, self.turns = starts, classes, turns
        self.v, self.sums = v, sums


class _Rows:
    """What the rows of a call attend to, each (queries, nheads): one of the keys, how many there are of its class, none
    where a row sees no key, and the sum of V over them; beside the sequence of each query, and its place there.
    """

    def __init__(self, problem: AttentionProblem, keys: _Keys, seed: int, alike: str) -> None:
        of, row, first, visible = seen_by_rows(problem)
        heads = np.arange(problem.nheads)
        number = row[:, None] * problem.group + heads % problem.group
        owner, turned, number = (x * ("queries" not in alike) for x in (of[:, None], heads, number))
        turn = number + number // keys.classes * 5 + mixed(seed + 1, owner, turned)
        edge = mixed(seed + 2, owner, number) % _EDGES
        chosen = np.where(edge == 0, 0, np.where(edge == 1, visible - 1, turn % np.maximum(visible, 1)))
        sees = np.broadcast_to(visible > 0, chosen.shape)
        low = np.where(sees, first + chosen % keys.classes, 0)
        high = np.where(sees, first + visible - 1 - (visible - 1 - chosen) % keys.classes, 0)
        start, head = keys.starts[of][:, None], np.broadcast_to(heads // problem.group, chosen.shape)
        within = np.minimum(start + high, max(0, len(keys.sums) - 1)), head
        in_front = np.maximum(start + low - keys.classes, 0), head
        total = np.zeros((*chosen.shape, problem.head_dim_v), np.float32)
        if len(keys.sums):
            total += keys.sums[within]
            total -= np.where((low >= keys.classes)[..., None], keys.sums[in_front], 0)
        count = np.where(sees, (high - low) // keys.classes + 1, 0)
        self.of, self.row = of, row
        self.target, self.count = first + chosen, count
        self.total = total * sees[..., None]


def addressed(problem: AttentionProblem, *, seed: int = 0, alike: str = "", is_coarse: bool = False) -> Addressed:
    """Return a forward call whose outputs name addresses.

    Parameters
    ----------
    problem : AttentionProblem
        Without softcap, terms and ``qv``, whose keys are stored in its own format.
    seed : int
        Seed of V and of what rows attend to.
    alike : str
        "batch" or "heads" where K and V are the same along that axis, "queries" where Q is the same everywhere: they
        may then be expanded.
    is_coarse : bool
        Whether the kernel rounds its operands or P to few bits: no two of V's numbers are then added.
    """
    is_short = is_coarse or problem.dtype == "e4m3"
    keys = _Keys(problem, seed, alike, 4 if is_short else 15, 1 if is_short else 4)
    rows = _Rows(problem, keys, seed, alike)
    heads = np.arange(problem.nheads)
    turns = keys.turns[rows.of][:, heads // problem.group]
    whose = (x * ("queries" not in alike) for x in (rows.of[:, None], rows.row[:, None], heads))
    steps = np.array(_SIZES)[mixed(seed + 3, *whose) % len(_SIZES)]
    sizes = np.where(problem.sinks, 1, steps / 4) * loudness(problem, keys.classes, problem.head_dim)
    codes = codebook(keys.classes, problem.head_dim)
    q = codes[(rows.target + turns) % keys.classes] * sizes[..., None].astype(np.float32)
    owner, place = positions(lengths_of(problem)[1])
    k = np.take(
        codes.astype(FORMATS[stored_in(problem)].dtype), (place[:, None] + keys.turns[owner]) % keys.classes, axis=0
    )
    of_k, of_v = _descales(problem, seed)
    kv = heads // problem.group
    scores = sizes * (problem.head_dim * problem.softmax_scale) * of_k[rows.of][:, kv]
    # A sink weighs as much as the keys of a row that has most of them, or nothing.
    heard = mixed(seed + 4, heads) % 2 * problem.sinks * max(1, rows.count.max(initial=1))
    sinks = (scores.flat[0] + np.log(np.maximum(heard, np.exp(-2 * _NATS)))).astype(np.float32)
    sees = rows.count > 0
    shares = np.where(sees, rows.count + heard, 1)
    known = sees & ~(is_coarse & (rows.count > 1))  # keys of a class differ where K is rounded to few bits
    operands = _stored(problem, (q, k, keys.v), sinks if problem.sinks else None, (of_k, of_v))
    unit = (of_v[rows.of][:, kv] / shares)[..., None]
    shape = problem.out_shape
    return Addressed(
        problem,
        operands,
        {
            "out": (rows.total * unit).astype(np.float32).reshape(shape),
            "lse": as_lse(problem, (scores + np.log(shares)).astype(np.float32)),
        },
        {
            "out": np.where(known[..., None], _UNIT * unit, np.inf).reshape(*shape[:-1], 1),
            "lse": as_lse(problem, np.where(sees, _LSE_NATS + is_coarse * scores / 16, np.inf)),
        },
    )


def _descales(problem: AttentionProblem, seed: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return by how much the keys and values of each sequence and kv head are multiplied: powers of two where they are
    stored in e4m3, else 1. A score of a sink is one of all heads, so that beside it keys are not multiplied.
    """
    shape = (problem.batch, problem.nheads_kv)
    powers = mixed(seed + 5, np.arange(shape[0])[:, None], np.arange(shape[1])) * (stored_in(problem) == "e4m3")
    return (2.0 ** (powers % 3 * (not problem.sinks))).astype(np.float32), (0.5 ** (powers // 3 % 3)).astype(np.float32)


def _stored(
    problem: AttentionProblem, arrays: tuple[np.ndarray, ...], sinks: np.ndarray | None, of_kv: tuple[np.ndarray, ...]
) -> Operands:
    """Return operands of packed arrays in the formats of a problem; what the call rotates is turned back before."""
    q, k, v = (x.reshape(shape) for x, shape in zip(arrays, (problem.q_shape, problem.k_shape, problem.v_shape)))
    if problem.is_rotated:
        q, k = unrotated(problem, q, k)
    descales: Json = {}
    if stored_in(problem) == "e4m3":
        descales = {f"{name}_descale": Descale(x[..., None]) for name, x in zip("kv", of_kv, strict=True)}
    if problem.dtype == "e4m3":
        descales["q_descale"] = Descale(np.ones((problem.batch, problem.nheads, 1), np.float32))
    dtypes = (FORMATS[name].dtype for name in (problem.dtype, stored_in(problem)))
    with np.errstate(over="ignore"):
        q, k = (x.astype(dtype, copy=False) for x, dtype in zip((q, k), dtypes, strict=True))
        return Operands(q, k, v, sinks=sinks, **descales)


def stored_in(problem: AttentionProblem) -> Dtype:
    """Return the format of the keys that a kernel gets."""
    return "e4m3" if problem.cache is not None and problem.cache.fp8 else problem.dtype


def unrotated(problem: AttentionProblem, q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what the rotary embedding of a call makes Q and appended keys of, before it."""
    cache = problem.cache
    assert cache is not None
    dim = cache.rotary_dim
    flips = np.ones(problem.head_dim)  # a rotation between two of these reflections turns the other way
    flips[slice(1, dim, 2) if cache.interleaved else slice(dim // 2, dim)] = -1
    back_q, back_k = rotated(problem, q * flips, k * flips)
    return back_q * flips, back_k * flips
