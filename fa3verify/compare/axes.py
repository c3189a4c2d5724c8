"""The axes: what may change between two calls of a serving stack, and the pairs of calls whose rows must agree.

The calls of a pair have the same stored operands, never quantised again: a cache does not change with the call that
reads it. :mod:`fa3verify.compare.run` runs the pairs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fa3_reference.problem import AttentionProblem
from fa3verify.kernels.calls import Refused
from fa3verify.kernels.record import Kernel
from fa3verify.kernels.twins import is_twin
from fa3verify.operations import Outputs
from fa3verify.properties.law import Setup
from fa3verify.properties.transforms import part, part_of_result, reordered

Fields = dict[str, Any]
PAIR: Fields = {  # the problem on which two kernels are compared, unless somebody chooses its sizes
    "batch": 1,
    "nheads": 2,
    "nheads_kv": 1,
    "seqlen_q": 4,
    "seqlen_k": 300,
    "head_dim": 128,
    "causal": False,
}
SIZES = tuple(PAIR)  # the fields that a user may choose
LONG = 2000  # keys, enough for FlashAttention-3 to split them by itself


def base(kernel: Kernel) -> Fields:
    """Fields of the problems of all axes: two kv heads, grouped where the kernel takes that."""
    group = 2 if "gqa" in kernel.features else 1
    dims = kernel.head_dims or (128,)
    return {"nheads": 2 * group, "nheads_kv": 2, "head_dim": dims[0], "dtype": kernel.dtype}


def causal(tokens: int, sizes: Fields) -> Fields:
    """Return a prefill of one sequence, with the user's ``sizes`` of heads."""
    heads = {"nheads": 2, "nheads_kv": 1} | sizes
    return heads | {"batch": 1, "seqlen_q": tokens, "seqlen_k": tokens, "causal": True}


def dense(keys: int, *, rows: int = 8, batch: int = 1) -> Fields:
    """Return a few rows that see all keys."""
    return {"batch": batch, "seqlen_q": rows, "seqlen_k": keys}


def always(fields: Fields) -> Callable[[Any, Fields], Fields]:
    """Return the function of an axis whose problem is the same at each of its values."""
    return lambda _, sizes: fields | sizes


def beside(neighbours: int | str, sizes: Fields) -> Fields:
    """Return a packed sequence and its neighbours, given as LENGTH for one or as COUNTxLENGTH: keys of each.

    Unless ``sizes`` has its lengths, the compared sequence has 40 queries and LONG keys. Neighbours have as many
    queries, but no more than they have keys. "0x5" is the sequence alone. ValueError for anything else, None too.

    >>> beside("2x9", {"seqlen_q": 1, "seqlen_k": 40})["seqlens_k"]
    (40, 9, 9)
    """
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)", str(neighbours))
    if not match:
        raise ValueError(f"neighbours must be LENGTH or COUNTxLENGTH, such as 3000 or 8x3000, got {neighbours!r}")
    count = int(match[1] or 1)
    length = int(match[2])
    rows = sizes.get("seqlen_q", 40)
    seqlens_q = (rows, *(min(rows, length),) * count)
    seqlens_k = (sizes.get("seqlen_k", LONG), *(length,) * count)
    lengths = {"seqlen_q": max(seqlens_q), "seqlen_k": max(seqlens_k), "seqlens_q": seqlens_q, "seqlens_k": seqlens_k}
    return {"batch": count + 1} | lengths


def disagreement(problem: AttentionProblem, sizes: Fields) -> str:
    """Return in words which chosen size a problem does not have; empty where it has all.

    Of packed sequences the lengths of the first, the compared one, count.
    """
    first = next(iter(problem.sequences()))
    own = {"seqlen_q": first.seqlen_q, "seqlen_k": first.seqlen_k}
    for name, chosen in sizes.items():
        value = own.get(name, getattr(problem, name))
        if value != chosen:
            return f"{name} {value}, which cannot be chosen, got {chosen}"
    return ""


Picked = Callable[[Outputs], Outputs]


class Pair(NamedTuple):
    """Two calls, and functions that cut from their results the parts that must agree; by default all of them."""

    plain: Setup
    changed: Setup
    of_plain: Picked = dict
    of_changed: Picked = dict


@dataclass(frozen=True, slots=True)
class Axis:
    """One thing that may change between calls.

    Parameters
    ----------
    name, words : str
        Its name in commands, and in a sentence.
    values : tuple
        The values that are tried by default, rising.
    problem : callable
        ``problem(value, sizes)`` returns fields of the problem that the pairs are cut from, beside those of
        :func:`base`; ``sizes`` are those that a user chose, which an axis may overrule.
    pairs : callable
        ``pairs(setup, value)`` yields the pairs of calls.
    needs : frozenset of str
        Features that a kernel must have.
    changes : frozenset of str
        Fields of its configuration that a caller must be able to choose.
    """

    name: str
    words: str
    values: tuple[Any, ...]
    problem: Callable[[Any, Fields], Fields]
    pairs: Callable[[Setup, Any], Iterator[Pair]]
    needs: frozenset[str] = frozenset()
    changes: frozenset[str] = frozenset()

    def fits(self, kernel: Kernel) -> bool:
        """Tell whether a kernel has what the axis needs. A twin can be built with any tile, which callers of a kernel
        cannot choose.
        """
        return self.needs <= kernel.features and (is_twin(kernel.name) or self.changes <= kernel.changeable)

    def check_values(self, values: Iterable[Any]) -> None:
        """Raise ValueError for a value that is of another kind than the axis's own."""
        kinds = {type(value) for value in self.values}
        for value in values:
            if type(value) not in kinds:
                examples = ", ".join(str(x).lower() for x in (*self.values[:2], self.values[-1]))
                raise ValueError(f"values of {self.name} are such as {examples}, got {str(value).lower()}")

    def problem_for(self, kernel: Kernel, value: Any, sizes: Fields) -> AttentionProblem:
        """Return the problem of one value for a kernel; heads are equal where it takes no groups.

        ValueError for a chosen size that the problem does not have, because the axis sets it itself or the kernel does
        not take it.
        """
        self.check_values([value])
        fields = base(kernel) | sizes | self.problem(value, sizes)
        if "gqa" not in kernel.features:
            fields["nheads_kv"] = fields["nheads"]
        problem = AttentionProblem(**fields)
        if words := disagreement(problem, sizes):
            raise ValueError(f"{kernel.name} over {self.name}={value} has {words}")
        return problem


def own_choice(setup: Setup) -> Setup:
    """Return the same call in the configuration that the kernel chooses for its problem."""
    return setup._replace(config=setup.kernel.config_for(setup.problem))


def _of(setup: Setup, index: int, rows: slice | None = None) -> Picked:
    """Return a function that cuts some rows of one sequence from the result of a whole call."""
    seq = list(setup.problem.sequences())[index]
    return lambda result: part_of_result(setup, result, seq, rows=rows)


def _packed(setup: Setup) -> Setup:
    """Return a batched call of one sequence as a packed one."""
    p = setup.problem
    o = setup.operands
    problem = replace(p, seqlens_q=(p.seqlen_q,), seqlens_k=(p.seqlen_k,))
    return setup._replace(problem=problem, operands=replace(o, q=o.q[0], k=o.k[0], v=o.v[0]))


def _alone(setup: Setup, _: int) -> Iterator[Pair]:
    whole = own_choice(setup)
    for seq in setup.problem.sequences():
        yield Pair(own_choice(part(setup, seq)), whole, of_changed=_of(setup, seq.index))


def _moved(setup: Setup, places: int) -> Iterator[Pair]:
    problem = setup.problem
    if places % problem.batch == 0:
        raise Refused(f"a place must change, got {places} places of {problem.batch}")
    order = np.roll(np.arange(problem.batch), places)
    moved = reordered(setup, order, np.arange(problem.nheads_kv), np.arange(problem.group))
    yield Pair(setup, moved, of_plain=lambda result: {name: x[order] for name, x in result.items()})


def _neighbours(setup: Setup, _: int | str) -> Iterator[Pair]:
    one = own_choice(_packed(part(setup, next(iter(setup.problem.sequences())))))
    yield Pair(one, own_choice(setup), lambda result: {name: x[None] for name, x in result.items()}, _of(setup, 0))


def _cut(whole: Setup, rows: slice) -> Pair:
    """Pair a causal call with a call of some of its rows alone, with the keys up to the last of them."""
    first = next(iter(whole.problem.sequences()))
    cut = own_choice(part(whole, first, rows=rows, keys=slice(0, rows.stop)))
    return Pair(whole, cut, of_plain=_of(whole, 0, rows))


PROMPT = 40  # tokens of a prompt that is padded


def _padded(setup: Setup, _: int) -> Iterator[Pair]:
    pair = _cut(own_choice(setup), slice(0, PROMPT))
    yield Pair(pair.changed, pair.plain, pair.of_changed, pair.of_plain)


def _chunked(setup: Setup, chunk: int) -> Iterator[Pair]:
    whole = own_choice(setup)
    tokens = setup.problem.seqlen_q
    for start in range(0, tokens, chunk):
        yield _cut(whole, slice(start, min(start + chunk, tokens)))


def _decoded(setup: Setup, tokens: int) -> Iterator[Pair]:
    yield _cut(own_choice(setup), slice(tokens - 1, tokens))


def _configured(name: str) -> Callable[[Setup, Any], Iterator[Pair]]:
    """Return the pairs of an axis that changes one field of the configuration; there is none for its own value."""

    def pairs(setup: Setup, value: Any) -> Iterator[Pair]:
        problem = setup.problem
        if name == "pack_gqa" and problem.group == 1:
            raise Refused(f"packed heads must share kv heads, got {problem.nheads} heads on {problem.nheads_kv}")
        if getattr(setup.config, name) == value:  # it is the plain call
            return
        changes = {name: value}
        if name == "tile_n" and setup.config.promotion_interval:
            changes["promotion_interval"] = next(n for n in (128, 96, 64, 32) if value % n == 0)
        yield Pair(setup, setup.configured(**changes))

    return pairs


# Keys around the ends of tiles, whose sizes differ with kernel and head_dim, and longer ones.
EDGES = (1, 2, 63, 64, 65, 96, 97, 127, 128, 129, 160, 176, 177, 192, 193, 224, 225, 256, 257, 353, 449, 700, 881, 1500)
AXES: tuple[Axis, ...] = (
    Axis("batch", "batch size", (2, 3, 24), lambda n, sizes: dense(LONG, rows=2) | sizes | {"batch": n}, _alone),
    Axis("position", "place in the batch", (1, 2), always(dense(LONG, batch=3)), _moved),
    Axis(
        "neighbours",
        "lengths of other sequences",
        (1, 9, 10, 129, 3000, "10x3000"),
        beside,
        _neighbours,
        needs=frozenset({"varlen"}),
    ),
    Axis(
        "seqlen_k",
        "padding of a prompt",
        (41, 64, 129, 192, 300, 1500),
        causal,
        _padded,
        needs=frozenset({"causal"}),
    ),
    Axis(
        "chunk",
        "chunked prefill",
        (64, 128, 177),
        lambda _, sizes: causal(sizes.get("seqlen_k", 1000), sizes),
        _chunked,
        needs=frozenset({"causal"}),
    ),
    Axis("decode", "decode instead of prefill", EDGES, causal, _decoded, needs=frozenset({"causal"})),
    Axis(
        "num_splits",
        "number of splits",
        (2, 3, 8),
        always(dense(LONG)),
        _configured("num_splits"),
        changes=frozenset({"num_splits"}),
    ),
    Axis(
        "pack_gqa",
        "packed heads",
        (False, True),
        always(dense(LONG, rows=70)),
        _configured("pack_gqa"),
        needs=frozenset({"gqa"}),
        changes=frozenset({"pack_gqa"}),
    ),
    Axis(
        "tile_m",
        "query rows of a tile",
        (64, 128, 192),
        always(dense(700, rows=200)),
        _configured("tile_m"),
        changes=frozenset({"tile_m"}),
    ),
    Axis(
        "tile_n",
        "keys of a tile",
        (64, 96, 128, 160, 192, 224),
        always(dense(LONG)),
        _configured("tile_n"),
        changes=frozenset({"tile_n"}),
    ),
)


def axis_of(name: str) -> Axis:
    """Return an axis by name; ValueError names what exists."""
    for axis in AXES:
        if axis.name == name:
            return axis
    raise ValueError(f"axis must be one of {', '.join(axis.name for axis in AXES)}, got {name!r}")
